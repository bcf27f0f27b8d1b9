"""Quantised weight files, read as plain floats or as rows of their own bytes: of each tensor only
the part that is asked for.

gpt-oss is published in MXFP4: `X_blocks` holds two values a byte, `X_scales` one exponent for 32
values. DeepSeek-V3 is published in fp8: `X_scale_inv` holds one scale for each block of `X`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from shardwise.errors import UserError
from shardwise.facts.fp8_block_size import num_blocks
from shardwise.facts.quantization import FP8, MXFP4, Quantization, read_quantization
from shardwise.kernels import fp8_blocks, mxfp4
from shardwise.kernels.float8 import FORWARD
from shardwise.kernels.packed_rows import Packing
from shardwise.model.boxes import Box, Sizes, whole_box
from shardwise.model.stored import StoredWeights, find_weights, open_weights

_BLOCKS, _SCALES = "_blocks", "_scales"
_FP8_SCALES, _FP8_WEIGHT_SCALE = "_scale_inv", ".weight_scale"
# Scales of activations, which weights do not need.
_FP8_UNREAD = ("activation_scale", "input_scale")
_GROUP, _GROUP_BYTES = 32, 16
_FETCH_ANEW = "fetch or save the weights anew, or name another copy: model.weights_from=DIR"


class _Quantised(Protocol):
    """One tensor that is stored as values and scales."""

    def shape(self) -> list[int]:
        """The shape of the tensor that they make."""

    def read(self, box: Box) -> Tensor:
        """This part of it."""

    def read_rows(self, box: Box) -> Tensor:
        """The bytes of this part, which has whole rows, as its packing has them."""

    method: ClassVar[str]
    """How it is packed, as config.json says it."""


class DequantisedWeights:
    """Stored tensors, where quantised ones have the name, shape and values of plain ones."""

    def __init__(self, files: StoredWeights, made: dict[str, _Quantised], hidden: set[str]) -> None:
        self._files = files
        self._made = made
        self._hidden = hidden

    def keys(self) -> Iterable[str]:
        """All names; a quantised tensor has one."""
        return [*(set(self._files.keys()) - self._hidden), *self._made]

    def is_packed(self, key: str) -> bool:
        """Whether a tensor is stored as values and scales."""
        return key in self._made

    def own_name(self, stored: str) -> str | None:
        """The name here of a tensor in the files; None where it is a part of another."""
        if stored.removesuffix(_BLOCKS) in self._made:
            return stored.removesuffix(_BLOCKS)
        return None if stored in self._hidden else stored

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

    def read_rows(self, key: str, box: Box, packing: Packing) -> Tensor:
        """The bytes of this part of a tensor as the files have them, in rows of this packing."""
        made = self._made.get(key)
        if made is None or made.method != packing.base:
            raise UserError(
                f"{key} is not in {packing.name} in the files",
                why=f"adapter.base={packing.base} keeps the bytes of files, and config.json says "
                "that this tensor is packed",
                fix="write adapter.base=param",
            )
        return made.read_rows(box).view(packing.dtype)


def open_dequantised(place: Path) -> DequantisedWeights:
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
    method: ClassVar[str] = MXFP4

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
        _, column, _ = box.offsets
        first = column - column // _GROUP * _GROUP
        values = mxfp4.unpack(*self._parts(box))[0]
        return values[:, first : first + box.sizes[1]].T

    def read_rows(self, box: Box) -> Tensor:
        """Rows along the columns, as the files have them: (experts, rows, bytes)."""
        self.shape()
        return mxfp4.join(*self._parts(box))

    def _parts(self, box: Box) -> tuple[Tensor, Tensor]:
        """The blocks and scales that hold a box."""
        (expert, column, row), (num_experts, num_columns, num_rows) = box.offsets, box.sizes
        groups = _covering(column, num_columns, _GROUP)
        offsets, sizes = (expert, row, groups.start), (num_experts, num_rows, len(groups))
        blocks = self.files.read(self.blocks, Box((*offsets, 0), (*sizes, _GROUP_BYTES)))
        scales = self.files.read(self.scales, Box(offsets, sizes))
        for key, part in ((self.blocks, blocks), (self.scales, scales)):
            if part.dtype != torch.uint8:
                raise _wrong_dtype(key, part.dtype, "uint8")
        return blocks, scales


@dataclass(frozen=True, slots=True)
class _Fp8:
    """Values of shape (…, rows, columns), and a scale for each block of rows and columns, or one
    for all. A block at an edge may be cut off."""

    files: StoredWeights
    values: str
    scales: str
    block: tuple[int, int] | None
    method: ClassVar[str] = FP8

    def shape(self) -> list[int]:
        return self.files.shape(self.values)

    def read(self, box: Box) -> Tensor:
        """In fp32, as a scale has more bits than bf16 holds."""
        values = self.files.read(self.values, box)
        if not _is_fp8(values):
            raise _wrong_dtype(self.values, values.dtype, "fp8")
        if not box.num_elements:
            return values.float()
        scales, lengths = self._read_scales(box)
        return values.float().mul_(_spread(scales, lengths, box))

    def read_rows(self, box: Box) -> Tensor:
        """With a scale for each 128 columns of each row."""
        values = self.files.read(self.values, box)
        if values.dtype != FORWARD:
            raise _wrong_dtype(self.values, values.dtype, "float8_e4m3fn")
        scales, lengths = self._read_scales(box)
        count = num_blocks(box.sizes[-1])
        # Scales of rows are copies; those of columns too, where a block has several times 128.
        *rows, columns = lengths
        by_block = Box((*box.offsets[:-1], 0), (*box.sizes[:-1], count))
        return fp8_blocks.join(values, _spread(scales, (*rows, num_blocks(columns)), by_block))

    def _read_scales(self, box: Box) -> tuple[Tensor, Sizes]:
        """The scales of the blocks that hold `box`, and the sizes of a block."""
        shape, found = self.shape(), self.files.shape(self.scales)
        if all(size == 1 for size in found):
            one = self.files.read(self.scales, whole_box(found)).float()
            return one.reshape((1,) * len(shape)), tuple(shape)
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
        return self.files.read(self.scales, covering).float(), lengths


def _spread(scales: Tensor, lengths: Sizes, box: Box) -> Tensor:
    """A copy of its block's scale for each element of a box."""
    for dim, length in enumerate(lengths):
        first = box.offsets[dim] % length
        scales = scales.repeat_interleave(length, dim).narrow(dim, first, box.sizes[dim])
    return scales


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
