"""A model's shape and its parameter counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardwise.facts.adapter_sizes import AdapterSpec
from shardwise.facts.block_kind import BlockKind
from shardwise.facts.config_source import ModelSource, read_model_config
from shardwise.facts.head_form import PLAIN, HeadForm

__all__ = [
    "ATTENTIONS",
    "ModelSource",
    "ModelSpec",
    "read_model_config",
]

# Every attention that a user may ask for. The first one that a family has is planned.
ATTENTIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_4", "flex_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The sizes that memory, time and FLOPs follow from."""

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Width of the MLP; of one expert where there are several."""

    vocab_size: int
    tied_embeddings: bool
    num_experts: int = 1
    experts_per_token: int = 1
    num_routers: int = 0
    """Routers whose logits a load-balancing loss can be computed from."""

    why_no_routers: str = "it has none"
    router_aux_loss: float | None = None
    """The coefficient of the load-balancing loss that the model's config asks for, if it does."""

    head_norms: bool = False
    """Whether queries and keys are normed head by head."""

    gated_mlp: bool = False
    """Whether every block has one MLP, silu(gate) * up or gelu's tanh form of it, of layers without
    a bias."""

    attention_window: int | None = None
    """Tokens that a token sees at most, where every block has such a window."""

    attention_dropout: bool = False
    """Whether attention drops some of its weights in training."""

    max_positions: int | None = None
    """Positions that the model was made for; None where it has no such number."""

    position_table: bool = False
    """Whether positions are rows of a table, so that there are none beyond `max_positions`."""

    attentions: tuple[str, ...] = ATTENTIONS
    """Attentions that the family's class has, in the order of `ATTENTIONS`."""

    embedding_params: int
    """Token embedding, and positions where they are learned."""

    block_params: int
    """One decoder block."""

    tail_params: int
    """Final norm, and the output head where it is not the embedding."""

    total_params: int
    matmul_params_per_token: int
    """Weights that multiply a token: linear layers with only its own experts, and the output head
    even when tied. Not the input embedding (a lookup), norms or biases."""

    source: Literal["config.json", "counted"]

    kinds: tuple[BlockKind, ...] = ()
    """What blocks save for backward, where it was counted from their code. Elsewhere the shape of a
    Llama is assumed."""

    uncounted: str = ""
    """Why it could not be counted, where that was tried."""

    head: HeadForm = PLAIN
    """What the model does around its output head."""

    whole_logits: str = ""
    """Why the loss needs the logits of all tokens at once, where it does."""

    adapter: AdapterSpec | None = None
    """What is trained in place of the parameters above, where that is asked for."""

    @property
    def trained_params(self) -> int:
        """Parameters that have gradients and optimizer state."""
        return self.total_params if self.adapter is None else self.adapter.num_params

    @property
    def block_matmul_params_per_token(self) -> int:
        """The same for all blocks together, without the output head."""
        return self.matmul_params_per_token - self.vocab_size * self.hidden_size

    @property
    def expert_params(self) -> int:
        """The parameters of one block's experts; 0 where there is one MLP for all tokens."""
        return 3 * self.hidden_size * self.ffn_size * self.num_experts * (self.num_experts > 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelSpec:
        """Back from `to_dict`, or from JSON, which has no tuples."""
        attentions = tuple(data.get("attentions", ATTENTIONS))
        kinds = tuple(map(BlockKind.from_dict, data.get("kinds", ())))
        head = HeadForm(**data.get("head", {}))
        adapter = data.get("adapter")
        if adapter is not None:
            names = {name: tuple(adapter.get(name, ())) for name in ("left", "whole", "unpacked")}
            adapter = AdapterSpec(**{**adapter, **names})
        made = {"attentions": attentions, "kinds": kinds, "head": head, "adapter": adapter}
        return cls(**{**data, **made})
