from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from shardwise.checkpoint.index import (
    Index,
    Piece,
    StoredTensor,
    dump_index,
    index_of_metadata,
    metadata_of_index,
    read_index,
)
from shardwise.checkpoint.manifest import INDEX_NAME, Damaged
from shardwise.checkpoint.tensor_places import ITEM_BYTES

FIRST, SECOND = "rank-00000.bin", "rank-00001.bin"
# Rows over two ranks, columns over two ranks, a scalar, an empty part, an empty tensor.
INDEX: Index = {
    "model.rows": StoredTensor(
        torch.float32, (3, 4), (Piece((0, 0), (2, 4), FIRST, 0), Piece((2, 0), (1, 4), SECOND, 0))
    ),
    "model.columns": StoredTensor(
        torch.bfloat16,
        (2, 4),
        (Piece((0, 0), (2, 3), FIRST, 64), Piece((0, 3), (2, 1), SECOND, 64)),
    ),
    "optim.step": StoredTensor(torch.float32, (), (Piece((), (), SECOND, 128),)),
    "model.short": StoredTensor(
        torch.int64, (1,), (Piece((0,), (1,), FIRST, 128), Piece((1,), (0,), SECOND, 192))
    ),
    "model.none": StoredTensor(torch.uint8, (0, 5), (Piece((0, 0), (0, 5), FIRST, 136),)),
}


def write(directory: Path, index: Index) -> Path:
    (directory / INDEX_NAME).write_bytes(dump_index(index))
    for name in (FIRST, SECOND):
        (directory / name).write_bytes(bytes(256))
    return directory


def test_an_index_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_index(write(tmp_path, INDEX)) == INDEX


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    ],
)
def test_every_format_survives(tmp_path: Path, dtype: torch.dtype) -> None:
    index = {"x": StoredTensor(dtype, (4,), (Piece((0,), (4,), FIRST, 0),))}
    assert read_index(write(tmp_path, index)) == index


def test_dcp_plans_over_the_same_pieces(tmp_path: Path) -> None:
    metadata = metadata_of_index(INDEX)
    entry = metadata.state_dict_metadata["model.rows"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.size == torch.Size((3, 4))
    assert entry.properties.dtype is torch.float32
    starts = {
        MetadataIndex(name, torch.Size(piece.offsets)): (piece.file, piece.start)
        for name, tensor in INDEX.items()
        for piece in tensor.pieces
    }
    assert index_of_metadata(metadata, starts) == INDEX


def test_only_tensors_are_stored() -> None:
    metadata = Metadata(state_dict_metadata={"model.config": BytesStorageMetadata()})
    with pytest.raises(TypeError, match=r"model\.config is not a tensor"):
        index_of_metadata(metadata, {})


@pytest.mark.parametrize(
    "pieces",
    [
        (),
        (Piece((0, 0), (2, 4), FIRST, 0),),
        (Piece((0, 0), (2, 4), FIRST, 0), Piece((0, 0), (1, 4), FIRST, 64)),
        (Piece((0, 0), (3, 4), FIRST, 0), Piece((2, 0), (1, 4), SECOND, 0)),
        (Piece((0, 0), (3, 5), FIRST, 0),),
        (Piece((0,), (12,), FIRST, 0),),
        (Piece((0, 0), (3, 4), FIRST, 209),),
        (Piece((0, 0), (3, 4), "rank-00002.bin", 0),),
    ],
    ids=["none", "hole", "twice", "too many", "outside", "flat", "past the end", "no such file"],
)
def test_pieces_must_be_the_tensor(tmp_path: Path, pieces: tuple[Piece, ...]) -> None:
    index = {"x": StoredTensor(torch.float32, (3, 4), pieces)}
    with pytest.raises(Damaged, match=r"tensors\.json: x"):
        read_index(write(tmp_path, index))


def test_a_missing_index_is_damage(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match=r"tensors\.json: cannot be read"):
        read_index(tmp_path)


def test_element_sizes_are_those_of_torch() -> None:
    assert {name: getattr(torch, name).itemsize for name in ITEM_BYTES} == ITEM_BYTES
