"""Functions of torch with a leading underscore: there, and what we take them for."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from shardwise.internals import functions


def test_chunks_of_all_tensors_lie_row_by_row() -> None:
    tensors, out = [torch.arange(6.0).view(3, 2), torch.arange(4.0)], torch.full((2, 6), -1.0)
    functions.chunk_cat_by_torch(tensors, 0, 2, out)
    assert out.tolist() == [[0, 1, 2, 3, 0, 1], [4, 5, 0, 0, 2, 3]]


def test_tensors_are_copied_and_cast_to_their_places() -> None:
    sources = [torch.arange(6.0, dtype=torch.bfloat16).view(3, 2), torch.ones(1).bfloat16()]
    row = torch.zeros(7)
    functions.copy_to_each(row.split([6, 1]), sources)
    assert row.tolist() == [0, 1, 2, 3, 4, 5, 1]


def test_an_amount_is_added_to_each_in_place() -> None:
    tensors: list[Tensor] = [torch.zeros(()), torch.ones(())]
    functions.add_to_each(tensors, [torch.tensor(2.0), torch.tensor(3.0)])
    assert [tensor.item() for tensor in tensors] == [2, 4]


def test_each_tensor_has_its_norm() -> None:
    norms = functions.norm_of_each([torch.tensor([3.0, 4.0]), torch.zeros(0)])
    assert [norm.item() for norm in norms] == [5, 0]


def test_float8_matrices_are_multiplied_and_scaled() -> None:
    left = torch.eye(16).to(torch.float8_e4m3fn)
    right = torch.arange(256.0).remainder(8).view(16, 16).to(torch.float8_e4m3fn)
    scales = torch.tensor(2.0), torch.tensor(0.5)
    try:
        found = functions.scaled_matmul(left, right.t(), scales, torch.bfloat16, fast=False)
    except RuntimeError as error:
        # On a CPU that oneDNN has no kernel for.
        pytest.skip(str(error).splitlines()[0])
    assert torch.equal(found, right.t().to(torch.bfloat16))


def test_a_copy_has_other_children_and_the_module_keeps_its_own() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    before, first = deepcopy(module.state_dict()), module[0]
    changed = functions.with_children(module, {"0": nn.Identity()})
    assert changed(torch.tensor([[-1.0, 2.0]])).tolist() == [[0, 2]]
    assert module[0] is first
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())


def test_the_gpu_s_functions_are_there() -> None:
    assert callable(torch.cuda._sleep)
    assert callable(torch.cuda.memory._record_memory_history)
    assert callable(torch.cuda.memory._dump_snapshot)
