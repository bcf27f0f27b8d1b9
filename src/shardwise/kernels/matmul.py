"""Matmuls by the fastest of cuBLAS's algorithms, found by trying them.

All that are tried give the same numbers as torch's own choice, bit for bit; the others are left
out. So is everything that a library of another version would number differently: what was found is
for this process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.library import custom_op

from shardwise.kernels.cublaslt import Problem, multiply, proposals

# A GPU slows down to its power limit within tenths of a second of full load.
_WARM_UP_S = 0.3
_FIRST_S = 0.05
_AGAIN_S = 0.1
_ROUNDS = 3
_MOST = 16
_KEPT = 3
# What is not better by this much is noise, and torch's own choice stays.
_LEAST_GAIN = 0.005


@dataclass(frozen=True, slots=True)
class Tuned:
    """The fastest algorithm for a problem, "" for torch's own choice, and seconds with both."""

    algorithm: str
    seconds: float
    torch_s: float


@custom_op("shardwise::matmul", mutates_args=(), device_types="cpu")
def matmul(left: Tensor, right: Tensor, algorithm: str) -> Tensor:
    """left @ right, by an algorithm that `tune` found; "" is torch's own."""
    return left @ right


@matmul.register_kernel("cuda")
def _(left: Tensor, right: Tensor, algorithm: str) -> Tensor:
    return multiply(left, right, algorithm) if algorithm else left @ right


@matmul.register_fake
def _(left: Tensor, right: Tensor, algorithm: str) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


def why_not_tuned() -> str | None:
    """None where torch is built with cuBLAS."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return None


@cache
def tune(problem: Problem) -> Tuned:
    """Try the library's proposals on this GPU, with random numbers: zeros draw less power."""
    left = _random(problem.rows, problem.inner, problem.dtype, problem.left_turned)
    right = _random(problem.inner, problem.columns, problem.dtype, problem.right_turned)
    expected = left @ right
    works: dict[str, Callable[[], Tensor]] = {"": partial(torch.mm, left, right)}
    for algorithm in proposals(problem, _MOST):
        work = partial(multiply, left, right, algorithm)
        if torch.equal(work(), expected):
            works[algorithm] = work
    _seconds(works[""], _WARM_UP_S)
    first = {name: _seconds(work, _FIRST_S) for name, work in works.items()}
    kept = {"", *sorted(first, key=lambda name: first[name])[:_KEPT]}
    total = dict.fromkeys(kept, 0.0)
    for _ in range(_ROUNDS):
        for name in kept:
            total[name] += _seconds(works[name], _AGAIN_S) / _ROUNDS
    best = min(total, key=lambda name: total[name])
    if total[best] > (1 - _LEAST_GAIN) * total[""]:
        best = ""
    return Tuned(best, total[best], total[""])


def _random(rows: int, columns: int, dtype: torch.dtype, turned: bool) -> Tensor:
    if turned:
        return _random(columns, rows, dtype, turned=False).t()
    return torch.randn(rows, columns, dtype=dtype, device="cuda")


def _seconds(work: Callable[[], object], load_s: float) -> float:
    """Of one call, while the device does nothing else for so long."""
    count = max(2, round(load_s / _of_calls(work, 2)))
    return _of_calls(work, count)


def _of_calls(work: Callable[[], object], count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / count
