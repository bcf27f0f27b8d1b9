"""FlashAttention 4 against the attention that a run takes by itself, on the GPU that is here.

    python benchmarks/attention.py [--heads 32] [--kv-heads 8] [--width 128] [--rounds 3]

Causal attention in bf16, forward and backward, in milliseconds: medians of 30, in turn. Both are
what `shardwise train` runs: `model.attention=sdpa` and `flash_attention_4`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from shardwise.kernels.attention import causal_attention
from shardwise.training.surroundings import fast_attention

# Sequences and their length: the shapes of docs/speed.md, and one long sequence.
SHAPES = ((8, 4096), (6, 4096), (2, 4096), (4, 8192), (1, 32768))
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    turned = (side.transpose(1, 2) for side in (query, key, value))
    return scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True).transpose(1, 2)


def by_flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return causal_attention(query, key, value, query.shape[-1] ** -0.5)[0]


def by_flash_capped(query: Tensor, key: Tensor, value: Tensor, cap: float) -> Tensor:
    """Heads before the length, as torch has them, and scores bounded by a tanh."""
    sides = (side.transpose(1, 2) for side in (query, key, value))
    return causal_attention(*sides, query.shape[-1] ** -0.5, softcap=cap)[0].transpose(1, 2)


def milliseconds(attend: Attention, sides: list[Tensor], times: int) -> tuple[float, float]:
    """Forward and backward."""
    grad = torch.randn_like(sides[0])
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(times)]
    for start, middle, end in marks:
        start.record()
        out = attend(*sides)
        middle.record()
        torch.autograd.grad(out, sides, grad)
        end.record()
    torch.cuda.synchronize()
    return (
        median(start.elapsed_time(middle) for start, middle, _ in marks),
        median(middle.elapsed_time(end) for _, middle, end in marks),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| sequences | sdpa | flash_attention_4 | times as fast |\n|---|---|---|---|")
    with fast_attention(torch.device("cuda")):
        for count, length in SHAPES:
            sides = [
                torch.randn(count, length, heads, given.width, device="cuda", dtype=torch.bfloat16)
                for heads in (given.heads, given.kv_heads, given.kv_heads)
            ]
            for side in sides:
                side.requires_grad_()
            for attend in (by_torch, by_flash):
                milliseconds(attend, sides, 5)
            found = [
                [milliseconds(attend, sides, 30) for attend in (by_torch, by_flash)]
                for _ in range(given.rounds)
            ]
            torchs, flash = (
                tuple(median(each[who][part] for each in found) for part in (0, 1))
                for who in (0, 1)
            )
            print(
                f"| {count} x {length} | {torchs[0]:.2f} + {torchs[1]:.2f} "
                f"| {flash[0]:.2f} + {flash[1]:.2f} | {sum(torchs) / sum(flash):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
