"""Known faults in other tools' files and in scripts, which are read and never run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from shardwise.doctor.check import find_faults
from shardwise.doctor.examine import examine_config
from shardwise.doctor.foreign.checks import FOREIGN
from shardwise.doctor.foreign.setup import read_setup

ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_use_orig_params": True,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_sync_module_states": True,
    },
}
SCRIPT = """
import torch
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.utils.data import DataLoader, DistributedSampler

loader = DataLoader(data, sampler=DistributedSampler(data, seed=0))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
"""
FSDP1 = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
LAYERS = """\
for layer in model.model.layers:
    fully_shard(layer, mp_policy=policy)
"""
# What a file has instead of the healthy one, or what a script has besides.
FILES: dict[str, dict[str, object]] = {
    "SW153": {"fsdp_min_num_params": 100_000},
    "SW154": {"fsdp_use_orig_params": False},
    "SW155": {"fsdp_state_dict_type": "FULL_STATE_DICT"},
    "SW156": {"fsdp_backward_prefetch": "NO_PREFETCH"},
    "SW157": {"fsdp_cpu_ram_efficient_loading": False},
    "SW158": {"fsdp_sync_module_states": False},
    "SW160": {"fsdp_sharding_strategy": "FULL_SHARD", "num_machines": 4},
    "SW162": {"mixed_precision": "fp16"},
    "SW164": {"fsdp_forward_prefetch": True, "fsdp_limit_all_gathers": False},
}
SCRIPTS = {
    "SW150": f"{SCRIPT}{FSDP1}model = FSDP(model, auto_wrap_policy=policy)\n",
    "SW151": f"{FSDP1}from torch.distributed.tensor.parallel import parallelize_module\n"
    "model = FSDP(parallelize_module(model, mesh, plan), auto_wrap_policy=policy)\n",
    "SW152": SCRIPT.replace(LAYERS, ""),
    "SW159": SCRIPT.replace("reduce_dtype=torch.float32", "reduce_dtype=torch.bfloat16"),
    "SW161": SCRIPT.replace(", fused=True", "")
    + "from torch.distributed.fsdp import CPUOffloadPolicy\noffload = CPUOffloadPolicy()\n",
    "SW163": SCRIPT.replace("sampler=DistributedSampler(data, seed=0)", "shuffle=True"),
}


def found_in(file: Path) -> dict[str, str]:
    setup = read_setup(file)
    assert setup is not None
    return {each.check.id: each.evidence for each in find_faults(FOREIGN, setup)}


def accelerate_file(folder: Path, **changes: object) -> Path:
    tree = json.loads(json.dumps(ACCELERATE))
    for name, value in changes.items():
        (tree["fsdp_config"] if name.startswith("fsdp_") else tree)[name] = value
    file = folder / "fsdp.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def script_file(folder: Path, text: str) -> Path:
    file = folder / "train.py"
    file.write_text(text)
    return file


def test_every_check_has_a_fault() -> None:
    assert {check.id for check in FOREIGN} == {*FILES, *SCRIPTS}


@pytest.mark.parametrize("name", FILES)
def test_a_fault_of_a_file_is_found(name: str, tmp_path: Path) -> None:
    found = found_in(accelerate_file(tmp_path, **FILES[name]))
    assert list(found) == [name], found


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_fault_of_a_script_is_found(name: str, tmp_path: Path) -> None:
    found = found_in(script_file(tmp_path, SCRIPTS[name]))
    assert list(found) == [name], found
    assert "line " in found[name]


def test_older_forms_are_found_too(tmp_path: Path) -> None:
    flat = f"{FSDP1}FSDP(model, use_orig_params=False, backward_prefetch=None)\n"
    assert list(found_in(script_file(tmp_path, flat))) == ["SW152", "SW154", "SW156"]
    assert list(found_in(accelerate_file(tmp_path, fsdp_auto_wrap_policy="NO_WRAP"))) == ["SW152"]


def test_healthy_files_and_scripts_are_quiet(tmp_path: Path) -> None:
    assert found_in(accelerate_file(tmp_path)) == {}
    assert found_in(script_file(tmp_path, SCRIPT)) == {}
    looped = "for module in [*model.model.layers, model]:\n    fully_shard(module)\n"
    imports = "from torch.distributed.fsdp import fully_shard\n"
    assert found_in(script_file(tmp_path, imports + looped)) == {}


def test_what_is_no_file_of_another_tool_is_left_to_the_loader(tmp_path: Path) -> None:
    ours = tmp_path / "run.yaml"
    ours.write_text("model: tiny-llama\ndata: synthetic\ncluster: 1xCPU\n")
    assert read_setup(ours) is None
    ours.write_text("model: tiny-llama\nlearning_rate: 1\n")
    assert read_setup(ours) is None
    found = examine_config(ours, [], {"CUDA_VISIBLE_DEVICES": ""})
    assert [each.check.id for each in found.findings] == ["SW100"]
    ours.write_text(": [")
    assert read_setup(ours) is None
    assert read_setup(tmp_path / "none.yaml") is None
