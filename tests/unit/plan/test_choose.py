from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.config.schema import ClusterConfig, ModelConfig, RunConfig
from shardwise.errors import ExitCode, UserError
from shardwise.facts import probe
from shardwise.facts.cluster import resolve_cluster
from shardwise.facts.families import spec_from_config
from shardwise.facts.models import read_model_config
from shardwise.facts.presets import PRESETS
from shardwise.plan import choose
from shardwise.plan.decisions import explained
from shardwise.plan.planned import Plan
from shardwise.plan.search import HEADROOM
from shardwise.units import GIB

PlanOf = Callable[..., Plan]


def mesh_of(plan: Plan) -> tuple[str, int, int]:
    return plan.decided.strategy, plan.decided.replicate, plan.decided.shard


@pytest.mark.parametrize(
    ("model", "cluster", "mesh"),
    [
        ("llama-3.2-1b", "1xH100", ("no_shard", 1, 1)),
        ("llama-3.2-1b", "8xH100", ("no_shard", 8, 1)),
        ("llama-3.2-1b", "4x8xH100", ("no_shard", 32, 1)),
        ("llama-3.1-8b", "8xH100", ("full_shard", 1, 8)),
        ("llama-3.1-8b", "2x8xH100", ("hybrid_shard", 2, 8)),
        ("llama-3.1-8b", "4x8xH100", ("hybrid_shard", 4, 8)),
        ("mixtral-8x7b", "4x8xH100", ("hybrid_shard", 2, 16)),
        ("llama-3.1-70b", "8x8xH100", ("hybrid_shard", 2, 32)),
        ("llama-3.1-70b", "4x8xH100", ("full_shard", 1, 32)),
        ("llama-3.1-70b", "18x4xGB200", ("full_shard", 1, 72)),
    ],
)
def test_the_decision_tree_follows_model_and_links(
    tree_plan_of: PlanOf, model: str, cluster: str, mesh: tuple[str, int, int]
) -> None:
    plan = tree_plan_of(f"model.name={model}", f"cluster.name={cluster}", "data.seq_len=4096")
    assert mesh_of(plan) == mesh
    assert plan.world_size == plan.cluster.world_size
    assert plan.memory.high <= HEADROOM * plan.cluster.memory_bytes
    assert plan.forecast is None and plan.choices["strategy"].source == "rule"


def test_the_search_leaves_the_tree_for_a_clear_gain_only(plan_of: PlanOf) -> None:
    words = ("model.name=llama-3.1-8b", "data.seq_len=4096")
    plan = plan_of(*words, "cluster.name=2x8xH200")
    assert mesh_of(plan) == ("hybrid_shard", 2, 8)
    assert any("too little to replace" in other.why_not for other in plan.alternatives)
    plan = plan_of("model.name=llama-3.1-70b", "data.seq_len=4096", "cluster.name=8x8xH100")
    assert mesh_of(plan) == ("full_shard", 1, 64)
    assert plan.choices["strategy"].source == "search"
    assert "faster than hybrid_shard 2 x 32" in plan.choices["strategy"].why


def test_parameters_stay_gathered_where_memory_allows_and_it_pays(plan_of: PlanOf) -> None:
    words = ("model.name=llama-3.1-8b", "data.seq_len=4096", "cluster.name=2x8xH200")
    slow = (*words, "cluster.interconnect=ethernet-100")
    names = [other.label for other in plan_of(*slow).alternatives]
    assert any(name.startswith("hybrid_shard (parameters kept) 2 x 8") for name in names)
    assert any(name.startswith("shard_grad_op 1 x 16") for name in names)
    given = plan_of(*words, "shard.reshard_after_forward=true")
    assert not any("shard_grad_op" in other.label for other in given.alternatives)


def test_slow_networks_keep_the_gathers_inside_a_node(plan_of: PlanOf) -> None:
    words = ("model.name=llama-3.1-8b", "cluster.name=4x8xH100", "data.seq_len=4096")
    speeds = {}
    for strategy in ("full_shard", "hybrid_shard"):
        slow = ("cluster.interconnect=ethernet-100", f"shard.strategy={strategy}")
        slow = (*slow, "train.accumulation=8", "memory.accumulate=sharded")
        forecast = plan_of(*words, *slow).forecast
        assert forecast is not None
        speeds[strategy] = forecast.tokens_per_s
    assert speeds["hybrid_shard"] > 1.5 * speeds["full_shard"]


def test_the_fastest_that_fits_is_chosen(plan_of: PlanOf) -> None:
    plan = plan_of("model.name=llama-3.1-8b", "cluster.name=8xH100", "data.seq_len=4096")
    assert plan.forecast is not None
    fitting = [a for a in plan.alternatives if "too little room" not in a.why_not]
    assert fitting and all(
        a.tokens_per_s is not None and a.tokens_per_s <= 1.01 * plan.forecast.tokens_per_s
        for a in fitting
    )
    assert all(a.why_not for a in plan.alternatives)


def test_a_price_makes_a_cost(plan_of: PlanOf) -> None:
    words = ("model.name=llama-3.1-8b", "cluster.name=8xH100", "data.seq_len=4096")
    listed, given = plan_of(*words).forecast, plan_of(*words, "cluster.usd_per_gpu_hour=1.55")
    assert listed is not None and given.forecast is not None
    hours = listed.hours_per_billion_tokens
    assert hours == pytest.approx(1e9 / (8 * listed.tokens_per_s) / 3600)
    assert listed.usd_per_billion_tokens == pytest.approx(26.32 * hours)
    assert given.forecast.usd_per_billion_tokens == pytest.approx(12.40 * hours)
    free = plan_of("model.name=llama-3.1-8b", "cluster.name=8xH800", "data.seq_len=4096").forecast
    assert free is not None and free.usd_per_billion_tokens is None


def test_a_larger_group_is_taken_only_where_the_domain_does_not_fit(tree_plan_of: PlanOf) -> None:
    plan = tree_plan_of("model.name=mixtral-8x7b", "cluster.name=4x8xH100", "data.seq_len=4096")
    assert "a copy over 8 GPUs does not fit; 16 do" in plan.choices["strategy"].why
    inside = tree_plan_of("model.name=mixtral-8x7b", "cluster.name=4x8xH200", "data.seq_len=4096")
    assert inside.decided.shard == 8


def test_a_narrower_domain_makes_smaller_groups(tree_plan_of: PlanOf) -> None:
    words = ("model.name=llama-3.1-8b", "cluster.name=2x8xH100", "data.seq_len=4096")
    assert mesh_of(tree_plan_of(*words, "cluster.nvlink_domain=4")) == ("hybrid_shard", 4, 4)


def test_reshard_rule_is_the_strategys(plan_of: PlanOf) -> None:
    for strategy, reshards in (
        ("full_shard", True),
        ("hybrid_shard", True),
        ("shard_grad_op", False),
        ("no_shard", False),
    ):
        plan = plan_of("cluster.name=2x8xH100", f"shard.strategy={strategy}")
        assert plan.decided.strategy == strategy
        assert plan.decided.reshard_after_forward is reshards


@pytest.mark.parametrize(
    ("overrides", "mesh"),
    [
        (("mesh.shard=8",), ("full_shard", 1, 8)),
        (("mesh.shard=4",), ("hybrid_shard", 2, 4)),
        (("mesh.replicate=4",), ("hybrid_shard", 4, 2)),
        (("mesh.shard=1",), ("no_shard", 8, 1)),
        (
            ("mesh.replicate=2", "mesh.shard=4", "shard.strategy=hybrid_shard"),
            ("hybrid_shard", 2, 4),
        ),
    ],
)
def test_a_given_mesh_is_taken(
    plan_of: PlanOf, overrides: tuple[str, ...], mesh: tuple[str, int, int]
) -> None:
    plan = plan_of("cluster.name=8xH100", *overrides)
    assert mesh_of(plan) == mesh
    assert plan.choices["shard"].source == plan.choices["replicate"].source == "user"


def test_states_that_do_not_fit_are_refused(plan_of: PlanOf) -> None:
    with pytest.raises(UserError, match="does not fit on 8xH100") as caught:
        plan_of("model.name=llama-3.1-405b", "cluster.name=8xH100")
    assert caught.value.code == ExitCode.DOES_NOT_FIT
    # Its 6 TiB of states are more than the memory of a host, so offload is not offered.
    assert caught.value.fix == "write cluster.name=12x8xH100"


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (
            ("model.name=llama-3.1-405b", "data.seq_len=512", "cluster.name=8x8xH100"),
            {"cluster.name=12x8xH100"},
        ),
        (
            ("model.name=llama-3.1-70b", "cluster.name=8xH100", "train.global_batch=64"),
            {"memory.offload=cpu", "cluster.name=2x8xH100"},
        ),
        (
            ("model.name=llama-3.1-8b", "cluster.name=8xH100", "shard.strategy=no_shard"),
            {"shard.strategy=auto", "memory.offload=cpu"},
        ),
        (
            ("model.name=llama-3.1-8b", "cluster.name=8xH100", "train.micro_batch=2048"),
            {"train.micro_batch=auto"},
        ),
        (
            (
                *("model.name=llama-3.2-1b", "cluster.name=4xA10G", "data.seq_len=131072"),
                "mesh.context=1",
            ),
            {"mesh.context=auto", "data.seq_len=65536"},
        ),
    ],
)
def test_every_change_that_an_error_names_fits(
    plan_of: PlanOf, words: tuple[str, ...], advice: set[str]
) -> None:
    with pytest.raises(UserError, match="does not fit") as caught:
        plan_of(*words)
    offered = caught.value.fix.removeprefix("write ").split(", or ")
    assert advice <= set(offered)
    for change in offered:
        warnings = plan_of(*words, *change.split(" ")).warnings
        assert not any("run out of memory" in warning for warning in warnings)


def test_a_change_that_would_not_help_is_not_named(plan_of: PlanOf) -> None:
    words = ("model.name=mixtral-8x7b", "model.overrides.num_local_experts=4096")
    with pytest.raises(UserError, match="does not fit") as caught:
        plan_of(*words, "cluster.name=8xH100")
    assert "=" not in caught.value.fix
    assert "a smaller model.name" in caught.value.fix


def test_a_plan_larger_than_the_memory_of_a_cpu_is_refused(
    plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_ram_bytes", lambda: int(23.5 * GIB))
    words = ("model.name=llama-3.2-1b", "cluster.name=1xCPU")
    with pytest.raises(UserError, match=r"llama-3\.2-1b does not fit on 1xCPU") as caught:
        plan_of(*words, "data.seq_len=65536")
    assert caught.value.code == ExitCode.DOES_NOT_FIT
    assert "GiB are needed on a rank that has 23.5 GiB" in caught.value.why
    shorter = re.search(r"data.seq_len=\d+", caught.value.fix)
    assert shorter is not None
    plan = plan_of(*words, shorter[0])
    assert plan.memory.total < plan.cluster.memory_bytes
    assert not plan.warnings


def test_ranks_of_a_cpu_have_more_memory_where_they_are_fewer(
    plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_ram_bytes", lambda: 4 * GIB)
    words = ("model.name=small-llama", "train.global_batch=64", "data.seq_len=2048")
    with pytest.raises(UserError, match="does not fit on 16xCPU") as caught:
        plan_of(*words, "cluster.name=16xCPU")
    fewer = re.search(r"cluster.name=\d+xCPU( train.global_batch=\d+)?", caught.value.fix)
    assert fewer is not None
    assert not plan_of(*words, *fewer[0].split(" ")).warnings


@pytest.mark.parametrize(
    ("cluster", "dtype", "why"),
    [
        ("8xH100", "bf16", "computes bf16"),
        ("8xV100", "fp16", "no bf16 arithmetic; fp16 with dynamic loss scaling"),
        ("8xT4", "fp16", "no bf16"),
    ],
)
def test_precision_follows_the_hardware(
    plan_of: PlanOf, cluster: str, dtype: str, why: str
) -> None:
    plan = plan_of(f"cluster.name={cluster}")
    assert plan.decided.param_dtype == dtype
    assert why in plan.choices["param_dtype"].why
    assert plan.decided.reduce_dtype == "fp32"


def test_a_format_that_a_device_emulates_has_no_forecast(plan_of: PlanOf) -> None:
    plan = plan_of("cluster.name=8xV100", "precision.param=bf16")
    assert plan.decided.param_dtype == "bf16" and plan.forecast is None


@pytest.mark.parametrize("formats", [{"fp32"}, {"fp32", "bf16"}])
def test_a_cpu_computes_fp32(formats: set[str]) -> None:
    config = RunConfig(model=ModelConfig(name="tiny-llama"), cluster=ClusterConfig(name="2xCPU"))
    source = read_model_config(config.model)
    spec = spec_from_config("tiny-llama", source.hf_config)
    cluster = replace(resolve_cluster(config.cluster, {}), compute_formats=frozenset(formats))
    plan = choose.choose_plan(config, spec, cluster, source)
    assert plan.decided.param_dtype == "fp32"
    assert "whether it computes bf16 or not" in plan.choices["param_dtype"].why
    assert plan.decided.compile is False


@pytest.mark.parametrize("cluster", ["2xCPU", "1xH100", "8xH100", "4x8xH100", "8xV100"])
@pytest.mark.parametrize("model", ["tiny-llama", "small-llama"])
def test_every_choice_has_a_reason(plan_of: PlanOf, model: str, cluster: str) -> None:
    plan = plan_of(f"model.name={model}", f"cluster.name={cluster}", "data.seq_len=512")
    choices = plan.choices
    assert tuple(choices) == explained()
    for name, choice in choices.items():
        assert choice.why.strip(), name
        assert choice.source in ("rule", "search"), name


GIVEN = {
    "reshard_after_forward": ("shard.reshard_after_forward=4", 4),
    "gather_in_place": ("shard.gather_in_place=false", False),
    "forward_prefetch": ("shard.forward_prefetch=2", 2),
    "backward_prefetch": ("shard.backward_prefetch=3", 3),
    "param_dtype": ("precision.param=fp16", "fp16"),
    "reduce_dtype": ("precision.reduce=bf16", "bf16"),
    "output_dtype": ("precision.output=fp32", "fp32"),
    "checkpoint_activations": ("memory.checkpoint_activations=0.5", 0.5),
    "compile": ("memory.compile=false", False),
    "offload": ("memory.offload=cpu", True),
    "offload_activations": ("memory.offload_activations=0.5", 0.5),
    "attention": ("model.attention=eager", "eager"),
    "loss": ("memory.loss=full", "full"),
    "loss_chunk_tokens": ("memory.loss_chunk_tokens=512", 512),
    "micro_batch": ("train.micro_batch=2", 2),
    "accumulation": ("train.accumulation=4", 4),
    "accumulate": ("memory.accumulate=sharded", "sharded"),
    "fused_optimizer": ("optim.fused=false", False),
    "optimizer_state": ("optim.state=bf16", "bf16"),
    "kernels": ("train.kernels=torch", "torch"),
    "router_aux_loss": ("train.router_aux_loss=off", 0.0),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_the_user_gives_is_the_users(plan_of: PlanOf, name: str) -> None:
    override, value = GIVEN[name]
    plan = plan_of("cluster.name=8xH100", "shard.strategy=full_shard", override)
    choice = plan.choices[name]
    assert (choice.value, choice.source) == (value, "user")
    assert plan.choices["strategy"].source == "user"


def test_a_state_of_bf16_and_faster_attention_are_foreseen(plan_of: PlanOf) -> None:
    words = ("model.name=llama-3.1-8b", "cluster.name=8xH200", "train.micro_batch=2")
    usual, narrow, flash = (
        plan_of(*words, *more)
        for more in ((), ("optim.state=bf16",), ("model.attention=flash_attention_4",))
    )
    assert narrow.memory.optimizer == usual.memory.optimizer // 2
    assert narrow.forecast is not None and usual.forecast is not None and flash.forecast is not None
    assert narrow.forecast.terms["optimizer"] < usual.forecast.terms["optimizer"]
    assert flash.forecast.terms["attention"] == pytest.approx(
        usual.forecast.terms["attention"] / 1.1
    )


def test_kernels_of_our_own_are_for_gpus(plan_of: PlanOf) -> None:
    words = ("model.name=llama-3.1-8b", "cluster.name=8xH100")
    ours, theirs = (plan_of(*words, f"train.kernels={kernels}") for kernels in ("auto", "torch"))
    assert (
        ours.decided.kernels == "own" and plan_of("cluster.name=2xCPU").decided.kernels == "torch"
    )
    assert ours.forecast is not None and theirs.forecast is not None
    assert ours.forecast.tokens_per_s > theirs.forecast.tokens_per_s
    with pytest.raises(UserError, match="needs GPUs"):
        plan_of("cluster.name=2xCPU", "train.kernels=own")


def test_a_given_accumulation_is_the_users_beside_a_given_batch(plan_of: PlanOf) -> None:
    plan = plan_of("cluster.name=8xH100", "train.global_batch=64", "train.accumulation=4")
    assert (plan.decided.accumulation, plan.choices["accumulation"].source) == (4, "user")


def test_a_reshard_group_goes_with_an_automatic_strategy(plan_of: PlanOf) -> None:
    words = ("model.name=llama-3.1-70b", "cluster.name=4x8xH100", "data.seq_len=4096")
    plan = plan_of(*words, "shard.reshard_after_forward=8")
    assert mesh_of(plan) == ("full_shard", 1, 32)
    assert plan.decided.reshard_after_forward == 8


def test_experts_that_a_reshard_group_pads_are_warned_of(plan_of: PlanOf) -> None:
    def warned(model: str, reshard: object, nodes: int) -> str:
        words = (f"model.name={model}", f"cluster.name={nodes}x8xH200", "shard.strategy=full_shard")
        return " ".join(plan_of(*words, f"shard.reshard_after_forward={reshard}").warnings)

    assert "hold and move 4.0 times its part of the experts" in warned("mixtral-8x7b", 8, 4)
    # Another dim is cut, the experts are as many as the ranks, or there are none.
    for quiet in (("mixtral-8x7b", "true", 4), ("mixtral-8x7b", 4, 1), ("llama-3.1-8b", 8, 4)):
        assert "experts" not in warned(*quiet)


def test_the_group_that_did_not_fit_is_one_that_was_tried(tree_plan_of: PlanOf) -> None:
    plan = tree_plan_of("model.name=llama-3.1-70b", "cluster.name=8x8xH100", "data.seq_len=4096")
    assert plan.choices["strategy"].why == "a copy over 16 GPUs does not fit; 32 do"


def test_all_gather_limit_caps_prefetch(plan_of: PlanOf) -> None:
    plan = plan_of("cluster.name=8xH100", "shard.all_gather_limit=1")
    assert plan.decided.backward_prefetch == 0
    assert "all_gather_limit=1" in plan.choices["backward_prefetch"].why
    assert plan.decided.forward_prefetch == 0


@pytest.mark.parametrize(
    ("cluster", "override", "in_place", "why"),
    [
        ("8xH100", "shard.strategy=full_shard", True, "no copy out of a buffer"),
        ("8xH100", "shard.strategy=no_shard", False, "nothing is gathered"),
        ("8xH100", "shard.reshard_after_forward=4", False, "fewer ranks than forward"),
        ("8xH100", "shard.forward_prefetch=0", False, "gathered ahead"),
        ("8xH100", "shard.all_gather_limit=1", False, "gathered ahead"),
        ("8xH100", "train.kernels=torch", False, "our own kernels only"),
        ("2xCPU", "shard.strategy=full_shard", False, "our own kernels only"),
    ],
)
def test_parameters_are_gathered_in_place_where_that_is_hidden(
    plan_of: PlanOf, cluster: str, override: str, in_place: bool, why: str
) -> None:
    words = (f"cluster.name={cluster}", "mesh.replicate=1") if "no_shard" not in override else ()
    plan = plan_of(*(words or (f"cluster.name={cluster}",)), override)
    assert plan.decided.gather_in_place is in_place
    assert why in plan.choices["gather_in_place"].why
    assert plan.decided.forward_prefetch == int(in_place)


def test_gathers_in_place_need_one_group(plan_of: PlanOf) -> None:
    words = ("cluster.name=8xH100", "shard.strategy=full_shard", "shard.gather_in_place=true")
    with pytest.raises(UserError, match=r"does not work with shard\.reshard_after_forward=4"):
        plan_of(*words, "shard.reshard_after_forward=4")


def test_least_recompute_that_fits_is_chosen(plan_of: PlanOf) -> None:
    words = ("model.name=llama-3.1-8b", "cluster.name=8xH200", "data.seq_len=4096")
    roomy = plan_of(*words, "train.micro_batch=4")
    tight = plan_of("model.name=llama-3.1-70b", "cluster.name=4x8xH100", "data.seq_len=4096")
    assert roomy.decided.checkpoint_activations == "none"
    assert tight.decided.checkpoint_activations == "full"


def batch_of(plan: Plan) -> tuple[int, int, int]:
    return plan.decided.micro_batch, plan.decided.accumulation, plan.decided.global_batch


@pytest.mark.parametrize(
    ("overrides", "batch"),
    [
        (("train.global_batch=64",), (8, 1, 64)),
        (("train.global_batch=8",), (1, 1, 8)),
        (("train.global_batch=24",), (3, 1, 24)),
        (("train.global_batch=64", "train.micro_batch=2"), (2, 4, 64)),
        (("train.global_batch=64", "train.accumulation=8"), (1, 8, 64)),
        (("train.micro_batch=2", "train.accumulation=3"), (2, 3, 48)),
        (("train.micro_batch=2",), (2, 1, 16)),
        (("train.global_batch=64", "train.micro_batch=4", "train.accumulation=2"), (4, 2, 64)),
    ],
)
def test_batch_is_micro_times_accumulation_times_ranks(
    plan_of: PlanOf, overrides: tuple[str, ...], batch: tuple[int, int, int]
) -> None:
    plan = plan_of("cluster.name=8xH100", "data.seq_len=2048", *overrides)
    assert batch_of(plan) == batch
    assert plan.tokens_per_step == batch[2] * 2048


def test_an_automatic_micro_batch_stays_below_the_token_cap(plan_of: PlanOf) -> None:
    plan = plan_of("cluster.name=8xH100", "data.seq_len=8192", "train.global_batch=1024")
    assert plan.decided.micro_batch * 8192 == 32768
    assert plan.decided.accumulation == 32


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("train.global_batch=12",), "does not divide over 8 ranks"),
        (("train.global_batch=16", "train.micro_batch=3"), "micro_batch=3"),
        (("train.global_batch=16", "train.accumulation=3"), "accumulation=3"),
        (("train.global_batch=8", "train.micro_batch=2"), "micro_batch=2"),
    ],
)
def test_batches_that_do_not_divide(plan_of: PlanOf, overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        plan_of("cluster.name=8xH100", *overrides)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("overrides", "accumulate"),
    [
        (("model.name=llama-3.1-8b", "train.micro_batch=1"), "unsharded"),  # one pass
        (("model.name=llama-3.1-8b", "train.micro_batch=1", "train.accumulation=4"), "unsharded"),
        (("model.name=llama-3.1-8b", "train.micro_batch=6", "train.accumulation=4"), "sharded"),
    ],
)
def test_accumulate_keeps_whole_gradients_where_they_fit(
    plan_of: PlanOf, overrides: tuple[str, ...], accumulate: str
) -> None:
    plan = plan_of("cluster.name=8xH100", "data.seq_len=2048", *overrides)
    assert plan.decided.accumulate == accumulate
    assert plan.choices["accumulate"].source == "rule"


def test_memory_counts_the_whole_gradients_that_accumulation_keeps(plan_of: PlanOf) -> None:
    words = ("model.name=llama-3.1-8b", "cluster.name=8xH100", "data.seq_len=2048")
    words = (*words, "shard.strategy=full_shard", "memory.checkpoint_activations=none")
    batch = ("train.micro_batch=1", "train.accumulation=4")
    whole = plan_of(*words, *batch, "memory.accumulate=unsharded")
    parts = plan_of(*words, *batch, "memory.accumulate=sharded")
    shards = 4 * -(-whole.model.total_params // 8)
    assert whole.memory.total - parts.memory.total >= 4 * whole.model.total_params - shards


def test_torchrun_counts_hold_for_a_local_cluster(plan_of: PlanOf) -> None:
    environ = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
    plan = plan_of("cluster.name=local", environ=environ)
    assert plan.world_size == 4
    assert plan.cluster.num_nodes == 2


def test_weights_are_read_where_they_lie(plan_of: PlanOf, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["tiny-llama"]))
    words = (f"model.name={tmp_path}", "cluster.name=1xH100")
    assert plan_of("model.name=tiny-llama", "cluster.name=1xH100").weights_dir is None
    assert plan_of(*words).weights_dir is None
    (tmp_path / "model.safetensors").touch()
    assert plan_of(*words).weights_dir == str(tmp_path)
    assert plan_of(*words, "model.weights=random").weights_dir is None


def test_a_setting_without_effect_is_said(plan_of: PlanOf) -> None:
    words = ("model.name=tiny-llama", "observe.memory_history=true")
    (warning,) = plan_of(*words, "cluster.name=2xCPU").warnings
    assert "observe.memory_history has no effect" in warning
    assert plan_of(*words, "cluster.name=2xH100").warnings == []
