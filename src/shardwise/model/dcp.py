"""Directories of PyTorch's DCP, as Accelerate and FSDP leave them: read piece by piece."""

from __future__ import annotations

import io
import os
import re
import struct
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from shardwise.errors import UserError
from shardwise.model.archive import bytes_of_member
from shardwise.model.boxes import Box
from shardwise.model.dcp_index import DcpPiece, read_dcp_index
from shardwise.model.torch_file import load_torch

_DATA_MEMBER = re.compile(r"[^/]+/data/\w+")
_ZIP_ERRORS = (zipfile.BadZipFile, ValueError, OSError, EOFError, RuntimeError, struct.error)


class DcpWeights:
    """The model of a DCP directory. Only the requested part of each piece is read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tensors = read_dcp_index(directory)

    def keys(self) -> Iterable[str]:
        """All names."""
        return self._tensors.keys()

    def shape(self, key: str) -> list[int]:
        """The shape of the whole tensor."""
        return list(self._tensors[key].shape)

    def read(self, key: str, box: Box) -> Tensor:
        """This part of a tensor."""
        stored = self._tensors[key]
        found = torch.empty(box.sizes, dtype=stored.dtype)
        for piece in stored.pieces:
            part = box.overlap(piece)
            if part.num_elements:
                target = found[part.seen_from(box).slices]
                self._item(piece, stored.dtype).copy_box(part.seen_from(piece), target)
        return found

    def _item(self, piece: DcpPiece, dtype: torch.dtype) -> _Item:
        return _Item(self._directory / piece.file, piece, dtype)


class _Item:
    """One piece: a range of a file that is itself a `torch.save` file of one tensor."""

    def __init__(self, path: Path, piece: DcpPiece, dtype: torch.dtype) -> None:
        self.path = path
        self.piece = piece
        self.dtype = dtype

    def copy_box(self, box: Box, target: Tensor) -> None:
        """Copy a box of the piece to `target`, from the places in the file where it lies."""
        with self.path.open("rb") as file:
            view = _FilePart(file, self.piece.start, self.piece.length)
            data = self._find_data(view)
            # With meta, torch reads the tensor's description and none of its bytes.
            described = self._load(view, "meta")
            if not described.is_contiguous():
                target.copy_(self._load(view, "cpu")[box.slices])
                return
            width = self.dtype.itemsize
            start = data.start + int(described.storage_offset()) * width
            part = target if target.is_contiguous() else torch.empty(target.shape, dtype=self.dtype)
            filled = part.view(-1)
            for run in box.runs_in(self.piece.sizes):
                run_part, filled = filled[: len(run)], filled[len(run) :]
                view.seek(start + run.start * width)
                if start + run.stop * width > data.stop or not view.fill(run_part):
                    raise self._broken("it ends within the tensor's bytes")
            if part is not target:
                target.copy_(part)

    def _load(self, view: _FilePart, device: str) -> Tensor:
        view.seek(0)
        tensor = load_torch(cast(BinaryIO, view), self._name, device=device)
        if (
            not isinstance(tensor, Tensor)
            or tensor.dtype != self.dtype
            or tuple(tensor.shape) != self.piece.sizes
        ):
            raise self._broken("it is not the tensor that .metadata describes")
        return tensor.detach()

    def _find_data(self, view: _FilePart) -> range:
        """Where the tensor's bytes lie. Compressed data is refused: it could grow to any size."""
        try:
            with zipfile.ZipFile(cast(BinaryIO, view)) as archive:
                members = archive.infolist()
                if any(m.compress_type != zipfile.ZIP_STORED for m in members):
                    raise ValueError("it is compressed")
                if sum(m.file_size for m in members) > self.piece.length:
                    raise ValueError("it claims more bytes than it has")
                orders = {archive.read(m) for m in members if m.filename.endswith("/byteorder")}
            if not orders <= {sys.byteorder.encode()}:
                raise ValueError("its numbers have another byte order")
            (data,) = (m for m in members if _DATA_MEMBER.fullmatch(m.filename))
            return bytes_of_member(cast(BinaryIO, view), data)
        except _ZIP_ERRORS as error:
            raise self._broken(f"it is not one tensor of torch.save: {error}") from error

    @property
    def _name(self) -> str:
        return f"{self.path} at byte {self.piece.start}"

    def _broken(self, why: str) -> UserError:
        return UserError(
            f"cannot read {self._name}", why=why, fix="copy or save the checkpoint anew"
        )


class _FilePart(io.RawIOBase):
    """A part of an open file, as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("before the start of the window")
        self._position = base + offset
        return self._position

    def fill(self, tensor: Tensor) -> bool:
        """Read a contiguous tensor's bytes; False where they end too early."""
        return self.readinto(tensor.view(-1).view(torch.uint8).numpy()) == tensor.nbytes

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: max(self._length - self._position, 0)]
        self._file.seek(self._start + self._position)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._position += count
        return int(count)
