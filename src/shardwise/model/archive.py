"""`torch.save` files as data: plain values, and where in the file each tensor lies.

Nothing that the pickle of such a file names is called, so a file that holds objects beside its
tensors can be read too.
"""

from __future__ import annotations

import math
import struct
import sys
import zipfile
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from shardwise.errors import UserError
from shardwise.internals.private_names import (
    REBUILD_PARAMETER,
    REBUILD_TENSOR,
    REBUILD_WITH_ATTRIBUTES,
)
from shardwise.model.boxes import Sizes, validate_sizes
from shardwise.model.pickled import Described, Name, read_pickle

# The header of a zip member. It ends with the lengths of the name and of the padding.
_MEMBER_HEADER = struct.Struct("<26xHH")
# Far above what describes the tensors of one rank.
_MAX_PICKLE_BYTES = 2**30
_TENSOR, _PARAMETER = Name(*REBUILD_TENSOR), Name(*REBUILD_PARAMETER)
_WITH_ATTRIBUTES = Name(*REBUILD_WITH_ATTRIBUTES)
_STORAGES = {
    Name("torch", f"{word}Storage"): dtype
    for word, dtype in {
        **{"Float": torch.float32, "BFloat16": torch.bfloat16, "Half": torch.float16},
        **{"Double": torch.float64, "Long": torch.int64, "Int": torch.int32, "Bool": torch.bool},
        **{"Byte": torch.uint8, "Char": torch.int8, "Short": torch.int16},
    }.items()
}


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """A tensor whose bytes lie one after the other in a file."""

    path: Path
    dtype: torch.dtype
    shape: Sizes
    start: int

    def flat(self) -> Tensor:
        """All of its elements, mapped: the system reads the pages that are used."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        if num_bytes == 0:
            return torch.empty(0, dtype=self.dtype)
        # The mapping is private, so that torch may have it as memory of its own.
        mapped = np.memmap(self.path, np.uint8, "c", self.start, (num_bytes,))
        return torch.from_numpy(mapped).view(self.dtype)


class Archive:
    """One file of `torch.save`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self._members = self._members_of(archive)
                self.content = read_pickle(self._pickle_of(archive), _Anything())
        except (zipfile.BadZipFile, OSError, ValueError, EOFError, KeyError, RuntimeError) as error:
            raise self.broken(str(error) or type(error).__name__) from error

    def tensor(self, described: Any) -> ArchivedTensor:
        """Where a tensor of the content lies."""
        try:
            return self._tensor(described)
        except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
            raise self.broken(f"a tensor in it is not whole ({error})") from error

    def broken(self, why: str) -> UserError:
        """The error for a file that is not what it should be."""
        return UserError(f"cannot read {self.path}", why=why, fix="copy or save the file anew")

    def _tensor(self, described: Any) -> ArchivedTensor:
        if described.made_by == _WITH_ATTRIBUTES:
            made_by, _, args, _ = described.args
            described = Described(made_by, args)
        if described.made_by == _PARAMETER:
            described = described.args[0]
        if described.made_by != _TENSOR:
            raise ValueError(f"it is made by {described.made_by}")
        storage, offset, shape, strides, *_ = described.args
        _, kind, key, _, _ = storage.args[0]
        dtype, shape = _STORAGES[kind], validate_sizes(shape)
        if not _are_contiguous(shape, strides):
            raise ValueError("its elements do not lie one after the other")
        data = self._data(self._members[f"data/{key}"])
        (offset,) = validate_sizes((offset,))
        start = data.start + offset * dtype.itemsize
        if start + math.prod(shape) * dtype.itemsize > data.stop:
            raise ValueError("it is longer than its bytes")
        return ArchivedTensor(self.path, dtype, shape, start)

    def _members_of(self, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
        """The members without the name of the archive, which is the first part of their paths."""
        members = {m.filename.partition("/")[2]: m for m in archive.infolist()}
        if any(m.compress_type != zipfile.ZIP_STORED for m in members.values()):
            raise ValueError("it is compressed")
        if sum(m.file_size for m in members.values()) > self.path.stat().st_size:
            raise ValueError("it claims more bytes than it has")
        if "byteorder" in members and archive.read(members["byteorder"]) != sys.byteorder.encode():
            raise ValueError("its numbers have another byte order")
        return members

    def _pickle_of(self, archive: zipfile.ZipFile) -> bytes:
        member = self._members["data.pkl"]
        if member.file_size > _MAX_PICKLE_BYTES:
            raise ValueError("its description is larger than 1 GiB")
        return archive.read(member)

    def _data(self, member: zipfile.ZipInfo) -> range:
        with self.path.open("rb") as file:
            data = bytes_of_member(file, member)
        if data.stop > self.path.stat().st_size:
            raise ValueError("the file ends before it")
        return data


def bytes_of_member(file: BinaryIO, member: zipfile.ZipInfo) -> range:
    """Where the bytes of a zip member lie that is not compressed."""
    file.seek(member.header_offset)
    header = file.read(_MEMBER_HEADER.size)
    if len(header) < _MEMBER_HEADER.size:
        raise ValueError("the file ends before it")
    start = member.header_offset + _MEMBER_HEADER.size + sum(_MEMBER_HEADER.unpack(header))
    return range(start, start + member.file_size)


class _Anything(Container[Name]):
    """All names: none of them is called."""

    def __contains__(self, name: object) -> bool:
        return True


def sizes_of(described: Any) -> Sizes:
    """A torch.Size of a pickle."""
    if isinstance(described, Described) and described.made_by == Name("torch", "Size"):
        return validate_sizes(described.args[0])
    raise ValueError("a shape is missing")


def _are_contiguous(shape: Sizes, strides: Any) -> bool:
    expected = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    pairs = zip(shape, strides, expected, strict=True)
    return math.prod(shape) == 0 or all(size == 1 or a == b for size, a, b in pairs)
