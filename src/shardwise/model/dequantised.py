"""Quantised weight files, read as plain floats: of each tensor only the part that is asked for.

gpt-oss is published in MXFP4: `X_blocks` holds two values a byte, `X_scales` one exponent for 32
values. DeepSeek-V3 is published in fp8: `X_scale_inv` holds one scale for each block of `X`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shardwise.errors import UserError
from shardwise.facts.quantization import MXFP4, Quantization, read_quantization
from shardwise.model.boxes import Box, whole_box
from shardwise.model.stored import StoredWeights, find_weights, open_weights

_BLOCKS, _SCALES = "_blocks", "_scales"
_FP8_SCALES, _FP8_WEIGHT_SCALE = "_scale_inv", ".weight_scale"
# Scales of activations, which weights do not need.
_FP8_UNREAD = ("activation_scale", "input_scale")
# The values of e2m1 by their four bits.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_GROUP, _GROUP_BYTES = 32, 16
_FETCH_ANEW = "fetch or save the weights anew, or name another copy: model.weights_from=DIR"


class _Quantised(Protocol):
    """One tensor that is stored as values and scales."""

    def shape(self) -> list[int]:
        """The shape of the tensor that they make."""

    def read(self, box: Box) -> Tensor:
        """This part of it."""


class DequantisedWeights:
    """Stored tensors, where quantised ones have the name, shape and values of plain ones."""

    def __init__(self, files: StoredWeights, made: dict[str, _Quantised], hidden: set[str]) -> None:
        self._files = files
        self._made = made
        self._hidden = hidden

    def keys(self) -> Iterable[str]:
        """All names; a quantised tensor has one."""
        return [*(set(self._files.keys()) - self._hidden), *self._made]

    def shape(self, key: str) -> list[int]:
        """The shape of the whole tensor, dequantised."""
        return self._made[key].shape() if key in self._made else self._files.shape(key)

    def read(self, key: str, box: Box) -> Tensor:
        """This part of a tensor, dequantised."""
        if key in self._made:
            return self._made[key].read(box)
        part = self._files.read(key, box)
        if _is_fp8(part):
            raise UserError(
                f"{key} is stored in fp8, and its scales are not known",
                why=f"the files have no {key}{_FP8_SCALES}, or the config.json beside them has "
                "no quantization_config with quant_method fp8",
                fix=_FETCH_ANEW,
            )
        return part


def open_dequantised(place: Path) -> StoredWeights:
    """The weights of `place`, as `open_weights` finds them, all of them plain."""
    files, quantization = open_weights(place), stored_quantization(place)
    if quantization is None:
        return DequantisedWeights(files, {}, set())
    if quantization.method == MXFP4:
        return _from_mxfp4(files)
    return _from_fp8(files, quantization)


def stored_quantization(place: Path) -> Quantization | None:
    """How the weights of `place` are quantised; None where they are plain."""
    return read_quantization(find_weights(place).parent)


def _from_mxfp4(files: StoredWeights) -> DequantisedWeights:
    keys = set(files.keys())
    made: dict[str, _Quantised] = {}
    for key in sorted(keys):
        for ending, other in ((_BLOCKS, _SCALES), (_SCALES, _BLOCKS)):
            name = key.removesuffix(ending)
            if name != key and name + other not in keys:
                raise UserError(
                    f"{name} cannot be dequantised: the files have no {name}{other}",
                    why=f"MXFP4 is stored as {_BLOCKS} and {_SCALES}, and they have {key} alone",
                    fix=_FETCH_ANEW,
                )
        if key.endswith(_BLOCKS):
            name = key.removesuffix(_BLOCKS)
            made[name] = _Mxfp4(files, key, name + _SCALES)
    return DequantisedWeights(
        files, made, {key for key in keys if key.endswith((_BLOCKS, _SCALES))}
    )


def _from_fp8(files: StoredWeights, quantization: Quantization) -> DequantisedWeights:
    keys = set(files.keys())
    made: dict[str, _Quantised] = {}
    hidden: set[str] = set()
    for scales in keys:
        if not scales.endswith((_FP8_SCALES, _FP8_WEIGHT_SCALE)):
            continue
        key = scales.rpartition("_scale")[0]
        if key in keys:
            made[key] = _Fp8(files, key, scales, quantization.block)
            beside = {f"{key.rpartition('.')[0]}.{name}" for name in _FP8_UNREAD}
            hidden |= {key, scales, *(beside & keys)}
    return DequantisedWeights(files, made, hidden)


@dataclass(frozen=True, slots=True)
class _Mxfp4:
    """A stack of experts: blocks of shape (experts, rows, groups, 16), scales of shape (experts,
    rows, groups). The tensor is (experts, groups · 32, rows), as the model multiplies by it."""

    files: StoredWeights
    blocks: str
    scales: str

    def shape(self) -> list[int]:
        found = self.files.shape(self.blocks)
        if len(found) != 4 or found[-1] != _GROUP_BYTES:
            raise _wrong_shape(self.blocks, found, "(experts, rows, groups, 16)")
        experts, rows, groups, _ = found
        scales = self.files.shape(self.scales)
        if scales != [experts, rows, groups]:
            raise _wrong_shape(self.scales, scales, f"{[experts, rows, groups]}")
        return [experts, groups * _GROUP, rows]

    def read(self, box: Box) -> Tensor:
        """In bf16, which holds each value exactly: two bits of mantissa, and bf16's exponents."""
        self.shape()  # raises where blocks and scales do not fit
        made = torch.empty(box.sizes, dtype=torch.bfloat16)
        # One expert at a time, so that what is packed and what is made are not whole at once.
        for number in range(box.sizes[0] if made.numel() else 0):
            one = Box((box.offsets[0] + number, *box.offsets[1:]), (1, *box.sizes[1:]))
            made[number].copy_(self._read_expert(one))
        return made

    def _read_expert(self, box: Box) -> Tensor:
        expert, column, row = box.offsets
        _, num_columns, num_rows = box.sizes
        groups = _covering(column, num_columns, _GROUP)
        offsets, sizes = (expert, row, groups.start), (1, num_rows, len(groups))
        blocks = self.files.read(self.blocks, Box((*offsets, 0), (*sizes, _GROUP_BYTES)))[0]
        scales = self.files.read(self.scales, Box(offsets, sizes))[0]
        for key, part in ((self.blocks, blocks), (self.scales, scales)):
            if part.dtype != torch.uint8:
                raise _wrong_dtype(key, part.dtype, "uint8")
        values = unpack_mxfp4(blocks, scales)
        first = column - groups.start * _GROUP
        return values[:, first : first + num_columns].T


@dataclass(frozen=True, slots=True)
class _Fp8:
    """Values of shape (…, rows, columns), and a scale for each block of rows and columns, or one
    for all. A block at an edge may be cut off."""

    files: StoredWeights
    values: str
    scales: str
    block: tuple[int, int] | None

    def shape(self) -> list[int]:
        return self.files.shape(self.values)

    def read(self, box: Box) -> Tensor:
        """In fp32, as a scale has more bits than bf16 holds."""
        values = self.files.read(self.values, box)
        if not _is_fp8(values):
            raise _wrong_dtype(self.values, values.dtype, "fp8")
        return values.float().mul_(self._read_scales(box)) if box.num_elements else values.float()

    def _read_scales(self, box: Box) -> Tensor:
        """The scale of each element of `box`, or the one scale of all."""
        shape, found = self.shape(), self.files.shape(self.scales)
        if all(size == 1 for size in found):
            return self.files.read(self.scales, whole_box(found)).float().reshape(())
        if self.block is None or len(shape) < 2:
            raise _wrong_shape(self.scales, found, "one number, as config.json names no blocks")
        lengths = (*(1 for _ in shape[2:]), *self.block)
        wanted = [-(-size // length) for size, length in zip(shape, lengths, strict=True)]
        if found != wanted:
            why = f"{wanted}, for {self.values} of {shape} in blocks of {list(self.block)}"
            raise _wrong_shape(self.scales, found, why)
        parts = [
            _covering(offset, size, length)
            for offset, size, length in zip(box.offsets, box.sizes, lengths, strict=True)
        ]
        covering = Box(tuple(p.start for p in parts), tuple(len(p) for p in parts))
        scales = self.files.read(self.scales, covering).float()
        for dim, length in enumerate(lengths):
            first = box.offsets[dim] - parts[dim].start * length
            scales = scales.repeat_interleave(length, dim).narrow(dim, first, box.sizes[dim])
        return scales


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """`blocks` of shape (…, groups, 16) times `scales` (…, groups), as values (…, groups · 32)."""
    # The low four bits come first. Both values of a byte are looked up at once, as one number.
    by_bits = torch.tensor(_E2M1, dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack([by_bits[byte & 15], by_bits[byte >> 4]], dim=1).view(torch.int32).flatten()
    # This takes a third of the time of indexing.
    values = pairs.index_select(0, blocks.flatten().int()).view(torch.bfloat16)
    # 255 is the format's NaN.
    powers = torch.exp2(torch.arange(256, dtype=torch.float64) - 127).to(torch.bfloat16)
    powers[255] = torch.nan
    by_group = values.view(*scales.shape, _GROUP)
    return by_group.mul_(powers[scales.int()].unsqueeze(-1)).flatten(-2)


def _covering(offset: int, size: int, length: int) -> range:
    """The groups of `length` that hold `size` elements from `offset` on."""
    return range(offset // length, -(-(offset + size) // length) if size else offset // length)


def _is_fp8(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.itemsize == 1


def _wrong_shape(key: str, found: Sequence[int], wanted: str) -> UserError:
    return UserError(
        f"{key} has shape {list(found)} in the files, so its tensor cannot be dequantised",
        why=f"it must be {wanted}",
        fix=_FETCH_ANEW,
    )


def _wrong_dtype(key: str, found: torch.dtype, wanted: str) -> UserError:
    return UserError(
        f"{key} is stored as {str(found).removeprefix('torch.')}, so it cannot be dequantised",
        why=f"it must be {wanted}",
        fix=_FETCH_ANEW,
    )
