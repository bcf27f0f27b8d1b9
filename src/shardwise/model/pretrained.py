"""Pretrained weights into shards. Each rank reads the part that it keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.model.boxes import Box, cover_once, whole_box
from shardwise.model.dequantised import DequantisedWeights, open_dequantised
from shardwise.model.matching import Fusion, match_keys, own_tensors
from shardwise.model.new_rows import num_new_rows, read_with_new_rows, table_params
from shardwise.model.stage_part import other_names
from shardwise.model.stored import StoredWeights
from shardwise.model.unread_tensors import may_be_missing, validate_leftovers
from shardwise.model.weights import Portion, portions_of

_FETCH_ANEW = "fetch or save the weights anew; some of their files may be missing"


def load_pretrained(model: nn.Module, place: Path, ignore: Sequence[str] = ()) -> int:
    """Read every parameter and persistent buffer of the sharded `model` from `place`.

    Returns the bytes read. A tensor in the files that the model does not have is an error, unless
    the family says that it may stay unread or a pattern of `ignore` matches it. Quantised weights
    are dequantised, and count as what they become.
    """
    files = open_dequantised(place)
    matched = match_keys(model, files)
    fused = {name for fusion in matched.fusions for name in fusion.targets}
    portions = portions_of(model, matched.tensors)
    wanted: dict[str, Portion] = {}
    missing: list[str] = []
    for first, *others in _tied_names(model):
        found = [name for name in (first, *others) if name in matched.plain or name in fused]
        if not found:
            missing.append(first)
            continue
        wanted[found[0]] = portions[first]
        keys = [matched.plain[name] for name in found if name in matched.plain]
        _validate_equal(files, keys, portions[first])
    _validate_all_there(model, missing, place, files)
    validate_leftovers(matched.left, model, files, place, ignore)
    # A fusion may fill several parameters, so the loop is over fusions.
    tables = table_params(model)
    return sum(
        _read_plain(files, matched.plain[source], kept, may_grow=id(kept.tensor) in tables)
        for source, kept in wanted.items()
        if source in matched.plain
    ) + sum(_read_fused(files, fusion, wanted) for fusion in matched.fusions)


def new_rows(model: nn.Module, place: Path) -> dict[str, int]:
    """The tables that have more rows than the files, and how many."""
    files = open_dequantised(place)
    matched, tables = match_keys(model, files), table_params(model)
    portions, here = portions_of(model, matched.tensors), other_names(model)
    counts = {
        name: num_new_rows(tuple(files.shape(key)), portions[here.get(name, name)].shape)
        for name, key in matched.plain.items()
        if id(matched.tensors[name]) in tables
    }
    return {name: count for name, count in counts.items() if count}


def stored_parts(model: nn.Module, files: StoredWeights) -> dict[str, tuple[str, Box]]:
    """For each tensor in the files that fills one of the model's, or a part of it, by itself: the
    model's name, and the part."""
    matched = match_keys(model, files)
    parts = {key: (name, whole_box(files.shape(key))) for name, key in matched.plain.items()}
    for fusion in matched.fusions:
        if fusion.is_stack:
            parts |= {key: (fusion.target, box) for key, box in fusion.stack(files).items()}
    return parts


def _tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each stored tensor. A file may hold any of several tied names."""
    names: dict[int, list[str]] = {}
    for name, tensor in own_tensors(model).items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def _validate_equal(files: StoredWeights, keys: Sequence[str], kept: Portion) -> None:
    """Raise where a file holds two tensors for names that the model ties: it is of another
    model."""
    for key in keys[1:]:
        first = keys[0]
        _validate_shape(key, files.shape(key), files.shape(first))
        stored = whole_box(files.shape(first))
        parts = [box.overlap(stored) for box, _ in kept.places]
        if not all(torch.equal(files.read(first, p), files.read(key, p)) for p in parts):
            raise UserError(
                f"{first} and {key} differ in the files, and the model ties them",
                why="it would train with the first of them in both places",
                fix="set model.overrides.tie_word_embeddings=false if they are embedding and head, "
                "as save_pretrained would have written it",
            )


def _read_plain(
    files: DequantisedWeights, key: str, kept: Portion, *, may_grow: bool = False
) -> int:
    """Fill `kept` from one stored tensor; returns the bytes read."""
    if may_grow and num_new_rows(tuple(files.shape(key)), kept.shape):
        return read_with_new_rows(files, key, kept)
    _validate_shape(key, files.shape(key), kept.floats_shape)
    num_bytes = 0
    for whole, own in kept.places:
        part = _read_part(files, key, whole, kept)
        _copy(key, part, kept, own)
        num_bytes += part.nbytes
    return num_bytes


def _read_part(files: DequantisedWeights, key: str, box: Box, kept: Portion) -> Tensor:
    """A part of a stored tensor: as floats, or as the rows of bytes that are kept of it."""
    if kept.packing is None or not kept.packing.is_shipped:
        return files.read(key, box)
    return files.read_rows(key, box, kept.packing)


def _read_fused(files: DequantisedWeights, fusion: Fusion, wanted: Mapping[str, Portion]) -> int:
    """Fill what a fusion makes, from this rank's part of the files where that is enough."""
    portions = {name: wanted[name] for name in fusion.targets if name in wanted}
    if not portions:
        return 0
    absent = [p for p in fusion.converter.source_patterns if p not in fusion.keys]
    if absent:
        raise UserError(
            f"{fusion.target} cannot be made: the files have no tensor like {', '.join(absent)}",
            why=f"they have {', '.join(fusion.keys)}, which is a part of it",
            fix=_FETCH_ANEW,
        )
    if fusion.is_stack:
        return _read_stack(files, fusion, portions[fusion.target])
    for name, kept in portions.items():
        if kept.packing is not None and kept.packing.is_shipped:
            raise UserError(
                f"{name} cannot be kept in {kept.packing.name}",
                why="transformers makes it of several tensors of the files, and their rows are "
                "not its rows",
                fix="write adapter.base=param",
            )
    made = fusion.convert(lambda key: files.read(key, whole_box(files.shape(key))))
    for name, kept in portions.items():
        _validate_shape(name, made[name].shape, kept.floats_shape)
        kept.fill(made[name])
    return sum(value.nbytes for value in made.values())


def _read_stack(files: DequantisedWeights, fusion: Fusion, kept: Portion) -> int:
    """Fill `kept` from the parts of stored tensors that this rank keeps."""
    boxes = fusion.stack(files)
    _validate_stack(fusion.target, boxes.values(), kept.floats_shape)
    num_bytes = 0
    for (key, box), (whole, own) in product(boxes.items(), kept.places):
        common = whole.overlap(box)
        if common.num_elements:
            _validate_shape(key, files.shape(key), box.sizes[1:])
            inside = common.seen_from(box)
            # Stored tensors have no dim for the row.
            part = _read_part(files, key, Box(inside.offsets[1:], inside.sizes[1:]), kept)
            _copy(key, part[None], kept, common.seen_from(whole).moved_by(own.offsets))
            num_bytes += part.nbytes
    return num_bytes


def _copy(key: str, part: Tensor, kept: Portion, own: Box) -> None:
    """Copy what was read to a box of what this rank keeps, unless it is whole numbers that stand
    for other values."""
    wants_floats = kept.tensor.is_floating_point() or kept.packing is not None
    if wants_floats and not part.is_floating_point() and part.dtype != kept.dtype:
        raise UserError(
            f"{key} is stored as {str(part.dtype).removeprefix('torch.')}, the model needs floats",
            why="such weights are quantised, and config.json does not say how",
            fix="name a copy whose weights are bf16 or fp32: model.weights_from=DIR",
        )
    kept.put(own, part)


def _validate_shape(key: str, stored: Sequence[int], wanted: Sequence[int]) -> None:
    if list(stored) != list(wanted):
        raise UserError(
            f"{key} has shape {list(stored)} in the files, the model needs {list(wanted)}",
            fix="leave model.overrides out, or write model.weights=random",
        )


def _validate_stack(name: str, boxes: Collection[Box], shape: Sequence[int]) -> None:
    """Raise unless the files fill all of a parameter, and nothing twice."""
    ends = zip(*([part.stop for part in box.slices] for box in boxes), strict=False)
    _validate_shape(name, [max(stops) for stops in ends], shape)
    whole = tuple(shape)
    if not all(box.lies_in(whole) for box in boxes) or not cover_once(whole, boxes):
        raise UserError(
            f"{name} cannot be made: the files have only a part of it",
            why=f"they have {len(boxes)} tensors for it, which leave gaps",
            fix=_FETCH_ANEW,
        )


def _validate_all_there(
    model: nn.Module, missing: list[str], place: Path, files: StoredWeights
) -> None:
    """Raise where a tensor was not filled, unless it is a buffer that the family's files need
    not have. Such a buffer keeps its first value."""
    buffers = {name for name, _ in model.named_buffers()}
    optional = may_be_missing(model, buffers)
    absent = [name for name in missing if name not in optional]
    if absent:
        raise UserError(
            f"{len(absent)} tensors of the model are not in {place}",
            why=f"first of them: {', '.join(absent[:3])}; the files hold: "
            f"{', '.join(sorted(files.keys())[:3])}",
            fix="name a config.json and weights of one family: model.name=DIR, or write "
            "model.weights=random",
        )
