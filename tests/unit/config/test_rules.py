from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.config.rules import RULES, validate_rules
from shardwise.config.schema import RunConfig
from shardwise.config.schema_text import describe_fields
from shardwise.errors import UserError


def config_with(**sections: Any) -> RunConfig:
    base = RunConfig()
    changed = {
        name: replace(getattr(base, name), **fields) if isinstance(fields, dict) else fields
        for name, fields in sections.items()
    }
    return replace(base, **changed)


PAIRS = {"source": "jsonl", "path": "a", "format": "pairs"}
BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("data.format", {"preference": {"objective": "dpo"}}),
    ("data.format", {"preference": {"objective": "kto"}}),
    ("data.format", {"data": PAIRS}),
    ("data.packing", {"data": {**PAIRS, "packing": "cut"}, "preference": {"objective": "dpo"}}),
    ("preference.beta", {"preference": {"beta": 0.5}}),
    ("preference.beta", {"preference": {"objective": "dpo", "beta": 0.0}, "data": PAIRS}),
    ("preference.gamma", {"preference": {"objective": "dpo", "gamma": 2.0}, "data": PAIRS}),
    ("preference.kl_term", {"preference": {"objective": "dpo", "kl_term": False}, "data": PAIRS}),
    ("data.packing", {"data": {**PAIRS, "packing": "one"}, "preference": {"objective": "kto"}}),
    ("preference.gamma", {"preference": {"objective": "simpo", "gamma": -1.0}, "data": PAIRS}),
    (
        "preference.label_smoothing",
        {"preference": {"objective": "dpo", "label_smoothing": 0.6}, "data": PAIRS},
    ),
    (
        "preference.desirable_weight",
        {"preference": {"objective": "kto", "desirable_weight": 0.0}, "data": PAIRS},
    ),
    (
        "preference.undesirable_weight",
        {"preference": {"objective": "dpo", "undesirable_weight": 2.0}, "data": PAIRS},
    ),
    ("name", {"name": "a/b"}),
    ("train.steps", {"train": {"steps": 0}}),
    ("data.seq_len", {"data": {"seq_len": 1}}),
    ("train.global_batch", {"train": {"global_batch": 0}}),
    ("train.micro_batch", {"train": {"micro_batch": 0}}),
    ("train.accumulation", {"train": {"accumulation": 0}}),
    ("train.global_batch", {"train": {"global_batch": 10, "micro_batch": 4, "accumulation": 1}}),
    ("data.eval_fraction", {"data": {"eval_fraction": 0.6}}),
    ("memory.checkpoint_activations", {"memory": {"checkpoint_activations": 1.5}}),
    ("memory.offload_activations", {"memory": {"offload_activations": 1.5}}),
    ("optim.lr", {"optim": {"lr": 0.0}}),
    ("optim.clip_norm", {"optim": {"clip_norm": 0.0}}),
    ("optim.state", {"optim": {"state": "bf16", "fused": False}}),
    ("optim.fused", {"optim": {"state": "int8", "fused": True}}),
    ("optim.state", {"optim": {"state": "bf16"}, "memory": {"offload": "cpu"}}),
    ("optim.state", {"optim": {"state": "bf16"}, "train": {"kernels": "torch"}}),
    ("optim.betas", {"optim": {"betas": (0.9, 1.0)}}),
    ("mesh.pipeline", {"mesh": {"pipeline": 0}}),
    ("mesh.pipeline_chunks", {"mesh": {"pipeline": 2, "pipeline_chunks": 0}}),
    ("optim.min_lr_ratio", {"optim": {"min_lr_ratio": 2.0}}),
    ("optim.warmup_steps", {"optim": {"warmup_steps": 1001}}),
    ("optim.warmup_steps", {"optim": {"warmup_steps": -1}}),
    ("optim.decay_steps", {"optim": {"decay_steps": 5}}),
    (
        "optim.decay_steps",
        {"optim": {"schedule": "wsd", "warmup_steps": 600, "decay_steps": 600}},
    ),
    ("train.stop_after", {"train": {"stop_after": 1001}}),
    ("train.stop_after", {"train": {"stop_after": 0}}),
    ("mesh.shard", {"mesh": {"shard": 0}}),
    ("mesh.replicate", {"mesh": {"replicate": 0}}),
    ("mesh.shard", {"mesh": {"shard": 2}, "shard": {"strategy": "no_shard"}}),
    ("shard.forward_prefetch", {"shard": {"forward_prefetch": -1}}),
    ("shard.forward_prefetch", {"shard": {"forward_prefetch": 2, "all_gather_limit": 2}}),
    ("shard.backward_prefetch", {"shard": {"backward_prefetch": 1, "all_gather_limit": 1}}),
    ("shard.all_gather_limit", {"shard": {"all_gather_limit": 0}}),
    ("model.ignore_weights", {"model": {"ignore_weights": ["^mtp("]}}),
    ("model.weights_from", {"model": {"weights_from": "x", "weights": "random"}}),
    ("shard.unit_min_params", {"shard": {"unit_classes": ["A"], "unit_min_params": 5}}),
    ("shard.reshard_after_forward", {"shard": {"reshard_after_forward": 1}}),
    ("shard.reshard_after_forward", {"shard": {"reshard_after_forward": 0}}),
    (
        "shard.reshard_after_forward",
        {"shard": {"strategy": "shard_grad_op", "reshard_after_forward": True}},
    ),
    ("model.trust_remote_code", {"model": {"name": "who/what", "trust_remote_code": True}}),
    ("data.path", {"data": {"source": "jsonl"}}),
    ("data.path", {"data": {"source": "synthetic", "path": "x"}}),
    ("checkpoint.keep", {"checkpoint": {"keep": 0}}),
    ("checkpoint.every", {"checkpoint": {"every": -1}}),
    ("data.group_lengths", {"data": {"group_lengths": True}, "memory": {"compile": False}}),
    (
        "data.group_lengths",
        {"data": {"format": "auto", "packing": "one", "group_lengths": True}},
    ),
    ("checkpoint.keep_best", {"checkpoint": {"keep_best": True}}),
    ("train.patience", {"train": {"patience": 2, "eval_every": 10}}),
    ("train.patience", {"train": {"patience": 2}, "data": {"eval_fraction": 0.1}}),
    ("train.min_gain", {"train": {"min_gain": 0.1}}),
    ("observe.log_every", {"observe": {"log_every": 0}}),
    ("observe.profile", {"observe": {"profile": 0}}),
    ("observe.profile", {"observe": {"profile": 999, "profile_steps": 3}}),
    ("observe.profile", {"observe": {"profile": 20}, "train": {"stop_after": 21}}),
    ("observe.profile_steps", {"observe": {"profile": 20, "profile_steps": 0}}),
    ("gates.max_exposed", {"gates": {"max_exposed": 15.0}}),
    ("observe.prometheus_port", {"observe": {"prometheus_port": 0}}),
    ("observe.prometheus_port", {"observe": {"prometheus_port": 65536}}),
    ("observe.prometheus_host", {"observe": {"prometheus_host": "0.0.0.0"}}),
    ("launch.walltime_s", {"launch": {"walltime_s": 0}}),
    ("launch.grace_s", {"launch": {"grace_s": -1.0}}),
    ("launch.max_requeues", {"launch": {"max_requeues": -1}}),
    ("launch.setup", {"launch": {"setup": ["module load cuda\nrm -r /"]}}),
    ("launch.setup", {"launch": {"environment": {"A": "b\nc"}}}),
    ("launch.command", {"launch": {"command": "shardwise 'half"}}),
    ("launch.environment", {"launch": {"environment": {"A;B": "c"}}}),
    ("launch.exclude", {"launch": {"exclude": ["node1,node2"]}}),
    ("launch.options", {"launch": {"options": ["partition=gpu"]}}),
    ("launch.options", {"launch": {"options": ["--partition gpu"]}}),
    ("skypilot.infra", {"skypilot": {"infra": "aws us-east-1"}}),
    ("skypilot.volume", {"skypilot": {"volume": ""}}),
    ("skypilot.accelerator", {"skypilot": {"accelerator": "H100 80GB"}}),
    ("skypilot.image", {"skypilot": {"image": "an image"}}),
    ("skypilot.mount", {"skypilot": {"mount": "shared"}}),
    ("skypilot.file_mounts", {"skypilot": {"file_mounts": {"data": "s3://bucket"}}}),
    ("skypilot.secrets", {"skypilot": {"secrets": ["HF_TOKEN=hf_123"]}}),
    ("kubernetes.image", {"kubernetes": {"image": "an image"}}),
    ("kubernetes.claim", {"kubernetes": {"claim": "My_Claim"}}),
    ("kubernetes.namespace", {"kubernetes": {"namespace": "-a"}}),
    ("kubernetes.queue", {"kubernetes": {"queue": "x" * 254}}),
    ("kubernetes.secret", {"kubernetes": {"secret": ""}}),
    ("kubernetes.pull_secret", {"kubernetes": {"pull_secret": "a b"}}),
    ("kubernetes.service_account", {"kubernetes": {"service_account": "a/b"}}),
    ("kubernetes.context", {"kubernetes": {"context": " "}}),
    ("kubernetes.mount", {"kubernetes": {"mount": "shared"}}),
    ("kubernetes.mount", {"kubernetes": {"mount": "/a:b"}}),
    ("kubernetes.mount", {"kubernetes": {"mount": "/a/../b"}}),
    ("kubernetes.mount", {"kubernetes": {"mount": "/"}}),
    ("kubernetes.topology", {"kubernetes": {"topology": "a rack"}}),
    ("kubernetes.topology_required", {"kubernetes": {"topology_required": True}}),
    ("kubernetes.resources", {"kubernetes": {"resources": {"cpu": "many"}}}),
    ("kubernetes.resources", {"kubernetes": {"resources": {"a b": 1}}}),
    ("kubernetes.resources", {"kubernetes": {"resources": {"nvidia.com/gpu": 8}}}),
    ("kubernetes.node_selector", {"kubernetes": {"node_selector": {"pool": "a b"}}}),
    ("kubernetes.tolerate", {"kubernetes": {"tolerate": ["a=b"]}}),
    ("mesh.site", {"mesh": {"site": 0}}),
    ("diloco.meet", {"diloco": {"meet": "node1"}, "mesh": {"site": 2}}),
    ("diloco.site", {"diloco": {"meet": "node1:29700", "site": 2}, "mesh": {"site": 2}}),
    ("diloco.site", {"diloco": {"site": 1}, "mesh": {"site": 2}}),
    ("diloco.patience_s", {"diloco": {"meet": "a:1", "patience_s": 0}, "mesh": {"site": 2}}),
    ("diloco.exchange", {"diloco": {"meet": "a:1", "exchange": "int8"}, "mesh": {"site": 2}}),
    ("diloco.fragments", {"diloco": {"meet": "a:1", "fragments": 2}, "mesh": {"site": 2}}),
    ("diloco.overlap_steps", {"diloco": {"meet": "a:1", "overlap_steps": 2}, "mesh": {"site": 2}}),
    ("cluster.datacenters", {"diloco": {"meet": "a:1"}, "cluster": {"datacenters": 2}}),
    ("optim.name", {"diloco": {"meet": "a:1"}, "mesh": {"site": 2}, "optim": {"name": "muon"}}),
    (
        "optim.state",
        {"diloco": {"meet": "a:1"}, "mesh": {"site": 2}, "optim": {"state": "int8"}},
    ),
    ("mesh.site", {"mesh": {"site": 1}, "cluster": {"datacenters": 2}}),
    ("diloco.lr", {"diloco": {"lr": 0.5}}),
    ("diloco.momentum", {"diloco": {"momentum": 2.0}, "mesh": {"site": 2}}),
    ("cluster.site_link", {"cluster": {"site_link": 1.0}}),
    ("cluster.site_link", {"cluster": {"site_link": 0.0, "datacenters": 2}}),
    ("train.steps", {"train": {"steps": 1010}, "mesh": {"site": 2}}),
    ("train.stop_after", {"train": {"stop_after": 50}, "mesh": {"site": 2}}),
    ("train.eval_every", {"train": {"eval_every": 150}, "mesh": {"site": 2}}),
    ("checkpoint.every", {"checkpoint": {"every": 50}, "mesh": {"site": 2}}),
    ("diloco.fragments", {"diloco": {"fragments": 3}, "mesh": {"site": 2}}),
    ("diloco.overlap_steps", {"diloco": {"overlap_steps": 100}, "mesh": {"site": 2}}),
    ("adapter.method", {"adapter": {"method": "lora"}, "mesh": {"site": 2}}),
    ("memory.offload", {"memory": {"offload": "cpu"}, "mesh": {"site": 2}}),
    ("precision.linear", {"precision": {"linear": "float8"}, "cluster": {"datacenters": 2}}),
]


@pytest.mark.parametrize(("field", "sections"), BROKEN)
def test_broken_rule_names_field_value_and_fix(field: str, sections: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"(?m)^ *{re.escape(field)} is .*, but ") as caught:
        validate_rules(config_with(**sections))
    assert "fix:" in str(caught.value)


KEPT: list[dict[str, Any]] = [
    {},
    {"optim": {"state": "bf16"}},
    {"optim": {"state": "int8", "fused": False}, "memory": {"offload": "cpu"}},
    {"optim": {"schedule": "wsd", "warmup_steps": 500, "decay_steps": 500}},
    {"train": {"global_batch": 16, "micro_batch": 4, "accumulation": 2, "stop_after": 1000}},
    {"train": {"global_batch": 10, "micro_batch": 4}},
    {"shard": {"forward_prefetch": 1, "backward_prefetch": 1, "all_gather_limit": 2}},
    {"shard": {"forward_prefetch": 0, "all_gather_limit": 1}},
    {"shard": {"reshard_after_forward": 8}},
    {"shard": {"reshard_after_forward": False, "strategy": "shard_grad_op"}},
    {"shard": {"strategy": "hybrid_shard"}, "mesh": {"replicate": 1, "shard": 8}},
    {"shard": {"strategy": "no_shard"}, "mesh": {"shard": 1}},
    {"model": {"name": "who/what", "trust_remote_code": True, "revision": "abc"}},
    {"data": {"source": "datasets", "path": "wikitext"}},
    {"optim": {"clip_norm": None}, "checkpoint": {"every": 0}},
    {"train": {"patience": 2, "min_gain": 0.1, "eval_every": 5}, "data": {"eval_fraction": 0.1}},
    {"cluster": {"datacenters": 2, "site_link": 0.1, "site_delay_ms": 20.0}},
    {"mesh": {"site": 2}, "diloco": {"steps": 50, "fragments": 5, "overlap_steps": 9}},
    {"observe": {"profile": 998, "profile_steps": 3}},
    {"observe": {"profile": 20}, "train": {"stop_after": 10}},
    {"observe": {"prometheus_port": 9630, "prometheus_host": "0.0.0.0"}},
    {"launch": {"options": ["--partition=gpu"], "exclude": ["a1"], "environment": {"A": "b c"}}},
    {"kubernetes": {"resources": {"cpu": 96, "memory": "900Gi", "rdma/hca_a": 8}, "topology": 2}},
    {"kubernetes": {"image": "r.example.com:5000/a/b:1@sha256:0a", "mount": "/mnt/all"}},
]


@pytest.mark.parametrize("sections", KEPT)
def test_what_makes_sense_passes(sections: dict[str, Any]) -> None:
    validate_rules(config_with(**sections))


def test_code_in_a_local_directory_needs_no_revision(tmp_path: Path) -> None:
    validate_rules(config_with(model={"name": str(tmp_path), "trust_remote_code": True}))


def test_all_broken_rules_are_told_together_with_their_places() -> None:
    config = config_with(train={"steps": 0}, optim={"lr": -1.0})
    with pytest.raises(UserError) as caught:
        validate_rules(config, lambda field: f"here:{field}")
    assert "here:train.steps: train.steps is 0" in str(caught.value)
    assert "here:optim.lr: optim.lr is -1.0" in str(caught.value)


def test_every_rule_speaks_of_a_field_and_has_its_own_id() -> None:
    paths = {field.path for field in describe_fields()}
    assert {rule.field for rule in RULES} <= paths
    assert len({rule.id for rule in RULES}) == len(RULES)
