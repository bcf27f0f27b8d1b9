"""AdamW whose moments are eight bits a number, with a scale for each block of a row.

A code is a root of the number: the square root of a mean and the fourth root of a square, because
both have many small numbers beside few large ones. Codes are rounded at random, so that changes
smaller than a code's step add up. All of it is plain torch on a rank's own shard, one parameter at
a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shardwise.kernels.adamw import chance_of
from shardwise.parallel.torchao_float8 import bare, own_part

BLOCK = 256
_CODES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
# Vectors and narrow matrices would save little, and blocks of few numbers need as many scales.
_LEAST_COLUMNS = 64
_RANDOM = 2.0**-32
_OTHER_BITS = 0x5BD1E995
# Numbers that are floats at once.
_CHUNK = 2**24
# Numbers of chunks, which random bits depend on: a prime step in a range that 64 bits multiply.
_PRIME, _NUMBERS = 4099, 2**14


class Adam8(torch.optim.AdamW):
    """torch's AdamW with codes and scales in place of moments."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of all parameters."""
        for group in self.param_groups:
            for index, param in enumerate(group["params"]):
                if param.grad is not None:
                    self._update(group, param, index)

    def _update(self, group: dict[str, Any], param: Tensor, index: int) -> None:
        state = self._state_of(param)
        state["step"] += 1
        count = int(state["step"].item())
        own, grad = _local(param), _local(param.grad)
        if not has_codes(param):
            _move(group, count, own, grad, *(_local(state[name]) for name in _CODES))
            return
        stored = [state[name] for code in _CODES for name in (code, f"{code}_scale")]
        tensors = [_rows_of(tensor) for tensor in (own, grad, *map(_local, stored))]
        num_rows = max(1, _CHUNK // own.shape[-1])
        # Floats of some rows at a time, so that a large table needs no memory for all of its own.
        for part, chunk in enumerate(zip(*(t.split(num_rows) for t in tensors), strict=True)):
            _move_codes(group, count, (index + _PRIME * part) % _NUMBERS, chunk)

    def _state_of(self, param: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name, dtype in _CODES.items():
                packs = has_codes(param)
                state[name] = torch.zeros_like(bare(param), dtype=dtype if packs else torch.float32)
                if packs:
                    state[f"{name}_scale"] = _scales_like(param)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state. torch casts it to the dtype of the parameter, and here codes are cast
        back."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name, dtype in _CODES.items():
                if f"{name}_scale" in state:
                    state[name] = state[name].to(dtype)


def _move(
    group: dict[str, Any], count: int, own: Tensor, grad: Tensor, mean: Tensor, square: Tensor
) -> None:
    """AdamW's update number `count` of fp32 numbers, in place."""
    beta1, beta2 = group["betas"]
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    own.mul_(1 - group["lr"] * group["weight_decay"])
    root = (square / (1 - beta2**count)).sqrt_().add_(group["eps"])
    own.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**count))


def _move_codes(group: dict[str, Any], count: int, index: int, chunk: tuple[Tensor, ...]) -> None:
    """The same where the moments are codes. `index` tells one chunk from others."""
    own, grad, mean_codes, mean_scales, square_codes, square_scales = chunk
    mean, square = decode(mean_codes, mean_scales), decode(square_codes, square_scales)
    _move(group, count, own, grad, mean, square)
    chance = chance_of(own, count, index)
    for moment, codes, scales, bits in (
        (mean, mean_codes, mean_scales, chance),
        (square, square_codes, square_scales, chance ^ _OTHER_BITS),
    ):
        new_codes, new_scales = encode(moment, codes.dtype, bits)
        codes.copy_(new_codes)
        scales.copy_(new_scales)


def _rows_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1, tensor.shape[-1])


def has_codes(param: Tensor) -> bool:
    """Whether the moments of a parameter are codes: of a wide matrix with whole rows."""
    whole_rows = not isinstance(param, DTensor) or not any(
        isinstance(place, Shard) and place.dim == param.dim() - 1 for place in param.placements
    )
    return param.dim() >= 2 and param.shape[-1] >= _LEAST_COLUMNS and whole_rows


def encode(moment: Tensor, dtype: torch.dtype, chance: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of fp32 numbers, rounded by 32 random bits each, and the scale of each block."""
    blocks = _blocks(moment)
    scales = blocks.abs().amax(-1)
    shares = blocks.abs() / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    wide = 127 * shares.sqrt() if dtype == torch.int8 else 255 * shares.sqrt().sqrt()
    random = _blocks(chance.double().mul_(_RANDOM).float())
    codes = (wide + random).floor()
    # The largest of a block keeps its code, and so the scale its meaning.
    codes = torch.where(shares == 1, wide.round(), codes).clamp_(max=_most(dtype))
    if dtype == torch.uint8:
        # A square of zero under a mean that is none would make a huge step.
        codes = torch.where(shares > 0, codes.clamp(min=1), codes)
    else:
        codes = codes * blocks.sign()
    return _rows(codes, moment).to(dtype), scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers that codes stand for."""
    shares = _blocks(codes.float()) / _most(codes.dtype)
    values = shares * shares.abs() if codes.dtype == torch.int8 else shares.square().square()
    return _rows(values * scales[..., None], codes)


def _most(dtype: torch.dtype) -> int:
    return 127 if dtype == torch.int8 else 255


def _blocks(rows: Tensor) -> Tensor:
    """Rows cut into blocks; the last one of a row is filled with zeros."""
    padded = F.pad(rows, (0, -rows.shape[-1] % BLOCK))
    return padded.unflatten(-1, (-1, BLOCK))


def _rows(blocks: Tensor, like: Tensor) -> Tensor:
    return blocks.flatten(-2)[..., : like.shape[-1]].contiguous()


def _scales_like(param: Tensor) -> Tensor:
    """Zeros, a scale for each block of a row, sharded as the rows are."""
    local = _local(param)
    count = -(-param.shape[-1] // BLOCK)
    scales = local.new_zeros((*local.shape[:-1], count), dtype=torch.float32)
    if not isinstance(param, DTensor):
        return scales
    shape = torch.Size((*param.shape[:-1], count))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        scales, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride
    )


def _local(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError("a parameter without a gradient is not updated")
    return own_part(tensor)
