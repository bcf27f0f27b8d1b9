"""cuBLASLt's matmul by an algorithm that the caller names.

torch takes the first algorithm that the library proposes. Others give the same numbers, and at the
power limit of a card some are faster; `kernels/matmul.py` looks for them. torch has no way to name
one, so this is the library's own C interface, in the copy that torch has loaded.

cuBLAS reads memory by columns, torch by rows: `left @ right` by rows is `right.T @ left.T` by
columns, so operands change places below.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Of cublasLt.h and library_types.h.
_IN_FP32, _FP32 = 68, 0
_FORMATS = {torch.bfloat16: 14, torch.float16: 2, torch.float32: 0}
_TURN_FIRST, _TURN_SECOND = 3, 4
_MOST_WORKSPACE = 1
_SPLITS = 2
_ALGORITHM_BYTES = 64


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * (_ALGORITHM_BYTES // 8)),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Problem:
    """What an algorithm is for: the sizes of `left @ right`, how both lie in memory, their format.

    Turned operands are transposed views of what lies there by rows.
    """

    rows: int
    inner: int
    columns: int
    left_turned: bool
    right_turned: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, left: Tensor, right: Tensor) -> Problem:
        """Raises ValueError where an operand is neither by rows nor the view of one that is."""
        rows, inner = left.shape
        turned = (not left.is_contiguous(), not right.is_contiguous())
        for side, is_turned in zip((left, right), turned, strict=True):
            if is_turned and not side.t().is_contiguous():
                raise ValueError(f"strides of {tuple(side.stride())} are no matmul's")
        return cls(rows, inner, right.shape[1], *turned, left.dtype)


def proposals(problem: Problem, most: int) -> list[str]:
    """The library's algorithms in the order it believes in, as hexadecimal text.

    None needs memory of its own, and none splits its sums, which would change their order.
    """
    prepared = _prepared(problem)
    found, count = (_Proposal * most)(), c_int()
    preference = _made("cublasLtMatmulPreferenceCreate")
    _set("cublasLtMatmulPreferenceSetAttribute", preference, _MOST_WORKSPACE, c_uint64(0))
    _call(
        "cublasLtMatmulAlgoGetHeuristic", _handle(torch.cuda.current_device()), prepared.kind,
        prepared.first, prepared.second, prepared.out, prepared.out, preference, c_int(most),
        byref(found), byref(count),
    )  # fmt: skip
    _call("cublasLtMatmulPreferenceDestroy", preference)
    good = [one for one in found[: count.value] if one.status == 0 and _splits(one) <= 1]
    return [bytes(one.algorithm).hex() for one in good]


def multiply(left: Tensor, right: Tensor, algorithm: str) -> Tensor:
    """left @ right."""
    problem = Problem.of(left, right)
    prepared = _prepared(problem)
    out = left.new_empty(problem.rows, problem.columns)
    _call(
        "cublasLtMatmul", _handle(torch.cuda.current_device()), prepared.kind, byref(_ONE),
        c_void_p(right.data_ptr()), prepared.first, c_void_p(left.data_ptr()), prepared.second,
        byref(_ZERO), c_void_p(out.data_ptr()), prepared.out, c_void_p(out.data_ptr()),
        prepared.out, _bytes_of(algorithm), c_void_p(0), c_size_t(0),
        c_void_p(torch.cuda.current_stream().cuda_stream),
    )  # fmt: skip
    return out


_ONE, _ZERO = c_float(1), c_float(0)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The library's description of a problem, made once."""

    kind: c_void_p
    first: c_void_p
    second: c_void_p
    out: c_void_p


@cache
def _prepared(problem: Problem) -> _Prepared:
    kind = _made("cublasLtMatmulDescCreate", c_int(_IN_FP32), c_int(_FP32))
    turns = ((_TURN_FIRST, problem.right_turned), (_TURN_SECOND, problem.left_turned))
    for which, turned in turns:
        _set("cublasLtMatmulDescSetAttribute", kind, which, c_int32(turned))
    rows, inner, columns = problem.rows, problem.inner, problem.columns
    left = (rows, inner) if problem.left_turned else (inner, rows)
    right = (inner, columns) if problem.right_turned else (columns, inner)
    layouts = (_layout(*sizes, problem.dtype) for sizes in (right, left, (columns, rows)))
    return _Prepared(kind, *layouts)


def _layout(height: int, width: int, dtype: torch.dtype) -> c_void_p:
    """Of numbers that lie by columns of this height."""
    sizes = (c_uint64(height), c_uint64(width), c_int64(height))
    return _made("cublasLtMatrixLayoutCreate", c_int(_FORMATS[dtype]), *sizes)


def _splits(proposal: _Proposal) -> int:
    found, size = c_int32(), c_size_t()
    _call(
        "cublasLtMatmulAlgoConfigGetAttribute", byref(proposal), c_int(_SPLITS), byref(found),
        c_size_t(ctypes.sizeof(found)), byref(size),
    )  # fmt: skip
    return found.value


@cache
def _bytes_of(algorithm: str) -> ctypes.Array[Any]:
    return ctypes.create_string_buffer(bytes.fromhex(algorithm), _ALGORITHM_BYTES)


def _set(name: str, of: c_void_p, which: int, value: Any) -> None:
    _call(name, of, c_int(which), byref(value), c_size_t(ctypes.sizeof(value)))


def _made(name: str, *given: Any) -> c_void_p:
    made = c_void_p()
    _call(name, byref(made), *given)
    return made


@cache
def _handle(device: int) -> c_void_p:
    """Of a device, which must be the current one."""
    return _made("cublasLtCreate")


def _call(name: str, *given: Any) -> None:
    if status := getattr(_library(), name)(*given):
        raise RuntimeError(f"{name} of cuBLASLt failed with status {status}")


@cache
def _library() -> ctypes.CDLL:
    """Found by its name alone, as torch has loaded it."""
    major = (torch.version.cuda or "").split(".")[0]
    return ctypes.CDLL(f"libcublasLt.so.{major}")
