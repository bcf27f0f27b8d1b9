"""The most that a GPU could do for a family, from rates measured on it now.

The limit is that of `ceilings.py`, for any model: every matmul of its forward and both of its
backward at their own shapes, attention at the rate that it reaches over whole sequences, with a
soft cap where the model has one, and 32 bytes for each parameter of the update. Layers with one
input are one matmul or several, whichever is faster. Experts are grouped matmuls over as many
tokens each. A window leaves out its share of attention. Norms, activations, routing and
recomputation are no part of the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ceilings import UPDATE_BYTES
from family_list import Case
from family_work import Layer, SeenAttention, SeenExperts, SeenWork

if TYPE_CHECKING:
    from shardwise.metrics.clock import Clock

# Tokens that layers are measured with, and seconds that each loads the device for.
_TOKENS = {"cuda": 16384, "cpu": 64}
_LOAD_S = {"cuda": 0.4, "cpu": 0.001}
COPY = "copied bytes/s"


@dataclass(frozen=True, slots=True)
class Kernel:
    """Something that is measured once for all rows that need it."""

    shape: Layer | SeenExperts | SeenAttention
    seq_len: int = 0
    """Of attention."""

    def __str__(self) -> str:
        shape = self.shape
        if isinstance(shape, SeenExperts):
            sizes = f"{shape.count} x {shape.layer[0]} x {shape.layer[1]}"
            return f"experts {sizes}, {shape.per_token} a token"
        if isinstance(shape, SeenAttention):
            sizes = f"{shape.heads} x {shape.width}/{shape.value_width}"
            cap = "" if shape.cap is None else f", capped at {shape.cap:g}"
            return f"attention {sizes} over {self.seq_len}{cap}"
        return f"layer {shape[0]} x {shape[1]}"


def kernels_of(work: SeenWork, seq_len: int) -> Iterator[Kernel]:
    """All that a limit needs to know the time of."""
    for group in work.linears:
        yield from map(Kernel, group)
        if len(group) > 1:
            yield Kernel(_joined(group))
    yield from map(Kernel, work.experts)
    yield from (Kernel(_whole(each), seq_len) for each in work.attentions)


def limit_s(work: SeenWork, case: Case, world: int, seconds: Mapping[str, float]) -> float | None:
    """Seconds of one step, from those of each kernel for one token; None where one is missing."""
    if any(str(kernel) not in seconds for kernel in kernels_of(work, case.seq_len)):
        return None
    per_token = 0.0
    for group, times in work.linears.items():
        apart = sum(seconds[str(Kernel(layer))] for layer in group)
        joined = seconds[str(Kernel(_joined(group)))]
        per_token += times * min(apart, joined)
    for experts, count in work.experts.items():
        per_token += count * seconds[str(Kernel(experts))]
    for attention, count in work.attentions.items():
        whole = seconds[str(Kernel(_whole(attention), case.seq_len))]
        per_token += count * whole * _seen_share(attention.window, case.seq_len)
    return case.tokens * per_token + UPDATE_BYTES * work.params / world / seconds[COPY]


def measure_kernels(kernels: Iterable[Kernel], device: str, flash: bool) -> dict[str, float]:
    """Seconds of each for one token, forward and backward, and the rate of a large copy.

    With `flash`, attention may be FlashAttention 4, which takes seconds to compile for each width.
    """
    from shardwise.kernels.cublas import drop_workspace

    drop_workspace()  # as a run of shardwise does
    clock = _clock(device)
    found = {COPY: _copy_rate(clock)}
    for kernel in kernels:
        try:
            found[str(kernel)] = _seconds(kernel, clock, flash) / _TOKENS[device]
        except RuntimeError as error:
            print(f"{kernel}: {error}")
    return found


def _joined(group: tuple[Layer, ...]) -> Layer:
    return group[0][0], sum(layer[1] for layer in group)


def _whole(attention: SeenAttention) -> SeenAttention:
    """The same without its window."""
    return replace(attention, window=None)


def _seen_share(window: int | None, seq_len: int) -> float:
    """The share of all earlier tokens that a window leaves."""
    if window is None or window >= seq_len:
        return 1.0
    return (window - window**2 / (2 * seq_len)) / (seq_len / 2)


def _clock(device: str) -> Clock:
    import torch
    import torch.distributed as dist

    from shardwise.metrics.clock import Clock, Patience
    from shardwise.parallel.mesh import World

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return Clock(torch.device(device), Patience(_LOAD_S[device], 1), World.joined())


def _copy_rate(clock: Clock) -> float:
    from shardwise.calibrate.copy_rate import measure_copies

    return max(measure_copies(clock), key=lambda point: point["bytes"])["bytes_per_s"]


def _seconds(kernel: Kernel, clock: Clock, flash: bool) -> float:
    from shardwise.calibrate.matmul import linear_work

    shape, tokens = kernel.shape, _TOKENS[clock.device.type]
    if isinstance(shape, SeenAttention):
        return _attention_seconds(shape, kernel.seq_len, clock, flash)
    if isinstance(shape, SeenExperts):
        return clock.seconds(_experts_work(shape, tokens, clock))
    return clock.seconds(linear_work(clock.device, _dtype(clock), tokens, *shape))


def _experts_work(experts: SeenExperts, tokens: int, clock: Clock) -> Any:
    """Forward, and backward to the input and to the weights, with as many tokens for each."""
    import torch
    from torch.nn.functional import grouped_mm

    wide_in, wide_out = experts.layer
    each = max(8, tokens * experts.per_token // experts.count)
    rows, dtype, device = each * experts.count, _dtype(clock), clock.device
    ends = torch.arange(each, rows + 1, each, dtype=torch.int32, device=device)
    inputs = torch.randn(rows, wide_in, device=device).to(dtype)
    outputs = torch.randn(rows, wide_out, device=device).to(dtype)
    weight = torch.randn(experts.count, wide_out, wide_in, device=device).to(dtype)

    def work() -> None:
        grouped_mm(inputs, weight.mT, offs=ends)
        grouped_mm(outputs, weight, offs=ends)
        grouped_mm(outputs.T, inputs, offs=ends)

    return work


def _attention_seconds(shape: SeenAttention, seq_len: int, clock: Clock, flash: bool) -> float:
    """Forward and backward, by the fastest kernel that takes these widths."""
    import torch

    from shardwise.training.surroundings import fast_attention

    sequences = max(1, _TOKENS[clock.device.type] // seq_len)
    widths = (shape.width, shape.width, shape.value_width)
    sides = [
        torch.randn(sequences, shape.heads, seq_len, width, device=clock.device)
        .to(_dtype(clock))
        .requires_grad_()
        for width in widths
    ]
    found = []
    for attend in _attentions(shape, clock.device, flash):
        try:
            with fast_attention(clock.device):
                output = attend(*sides)
                gradient = torch.randn_like(output)

                def both(attend: Any = attend, gradient: Any = gradient) -> None:
                    torch.autograd.grad(attend(*sides), sides, gradient)

                found.append(clock.seconds(both))
        except (RuntimeError, AssertionError, NotImplementedError, ValueError, TypeError) as error:
            print(f"{shape}: {error}")
    if not found:
        raise RuntimeError("no attention takes these widths")
    return min(found) * _TOKENS[clock.device.type] / (sequences * seq_len)


def _attentions(shape: SeenAttention, device: Any, flash: bool) -> list[Any]:
    """Those that compute it."""
    from attention import by_flash_capped
    from ceilings import attentions_on
    from shardwise.calibrate.attention_rate import by_torch

    if shape.cap is not None and flash and device.type == "cuda":
        return [partial(by_flash_capped, cap=shape.cap)]
    return list(attentions_on(device).values()) if flash else [by_torch]


def _dtype(clock: Clock) -> Any:
    import torch

    return torch.bfloat16 if clock.device.type == "cuda" else torch.float32
