"""How long one block takes on one device: from its counted work, or from a Llama's formulas.

Matmuls and attention run at the device's rates, and everything else at its memory's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from shardwise.config.schema import FLOAT8_FORMATS
from shardwise.facts.block_kind import way_of
from shardwise.facts.block_work import Attention, Matmul, Work, mean_context
from shardwise.facts.models import ModelSpec
from shardwise.facts.rates import Rates
from shardwise.plan.decisions import (
    DTYPE_BYTES,
    Decisions,
    computes_float8,
    makes_product_again,
    multiplies_base,
    multiplies_experts,
)
from shardwise.plan.software import Software

# Attention over keys that arrive in parts has more edges of triangles, and partial results to
# merge.
_RING_FACTOR = 1.2
# Llama 3.1 8B: hidden channels, those of its feed-forward's three vectors, and what is counted of
# one of its blocks with the compiler and without. `Software` has passes for such blocks, and a
# counted block is to a forecast what it is beside this one.
_HIDDEN, _FFN_VECTORS = 4096, 3 * 14336
_COUNTED_BYTES = {True: 492_584, False: 1_890_432}
# Bytes of a number that is cast to float8 by rows, and by columns, which are read twice. Every
# factor of an expert's three matmuls is cast once, its weight by rows and by columns. Not measured.
_ROW_CAST, _COLUMN_CAST = 3, 5


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Seconds of one block's micro-batch on one device."""

    matmul_forward: float
    matmul_backward: float
    attention_forward: float
    attention_backward: float
    elementwise_forward: float
    elementwise_backward: float
    selective: float
    """What `selective` checkpointing computes again of that."""

    last_matmul: float
    """Seconds of forward matmuls whose result nothing in the block's backward needs."""

    @property
    def matmul(self) -> float:
        """Forward and backward."""
        return self.matmul_forward + self.matmul_backward

    @property
    def attention(self) -> float:
        """Forward and backward."""
        return self.attention_forward + self.attention_backward

    @property
    def elementwise(self) -> float:
        """Forward and backward."""
        return self.elementwise_forward + self.elementwise_backward

    @property
    def forward(self) -> float:
        """All of it."""
        return self.matmul_forward + self.attention_forward + self.elementwise_forward

    @property
    def backward(self) -> float:
        """All of it, without recompute."""
        return self.matmul_backward + self.attention_backward + self.elementwise_backward


def runs_float8(model: ModelSpec, decided: Decisions, software: Software) -> bool:
    """Whether matmuls of trained weights are in float8."""
    converts = software.converts_experts and decided.linear in FLOAT8_FORMATS
    return converts or computes_float8(model, decided)


def block_seconds(
    model: ModelSpec, decided: Decisions, rates: Rates, software: Software
) -> BlockTime:
    """The mean over a model's blocks."""
    seconds = _Seconds(model, decided, rates, software)
    if not model.kinds:
        return seconds.of_llama()
    times = [(kind.count, seconds.of_work(kind.work)) for kind in model.kinds]
    blocks = sum(count for count, _ in times)
    return BlockTime(
        *(
            sum(count * getattr(time, item.name) for count, time in times) / blocks
            for item in fields(BlockTime)
        )
    )


@dataclass(frozen=True, slots=True)
class _Seconds:
    """What a micro-batch costs with such rates and software."""

    model: ModelSpec
    decided: Decisions
    rates: Rates
    software: Software

    def of_work(self, work: Work) -> BlockTime:
        """The seconds of a block whose work was counted."""
        decided, software = self.decided, self.software
        whole, selective = (
            work.passes[
                way_of(
                    compiled=decided.compile,
                    own_kernels=decided.own_kernels and not self._float8,
                    recompute=mode,
                )
            ]
            for mode in ("none", "selective")
        )
        scores = decided.seq_len if decided.attention == "eager" else 0
        forward, backward = whole.bytes(scores)
        again = max(0.0, sum(selective.bytes(scores)) - forward - backward)
        matmul = sum(map(self._matmul, work.matmuls))
        scale = self._counted_factor * DTYPE_BYTES[decided.param_dtype] / 2
        weights = work.matmul_flops / 2
        ends = sum(each.rows * each.count * (each.inner + each.width) for each in work.matmuls)
        besides = decided.tokens * (self._float8_bytes + self._adapter_bytes(ends))
        besides += 2 * software.unpack_passes * self._packed(weights)
        besides += self._expert_casts(work.matmuls)
        return BlockTime(
            *self._matmuls(matmul, self._trained(work)),
            *self._attention(work.attentions),
            elementwise_forward=self._memory(decided.tokens * scale * forward + besides / 3),
            elementwise_backward=self._memory(decided.tokens * scale * backward + besides * 2 / 3),
            selective=self._memory(decided.tokens * scale * again),
            last_matmul=matmul * work.last_flops / max(1.0, work.matmul_flops),
        )

    def of_llama(self) -> BlockTime:
        """The seconds of a block of a Llama's shape."""
        model, decided, software = self.model, self.decided, self.software
        weights = model.block_matmul_params_per_token / model.num_layers
        ffn = model.ffn_size * max(1, model.experts_per_token)
        matmuls = tuple(self._llama_matmuls(weights))
        matmul = sum(map(self._matmul, matmuls))
        attention = Attention(
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            key_width=model.head_dim,
            value_width=model.head_dim,
            window=model.attention_window,
        )
        moved = decided.tokens * self._llama_bytes(weights, ffn)
        again = moved / 3
        if decided.compile and makes_product_again(model, decided):
            # In any case, so that norms alone are left.
            again = decided.tokens * software.norm_passes * model.hidden_size
        moved += 2 * software.unpack_passes * self._packed(weights)
        moved += self._expert_casts(matmuls)
        return BlockTime(
            *self._matmuls(matmul),
            *self._attention((attention,)),
            elementwise_forward=self._memory(moved / 3),
            elementwise_backward=self._memory(moved * 2 / 3),
            selective=self._memory(again),
            last_matmul=matmul * min(1.0, ffn * model.hidden_size / weights),
        )

    @property
    def _float8(self) -> bool:
        return runs_float8(self.model, self.decided, self.software)

    def _memory(self, moved: float) -> float:
        # Tensor parallelism splits all of it: the feed-forward by channels, norms and residuals by
        # tokens.
        return moved / self.decided.tensor / self.rates.memory_bytes_per_s

    # ---- matmuls

    def _matmuls(self, forward: float, trained: float = 0.0) -> tuple[float, float]:
        """(forward, backward) seconds. Of a frozen model those of adapters are `trained`."""
        return forward, forward + (trained if self.software.frozen else forward)

    def _trained(self, work: Work) -> float:
        """Seconds of the forward matmuls of adapters, which one side shows."""
        adapter = self.model.adapter
        if adapter is None:
            return 0.0
        narrow = (each for each in work.matmuls if adapter.rank in (each.inner, each.width))
        return sum(map(self._matmul, narrow))

    def _llama_matmuls(self, weights: float) -> Iterable[Matmul]:
        """One matmul that stands for all of a block, and one for its experts."""
        model = self.model
        narrow = round(min(model.hidden_size, max(1.0, weights / model.hidden_size / 4)))
        experts = model.expert_params * model.experts_per_token / model.num_experts
        yield Matmul(rows=(weights - experts) / narrow**2, inner=narrow, width=narrow)
        if experts:
            yield Matmul(
                rows=model.experts_per_token,
                inner=model.hidden_size,
                width=model.ffn_size,
                groups=model.num_experts,
                count=3,
            )

    def _matmul(self, matmul: Matmul) -> float:
        """Seconds of its forward."""
        decided, rates, software = self.decided, self.rates, self.software
        flops = decided.tokens * matmul.flops / decided.tensor / software.matmul_factor
        whole = rates.matmul_flops[decided.param_dtype]
        # A narrow shape loses tiles and waves: seconds that a faster format does not shorten.
        is_cut = matmul.groups == 1 or decided.expert == 1
        narrow = min(matmul.inner, matmul.width) / (decided.tensor if is_cut else 1)
        lost = software.narrow_factor * rates.half_width / narrow / whole
        rate = whole
        if self._float8 or self._is_base(matmul):
            rate = rates.matmul_flops["fp8"] * software.float8_factor
        if matmul.fp32:
            rate = rates.matmul_flops.get("fp32", rate)
        if matmul.groups > 1:
            if multiplies_experts(decided):
                rate = rates.matmul_flops.get("fp8", whole) * software.float8_experts_factor
            rate *= software.grouped_factor
            # A rank has fewer experts, each with the tokens of more ranks.
            groups = matmul.groups / decided.expert
            rows = decided.tokens * matmul.rows / (decided.tensor if decided.expert > 1 else 1)
            lost += software.half_rows * groups / rows / rate
        return flops * (1 / rate + lost)

    def _expert_casts(self, matmuls: Iterable[Matmul]) -> float:
        """Bytes of a micro-batch that are moved to cast experts' rows and weights to float8."""
        if not multiplies_experts(self.decided):
            return 0.0
        each = _ROW_CAST + _COLUMN_CAST
        moved = 0.0
        for matmul in matmuls:
            if matmul.groups > 1:
                rows = self.decided.tokens * matmul.rows * (matmul.inner + matmul.width)
                weights = matmul.groups / self.decided.expert * matmul.inner * matmul.width
                moved += each * matmul.count * (rows + weights)
        return moved

    def _is_base(self, matmul: Matmul) -> bool:
        """Whether it is of a frozen layer that multiplies the float8 that it stores: not of an
        adapter, which one side shows, and not of experts."""
        if self.model.adapter is None or not multiplies_base(self.decided):
            return False
        rank = self.model.adapter.rank
        return matmul.groups == 1 and rank not in (matmul.inner, matmul.width)

    # ---- attention

    def _attention(self, attentions: Sequence[Attention]) -> tuple[float, float]:
        """(forward, backward) seconds."""
        scores = sum(map(self._scores, attentions)) / self.decided.tensor
        if self.decided.context > 1:
            scores *= _RING_FACTOR
        rates = self.rates
        return scores / rates.attention_forward_flops, 2.5 * scores / rates.attention_backward_flops

    def _scores(self, attention: Attention) -> float:
        """FLOPs at the full rate that take as long as this forward."""
        decided, software = self.decided, self.software
        mean = mean_context(decided.seq_len, attention.window)
        widths = attention.key_width + attention.value_width
        seen = mean + self.rates.half_context / 2
        kernel, is_windowed = decided.attention, mean < decided.seq_len / 2
        if kernel == "flex_attention" and not (is_windowed or attention.softcap or attention.sinks):
            kernel = "sdpa"  # as `model.attention` does it
        factor = software.attention_factor * software.attention_share(kernel, attention.key_width)
        if kernel == "sdpa" and is_windowed:
            # torch gets a mask, and computes what is masked.
            seen, factor = float(decided.seq_len), factor * software.masked_factor
        return decided.tokens * 2.0 * attention.heads * widths * seen / factor

    # ---- the rest

    @property
    def _passes(self) -> tuple[float, float]:
        """Bytes for each hidden channel, and for each channel of the feed-forward's vectors."""
        software = self.software
        if self.decided.compile:
            return software.hidden_passes, software.ffn_passes
        hidden = software.hidden_passes * software.eager_factor
        return hidden, software.ffn_passes * software.eager_ffn_factor

    @property
    def _counted_factor(self) -> float:
        hidden_passes, ffn_passes = self._passes
        moved = hidden_passes * _HIDDEN + ffn_passes * _FFN_VECTORS
        return moved / _COUNTED_BYTES[self.decided.compile]

    @property
    def _float8_bytes(self) -> float:
        """Bytes of a token's casts to float8."""
        if not self._float8 and not multiplies_base(self.decided):
            return 0.0
        ffn = self.model.ffn_size * max(1, self.model.experts_per_token)
        return self.software.float8_passes * (3 * self.model.hidden_size + 2 * ffn)

    def _llama_bytes(self, weights: float, ffn: int) -> float:
        """Bytes that one block moves for one token outside of matmuls and attention."""
        model = self.model
        attention = 2 * model.hidden_size * model.head_dim * (model.num_heads + model.num_kv_heads)
        # Gated ones have three.
        vectors = max(2.0, (weights - attention) / (ffn * model.hidden_size))
        hidden_passes, ffn_passes = self._passes
        moved = hidden_passes * model.hidden_size + ffn_passes * vectors * ffn
        if model.num_experts > 1:
            routed = model.experts_per_token * model.hidden_size
            moved += self.software.routed_passes * routed
        moved *= DTYPE_BYTES[self.decided.param_dtype] / 2
        heads = model.head_dim * (model.num_heads + model.num_kv_heads)
        ends = 4 * model.hidden_size + 2 * heads + vectors * (model.hidden_size + ffn)
        return moved + self._float8_bytes + self._adapter_bytes(ends)

    def _packed(self, weights: float) -> float:
        """Weights of a block that are made floats before each use: those that are known to be
        packed, or `weights`."""
        adapter = self.model.adapter
        return weights if adapter is None else adapter.packed_params / self.model.num_layers

    def _adapter_bytes(self, ends: float) -> float:
        """Bytes of a token's adapters at so many channels, or at those that are known to have
        adapters."""
        if self.model.adapter is not None:
            ends = self.model.adapter.channels / self.model.num_layers
        eager = 1.0 if self.decided.compile else self.software.eager_ffn_factor
        return self.software.adapter_passes * ends * eager
