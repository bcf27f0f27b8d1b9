"""What the sizes of the axes mean for ranks, batches and the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.launch.prepare import choose_plan
from shardwise.plan import axis_sizes
from shardwise.plan.planned import Plan
from shardwise.plan.tensor_suits import REFUSED

MakePlan = Callable[..., Plan]
FILE = ("data.source=jsonl", "data.path=x.jsonl")
LONG = (
    "model.overrides={rope_scaling: {rope_type: dynamic, factor: 2.0, "
    "original_max_position_embeddings: 32}}"
)
DROPS = "model.overrides={attention_dropout: 0.1}"
GROUPED = ("data.packing=one", "data.group_lengths=true", "memory.compile=false")


@pytest.fixture
def plan_with(monkeypatch: pytest.MonkeyPatch) -> MakePlan:
    """A plan of some settings, with all axes in use."""
    monkeypatch.setattr(
        axis_sizes, "SUPPORTED", ("replicate", "shard", "tensor", "context", "expert")
    )

    def make(*settings: str) -> Plan:
        return choose_plan(load_config(None, ["data.seq_len=64", *settings]), environ={})

    return make


def test_the_world_is_the_product_of_all_axes_but_experts(plan_with: MakePlan) -> None:
    plan = plan_with(
        *("model.name=tiny-mixtral", "cluster.name=8xCPU"),
        *("mesh.tensor=2", "mesh.context=2", "mesh.shard=2"),
    )
    decided = plan.decided
    assert (decided.replicate, decided.shard, decided.world_size) == (1, 2, 8)
    assert plan.world_size == 8 and decided.data_ranks == 2
    assert axis_sizes.mesh_in_words(decided) == "replicate=1 x shard=2 x context=2 x tensor=2"
    assert plan.choices["tensor"].source == "user"
    experts = plan_with("model.name=tiny-mixtral", "cluster.name=4xCPU", "mesh.expert=2").decided
    assert experts.world_size == 4 and axis_sizes.mesh_in_words(experts).endswith("expert=2")


def test_ranks_that_share_a_batch_count_once(plan_with: MakePlan) -> None:
    plan = plan_with(
        "model.name=tiny-llama", "cluster.name=4xCPU", "mesh.tensor=2", "train.global_batch=6"
    )
    decided = plan.decided
    assert decided.micro_batch * decided.accumulation * decided.data_ranks == 6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("mesh.tensor=3",), r"mesh.tensor=3 x mesh.context=1 does not divide 4 ranks"),
        (("mesh.tensor=2", "mesh.shard=4"), "does not give 2 ranks, which mesh.tensor leave"),
        (("mesh.context=2", "data.seq_len=62"), "mesh.context=2 does not divide sequences of 62"),
        (("mesh.context=2", DROPS), "does not go with dropout in attention"),
        (("mesh.context=2", LONG), "cannot divide sequences of 64 tokens of this llama model"),
        (
            ("mesh.context=2", "model.attention=flash_attention_2"),
            "does not go with model.attention=flash_attention_2",
        ),
        (
            ("mesh.context=2", "data.format=pairs", "preference.objective=dpo", *FILE),
            "does not go with preference.objective",
        ),
        (
            ("mesh.context=2", "data.format=auto", *GROUPED, *FILE),
            "does not go with data.group_lengths",
        ),
    ],
)
def test_axes_that_do_not_fit_are_refused(
    plan_with: MakePlan, settings: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UserError, match=words) as found:
        plan_with("model.name=tiny-llama", "cluster.name=4xCPU", *settings)
    assert found.value.fix


TENSOR_REFUSALS: list[tuple[tuple[str, ...], str, str]] = [
    (("model.name=tiny-gpt2",), "how to divide gpt2 models is not known", "mesh.tensor=1"),
    (("model.overrides={num_key_value_heads: 1}",), "1 heads of keys and values", "mesh.tensor=1"),
    (
        ("model.overrides={num_key_value_heads: 2}", "mesh.tensor=4"),
        "takes a part of the model's 2 heads of keys",
        "write mesh.tensor=2",
    ),
    (("model.overrides={intermediate_size: 63}",), "63 channels of an MLP", "mesh.tensor=1"),
    (
        (
            "model.name=tiny-mixtral",
            "model.overrides={intermediate_size: 24}",
            "precision.param=fp16",
        ),
        "12 channels of an expert on a rank are not whole 16 bytes",
        "mesh.tensor=1",
    ),
    (("data.seq_len=63",), "and 63 do not divide", "data.seq_len=64, or mesh.sequence_parallel"),
    (
        ("adapter.method=lora", "adapter.dora=true"),
        "the lengths of whole rows",
        "leave adapter.dora out",
    ),
    (("optim.state=int8",), "a block of numbers with one scale", "optim.state"),
    (
        ("model.overrides={attention_dropout: 0.1}",),
        "each rank would drop others",
        "attention_dropout=0",
    ),
]


@pytest.mark.parametrize(("settings", "why", "fix"), TENSOR_REFUSALS)
def test_tensor_parallelism_that_was_not_shown_equal_is_refused(
    plan_with: MakePlan, settings: tuple[str, ...], why: str, fix: str
) -> None:
    common = ("model.name=tiny-llama", "cluster.name=4xCPU", "mesh.tensor=2")
    with pytest.raises(UserError, match=r"mesh.tensor=. does not suit this run") as found:
        plan_with(*common, *settings)
    assert why in found.value.why
    assert fix in found.value.fix


def test_every_refused_setting_has_its_reason() -> None:
    config = load_config(None, ["model.name=tiny-llama", "mesh.tensor=2"])
    changed = {
        "adapter.base": replace(config, adapter=replace(config.adapter, base="nf4")),
        "adapter.dora": replace(config, adapter=replace(config.adapter, dora=True)),
        "adapter.dropout": replace(config, adapter=replace(config.adapter, dropout=0.1)),
        "precision.linear": replace(
            config, precision=replace(config.precision, linear="float8_rowwise")
        ),
        "precision.experts": replace(config, precision=replace(config.precision, experts="float8")),
        "optim.state": replace(config, optim=replace(config.optim, state="int8")),
        "preference.objective": replace(
            config, preference=replace(config.preference, objective="dpo")
        ),
    }
    assert [refused.path for refused in REFUSED] == list(changed)
    for refused in REFUSED:
        asks = refused.is_asked
        assert refused.why and asks(changed[refused.path]) and not asks(config)


def test_sequence_parallelism_has_a_reason(plan_with: MakePlan) -> None:
    common = ("model.name=tiny-llama", "cluster.name=4xCPU")
    assert plan_with(*common, "mesh.tensor=2").decided.sequence_parallel
    assert not plan_with(*common).decided.sequence_parallel
    given = plan_with(*common, "mesh.tensor=2", "mesh.sequence_parallel=false")
    assert given.choices["sequence_parallel"].source == "user"


def test_ranks_with_the_same_tokens_do_not_send_them_to_experts(plan_with: MakePlan) -> None:
    words = ("model.name=tiny-mixtral", "cluster.name=2xCPU", "mesh.tensor=2", "mesh.expert=2")
    assert plan_with(*words).decided.expert == 2
    with pytest.raises(
        UserError, match=r"does not work with mesh.sequence_parallel=false"
    ) as found:
        plan_with(*words, "mesh.sequence_parallel=false")
    assert "would send the same tokens" in found.value.why


def test_ranks_that_divide_a_sequence_hold_one_copy_together(plan_with: MakePlan) -> None:
    words = ("model.name=tiny-llama", "mesh.context=2")
    alone = plan_with(*words, "cluster.name=2xCPU")
    given = plan_with(*words, "cluster.name=2xCPU", "mesh.shard=1")
    copies = plan_with(*words, "cluster.name=8xCPU")
    for plan, strategy, replicate in (
        (alone, "full_shard", 1),
        (given, "full_shard", 1),
        (copies, "hybrid_shard", 4),
    ):
        decided = plan.decided
        assert (decided.strategy, decided.replicate, decided.shard) == (strategy, replicate, 1)
        assert decided.reshard_after_forward is True
    assert "hold one copy together" in alone.choices["strategy"].why


KEPT = ("model.name=tiny-mixtral", "cluster.name=4xCPU", "mesh.shard=4", "mesh.expert=2")


def test_experts_may_be_kept_where_the_rest_is_freed(plan_with: MakePlan) -> None:
    freed = plan_with(*KEPT, "shard.keep_experts=false")
    kept = plan_with(*KEPT, "shard.keep_experts=true")
    assert kept.decided.reshard_after_forward is True
    assert freed.decided.frees_experts and not kept.decided.frees_experts
    assert kept.choices["keeps_experts"].source == "user"
    # What backward gathers of a block is its other parameters alone.
    model = kept.model
    experts = model.expert_params // 2
    more = kept.memory.gathered - freed.memory.gathered
    assert more == 4 * experts * model.num_layers
    assert kept.memory.buffers < freed.memory.buffers


def test_a_search_keeps_experts_where_that_is_faster(plan_with: MakePlan) -> None:
    words = ("model.name=qwen3-30b-a3b", "cluster.name=4x8xH100", "mesh.expert=8")
    two_k = "data.seq_len=2048"
    found = plan_with(*words, two_k)
    freed = plan_with(*words, two_k, "shard.keep_experts=false")
    choice = found.choices["keeps_experts"]
    assert (choice.value, choice.source) == (True, "search")
    assert found.forecast is not None and freed.forecast is not None
    assert found.forecast.tokens_per_s > freed.forecast.tokens_per_s
    assert found.memory.gathered > freed.memory.gathered
    # Without a second rank that has the same experts nothing is gathered.
    alone = plan_with("model.name=tiny-mixtral", "cluster.name=2xCPU", "mesh.expert=2")
    assert "has its experts whole" in alone.choices["keeps_experts"].why
