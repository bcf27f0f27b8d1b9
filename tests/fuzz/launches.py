"""Cases of `shardwise launch`, and of the files that it leaves for a submitted job."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from case import Case
from corpus import RUN
from mutators import mutate_bytes, mutate_json, mutate_tree, spell_json

from shardwise.config.load import load_config
from shardwise.launch.prepare import choose_plan
from shardwise.launch.ray_trainer import RayJob
from shardwise.platforms.job import FOLDER, build_job
from shardwise.platforms.known import PLATFORMS
from shardwise.platforms.launcher import write_files
from shardwise.platforms.submission import Submission

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "platforms"))
from kube_admission import admission_faults
from kube_schemas import RESOURCES_SERVED, schema_faults

Rng = random.Random

_KUBERNETES = ("jobset", "trainjob", "volcano")
_NUMBERS = {
    "local": "1.1",
    "slurm": "17",
    "ray": "run-1",
    "skypilot": "17",
    **dict.fromkeys(_KUBERNETES, "default/run"),
}
# What users write for a launch, beside `RUN`.
LAUNCH: dict[str, Any] = {
    "name": "run",
    "cluster": {"name": "2x1xCPU"},
    "launch": {
        "walltime_s": "auto",
        "grace_s": 120,
        "elastic": False,
        "max_requeues": 2,
        "exclude": [],
        "command": "auto",
        "setup": ["ulimit -c 0"],
        "environment": {"NCCL_IB_TIMEOUT": 22, "A": "it's $B"},
        "options": [],
    },
    "kubernetes": {
        "image": "registry.example.com/shardwise:1",
        "claim": "training",
        "mount": "/shared",
        "namespace": "default",
        "queue": "gpus",
        "resources": {"cpu": 2, "memory": "4Gi"},
        "node_selector": {"pool": "a"},
        "tolerate": ["nvidia.com/gpu"],
        "secret": "tokens",
    },
    "skypilot": {"volume": "training", "spot": True, "file_mounts": {"/d": "s3://b/d"}},
}


def launched(rng: Rng, home: Path, scratch: Path) -> Case:
    """Mutated settings of a launch. What is written has to be what a platform accepts."""
    platform = rng.choice([one.name for one in PLATFORMS])
    if rng.random() < 0.2:
        text = mutate_bytes(rng, yaml.safe_dump({**RUN, **LAUNCH}).encode())
    else:
        text = _spell(mutate_tree(rng, LAUNCH))
    (scratch / "run.yaml").write_bytes(text)
    words = ["launch", "run.yaml", "--on", platform, "--out", "files"]
    return Case([*words, *_fitting(rng, platform)], fault_of=_fault_of_files)


def _spell(tree: Any) -> bytes:
    return spell_json({**RUN, **tree} if isinstance(tree, dict) else tree)


def _fitting(rng: Rng, platform: str) -> list[str]:
    """Changes without which a platform would refuse every case for one reason."""
    if rng.random() < 0.1:
        return []
    if platform == "local":
        return ["cluster.name=2xCPU", "launch.grace_s=auto"]
    return [f"launch.elastic={rng.choice(('true', 'false'))}"] if rng.random() < 0.3 else []


def _fault_of_files(scratch: Path) -> str:
    files = scratch / "files"
    faults = [fault for path in sorted(files.iterdir()) for fault in _faults_of_script(path)]
    if (files / "manifest.yaml").exists():
        faults += _faults_of_manifests(files)
    if (files / "ray.yaml").exists():
        RayJob.load(files / "ray.yaml")
    return f"written: {faults[0]}" if faults else ""


def _faults_of_manifests(files: Path) -> Iterator[str]:
    store: dict[tuple[str, str], Any] = {}
    texts = [(files / name).read_text() for name in ("config-map.yaml", "manifest.yaml")]
    for manifest in (one for text in texts for one in yaml.safe_load_all(text)):
        resource = next(one for one in RESOURCES_SERVED if one.kind == manifest["kind"])
        yield from schema_faults(resource, manifest)
        yield from admission_faults(manifest, store)
        store[manifest["kind"], manifest["metadata"]["name"]] = manifest


def _faults_of_script(path: Path) -> Iterator[str]:
    """A shell has to understand what is for a shell."""
    if path.name in ("job.sbatch", "run.sh"):
        scripts = [path.read_text()]
    elif path.name == "task.yaml":
        task = yaml.safe_load(path.read_text())
        scripts = [task["setup"], task["run"]]
    else:
        return
    for script in scripts:
        # A user's own line of setup may be broken, which is for the shell to say.
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        if done.returncode != 0 and "setup" not in script:
            yield done.stderr


def job_files(rng: Rng, home: Path, scratch: Path) -> Case:
    """A job that was submitted, of whose files one was changed since."""
    platform = rng.choice([one.name for one in PLATFORMS])
    run = Path(shutil.copytree(home / "launched" / platform, scratch / "runs" / "run"))
    files = run / FOLDER
    note = files / "submission.json"
    Submission(
        platform=platform,
        id=_NUMBERS[platform],
        run_dir=str(run),
        files_dir=str(files),
        time=0.0,
    ).save()
    path = rng.choice([note, note, files / _main_of(files)])
    change = mutate_json if path == note else mutate_bytes
    if path != note and path.suffix == ".yaml" and rng.random() < 0.6:
        documents = list(yaml.safe_load_all(path.read_text()))
        place = rng.randrange(len(documents))
        documents[place] = mutate_tree(rng, documents[place])
        path.write_bytes(b"\n---\n".join(map(spell_json, documents)))
    else:
        path.write_bytes(change(rng, path.read_bytes()))
    words = [
        ["status", "runs/run"],
        ["status", "run", "--json"],
        ["logs", "run"],
        ["stop", "run"],
        ["exclude", "run", "node-7"],
        ["exclude", "run", "node-7"],
        ["exclude", "run", "--late"],
    ]
    if path.name == "ray.yaml":
        words = [["ray-driver", str(path)], ["ray-driver", str(path), "--stop"]]
    return Case(list(rng.choice(words)), _environment(scratch))


def _main_of(files: Path) -> str:
    names = ("manifest.yaml", "ray.yaml", "task.yaml", "job.sbatch", "run.sh")
    return next(name for name in names if (files / name).exists())


def _environment(scratch: Path) -> dict[str, str]:
    """No scheduler is there: no command on the PATH, and nobody at the API server's port."""
    place = scratch / "kubeconfig"
    place.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "main", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "main",
            }
        )
    )
    return {"KUBECONFIG": str(place), "PATH": os.devnull, "RAY_ADDRESS": "http://127.0.0.1:9"}


def build_launched(home: Path) -> None:
    """The files of a job on each platform, below `home/launched`."""
    folder = home / "launched"
    folder.mkdir()
    for platform in PLATFORMS:
        tree = {**RUN, **LAUNCH, "runs_dir": "/shared/runs"}
        if platform.name == "local":
            tree = {**RUN, "launch": {"setup": ["ulimit -c 0"]}}
        (folder / "run.json").write_text(json.dumps(tree))
        changes = [] if platform.name in ("local", "slurm") else ["launch.walltime_s=auto"]
        plan = choose_plan(load_config(str(folder / "run.json"), changes), environ={})
        files = folder / platform.name / FOLDER
        job = build_job(plan, command="/bin/shardwise", least_nodes=1, files_dir=files)
        write_files(platform.render(job))
