"""Checkpoints of DeepSpeed: weights in fp32, put together from the shards of all ranks.

ZeRO 1 and 2 lay all parameters of a group one after the other and give each rank an equal part of
the whole. ZeRO 3 gives each rank an equal part of every parameter. Without ZeRO one file holds all
weights, in the dtype that they were computed with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import UserError
from shardwise.model.archive import Archive, ArchivedTensor, sizes_of
from shardwise.model.boxes import Box, Sizes
from shardwise.model.pickled import Described

# Names the directory of the last checkpoint, beside it.
LATEST_NAME = "latest"
MODEL_NAMES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_(model|optim)_states\.pt")
_OTHERS = {
    "mp_rank_01_*": "it was saved with tensor parallelism",
    "zero_pp_rank_0_mp_rank_01_*": "it was saved with tensor parallelism",
    "layer_*-model_*_states.pt": "it was saved by pipeline stages",
    "*expert_*_model_states.pt": "its experts were saved apart",
}


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of a parameter that lie one after the other in a tensor of a file."""

    place: range
    """Which elements of the parameter these are, counted over all of its dims."""

    source: ArchivedTensor
    start: int
    """Where they begin in it."""


@dataclass(frozen=True, slots=True)
class ZeroTensor:
    """A parameter or a buffer, in runs that cover it."""

    shape: Sizes
    runs: tuple[Run, ...]


def find_checkpoint(place: Path) -> Path | None:
    """The first file of a checkpoint: `place` is its directory, or has `latest`."""
    latest, directories = place / LATEST_NAME, [place]
    if latest.is_file() and latest.stat().st_size < 1000:
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()
        directories += [place / tag] if tag and Path(tag).name == tag else []
    found = (directory / name for directory in directories for name in MODEL_NAMES)
    return next((path for path in found if path.is_file()), None)


class ZeroWeights:
    """The model of a checkpoint. Only the requested part of each shard is read."""

    def __init__(self, directory: Path) -> None:
        for pattern, why in _OTHERS.items():
            if any(True for _ in directory.glob(pattern)):
                raise UserError(
                    f"cannot read the checkpoint of DeepSpeed in {directory}",
                    why=why,
                    fix="make one file of it with its own zero_to_fp32.py, and name that: "
                    "model.weights_from=FILE",
                )
        models, shards = _archives(directory, "model"), _archives(directory, "optim")
        models = models or [Archive(directory / MODEL_NAMES[0])]
        try:
            self._tensors = dict(_tensors(models, shards))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise models[0].broken(f"it is no checkpoint of DeepSpeed ({error})") from error

    def keys(self) -> Iterable[str]:
        """All names."""
        return self._tensors.keys()

    def shape(self, key: str) -> list[int]:
        """The shape of the whole tensor."""
        return list(self._tensors[key].shape)

    def read(self, key: str, box: Box) -> Tensor:
        """This part of a tensor."""
        stored = self._tensors[key]
        found = torch.empty(box.num_elements, dtype=stored.runs[0].source.dtype)
        filled = 0
        for wanted in box.runs_in(stored.shape):
            for run in stored.runs:
                both = range(max(wanted.start, run.place.start), min(wanted.stop, run.place.stop))
                if not both:
                    continue
                start = run.start + both.start - run.place.start
                at = filled + both.start - wanted.start
                found[at : at + len(both)] = run.source.flat()[start : start + len(both)]
            filled += len(wanted)
        return found.view(box.sizes)


def _archives(directory: Path, kind: str) -> list[Archive]:
    """The files of all ranks, in the order of ranks."""
    named = ((_FILE.fullmatch(path.name), path) for path in directory.iterdir())
    files = {int(name[1]): path for name, path in named if name and name[2] == kind}
    if sorted(files) != list(range(len(files))):
        missing = min(set(range(max(files))) - set(files))
        raise UserError(
            f"the checkpoint of DeepSpeed in {directory} is not whole",
            why=f"the {kind} states of rank {missing} are missing",
            fix="copy or save the checkpoint anew",
        )
    return [Archive(files[rank]) for rank in range(len(files))]


def _tensors(
    models: Sequence[Archive], shards: Sequence[Archive]
) -> Iterator[tuple[str, ZeroTensor]]:
    content = models[0].content
    module: Mapping[str, Any] = content["module"]
    is_cut = bool(shards) and _stage(shards[0]) == 3
    # Below stage 3 this is the whole model, in the dtype that it was computed with.
    names = content["buffer_names"] if is_cut else module
    found = {name: _whole(models[0], module[name]) for name in names}
    if is_cut:
        found |= dict(_frozen(models))
    if shards:
        found |= dict(_trained(content, shards))
        # The other names of a parameter.
        found |= {tied: found[name] for tied, name in content["shared_params"].items()}
    yield from found.items()


def _trained(
    content: Mapping[str, Any], shards: Sequence[Archive]
) -> Iterator[tuple[str, ZeroTensor]]:
    """The parameters that the optimizer has copies of, in fp32."""
    states = [shard.content["optimizer_state_dict"] for shard in shards]
    stage, num_ranks = _stage(shards[0]), len(shards)
    counts = states[0]["partition_count"]
    if num_ranks != max(counts if isinstance(counts, list) else [counts]):
        raise ValueError(f"it has shards of {num_ranks} ranks, and {counts} were saved")
    word = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    parts = [
        [shard.tensor(each) for each in state[word]]
        for shard, state in zip(shards, states, strict=True)
    ]
    groups = [{name: sizes_of(size) for name, size in g.items()} for g in content["param_shapes"]]
    if stage == 3:
        shapes = {name: size for group in groups for name, size in group.items()}
        rows = [_end_to_end(part) for part in parts]
        place = 0
        for name, shape in shapes.items():
            each = -(-math.prod(shape) // num_ranks)
            yield name, _joined(shape, each, [_cut(row, place, each) for row in rows])
            place += each
        return
    for number, group in enumerate(groups):
        row = _end_to_end([part[number] for part in parts])
        place = 0
        for name, shape in group.items():
            size = math.prod(shape)
            yield name, _joined(shape, size, [_cut(row, place, size)])
            place += size


def _frozen(models: Sequence[Archive]) -> Iterator[tuple[str, ZeroTensor]]:
    """Parameters without a gradient have no copy in fp32. ZeRO 3 cuts them too."""
    for name, size in (models[0].content["frozen_param_shapes"] or {}).items():
        shape = sizes_of(size)
        each = -(-math.prod(shape) // len(models))
        parts = [model.tensor(model.content["frozen_param_fragments"][name]) for model in models]
        yield name, _joined(shape, each, [_cut(_end_to_end([part]), 0, each) for part in parts])


def _stage(shard: Archive) -> int:
    """Newer releases write a member of an enum."""
    stage = shard.content["optimizer_state_dict"]["zero_stage"]
    return int(stage.args[0] if isinstance(stage, Described) else stage)


def _whole(archive: Archive, described: Any) -> ZeroTensor:
    stored = archive.tensor(described)
    return ZeroTensor(stored.shape, (Run(range(math.prod(stored.shape)), stored, 0),))


def _end_to_end(tensors: Sequence[ArchivedTensor]) -> list[Run]:
    """Tensors one after the other, as one row."""
    runs, place = [], 0
    for stored in tensors:
        size = math.prod(stored.shape)
        runs.append(Run(range(place, place + size), stored, 0))
        place += size
    return runs


def _cut(row: Sequence[Run], start: int, size: int) -> list[Run]:
    """The elements from `start` on, counted from there."""
    stop, cut = start + size, []
    if stop > max((run.place.stop for run in row), default=0):
        raise ValueError("its shards are shorter than its parameters")
    for run in row:
        first, last = max(start, run.place.start), min(stop, run.place.stop)
        if first < last:
            offset = run.start + first - run.place.start
            cut.append(Run(range(first - start, last - start), run.source, offset))
    return cut


def _joined(shape: Sizes, each: int, parts: Sequence[Sequence[Run]]) -> ZeroTensor:
    """A parameter of parts that have `each` elements; what the last ones have beyond it is
    padding."""
    size, runs = math.prod(shape), []
    for number, part in enumerate(parts):
        for run in part:
            place = range(number * each + run.place.start, number * each + run.place.stop)
            if kept := place[: max(0, size - place.start)]:
                runs.append(Run(kept, run.source, run.start))
    return ZeroTensor(shape, tuple(runs))
