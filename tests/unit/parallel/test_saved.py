"""What blocks save for backward, counted from their code, against formulas and real tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from shardwise.facts.block_kind import BlockKind, Saved, way_of
from shardwise.facts.block_work import Attention, Matmul, Moved, Work
from shardwise.facts.families import spec_from_config
from shardwise.facts.models import ModelSpec
from shardwise.facts.presets import PRESETS
from shardwise.internals.parts import CHANGES, _what_changed, is_open
from shardwise.model.build import build_model
from shardwise.parallel.saved import CannotCount, count_saved
from shardwise.plan.block_memory import _selective_bytes, _whole_bytes
from shardwise.plan.decisions import Decisions

Count = Callable[..., tuple[BlockKind, ...]]
SHAPE = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3}
QWEN3: dict[str, Any] = {**PRESETS["qwen3-8b"], **SHAPE, "num_attention_heads": 8, "head_dim": 24}
KNOWN = {
    "llama": {**PRESETS["tiny-llama"], **SHAPE},
    "qwen3": {**QWEN3, "num_key_value_heads": 2, "vocab_size": 320},
    "mixtral": {**PRESETS["tiny-mixtral"], **SHAPE},
}


def expected(spec: ModelSpec, *, own: bool, selective: bool) -> float:
    """Bytes of a token in one compiled block, by the formulas."""
    decided = Decisions(
        param_dtype="bf16", compile=True, kernels="own" if own else "torch", seq_len=4096
    )
    return (_selective_bytes if selective else _whole_bytes)(spec, decided)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.long) for name in KNOWN],
)
def test_formulas_are_what_the_compiler_saves(family: str, count: Count) -> None:
    spec = spec_from_config("test", KNOWN[family])
    # Eagerly too, for a torch that cannot trace a checkpoint of this block.
    ways = ((False, False), (False, True), (True, True))
    selective = ((own, compiled, "selective") for own, compiled in ways)
    (kind,) = count(KNOWN[family], *selective, (True, True, "none"))
    assert kind.count == 3
    for own in (False, True):
        for selective in (False, True):
            mode = "selective" if selective else "none"
            way = way_of(compiled=True, own_kernels=own, recompute=mode)
            counted = kind.saved[way].bytes(2, 4096)
            # Statistics of head norms and the choices of a router are all that formulas leave out.
            assert expected(spec, own=own, selective=selective) == pytest.approx(counted, rel=0.02)


def test_counted_bytes_are_those_of_real_tensors(count: Count) -> None:
    """Without the compiler, and with the scores that eager attention saves."""
    config = {**PRESETS["tiny-llama"], **SHAPE, "num_hidden_layers": 2}
    (kind,) = count(config, attention="eager")
    model = build_model(config, attention="eager", code_dir=None, device="cpu").bfloat16()
    seq_len, found = 96, {}
    known = {id(tensor.untyped_storage()) for tensor in (*model.parameters(), *model.buffers())}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in known:
            found[id(storage)] = storage
        return tensor

    block = model.model.layers[0]
    x = torch.randn(1, seq_len, 128, dtype=torch.bfloat16, requires_grad=True)
    places = torch.arange(seq_len)[None]
    tables = model.model.rotary_emb(x, places)
    mask = torch.zeros(1, 1, seq_len, seq_len, dtype=torch.bfloat16)
    known |= {id(table.untyped_storage()) for table in (*tables, mask)}
    with saved_tensors_hooks(note, lambda tensor: tensor):
        block(x, position_embeddings=tables, attention_mask=mask)
    real = sum(storage.nbytes() for storage in found.values()) / seq_len
    assert kind.saved["eager"].bytes(2, seq_len) == pytest.approx(real, rel=0.01)
    assert kind.saved["eager"].scores > 0


def test_counting_leaves_private_parts_open(count: Count) -> None:
    """A rank that plans also trains: what it learns about torch must not come from fake tensors."""
    _what_changed.cache_clear()
    count({**KNOWN["llama"], "num_hidden_layers": 1})
    assert is_open(CHANGES)


def test_kinds_come_back_from_a_plan() -> None:
    work = Work(
        matmuls=(Matmul(rows=1.0, inner=2, width=3),),
        attentions=(Attention(heads=4, kv_heads=2, key_width=8, value_width=6, window=9),),
        passes={"compiled": Moved(1.0, 2.0, 3)},
    )
    kind = BlockKind(count=2, saved={"compiled": Saved(3.0, 4.0, 5.0)}, work=work)
    spec = spec_from_config("test", KNOWN["llama"])
    counted = replace(spec, kinds=(kind,))
    assert ModelSpec.from_dict(json.loads(json.dumps(counted.to_dict()))) == counted


def test_what_cannot_be_counted_says_why() -> None:
    with pytest.raises(CannotCount, match="UserError"):
        count_saved({"model_type": "no such family"}, attentions=("sdpa",))
