"""What a block computes for one token: as plain numbers, which a plan can use without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """A product of activations and a weight, or of activations: (rows, inner) x (inner, width)."""

    rows: float
    """Rows for each token: more than one where a token has several experts."""

    inner: int
    width: int
    groups: int = 1
    """Weights that the rows are dealt out to, such as those of experts."""

    fp32: bool = False
    """Whether it runs in fp32 in a model that computes in 16 bits, as some routers do."""

    count: int = 1
    """How many such matmuls a block has."""

    @property
    def flops(self) -> float:
        """FLOPs of one token, forward."""
        return 2.0 * self.rows * self.inner * self.width * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Scores of queries and keys, and the values that they weigh."""

    heads: int
    kv_heads: int
    key_width: int
    """Channels of one head of queries and keys."""

    value_width: int
    window: int | None = None
    """Tokens that a token sees at most."""

    softcap: bool = False
    sinks: bool = False
    other_mask: bool = False
    """Whether the mask is neither causal nor a window, such as one of chunks."""

    def flops(self, seq_len: int) -> float:
        """FLOPs of one token, forward, averaged over a sequence."""
        widths = self.key_width + self.value_width
        return 2.0 * self.heads * widths * mean_context(seq_len, self.window)


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that one token moves through memory outside of matmuls and attention, and kernels."""

    forward: float
    backward: float
    kernels: int
    """Launches of one block, forward and backward, matmuls and attention among them."""

    scores: float = 0.0
    """Bytes for each token of the sequence, forward and backward, if attention is `eager`."""

    def bytes(self, scored: int) -> tuple[float, float]:
        """Bytes of forward and of backward, with scores of so many tokens."""
        scores = scored * self.scores
        return self.forward + scores / 3, self.backward + scores * 2 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one block."""

    matmuls: tuple[Matmul, ...]
    attentions: tuple[Attention, ...]
    """None, for a block that mixes tokens in another way."""

    passes: dict[str, Moved]
    """By how the block runs: `way_of` gives the key."""

    last_flops: float = 0.0
    """Those FLOPs of a forward's matmuls that no recomputation needs: backward uses no result of
    theirs."""

    @property
    def matmul_flops(self) -> float:
        """FLOPs of all matmuls for one token, forward."""
        return sum(matmul.flops for matmul in self.matmuls)

    def attention_flops(self, seq_len: int) -> float:
        """FLOPs of attention for one token, forward."""
        return sum(attention.flops(seq_len) for attention in self.attentions)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Back from JSON."""
        return cls(
            matmuls=tuple(Matmul(**sizes) for sizes in data["matmuls"]),
            attentions=tuple(Attention(**sizes) for sizes in data["attentions"]),
            passes={way: Moved(**numbers) for way, numbers in data["passes"].items()},
            last_flops=data["last_flops"],
        )


def mean_context(seq_len: int, window: int | None) -> float:
    """Tokens that a token attends to, on average over the sequence."""
    if window is None or window >= seq_len:
        return seq_len / 2
    return window - window**2 / (2 * seq_len)
