"""cuBLAS's algorithms by name: on a GPU all of them give torch's numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.kernels.cublaslt import Problem, multiply, proposals
from shardwise.kernels.matmul import matmul, tune

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device: nothing here was tested"
)


def operands(problem: Problem, device: str) -> tuple[Tensor, Tensor]:
    made = []
    for rows, columns, turned in (
        (problem.rows, problem.inner, problem.left_turned),
        (problem.inner, problem.columns, problem.right_turned),
    ):
        sizes = (columns, rows) if turned else (rows, columns)
        made.append(torch.randn(*sizes, device=device).to(problem.dtype))
        made[-1] = made[-1].t() if turned else made[-1]
    return made[0], made[1]


PROBLEMS = [
    Problem(512, 256, 1024, False, True, torch.bfloat16),
    Problem(512, 1024, 256, False, False, torch.bfloat16),
    Problem(1024, 512, 256, True, False, torch.float16),
    Problem(1024, 512, 256, True, True, torch.bfloat16),
]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_problem_is_read_off_its_operands(problem: Problem) -> None:
    assert Problem.of(*operands(problem, "cpu")) == problem


def test_operands_with_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match="no matmul's"):
        Problem.of(torch.ones(8, 16)[:, :8], torch.ones(8, 8))


def test_on_a_processor_it_is_torchs() -> None:
    left, right = torch.randn(8, 4), torch.randn(6, 4).t()
    assert torch.equal(matmul(left, right, ""), left @ right)
    torch.library.opcheck(matmul, (left, right, ""))


@needs_gpu
@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_algorithm_gives_torchs_numbers(problem: Problem) -> None:
    left, right = operands(problem, "cuda")
    found = proposals(problem, 8)
    assert found
    for algorithm in found:
        torch.testing.assert_close(multiply(left, right, algorithm), left @ right)


@needs_gpu
def test_the_one_that_was_chosen_gives_the_same_bits() -> None:
    problem = PROBLEMS[1]
    left, right = operands(problem, "cuda")
    best = tune(problem)
    assert torch.equal(matmul(left, right, best.algorithm), left @ right)
    assert 0 < best.seconds <= best.torch_s
