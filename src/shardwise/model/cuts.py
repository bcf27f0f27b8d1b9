"""Parameters that an axis of the mesh divides before FSDP2 shards them.

The ranks of such an axis keep different parts of a parameter, and compute with them. A rank's part
is a plain parameter of its own shape, which FSDP2 shards over the other axes as if it were whole.
Only the module remembers which part of what it is, so that weights, checkpoints and norms find
every element of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shardwise.model.boxes import Box, Sizes

_CUTS = "shardwise_cuts"


@dataclass(frozen=True, slots=True)
class Cut:
    """One rank's part of a parameter, along one of its dims."""

    axis: str
    """The axis of the mesh."""

    dim: int
    index: int
    """The place of this rank on the axis."""

    count: int
    """The ranks of the axis."""

    stacked: int = 1
    """Matrices that lie one after the other along `dim`, each of which is divided: 2 where gate and
    up are one parameter."""

    shape: Sizes = ()
    """Of the whole parameter."""

    @property
    def part(self) -> range:
        """What this rank has of one of the stacked matrices, along `dim`: as torch.chunk divides
        it."""
        length = self.shape[self.dim] // self.stacked
        step = -(-length // self.count)
        return range(min(step * self.index, length), min(step * (self.index + 1), length))

    @property
    def own_shape(self) -> Sizes:
        """The shape of this rank's part."""
        return tuple(
            self.stacked * len(self.part) if dim == self.dim else size
            for dim, size in enumerate(self.shape)
        )

    def places(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """Where the elements of `box`, a box of this rank's part, lie in the whole parameter. With
        each of these boxes comes the same elements' box in `box`."""
        dim, part, length = self.dim, self.part, self.shape[self.dim] // self.stacked
        for number in range(self.stacked):
            start = [number * len(part) if each == dim else 0 for each in range(len(self.shape))]
            size = [len(part) if each == dim else n for each, n in enumerate(self.shape)]
            common = box.overlap(Box(tuple(start), tuple(size)))
            if common.num_elements:
                inside = common.seen_from(box)
                moved = list(common.offsets)
                moved[dim] += number * (length - len(part)) + part.start
                yield Box(tuple(moved), common.sizes), inside


def cut_parameter(module: nn.Module, name: str, cut: Cut) -> None:
    """Give a module this rank's part of one of its parameters. The model must be on meta."""
    param = module.get_parameter(name)
    cut = replace(cut, shape=tuple(param.shape))
    part = torch.empty(cut.own_shape, dtype=param.dtype, device="meta")
    setattr(module, name, nn.Parameter(part, requires_grad=param.requires_grad))
    setattr(module, _CUTS, {**own_cuts(module), name: cut})


def cut_tied(modules: Sequence[nn.Module], name: str, cut: Cut) -> None:
    """The same for a parameter that several modules share."""
    first, *others = modules
    cut_parameter(first, name, cut)
    for module in others:
        setattr(module, name, first.get_parameter(name))
        setattr(module, _CUTS, {**own_cuts(module), name: own_cuts(first)[name]})


def own_cuts(module: nn.Module) -> Mapping[str, Cut]:
    """The cuts of a module's own parameters, by name."""
    found: Mapping[str, Cut] = getattr(module, _CUTS, {})
    return found


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """The cuts of all parameters of a model, by name; a tied one has each of its names."""
    return {
        f"{prefix}.{name}" if prefix else name: cut
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, cut in own_cuts(module).items()
    }


def cuts_by_param(model: nn.Module) -> dict[Tensor, Cut]:
    """The same by parameter."""
    params = dict(model.named_parameters(remove_duplicate=False))
    return {params[name]: cut for name, cut in cuts_of(model).items()}
