from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from migrated import fate, migrated, why

from shardwise.migrate.migration import Migration


def settings_of(folder: Path, **tree: Any) -> dict[str, Any]:
    return migrated(folder, tree, name="ds.json").settings


@pytest.mark.parametrize(
    ("stage", "strategy", "fated"),
    [
        (0, "no_shard", "mapped"),
        (1, "shard_grad_op", "changed"),
        (2, "shard_grad_op", "mapped"),
        (3, "full_shard", "mapped"),
    ],
)
def test_stages(tmp_path: Path, stage: int, strategy: str, fated: str) -> None:
    done = migrated(tmp_path, {"zero_optimization": {"stage": stage}}, name="ds.json")
    assert done.settings["shard.strategy"] == strategy
    assert fate(done, "zero_optimization.stage") == fated


def test_mics_is_hsdp_and_hpz_is_a_group(tmp_path: Path) -> None:
    mics = settings_of(tmp_path, zero_optimization={"stage": 3, "mics_shard_size": 8})
    assert (mics["shard.strategy"], mics["mesh.shard"]) == ("hybrid_shard", 8)
    hpz = settings_of(tmp_path, zero_optimization={"stage": 3, "zero_hpz_partition_size": 4})
    assert (hpz["shard.strategy"], hpz["shard.reshard_after_forward"]) == ("full_shard", 4)


def offloading(folder: Path, **zero: Any) -> Migration:
    return migrated(folder, {"zero_optimization": {"stage": 3, **zero}}, name="ds.json")


PARAMETERS = "zero_optimization.offload_param"
OPTIMIZER = "zero_optimization.offload_optimizer"


def test_parameters_in_host_memory_take_the_optimizer_with_them(tmp_path: Path) -> None:
    cpu = {"device": "cpu", "pin_memory": True}
    both = offloading(tmp_path, offload_param=cpu, offload_optimizer=cpu)
    assert both.settings["memory.offload"] == "cpu" and both.settings["memory.pin_memory"]
    assert "memory.offload_optimizer" not in both.settings
    assert fate(both, f"{PARAMETERS}.device") == fate(both, f"{OPTIMIZER}.device") == "mapped"
    one = offloading(tmp_path, offload_optimizer={"device": "none"}, offload_param=cpu)
    assert one.settings["memory.offload"] == "cpu"
    assert fate(one, f"{PARAMETERS}.device") == fate(one, f"{OPTIMIZER}.device") == "changed"


@pytest.mark.parametrize(
    "zero",
    [
        {"offload_optimizer": {"device": "cpu", "pin_memory": False}},
        {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "none"}},
        {"cpu_offload": True},
    ],
    ids=["cpu", "nvme", "old"],
)
def test_the_optimizer_alone_in_host_memory_is_paged_adam(
    zero: dict[str, Any], tmp_path: Path
) -> None:
    done = offloading(tmp_path, **zero)
    assert done.settings["memory.offload_optimizer"] is True
    assert done.settings.get("memory.offload", "none") == "none"
    assert "memory.pin_memory" not in done.settings
    key = "zero_optimization.cpu_offload" if "cpu_offload" in zero else f"{OPTIMIZER}.device"
    assert fate(done, key) == "changed" and "Adam's moments" in why(done, key)
    assert ("NVMe" in why(done, key)) == ("nvme" in str(zero))


def test_loop_optimizer_and_schedule(tmp_path: Path) -> None:
    found = settings_of(
        tmp_path,
        train_batch_size=64,
        train_micro_batch_size_per_gpu=2,
        gradient_clipping=0,
        bf16={"enabled": True},
        optimizer={"type": "AdamW", "params": {"lr": "2e-5", "betas": [0.8, 0.99]}},
        scheduler={
            "type": "WarmupCosineLR",
            "params": {"warmup_num_steps": 5, "total_num_steps": 50, "cos_min_ratio": 0.2},
        },
    )
    assert found["train.global_batch"] == 64 and found["train.micro_batch"] == 2
    assert found["optim.clip_norm"] is None
    assert found["optim.lr"] == 2e-5 and found["optim.betas"] == [0.8, 0.99]
    assert found["optim.weight_decay"] == 0.0
    assert found["optim.schedule"] == "cosine" and found["optim.min_lr_ratio"] == 0.2
    assert found["optim.warmup_steps"] == 5 and found["train.steps"] == 50
    assert found["precision.param"] == found["precision.reduce"] == "bf16"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Lion", "lion"), ("FusedLion", "lion"), ("Muon", "muon"), ("Lamb", None)],
)
def test_other_optimizers_are_kept_where_we_have_them(
    tmp_path: Path, name: str, expected: str | None
) -> None:
    optimizer = {"type": name, "params": {"lr": "2e-5", "momentum": 0.9}}
    tree = {"zero_optimization": {"stage": 2}, "optimizer": optimizer}
    done = migrated(tmp_path, tree, name="ds.json")
    assert done.settings.get("optim.name") == expected
    assert fate(done, "optimizer.type") == "changed"
    assert why(done, "optimizer.params.momentum") == "optim has no setting for it"


def test_auto_is_left_to_the_plan_and_said(tmp_path: Path) -> None:
    tree = {"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    done = migrated(tmp_path, tree, name="ds.json")
    assert set(done.settings) == {"shard.strategy"}
    assert {fate(done, key) for key in ("train_batch_size", "bf16.enabled")} == {"changed"}


def test_fp32_is_assumed_where_no_format_is_enabled(tmp_path: Path) -> None:
    found = settings_of(tmp_path, zero_optimization={"stage": 2})
    assert found["precision.param"] == "fp32"
    found = settings_of(
        tmp_path, fp16={"enabled": True, "initial_scale_power": 10}, steps_per_print=1
    )
    assert (found["precision.param"], found["precision.loss_scale"]) == ("fp16", 1024.0)


def test_stage_3_keys_have_two_spellings(tmp_path: Path) -> None:
    keys = {"stage": 3, "stage3_max_live_parameters": 1e9, "max_reuse_distance": 0}
    done = migrated(tmp_path, {"zero_optimization": keys}, name="ds.json")
    assert not [line for line in done.lines if "unknown" in line.outcome.why]
