"""`adamw.update` of one parameter on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def launch(
    param: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    known: Tensor,
    numbers: Sequence[float],
) -> None:
    count = param.numel()
    if count:
        grid = (triton.cdiv(count, _BLOCK),)
        _update[grid](param, grad, mean, square, known, count, *numbers, BLOCK=_BLOCK, num_warps=8)


@triton.jit
def _update(
    param, grad, mean, square, known, count,
    rate, beta1, beta2, eps, decay,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(known) == 0.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        g = tl.load(grad + at, mask=inside) / tl.load(known + 1)
        m = tl.load(mean + at, mask=inside)
        v = tl.load(square + at, mask=inside)
        m = m + (g - m) * (1 - beta1)
        v = v * beta2 + g * g * (1 - beta2)
        p = tl.load(param + at, mask=inside) * (1 - rate * decay)
        p = p - rate / tl.load(known + 2) * m / (tl.sqrt(v / tl.load(known + 3)) + eps)
        tl.store(param + at, p, mask=inside)
        tl.store(mean + at, m, mask=inside)
        tl.store(square + at, v, mask=inside)
