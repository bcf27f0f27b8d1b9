"""Real runs on two forked gloo ranks that may be killed at any moment, and what they leave."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from forked import rank_of
from forkserver import forkserver
from shardwise.checkpoint import durable_files, store
from shardwise.checkpoint.audit import check_checkpoint
from shardwise.checkpoint.index import read_index
from shardwise.config.plain import config_from_dict
from shardwise.config.rules import validate_rules
from shardwise.errors import UserError
from shardwise.launch.one_plan import same_plan
from shardwise.launch.prepare import choose_plan
from shardwise.launch.rank_environment import RENDEZVOUS_VARIABLE
from shardwise.launch.worker import run_rank
from shardwise.metrics.events import read_events
from shardwise.plan.planned import Plan
from shardwise.plan.run_directory import write_run_directory
from shardwise.training import loop

LONG = os.environ.get("SHARDWISE_CHAOS") == "1"
WORLD = 2
STEPS = 6
TIMEOUT_S = 120.0
DEFAULTS: Mapping[str, Any] = {
    "model.overrides": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 257,
    },
    "data.source": "synthetic",
    "data.seq_len": 16,
    "cluster.name": f"{WORLD}xCPU",
    "precision.param": "fp32",
    "shard.strategy": "full_shard",
    "optim.lr": 1e-3,
    "train.global_batch": 4,
    "train.steps": STEPS,
    "checkpoint.every": 2,
    # So that every save but the first removes an old one.
    "checkpoint.keep": 1,
    "observe.log_every": 1,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """SIGKILL at one call of a primitive that writes checkpoints."""

    rank: int
    step: int
    """Of the checkpoint that is being saved."""

    call: int
    """Counted from 1 within that save."""

    after: bool = False
    """After the call instead of before it."""

    everyone: bool = False
    """The whole job at once instead of this rank alone."""


@dataclass(slots=True)
class Tally:
    """What all the kills came to."""

    kills: int = 0
    resumed: int = 0
    differences: int = 0
    recovery_s: list[float] = field(default_factory=list)
    """From a kill to the next step, where the launcher started the ranks again."""

    def __str__(self) -> str:
        text = f"{self.kills} kills, {self.resumed} resumed, {self.differences} differences"
        if not self.recovery_s:
            return text
        median = statistics.median(self.recovery_s)
        return (
            f"{text}; {len(self.recovery_s)} restarts by the launcher, median {median:.1f} s "
            "from the kill to the next step"
        )


def config_of(run_dir: Path, **settings: Any) -> dict[str, Any]:
    """`DEFAULTS` with `settings` laid over them; `section__field` stands for `section.field`."""
    sections: dict[str, Any] = defaultdict(dict)
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    for path, value in {**DEFAULTS, **dotted}.items():
        section, name = path.split(".")
        sections[section][name] = value
    return {"name": run_dir.name, "runs_dir": str(run_dir.parent), **sections}


def prepare(run_dir: Path, **settings: Any) -> Path:
    """Plan a tiny run and write its directory, as the launcher does; returns the plan's path."""
    config = config_from_dict(config_of(run_dir, **settings))
    validate_rules(config)
    return write_run_directory(choose_plan(config, environ={}))


class Job:
    """One start of a run: a process a rank, under the test's eyes."""

    def __init__(
        self, plan_path: Path, fault: Fault | None = None, bad: Collection[int] = ()
    ) -> None:
        context = forkserver()
        place = plan_path.parent.parent / f"rendezvous-{uuid4().hex}"
        self.processes = [
            context.Process(target=_live, args=(plan_path, rank, place, fault, bad), daemon=True)
            for rank in range(WORLD)
        ]
        for process in self.processes:
            process.start()

    def finish(self) -> list[int]:
        """Exit codes by rank. Once one has failed the others are killed, as the launcher does."""
        deadline = time.monotonic() + TIMEOUT_S
        while alive := [p for p in self.processes if p.exitcode is None]:
            # One that was killed may have left another in a wait that only a time limit ends.
            if any(p.exitcode for p in self.processes):
                self._give_time_to_agree()
                self.kill(range(WORLD))
            elif not wait([p.sentinel for p in alive], timeout=deadline - time.monotonic()):
                self.kill(range(WORLD))
                raise AssertionError("the ranks did not end in time")
        return [int(p.exitcode or 0) for p in self.processes]

    def kill(self, ranks: Collection[int]) -> None:
        """SIGKILL these ranks."""
        for rank in ranks:
            self.processes[rank].kill()
        for rank in ranks:
            self.processes[rank].join()

    def _give_time_to_agree(self) -> None:
        """Ranks that all leave with a UserError do so one after the other."""
        if not any(p.exitcode == -signal.SIGKILL for p in self.processes):
            for process in self.processes:
                process.join(5.0)


def run_clean(plan_path: Path, bad: Collection[int] = ()) -> None:
    """Start and finish without a fault."""
    codes = Job(plan_path, bad=bad).finish()
    assert codes == [0] * WORLD, logs(plan_path.parent)


def calls_of(run_dir: Path, rank: int, step: int) -> list[str]:
    """The primitives that a rank called to save `step` in the last run that ended well."""
    rows = json.loads((run_dir / f"calls-{rank}.json").read_text(encoding="utf-8"))
    return [name for name, saved in rows if saved == step]


def newest_good(run_dir: Path) -> int:
    """The newest checkpoint by its manifest, every file of it hashed; 0 where there is none."""
    found = store.list_checkpoints(run_dir / "checkpoints")
    return found[-1].step if found and not check_checkpoint(found[-1].path) else 0


def events_of(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    """Events of these kinds, in order."""
    path = run_dir / "events.jsonl"
    return [e for e in (read_events(path) if path.exists() else []) if e["event"] in kinds]


def end_state(run_dir: Path, step: int = STEPS) -> str:
    """sha256 of the last checkpoint: its scalars, and all bytes of all its tensors by name."""
    checkpoint = store.list_checkpoints(run_dir / "checkpoints")[-1]
    manifest = checkpoint.manifest
    assert manifest.step == step, logs(run_dir)
    assert check_checkpoint(checkpoint.path) == []
    scalars = [manifest.step, manifest.position, manifest.tokens, manifest.loss]
    digest = hashlib.sha256(json.dumps(scalars).encode())
    for name, tensor in sorted(read_index(checkpoint.path).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        for piece in sorted(tensor.pieces, key=lambda piece: piece.offsets):
            with (checkpoint.path / piece.file).open("rb") as file:
                file.seek(piece.start)
                digest.update(file.read(tensor.piece_bytes(piece)))
    return digest.hexdigest()


def ranks_of(launcher: int) -> dict[int, int]:
    """Process ids of the ranks that run now under this one."""
    found = {}
    for pid in _read(f"/proc/{launcher}/task/{launcher}/children").split():
        entries = _read(f"/proc/{pid}/environ").split("\0")
        environ = dict(entry.split("=", 1) for entry in entries if "=" in entry)
        rank = int(environ["RANK"]) if "RANK" in environ else rank_of(int(pid))
        if rank is not None:
            found[rank] = int(pid)
    return found


def _read(path: str) -> str:
    """Nothing of a process that is gone."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def logs(run_dir: Path) -> str:
    """The ends of the newest logs, to show why a run failed."""
    newest = sorted((run_dir / "logs").glob("attempt-*/rank-*.log"), key=os.path.getmtime)[-WORLD:]
    return "\n".join(f"--- {path}\n{path.read_text()[-2000:]}" for path in newest)


# ---- inside a rank ---------------------------------------------------------------------------


def _live(
    plan_path: Path, rank: int, place: Path, fault: Fault | None, bad: Collection[int]
) -> None:
    """What `python -m shardwise.launch.worker` does, with faults laid in its way."""
    os.environ |= {
        RENDEZVOUS_VARIABLE: f"file://{place}",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
    }
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    torch.set_num_threads(1)
    # The libraries stay; collections need not look at them again.
    gc.freeze()
    run_dir = plan_path.parent
    (run_dir / f"rank-{rank}.pid").write_text(str(os.getpid()), encoding="utf-8")
    calls = _watch_files(run_dir, rank, fault)
    if rank == WORLD - 1:
        _poison(bad)
    try:
        plan = Plan.load(plan_path)
        run_rank(same_plan(plan), plan.settings.train.hang_timeout_s)
    except UserError as error:
        sys.exit(error.code)
    (run_dir / f"calls-{rank}.json").write_text(json.dumps(calls), encoding="utf-8")


def _watch_files(run_dir: Path, rank: int, fault: Fault | None) -> list[tuple[str, int]]:
    """Count the primitives of checkpoint.durable_files, and die where the fault says."""
    calls: list[tuple[str, int]] = []

    def watched(name: str, primitive: Callable[..., None]) -> Callable[..., None]:
        def call(first: Any, *rest: Any) -> None:
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
            # Steps only grow: what names an older one, or none, belongs to the save under way.
            match = re.search(r"step-(\d{8})", path)
            step = max(int(match.group(1)) if match else 0, calls[-1][1] if calls else 0)
            calls.append((name, step))
            number = sum(saved == step for _, saved in calls)
            hit = fault is not None and (fault.rank, fault.step, fault.call) == (rank, step, number)
            if hit and not fault.after:
                _die(run_dir, rank, everyone=fault.everyone)
            primitive(first, *rest)
            if hit:
                _die(run_dir, rank, everyone=fault.everyone)

        return call

    durable_files.write_all = watched("write", durable_files.write_all)
    durable_files.sync_handle = watched("sync", durable_files.sync_handle)
    durable_files.rename = store.rename = watched("rename", durable_files.rename)
    return calls


def _die(run_dir: Path, rank: int, *, everyone: bool) -> None:
    others = [other for other in range(WORLD) if other != rank] if everyone else []
    for victim in [*others, rank]:
        pid = int((run_dir / f"rank-{victim}.pid").read_text(encoding="utf-8"))
        os.kill(pid, signal.SIGKILL)


def _poison(bad: Collection[int]) -> None:
    """Batches at these positions have a loss that is not a number, on this rank."""
    position = -1
    seed_step, attach = loop.seed_step, loop.attach_training_loss

    def note_position(seed: int, now: int, data_rank: int) -> None:
        nonlocal position
        position = now
        seed_step(seed, now, data_rank)

    def attach_poisoned(session: Any, say: Any) -> None:
        attach(session, say)
        sum_loss = session.model.sum_loss
        session.model.sum_loss = lambda *args: (
            sum_loss(*args) * (float("nan") if position in bad else 1.0)
        )

    loop.seed_step, loop.attach_training_loss = note_position, attach_poisoned
