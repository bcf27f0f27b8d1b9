"""Jobs for Kubernetes, and their manifests as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from shardwise.config.load import load_config
from shardwise.launch.prepare import choose_plan
from shardwise.plan.planned import Plan
from shardwise.platforms.job import Job, build_job
from shardwise.platforms.kubernetes.kube_launchers import KUBERNETES, KubernetesLauncher

LAUNCHERS = {one.name: one for one in KUBERNETES}
GPUS = """
model: llama-3.1-8b
data: {source: synthetic, seq_len: 4096}
cluster: 4x8xH100
runs_dir: /shared/runs
launch: {walltime_s: 86400, grace_s: 240}
kubernetes: {image: "registry.example.com/shardwise:1", claim: training, queue: gpus}
"""
CPUS = """
model: tiny-llama
data: {source: synthetic, seq_len: 32}
cluster: 2xCPU
kubernetes: {image: shardwise, claim: training, queue: gpus}
"""
GOLDEN = Path(__file__).with_name("golden")
EVERYTHING = (
    "launch.exclude=[node-3,node-9]",
    "launch.setup=[echo $(hostname) $$]",
    "launch.environment={A: $(B)}",
    "kubernetes.topology=cloud.provider.com/topology-rack",
    "kubernetes.topology_required=true",
    "kubernetes.resources={cpu: 96, memory: 900Gi, rdma/hca: 8}",
    "kubernetes.node_selector={pool: h100}",
    "kubernetes.tolerate=[nvidia.com/gpu]",
    "kubernetes.secret=tokens",
    "kubernetes.pull_secret=registry",
    "kubernetes.service_account=trainer",
    "kubernetes.mount=/mnt/all",
    "runs_dir=/mnt/all/runs",
)
VARIANTS = {
    "plain": (GPUS, ()),
    "everything": (GPUS, EVERYTHING),
    "one node": (GPUS, ("cluster.name=8xH100",)),
    "no walltime": (CPUS, ("runs_dir=runs",)),
    "many nodes": (GPUS, ("cluster.name=128x8xH100", f"name={'long-name-' * 12}")),
    "tier by number": (GPUS, ("kubernetes.topology=2",)),
    "elastic": (GPUS, ("launch.elastic=true",)),
}


_PLANS: dict[tuple[str, ...], Plan] = {}


def make_job(folder: Path, text: str = GPUS, *overrides: str, name: str = "first") -> Job:
    """A job that is launched from the current directory. Each plan is made once."""
    key = (text, name, *overrides)
    if key not in _PLANS:
        path = folder / f"{name}.yaml"
        path.write_text(text)
        _PLANS[key] = choose_plan(load_config(str(path), list(overrides)), environ={})
    plan = _PLANS[key]
    least = 2 if plan.config.launch.elastic else plan.cluster.num_nodes
    return build_job(plan, command="/bin/shardwise", least_nodes=least)


def manifests_of(launcher: KubernetesLauncher, job: Job) -> list[dict[str, Any]]:
    """In the order of their creation."""
    texts = [file.text for file in reversed(launcher.render(job).files)]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text)]


def job_manifest(on: str, job: Job) -> dict[str, Any]:
    """The last manifest: the job itself."""
    return manifests_of(LAUNCHERS[on], job)[-1]


def pod_of(on: str, job: Job) -> dict[str, Any]:
    """The pod spec. A TrainJob's container has its command from the TrainJob."""
    manifests = manifests_of(LAUNCHERS[on], job)
    if on == "volcano":
        return dict(manifests[-1]["spec"]["tasks"][0]["template"]["spec"])
    pod = dict(batch_job_of(on, job)["template"]["spec"])
    if on == "trainjob":
        trainer = manifests[-1]["spec"]["trainer"]
        renamed = {**trainer, "resources": trainer["resourcesPerNode"]}
        pod["containers"] = [{**pod["containers"][0], **renamed}]
    return pod


def jobset_spec_of(on: str, job: Job) -> dict[str, Any]:
    """The JobSet's spec, which for a TrainJob stands in its runtime."""
    manifests = manifests_of(LAUNCHERS[on], job)
    if on == "trainjob":
        return dict(manifests[1]["spec"]["template"]["spec"])
    return dict(manifests[-1]["spec"])


def batch_job_of(on: str, job: Job) -> dict[str, Any]:
    return dict(jobset_spec_of(on, job)["replicatedJobs"][0]["template"]["spec"])


def command_of(on: str, job: Job) -> list[str]:
    return list(pod_of(on, job)["containers"][0]["command"])


def options_of(on: str, job: Job) -> dict[str, str]:
    words = [word for word in command_of(on, job) if word.startswith("--")]
    return dict(word.removeprefix("--").split("=", 1) for word in words)
