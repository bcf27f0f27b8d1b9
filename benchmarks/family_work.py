"""The matmuls and the attention of a model, seen in a forward of its own code without data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# A layer's widths in and out.
Layer = tuple[int, int]
_NAME = "families_seen"
_SEQ_LEN = 64


@dataclass(frozen=True, slots=True)
class SeenAttention:
    """One call of attention."""

    heads: int
    width: int
    """Of a query and a key."""

    value_width: int
    window: int | None
    """Tokens that a token sees at most."""

    cap: float | None = None
    """Of its scores, by a tanh."""


@dataclass(frozen=True, slots=True)
class SeenExperts:
    """Matmuls of stacked experts: each token goes to some of them."""

    count: int
    per_token: int
    layer: Layer


@dataclass(frozen=True, slots=True)
class SeenWork:
    """What one forward of a model computes, and how often; the head is one of its layers."""

    linears: dict[tuple[Layer, ...], float]
    """Layers that have the same input, so that they could be one matmul."""

    experts: dict[SeenExperts, int]
    attentions: dict[SeenAttention, int]
    params: int


def see_work(hf_config: Mapping[str, Any], experts_per_token: int) -> SeenWork:
    """Run a forward on tensors without data, and note what it multiplies."""
    import torch
    from torch import nn
    from transformers import AttentionInterface, AttentionMaskInterface

    from shardwise.internals.hugging_face import unsearched_positions
    from shardwise.internals.peerless import FakeTensorMode
    from shardwise.model.build import build_on_meta

    attentions: Counter[SeenAttention] = Counter()

    def attend(module: Any, query: Any, key: Any, value: Any, *_: Any, **given: Any) -> Any:
        length, width = query.shape[2], value.shape[-1]
        limits = given.get("sliding_window"), given.get("softcap")
        seen = SeenAttention(query.shape[1], query.shape[3], width, *limits)
        attentions[seen] += 1
        return query.new_empty(query.shape[0], length, query.shape[1], width), None

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, lambda *_, **__: None)
    without_data = FakeTensorMode(allow_non_fake_inputs=True)
    model = build_on_meta(hf_config, attention=_NAME)
    params = sum(p.numel() for p in model.parameters())
    nn.Module.to(model, dtype=torch.bfloat16)
    with without_data:
        model.to_empty(device="cpu")
    seen = _SeenLinears(model)
    with without_data, torch.no_grad(), unsearched_positions():
        model(input_ids=torch.zeros(1, _SEQ_LEN, dtype=torch.long), use_cache=False)
    stacked = [p.shape for p in model.parameters() if p.dim() == 3]
    experts = Counter(
        SeenExperts(shape[0], experts_per_token, tuple(shape[1:])) for shape in stacked
    )
    return SeenWork(seen.groups(), dict(experts), dict(attentions), params)


class _SeenLinears:
    """Notes the linear layers that are called, by their input."""

    def __init__(self, model: Any) -> None:
        from torch import nn

        # An input that is kept has an identity of its own.
        self._inputs: list[Any] = []
        self._calls: dict[tuple[str, int, float], list[Layer]] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self._hook(name.rpartition(".")[0]))

    def _hook(self, owner: str) -> Any:
        def note(module: Any, given: tuple[Any, ...]) -> None:
            storage = given[0].untyped_storage()
            self._inputs.append(storage)
            layer = (module.in_features, module.out_features)
            # Experts that are layers of their own see only some of the tokens.
            share = given[0].numel() / module.in_features / _SEQ_LEN
            self._calls.setdefault((owner, id(storage), share), []).append(layer)

        return note

    def groups(self) -> dict[tuple[Layer, ...], float]:
        """Layers of one module and one input, and how often all tokens go through them."""
        found: dict[tuple[Layer, ...], float] = defaultdict(float)
        for (_, _, share), layers in self._calls.items():
            found[tuple(layers)] += share
        return dict(found)
