"""DCP's planning over our own files: raw bytes in one file for each rank, places in JSON, no
pickle."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwise.checkpoint.durable_files import Fingerprint, HashedFile
from shardwise.checkpoint.index import (
    Index,
    StoredTensor,
    index_of_metadata,
    metadata_of_index,
)

# Pieces are aligned so that any dtype can be read in place.
_ALIGNMENT = 64
Commit = Callable[[Index, dict[str, Fingerprint]], None]


@dataclass(frozen=True, slots=True)
class _WrittenPiece:
    """Where a piece was written. Every rank sends this to the coordinator."""

    file: str
    start: int
    fingerprint: Fingerprint


class ShardWriter(StorageWriter):
    """Each rank writes its shards to `rank-R.bin`, then the coordinator calls `commit`.

    DCP gathers the errors of both, so they are raised on every rank.
    """

    def __init__(self, directory: Path, rank: int, commit: Commit) -> None:
        self.directory = directory
        self.name = f"rank-{rank:05d}.bin"
        self.commit = commit
        self.written: dict[str, Fingerprint] = {}
        """What this rank has written, to be compared with what the disk holds."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all pieces of this rank to one file. A rank without pieces writes no file."""
        if not plan.items:
            return _done([])
        written: list[tuple[MetadataIndex, int, int]] = []
        with HashedFile(self.directory / self.name) as file:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                if not isinstance(tensor, Tensor):
                    raise TypeError(f"{item.index.fqn} is not a tensor; only tensors are stored")
                data = _bytes_of(tensor)
                file.write(bytes(-file.position % _ALIGNMENT))
                written.append((item.index, file.position, len(data)))
                file.write(data)
            fingerprint = file.fingerprint()
        self.written = {self.name: fingerprint}
        return _done(
            [
                WriteResult(index, size, _WrittenPiece(self.name, start, fingerprint))
                for index, start, size in written
            ]
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit. DCP calls this on the coordinator when all ranks have written."""
        places = {result.index: result.storage_data for rank in results for result in rank}
        starts = {
            MetadataIndex(index.fqn, index.offset): (place.file, place.start)
            for index, place in places.items()
        }
        files = {place.file: place.fingerprint for place in places.values()}
        self.commit(index_of_metadata(metadata, starts), files)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: a writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The directory is there already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As DCP planned it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As DCP planned it."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """We are always given a directory."""
        return True


class ShardReader(StorageReader):
    """Reads pieces that DCP's planner asks for out of a verified checkpoint."""

    def __init__(self, directory: Path, index: Index) -> None:
        self.directory = directory
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Sizes and pieces of all tensors."""
        return metadata_of_index(self.index)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy each wanted block into the tensor that the planner names."""
        for item in plan.items:
            stored = self.index[item.storage_index.fqn]
            with open_piece(self.directory, stored, item.storage_index.offset) as piece:
                block = _narrow(piece, item.storage_offsets, item.lengths)
                target = planner.resolve_tensor(item).detach()
                target.copy_(block)
                planner.commit_tensor(item, target)
        return _done(None)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: a reader serves one load."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """The index was read before."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As DCP planned it."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As DCP planned it."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """We are always given a directory."""
        return True


@contextmanager
def open_piece(
    directory: Path, stored: StoredTensor, offset: torch.Size | tuple[int, ...] | None
) -> Iterator[Tensor]:
    """One piece as a read-only tensor over the memory-mapped file, until the block ends."""
    wanted = tuple(offset or (0,) * len(stored.shape))
    piece = next(piece for piece in stored.pieces if piece.offsets == wanted)
    length = stored.piece_bytes(piece)
    if length == 0:
        yield torch.empty(piece.sizes, dtype=stored.dtype)
        return
    raw = np.memmap(directory / piece.file, np.uint8, "c", piece.start, (length,))
    yield torch.from_numpy(raw).view(stored.dtype).view(piece.sizes)


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def _narrow(tensor: Tensor, offsets: torch.Size, lengths: torch.Size) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
