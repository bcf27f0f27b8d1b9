"""One buffer for the inputs of all reduce-scatters, and before them for the head's gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.internals.parts import REDUCTIONS, is_open
from shardwise.parallel.mesh import Mesh
from shardwise.plan.planned import Plan
from shardwise.plan.reserved import has_reduce_buffer


class ReduceBuffer:
    """Memory that is allocated once and taken again and again, on the compute stream.

    The inputs of reduce-scatters are the largest tensors of backward: 2 GiB for the head of Llama
    3.1 8B, 9 GiB for a block of GLM-4.5-Air. The allocator needs one free block as large for each,
    and the gradients of other units lie between what activations have left. On an H200 as rank 0 of
    8 that cost Llama 2.0 GiB, Qwen3 8B with full recomputation 2.4 and GLM-4.5-Air 6.5.

    One buffer is enough. FSDP2 waits for the reduce-scatter of a unit before it copies the
    gradients of the next one, and the gradient that the loss sums up in fp32 is not needed any more
    when the head's gradients are copied. A buffer that is taken waits for the last stream that read
    it, so this is right for any caller.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._was_read: Any = None

    def take(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The first bytes of the buffer. What was taken before must not be used any more."""
        if self._was_read is not None:
            torch.cuda.current_stream(device).wait_event(self._was_read)
            self._was_read = None
        needed = math.prod(size) * dtype.itemsize
        if self._memory is None or self._memory.numel() < needed:
            # The old one goes first, so that there are never two.
            self._memory = None
            self._memory = torch.empty(needed, dtype=torch.uint8, device=device)
        return self._memory[:needed].view(dtype).view(*size)

    def note_read(self) -> None:
        """Remember that the current stream reads the buffer."""
        self._was_read = torch.cuda.Event()
        self._was_read.record()


@dataclass(frozen=True, slots=True)
class BufferedInputs:
    """The memory of FSDP2's reduce-scatters: inputs from the buffer, outputs from elsewhere.

    FSDP2 allocates the input on the compute stream, where it copies gradients into it, and the
    output on the stream that reduces.
    """

    buffer: ReduceBuffer
    allocate: Callable[..., Tensor]

    def __call__(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate, with the arguments that FSDP2 passes."""
        computes = torch.cuda.default_stream(device)
        is_input = torch.cuda.current_stream(device) == computes
        allocate = self.buffer.take if is_input else self.allocate
        return allocate(size, dtype=dtype, device=device)


def reduce_buffer_for(plan: Plan, mesh: Mesh) -> ReduceBuffer | None:
    """The buffer of this plan's reductions, where they have one."""
    if mesh.fsdp.size() == 1 or not is_open(REDUCTIONS):
        return None
    return ReduceBuffer() if has_reduce_buffer(plan.model, plan.decided, plan.cluster) else None
