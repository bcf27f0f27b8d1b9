"""The most that this GPU could do for a shape, from rates measured on it now.

    python benchmarks/ceilings.py [--shapes 8b-4096 ...] [--float8 8b-4096 ...]

The limit of a step is what no way of training the model can leave out, each part at the rate that
the device reaches when it does nothing else:

    limit_s = tokens x (layers x (projections + attention) + head)
            + 32 bytes x parameters / ranks / copy rate

- projections: the matmuls of a block, forward and both of backward, at their own shapes and at a
  usual number of tokens; query, key and value in one matmul or in three, gate and up in one or in
  two, whichever is faster. In bf16, or in float8 from numbers that are float8 already.
- attention: causal, forward and backward, by the kernel that training takes, or by FlashAttention 4
  where it is installed and faster. Always bf16.
- head: the output projection, always bf16.
- 32 bytes for each parameter that a rank holds: AdamW reads four fp32 numbers and writes three, and
  the norm of all gradients, which clipping needs before any update, reads one. At the rate of a
  large copy. Other traffic of parameters and gradients can run beside matmuls.

Norms, rotary embedding, SwiGLU, residuals, the loss and casts to float8 could all be part of a
matmul's reading or writing: they are no part of the limit, and neither is recomputation.

A GPU slows down to its power limit within tenths of a second of full load, so each matmul is
loaded for 0.4 s, and numbers are random, since zeros draw less.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from peers.shapes import SHAPES, Shape
from shardwise.facts.models import ModelSpec
from shardwise.kernels.cublas import drop_workspace

if TYPE_CHECKING:
    from torch import Tensor

    from shardwise.calibrate.attention_rate import Attend
    from shardwise.metrics.clock import Clock

UPDATE_BYTES = 32
# A layer's widths in and out; the layers of a way together compute one part of a block.
Layer = tuple[int, int]
Way = tuple[Layer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What was measured for one shape, in seconds for `tokens` tokens."""

    tokens: int
    block_s: dict[str, float]
    """Projections of one block, by format."""

    attention_s: float
    """Of one block, forward and backward."""

    head_s: float
    copy_bytes_per_s: float


def limit_s(
    found: Ceilings, spec: ModelSpec, *, tokens: int, world: int, precision: str
) -> float | None:
    """Of one step with so many tokens a rank; None where the format was not measured."""
    if precision not in found.block_s:
        return None
    block = found.block_s[precision] + found.attention_s
    compute = (spec.num_layers * block + found.head_s) * tokens / found.tokens
    return compute + UPDATE_BYTES * spec.total_params / world / found.copy_bytes_per_s


def ways_of(spec: ModelSpec) -> list[list[Way]]:
    """The parts of a block, each with the ways to compute it."""
    hidden, ffn = spec.hidden_size, spec.ffn_size
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return [
        [((hidden, query + 2 * key),), ((hidden, query), (hidden, key), (hidden, key))],
        [((query, hidden),)],
        [((hidden, 2 * ffn),), ((hidden, ffn), (hidden, ffn))],
        [((ffn, hidden),)],
    ]


def best_block_s(ways: Iterable[Iterable[Way]], seconds: Mapping[Layer, float]) -> float:
    """Every part in its fastest way."""
    return sum(min(sum(seconds[layer] for layer in way) for way in part) for part in ways)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["8b-4096"])
    parser.add_argument("--float8", nargs="*", default=[], help="those that use it too")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()

    drop_workspace()  # as a run of shardwise does
    import torch
    import torch.distributed as dist

    # 2.13 warns of names that 2.11 needs.
    warnings.simplefilter("ignore")
    bench = Bench(given.device)
    found = {
        name: asdict(bench.measure(SHAPES[name], float8=name in given.float8))
        for name in given.shapes
    }
    print(json.dumps({"cuda": torch.version.cuda, "ceilings": found}))
    dist.destroy_process_group()


class Bench:
    """Measures, and keeps what several shapes share."""

    def __init__(self, device: str) -> None:
        import torch

        self.device = torch.device(device)
        self.base = torch.bfloat16 if device == "cuda" else torch.float32
        self.clock = _clock(self.device)
        self._layers: dict[tuple[str, int, Layer], float] = {}
        self._copy_bytes_per_s = 0.0

    def measure(self, shape: Shape, *, float8: bool) -> Ceilings:
        """All that the shape's limit is made of."""
        spec, tokens = shape.spec, shape.ceiling_sequences * shape.seq_len
        ways = ways_of(spec)
        layers = {layer for part in ways for way in part for layer in way}
        block_s = {}
        for name in self._formats(float8):
            seconds = {layer: self._layer_s(name, tokens, layer) for layer in sorted(layers)}
            block_s[name] = best_block_s(ways, seconds)
        return Ceilings(
            tokens=tokens,
            block_s=block_s,
            attention_s=self._attention_s(shape),
            head_s=self._layer_s("bf16", tokens, (spec.hidden_size, spec.vocab_size)),
            copy_bytes_per_s=self._copy(),
        )

    def _attention_s(self, shape: Shape) -> float:
        """Forward and backward of one block, by the fastest kernel that is here."""
        from shardwise.calibrate.attention_rate import attention_seconds

        spec, tokens = shape.spec, shape.ceiling_sequences * shape.seq_len
        size = (shape.ceiling_sequences, spec.num_heads, shape.seq_len, spec.head_dim)
        # Scores and values, 2 each, over half the sequence; backward is 2.5 times that.
        flops = 2.0 * tokens * spec.num_heads * spec.head_dim * shape.seq_len
        seconds = []
        for name, attend in attentions_on(self.device).items():
            forward, backward = attention_seconds(self.clock, self.base, size, attend)
            rates = f"{_tera(flops, forward)} forward, {_tera(2.5 * flops, backward)} backward"
            _say(f"attention by {name}, {shape.seq_len} tokens: {rates}")
            seconds.append(forward + backward)
        return min(seconds)

    def _formats(self, float8: bool) -> list[str]:
        from shardwise.calibrate.matmul import why_no_float8

        if not float8:
            return ["bf16"]
        if (reason := why_no_float8(self.device)) is not None:
            _say(f"float8 left out: {reason}")
            return ["bf16"]
        return ["bf16", "float8"]

    def _layer_s(self, name: str, tokens: int, layer: Layer) -> float:
        """Forward and both of backward; a layer that several shapes have is measured once."""
        from shardwise.calibrate.matmul import float8_work, linear_work

        key = (name, tokens, layer)
        if key not in self._layers:
            work = (
                float8_work(self.device, tokens, *layer)
                if name == "float8"
                else linear_work(self.device, self.base, tokens, *layer)
            )
            if not self._layers:
                self.clock.seconds(work)  # from here on the device is warm
            self._layers[key] = self.clock.seconds(work)
            rate = _tera(6.0 * tokens * layer[0] * layer[1], self._layers[key])
            _say(f"{name} matmuls of {tokens} x {layer[0]} x {layer[1]}: {rate}")
        return self._layers[key]

    def _copy(self) -> float:
        from shardwise.calibrate.copy_rate import measure_copies

        if not self._copy_bytes_per_s:
            points = list(measure_copies(self.clock))
            # Smaller ones stay in the cache.
            self._copy_bytes_per_s = max(points, key=lambda point: point["bytes"])["bytes_per_s"]
            _say(f"copy: {self._copy_bytes_per_s / 1e12:.2f} TB/s")
        return self._copy_bytes_per_s


def attentions_on(device: Any) -> dict[str, Attend]:
    """By their names."""
    from attention import by_flash
    from shardwise.calibrate.attention_rate import by_torch
    from shardwise.facts.installed import has_flash_attention

    def turned(*sides: Tensor) -> Tensor:
        return by_flash(*(side.transpose(1, 2) for side in sides)).transpose(1, 2)

    found: dict[str, Attend] = {"torch": by_torch}
    if device.type == "cuda" and has_flash_attention():
        found["FlashAttention 4"] = turned
    return found


def _clock(device: Any) -> Clock:
    """For three matmuls of a layer at once: 0.4 s each."""
    import torch.distributed as dist

    from shardwise.metrics.clock import Clock, Patience
    from shardwise.parallel.mesh import World

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    patience = Patience(1.2, 3) if device.type == "cuda" else Patience(0.02, 1)
    return Clock(device, patience, World.joined())


def _tera(flops: float, seconds: float) -> str:
    return f"{flops / seconds / 1e12:.3g} TFLOP/s"


def _say(text: str) -> None:
    sys.stderr.write(f"  {time.strftime('%H:%M:%S')}  {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
