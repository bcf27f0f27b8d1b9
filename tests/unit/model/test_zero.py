"""Checkpoints of DeepSpeed: every element from its shard, nothing run, faults named."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwise.errors import UserError
from shardwise.model.boxes import Box, whole_box
from shardwise.model.stored import find_weights, open_weights, unread_state
from shardwise.model.weight_fingerprint import fingerprint_weights
from zero_files import save_zero


def made(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(*shape, generator=generator) for shape in shapes]


MATRIX, OTHER, VECTOR, SINGLE, FROZEN, BUFFER = made((7, 5), (4, 6), (3,), (1,), (5, 3), (4,))
GROUPS = [{"a.weight": MATRIX, "b.weight": OTHER}, {"a.bias": VECTOR, "b.bias": SINGLE}]
TRAINED = {name: tensor for group in GROUPS for name, tensor in group.items()}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_part_of_every_tensor_is_read(tmp_path: Path, stage: int, num_ranks: int) -> None:
    save_zero(
        tmp_path, GROUPS, stage=stage, num_ranks=num_ranks, buffers={"c.bias": BUFFER},
        frozen={"c.weight": FROZEN}, tied={"head.weight": "a.weight"},
    )  # fmt: skip
    weights = open_weights(tmp_path)
    kept = {"c.weight": FROZEN, "c.bias": BUFFER}
    if stage < 3:
        kept = {name: tensor.bfloat16() for name, tensor in kept.items()}
    expected = {**TRAINED, **kept, "head.weight": MATRIX}
    assert set(weights.keys()) == set(expected)
    for name, tensor in expected.items():
        assert weights.shape(name) == list(tensor.shape)
        assert torch.equal(weights.read(name, whole_box(tensor.shape)), tensor), name
    for box in (Box((2, 0), (3, 5)), Box((1, 2), (6, 2)), Box((6, 4), (1, 1)), Box((0, 0), (0, 5))):
        assert torch.equal(weights.read("a.weight", box), MATRIX[box.slices]), box
    assert not (tmp_path / "canary").exists()


def test_the_directory_of_one_step_can_be_named(tmp_path: Path) -> None:
    save_zero(tmp_path, GROUPS, stage=3, num_ranks=2)
    step = tmp_path / "global_step7"
    assert find_weights(step) == find_weights(tmp_path)
    assert set(open_weights(step).keys()) == set(TRAINED)
    assert unread_state(tmp_path) == ["the optimizer and scheduler of DeepSpeed"]
    before = fingerprint_weights(tmp_path)
    shutil.rmtree(tmp_path / "global_step7")
    changed = [{name: tensor + 1 for name, tensor in group.items()} for group in GROUPS]
    save_zero(tmp_path / "other", changed, stage=3, num_ranks=2)
    assert fingerprint_weights(tmp_path / "other") != before


def test_without_zero_one_file_has_all_weights(tmp_path: Path) -> None:
    torch.save({"module": {"a.weight": MATRIX.half()}}, tmp_path / "mp_rank_00_model_states.pt")
    found = open_weights(tmp_path).read("a.weight", whole_box(MATRIX.shape))
    assert torch.equal(found, MATRIX.half())


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("zero_pp_rank_1_mp_rank_00_optim_states.pt", None, "optim states of rank 1 are missing"),
        ("zero_pp_rank_2_mp_rank_00_optim_states.pt", None, "shards of 2 ranks, and 3 were saved"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", b"PK", "not a zip file"),
        ("zero_pp_rank_0_mp_rank_01_model_states.pt", b"", "tensor parallelism"),
        ("layer_01-model_00-model_states.pt", b"", "pipeline stages"),
    ],
)
def test_a_fault_is_named(tmp_path: Path, file: str, content: bytes | None, said: str) -> None:
    save_zero(tmp_path, GROUPS, stage=3, num_ranks=3)
    path = tmp_path / "global_step7" / file
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        open_weights(tmp_path)
    assert said in f"{caught.value.what} {caught.value.why}"


@pytest.mark.parametrize("damage", ["cut", "short", "shape"])
def test_what_does_not_fit_is_refused_before_a_byte_is_read(tmp_path: Path, damage: str) -> None:
    save_zero(tmp_path, GROUPS, stage=3, num_ranks=2)
    path = tmp_path / "global_step7" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-200])
    else:
        state = torch.load(path, weights_only=False)["optimizer_state_dict"]
        shutil.rmtree(tmp_path / "canary")
        flat = state["fp32_flat_groups"][0]
        part = flat[:-4].clone() if damage == "short" else flat[:32].view(2, -1).t()
        torch.save({"optimizer_state_dict": {**state, "fp32_flat_groups": [part]}}, path)
    with pytest.raises(UserError, match="cannot read"):
        open_weights(tmp_path)


def test_a_packed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00_model_states.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02}." + b"0" * 1000)
    with pytest.raises(UserError) as caught:
        open_weights(tmp_path)
    assert caught.value.why == "it is compressed"
