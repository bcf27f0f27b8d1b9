from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from migrated import fate, migrated, why


def fsdp(version: int = 2, mixed: str = "bf16", machines: int = 2, **section: Any) -> Any:
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": mixed,
        "num_machines": machines,
        "num_processes": 16,
        "fsdp_config": {"fsdp_version": version, **section},
    }


@pytest.mark.parametrize(
    ("said", "settings"),
    [
        ("FULL_SHARD", {"shard.strategy": "full_shard"}),
        ("SHARD_GRAD_OP", {"shard.strategy": "shard_grad_op"}),
        (2, {"shard.strategy": "shard_grad_op"}),
        ("NO_SHARD", {"shard.strategy": "no_shard"}),
        (
            "HYBRID_SHARD",
            {"shard.strategy": "hybrid_shard", "mesh.replicate": 2, "mesh.shard": 8},
        ),
        (
            5,
            {
                **{"shard.strategy": "hybrid_shard", "mesh.replicate": 2, "mesh.shard": 8},
                "shard.reshard_after_forward": False,
            },
        ),
    ],
)
def test_a_strategy_keeps_its_mesh(tmp_path: Path, said: Any, settings: dict[str, Any]) -> None:
    done = migrated(tmp_path, fsdp(1, fsdp_sharding_strategy=said))
    placed = {key: value for key, value in done.settings.items() if key[:5] in ("shard", "mesh.")}
    assert placed == settings
    assert fate(done, "fsdp_config.fsdp_sharding_strategy") == "mapped"


def test_hybrid_on_one_machine_is_full_shard(tmp_path: Path) -> None:
    done = migrated(tmp_path, fsdp(1, machines=1, fsdp_sharding_strategy="HYBRID_SHARD"))
    assert done.settings["shard.strategy"] == "full_shard"
    assert "mesh.replicate" not in done.settings


def test_fsdp2_reshards_or_keeps_and_reads_unprefixed_keys(tmp_path: Path) -> None:
    done = migrated(tmp_path, fsdp(fsdp_reshard_after_forward=False, offload_params=True))
    assert done.settings["shard.strategy"] == "shard_grad_op"
    assert done.settings["memory.offload"] == "cpu"
    assert done.settings["precision.reduce"] == "bf16"
    assert "fp32 is safer" in why(done, "mixed_precision")


def test_what_the_file_does_not_say_is_assumed_and_said(tmp_path: Path) -> None:
    tree = fsdp()
    del tree["mixed_precision"]
    done = migrated(tmp_path, tree)
    assert done.settings["shard.strategy"] == "full_shard"
    assert done.settings["precision.param"] == "fp32"
    assert fate(done, "mixed_precision") == "assumed"


def test_a_mesh_of_parallelism_config(tmp_path: Path) -> None:
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 4, "tp_size": 2, "cp_size": 1}
    tree = {
        **fsdp(fsdp_reshard_after_forward=True),
        "parallelism_config": {f"parallelism_config_{key}": val for key, val in sizes.items()},
    }
    done = migrated(tmp_path, tree)
    assert (done.settings["mesh.replicate"], done.settings["mesh.shard"]) == (2, 4)
    assert done.settings["shard.strategy"] == "hybrid_shard"
    assert done.settings["mesh.tensor"] == 2 and "mesh.context" not in done.settings
    assert fate(done, "parallelism_config.parallelism_config_cp_size") == "mapped"


@pytest.mark.parametrize(
    ("key", "fated", "says"),
    [
        ("fsdp_backward_prefetch_policy", "dropped", "never reads this key"),
        ("fsdp_ofload_params", "dropped", "unknown"),
        ("fsdp_use_orig_params", "mapped", "own parameters"),
    ],
)
def test_no_key_is_dropped_in_silence(tmp_path: Path, key: str, fated: str, says: str) -> None:
    done = migrated(tmp_path, fsdp(**{key: True}))
    assert fate(done, f"fsdp_config.{key}") == fated
    assert says in why(done, f"fsdp_config.{key}")


def test_an_unknown_key_has_its_nearest_name(tmp_path: Path) -> None:
    done = migrated(tmp_path, fsdp(fsdp_ofload_params=True))
    assert "did you mean `fsdp_offload_params`?" in why(done, "fsdp_config.fsdp_ofload_params")


def test_units_by_class_and_by_size(tmp_path: Path) -> None:
    done = migrated(tmp_path, fsdp(fsdp_transformer_layer_cls_to_wrap="A, B"))
    assert done.settings["shard.unit_classes"] == ["A", "B"]
    by_size = fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=2000)
    assert migrated(tmp_path, by_size).settings["shard.unit_min_params"] == 2000


def test_ddp_stays_ddp(tmp_path: Path) -> None:
    done = migrated(tmp_path, {"distributed_type": "MULTI_GPU", "mixed_precision": "fp16"})
    assert done.settings["shard.strategy"] == "no_shard"
    assert done.settings["precision.reduce"] == "fp32"


def test_ranks_on_a_cpu_are_a_cluster(tmp_path: Path) -> None:
    tree = {"distributed_type": "MULTI_CPU", "use_cpu": True, "num_processes": 4}
    assert migrated(tmp_path, tree).settings["cluster.name"] == "4xCPU"


def test_the_deepspeed_plugin_and_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "steps_per_print": 7}')
    plugin = {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
    done = migrated(tmp_path, {"distributed_type": "DEEPSPEED", "deepspeed_config": plugin})
    assert done.settings["shard.strategy"] == "full_shard"
    assert done.settings["memory.offload"] == "cpu"
    named = {"deepspeed_config_file": "ds.json", "zero3_init_flag": True}
    done = migrated(tmp_path, {"distributed_type": "DEEPSPEED", "deepspeed_config": named})
    assert done.settings["shard.strategy"] == "shard_grad_op"
    assert done.settings["observe.log_every"] == 7
    assert fate(done, "deepspeed_config.deepspeed_config_file: steps_per_print") == "changed"
