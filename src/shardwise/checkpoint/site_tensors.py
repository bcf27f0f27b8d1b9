"""The names of tensors in a checkpoint where several sites train apart.

`model.` is the model that the sites agree on, so whoever reads a checkpoint needs to know nothing
of sites. `optim.` is the state of the first site, and `site.N.optim.` that of the others. Where
sites know more than the common model when it is saved, `site.N.model.` is what each of them has.
The momentum of the outer step is `outer.momentum.`

A site that finds nothing of its own reads what is the first one's. So a run may begin with one
site, and go on with several, or the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from shardwise.checkpoint.index import Index

_MODEL, _OPTIMIZER, _MOMENTUM = "model.", "optim.", "outer.momentum."
_OF_SITES = re.compile(r"site\.\d+\.(?=model\.|optim\.)")


@dataclass(frozen=True, slots=True)
class SiteState:
    """What one rank keeps besides its model and optimizer."""

    site: int
    num_sites: int
    common: Mapping[str, Tensor]
    """The parameters that all sites agree on, by their names in the model."""

    momentum: Mapping[str, Tensor]
    differs: bool
    """Whether parameters differ from these when they are saved."""

    def names(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank saves, by its name in a checkpoint."""
        own = f"site.{self.site}."
        found = {f"{_MOMENTUM}{name}": tensor for name, tensor in self.momentum.items()}
        for name, tensor in tensors.items():
            common = self.common.get(name.removeprefix(_MODEL))
            if name.startswith(_OPTIMIZER):
                found[name if self.site == 0 else f"{own}{name}"] = tensor
            elif common is None:
                found[name] = tensor
            else:
                found[name] = common
                found |= {f"{own}{name}": tensor} if self.differs else {}
        return found

    def names_in(self, index: Index, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank reads of a checkpoint, by its name there."""
        wanted = self.names(tensors)
        found = {}
        for name, tensor in wanted.items():
            if name in index:
                found[name] = tensor
            elif name.startswith(f"site.{self.site}.{_OPTIMIZER}"):
                found[without_site(name)] = tensor
            elif not is_of_sites(name):
                found[name] = tensor
        return found

    def copies(self, name: str) -> int:
        """How many sites save a tensor like this one, each under a name of its own."""
        return self.num_sites if name.startswith((_OPTIMIZER, "site.")) else 1

    def take_common(self, index: Index, tensors: Mapping[str, Tensor]) -> None:
        """Give this site the common model, where a checkpoint knows nothing more of the site."""
        own = f"site.{self.site}."
        for name, common in self.common.items():
            if not (self.differs and f"{own}{_MODEL}{name}" in index):
                tensors[f"{_MODEL}{name}"].detach().copy_(common)


def is_of_sites(name: str) -> bool:
    """Whether only runs with several sites have this tensor."""
    return name.startswith(_MOMENTUM) or _OF_SITES.match(name) is not None


def without_site(name: str) -> str:
    """The name of the same tensor where there is one site."""
    if name.startswith(_MOMENTUM):
        return f"{_MODEL}{name.removeprefix(_MOMENTUM)}"
    return _OF_SITES.sub("", name)
