"""Meshes at random over many models: each is a plan, or an error that names a fix."""

from __future__ import annotations

import random

import pytest

from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.facts.presets import PRESETS
from shardwise.launch.prepare import choose_plan
from shardwise.plan.axis_traffic import planned_traffic
from shardwise.plan.picture import picture_data, picture_lines

MODELS = sorted(name for name in PRESETS if not name.startswith(("tiny", "small")))
CLUSTERS = (
    *("8xH100", "4x8xH100", "16x8xH100", "64x8xH200", "2x8xB200", "18x4xGB200", "6x8xH100"),
    *("4x8xA100-80GB", "8xL40S", "2x4xH100", "1xH200", "8xV100-32GB", "2xCPU", "8xCPU"),
)
SIZES = (1, 1, 1, 2, 2, 3, 4, 8, 16, 32, "auto")
LENGTHS = (512, 2048, 4096, 4100, 8192, 32768, 131072)


MORE = (
    *("shard.strategy=full_shard", "shard.strategy=hybrid_shard", "train.global_batch=96"),
    *("mesh.sequence_parallel=false", "memory.offload=cpu", "train.micro_batch=1"),
    *("shard.reshard_after_forward=4", "precision.linear=float8", "optim.state=int8"),
    *("model.attention=eager", "memory.checkpoint_activations=full"),
)
AXES = ("tensor", "pipeline", "context", "expert", "shard", "replicate")


def random_settings(rng: random.Random) -> list[str]:
    """A model on a cluster, with sizes for some axes and some other settings."""
    axes = [f"mesh.{axis}={rng.choice(SIZES)}" for axis in AXES if rng.random() < 0.25]
    more = [words for words in MORE if rng.random() < 0.06]
    place = [f"model.name={rng.choice(MODELS)}", f"cluster.name={rng.choice(CLUSTERS)}"]
    return [*place, f"data.seq_len={rng.choice(LENGTHS)}", *axes, *more]


def try_meshes(seed: int, count: int) -> tuple[int, int]:
    """(plans, errors) of so many meshes."""
    rng, plans, errors = random.Random(seed), 0, 0
    for _ in range(count):
        words = random_settings(rng)
        try:
            plan = choose_plan(load_config(None, words), environ={})
        except UserError as error:
            errors += 1
            assert error.fix, words
            continue
        plans += 1
        decided = plan.decided
        assert decided.world_size == plan.cluster.world_size, words
        assert decided.shard * decided.context * decided.tensor % decided.expert == 0, words
        assert decided.global_batch % decided.data_ranks == 0, words
        along = {axis for axis in AXES if getattr(decided, axis) > 1}
        assert along - {"shard"} <= planned_traffic(plan).keys(), words
        assert all(len(line) <= 80 for line in picture_lines(plan)), words
        assert len(picture_data(plan)["nodes"]) == plan.cluster.num_nodes, words
    return plans, errors


def test_every_mesh_is_a_plan_or_an_error_with_a_fix() -> None:
    plans, errors = try_meshes(seed=0, count=60)
    assert plans > 10 and errors > 10


@pytest.mark.long
def test_two_thousand_meshes_are_plans_or_errors_with_a_fix() -> None:
    assert len(MODELS) >= 30
    plans, errors = try_meshes(seed=1, count=2000)
    assert plans > 400 and errors > 400
