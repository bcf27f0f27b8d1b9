"""The command of a manifest, run as Kubernetes would run it in two pods on this machine."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from launched import Started, free_port

from commands import SHARDWISE
from shardwise.config.load import load_config
from shardwise.launch.prepare import choose_plan
from shardwise.platforms.job import build_job
from shardwise.platforms.kubernetes.launcher import KUBERNETES

pytestmark = [pytest.mark.long, pytest.mark.dist]
CONFIG = """\
model: tiny-llama
data: {source: synthetic, seq_len: 32}
cluster: 2x1xCPU
train: {steps: 100000, global_batch: 4}
checkpoint: {every: 0}
observe: {log_every: 1}
kubernetes: {image: shardwise, claim: training, queue: gpus}
"""
FIELDS = {
    "metadata.labels['batch.kubernetes.io/controller-uid']": "a-uid",
    "metadata.annotations['scheduling.k8s.io/group-name']": "first-uid",
    "metadata.annotations['volcano.sh/job-version']": "0",
    "status.podIP": "127.0.0.1",
}
INDEX = (
    "metadata.annotations['batch.kubernetes.io/job-completion-index']",
    "metadata.annotations['volcano.sh/task-index']",
)


def environment(entries: list[dict[str, Any]], index: int) -> dict[str, str]:
    """The variables of a pod: fields of the pod itself, and values that name other variables."""
    fields = FIELDS | dict.fromkeys(INDEX, str(index))
    made: dict[str, str] = {}
    for one in entries:
        value = one.get("value")
        if value is None:
            value = fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        made[one["name"]] = expanded(value, made)
    return made


def expanded(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)


@pytest.mark.parametrize("on", ["jobset", "trainjob", "volcano"])
def test_two_pods_meet_train_and_save(on: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.yaml").write_text(CONFIG)
    plan = choose_plan(load_config("first.yaml", []), environ={})
    job = build_job(plan, command=SHARDWISE, least_nodes=2)
    launcher = next(one for one in KUBERNETES if one.name == on)
    manifest = list(yaml.safe_load_all(launcher.render(job).main.text))[-1]
    spec = manifest["spec"]
    if on == "trainjob":
        container = spec["trainer"]
    elif on == "jobset":
        pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        container = pod["containers"][0]
    else:
        container = spec["tasks"][0]["template"]["spec"]["containers"][0]
    port, pods = free_port(), []
    for index in (1, 0):
        environ = environment(container["env"], index)
        if on == "trainjob":
            # What Trainer adds.
            environ |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(index)}
            environ |= {"PET_MASTER_ADDR": "first-node-0-0.first", "PET_MASTER_PORT": "29500"}
        words = [expanded(word, environ) for word in container["command"]]
        assert words[0] == "shardwise" and "--rdzv-id=" in " ".join(words)
        # No DNS knows the names of pods here, and every pod has this machine's ports.
        place = re.compile(r"first-node-0(-0)?\.first:29500")
        words = [place.sub(f"127.0.0.1:{port}", word) for word in words[1:]]
        words[-1] = str(tmp_path / "first.yaml")
        pods.append(Started((SHARDWISE, *words), tmp_path / f"pod-{index}", environ))
    pods[1].wait_for("step 3")
    # Kubernetes evicts one of them.
    pods[0].process.send_signal(signal.SIGTERM)
    assert [pod.end() for pod in pods] == [75, 75], pods[1].text
    run_dir = tmp_path / "runs" / "first"
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    last = max(one["step"] for one in events if one["event"] == "step")
    assert (run_dir / "checkpoints" / f"step-{last:08d}").is_dir()
