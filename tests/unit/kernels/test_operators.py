"""Operators of packed weights: the host runs their kernel in Python, and nothing else."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from shardwise.kernels import float8, float8_rows, fp8_blocks, mxfp4, nf4

ROWS = torch.randn(32, 64)
SCALE = torch.ones(())


NF4, FLOAT8 = nf4.pack(ROWS), float8_rows.pack(ROWS)
CALLS: dict[str, tuple[Any, ...]] = {
    "nf4_floats": (NF4, torch.bfloat16),
    "mxfp4_floats": (mxfp4.pack(ROWS).view(torch.int32), torch.bfloat16),
    "fp8_block_floats": (fp8_blocks.pack(ROWS).view(torch.int64), torch.bfloat16),
    "float8_steps": (FLOAT8,),
    "float8_floats": (FLOAT8, torch.bfloat16),
    "float8_cast": (ROWS, SCALE, float8.FORWARD),
    "float8_row_product": (ROWS.to(float8.FORWARD), SCALE, FLOAT8, torch.bfloat16),
    "float8_cast_columns": (ROWS, torch.ones(64)),
    "float8_row_grad": (ROWS.t().to(float8.BACKWARD), SCALE, FLOAT8, torch.bfloat16),
    "amax": (ROWS,),
}


def operator(name: str) -> Any:
    return getattr(torch.ops.shardwise, name).default


@pytest.mark.parametrize("name", CALLS)
def test_no_python_runs_between_the_call_and_the_kernel(name: str) -> None:
    """`custom_op` has four functions there, in torch/_library."""
    files: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    call, given = operator(name), CALLS[name]
    call(*given)
    sys.setprofile(note)
    try:
        call(*given)
    finally:
        sys.setprofile(None)
    assert any("shardwise" in file for file in files)
    assert not any("_library" in file for file in files)


@pytest.mark.parametrize("name", CALLS)
def test_results_are_new_memory_of_the_shape_that_the_compiler_is_told(name: str) -> None:
    given = CALLS[name]
    torch.library.opcheck(operator(name), given, test_utils=("test_faketensor",))
    made = operator(name)(*given)
    taken = {each.data_ptr() for each in given if isinstance(each, torch.Tensor)}
    assert not any(each.data_ptr() in taken for each in (made if type(made) is tuple else [made]))
