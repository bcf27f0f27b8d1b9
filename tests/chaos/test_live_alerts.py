"""Every alert, caused: a real run on two CPU ranks with faults in its ranks, a real Prometheus
with the rules of `shardwise observe`, and what it says is firing.

Two faults are not wholly real. A GPU cannot be broken here: the error is injected where Prometheus
reads of it, at an exporter that speaks as DCGM's does. And a rank that fills its memory does so on
a machine that says it has 2 GiB (faults/sitecustomize.py); what it holds is real and measured.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from chaos_ranks import config_of, events_of, logs, ranks_of

from real_prometheus import HAS_PROMETHEUS, SHARDWISE, WHY_SKIPPED, Prometheus, free_port
from shardwise.errors import ExitCode
from shardwise.launch.supervise import last_step
from shardwise.metrics.sinks.endpoint import Endpoint

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_PROMETHEUS, reason=WHY_SKIPPED),
]
FAULTS = Path(__file__).parent / "faults"
# An hour of the rules is 12 seconds here.
SCALE = 1 / 300
# Ranks take seconds to start, which no scale shortens: two restarts need an hour of two minutes.
PATIENT_SCALE = 1 / 30
TIMEOUT_S = 120.0
SLOW_RANK = KILLED_RANK = 1
# Slow reads begin with a batch that no rank reads yet: two are read ahead, and one was skipped.
STEPS_AHEAD = 6

# Off the bus, as DCGM's exporter tells it.
XID = 79
XID_PAGE = """\
# HELP DCGM_FI_DEV_XID_ERRORS Value of the last XID error encountered.
# TYPE DCGM_FI_DEV_XID_ERRORS gauge
DCGM_FI_DEV_XID_ERRORS{{gpu="0",UUID="GPU-0",device="nvidia0",Hostname="node-1"}} {xid}
"""

# A machine on which much else runs does make steps slow now and then, and the alerts say so.
NOISE = {"FSDPStepTimeRegression", "FSDPAllGatherP99", "TrainingGoodputLow"}
# Five minutes and five steps are three seconds here, which a busy one may well take for a step.
BUSY_NOISE = NOISE | {"TrainingMFURegression", "TrainingHang", "TrainingCheckpointStale"}
SLOWER = {"FSDPStepTimeRegression", "TrainingMFURegression"}


@dataclass(frozen=True)
class Case:
    """A fault, the alerts that it must cause, and those that may fire meanwhile."""

    fault: str
    fires: frozenset[str]
    may_fire: frozenset[str] = frozenset()


def case(fault: str, fires: set[str], may_fire: set[str] | None = None) -> Case:
    return Case(fault, frozenset(fires), frozenset(may_fire or ()))


# In this order: the first four need no history; what is slower comes later, so that it is in
# nobody's baseline. A stalled save stops the loop at the next one. Kills come last, under the
# longer hour, which the failed save is within. A peak of memory never falls: its alert stays until
# the ranks start again.
NO_HISTORY = ("broken_gpu", "nonfinite", "failing_save", "full_memory")
FAILED = {"TrainingNonFinite", "TrainingCheckpointFailed"}
FULL = {"TrainingMemoryNearLimit"}
# Steps that wait for data are slower, and what they wait is not productive.
STARVED = {"TrainingDataStarved", "TrainingGoodputLow", *SLOWER}
STALLED = {"TrainingCheckpointStale", "TrainingHang", "TrainingGoodputLow"}
CASES = (
    case("broken_gpu", {"GPUXIDError"}),
    case("nonfinite", {"TrainingNonFinite"}),
    case("failing_save", {"TrainingCheckpointFailed"}, FAILED),
    case("full_memory", FULL, {"TrainingCheckpointStale", *FAILED}),
    case("gradient_spike", {"FSDPGradNormSpike"}, FAILED | FULL),
    case("throttled", SLOWER, {"FSDPGradNormSpike", *FAILED, *FULL}),
    case("slow_data", {"TrainingDataStarved"}, STARVED | FULL),
    case("slow_rank", {"TrainingStraggler", "FSDPAllGatherP99"}, STARVED | FULL),
    case("stalled_save", STALLED, {*SLOWER, "TrainingStraggler", "FSDPAllGatherP99", *FULL}),
    case("killed_rank", {"TrainingRestartLoop"}, FAILED | FULL),
)


@dataclass
class Watched:
    """What was seen of a run under faults."""

    run_dir: Path
    before: dict[str, set[str]] = field(default_factory=dict)
    """What fired when a fault was switched on."""

    during: dict[str, set[str]] = field(default_factory=dict)
    """All that fired while it was on."""

    last_step: dict[str, int] = field(default_factory=dict)
    """The last step that was logged before it."""

    seconds: dict[str, float] = field(default_factory=dict)
    busy: bool = False
    """Whether ranks may have had to wait for a core."""

    exitcode: int = -1
    said: str = ""


class Stage:
    """The run and the server, started; faults come and go."""

    def __init__(self, home: Path, environment: Mapping[str, str]) -> None:
        self.switches = home / "faults"
        self.switches.mkdir()
        self.watched = Watched(home / "run")
        port = free_port()
        self.exporter = Endpoint("127.0.0.1", 0, self.xid_page, "text/plain; version=0.0.4")
        config = config_of(
            self.watched.run_dir,
            train__steps=100_000,
            checkpoint__every=5,
            cluster__peak_tflops=1e-4,
            observe__prometheus_port=port,
        )
        (home / "run.json").write_text(json.dumps(config), encoding="utf-8")
        self.output = (home / "output.txt").open("w+")
        self.run = subprocess.Popen(
            [SHARDWISE, "train", str(home / "run.json")],
            env={**environment, "PYTHONPATH": str(FAULTS), "FAULTS": str(self.switches)},
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )
        self.server = Prometheus(
            home / "prometheus", port, every=0.25, scale=SCALE, dcgm=self.exporter.port
        )

    def close(self) -> None:
        self.run.kill()
        self.run.wait()
        self.server.close()
        self.exporter.close()

    def xid_page(self) -> bytes:
        """What DCGM's exporter would say of the GPU."""
        is_broken = (self.switches / "broken_gpu").exists()
        return XID_PAGE.format(xid=XID if is_broken else 0).encode()

    def poll(self, condition: Callable[[], bool]) -> None:
        """Until it holds, or for so long that the tests will say what was there instead."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition() and time.monotonic() < deadline:
            assert self.run.poll() is None, logs(self.watched.run_dir)
            time.sleep(0.1)

    def cause(self, each: Case) -> None:
        """Switch a fault on until all its alerts have fired."""
        seen, switch = self.watched, self.switches / each.fault
        self.poll(lambda: not each.fires & self.server.firing())
        seen.before[each.fault] = self.server.firing()
        seen.during[each.fault] = set()
        seen.last_step[each.fault] = events_of(seen.run_dir, "step")[-1]["step"]
        began = time.monotonic()

        def all_fire() -> bool:
            now = self.server.firing()
            seen.during[each.fault] |= now
            return each.fires <= seen.during[each.fault]

        switch.write_text(str(seen.last_step[each.fault] + STEPS_AHEAD), encoding="utf-8")
        if each.fault == "nonfinite":
            # One batch; more of them would take the run back to a checkpoint.
            self.poll(lambda: bool(events_of(seen.run_dir, "nonfinite")))
            switch.unlink()
        if each.fault == "killed_rank":
            self.kill_twice(all_fire)
        self.poll(all_fire)
        switch.unlink(missing_ok=True)
        seen.seconds[each.fault] = time.monotonic() - began

    def kill_twice(self, look: Callable[[], bool]) -> None:
        """Again only when the ranks have come further than before: else the launcher gives up."""
        os.kill(ranks_of(self.run.pid)[KILLED_RANK], signal.SIGKILL)
        self.poll(lambda: look() or bool(events_of(self.watched.run_dir, "restart")))
        done = last_step(self.watched.run_dir)
        self.poll(lambda: look() or last_step(self.watched.run_dir) > done)
        os.kill(ranks_of(self.run.pid)[KILLED_RANK], signal.SIGKILL)

    def is_watched(self) -> bool:
        """Whether the run makes steps, and the server knows of a GPU that is well."""
        well = self.server.query("DCGM_FI_DEV_XID_ERRORS == 0")
        return len(events_of(self.watched.run_dir, "step")) > 3 and bool(well)

    def lengthen_hour(self) -> None:
        """And wait until what the stalled save caused is over."""
        self.server.rescale(PATIENT_SCALE)
        self.poll(lambda: not STALLED & self.server.firing())

    def has_caught_up(self) -> bool:
        """Whether no rank is late any more."""
        return events_of(self.watched.run_dir, "collectives")[-1]["straggler"] is None

    def has_history(self) -> bool:
        """Whether the rules that compare with the past have one, of steps at their usual pace."""
        past = f"fsdp:grad_norm offset {1800 * SCALE + 2:.0f}s"
        return bool(self.server.query(past)) and bool(self.server.query("training_mfu"))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    environment = {key: text for key, text in os.environ.items() if key != "RANK"}
    stage = Stage(tmp_path_factory.mktemp("alerts"), environment | {"OMP_NUM_THREADS": "1"})
    try:
        stage.poll(stage.is_watched)
        for each in CASES:
            if each.fault == "gradient_spike":
                stage.poll(stage.has_history)
            if each.fault == "killed_rank":
                stage.watched.busy = is_busy()
                stage.lengthen_hour()
            stage.cause(each)
            if each.fault == "broken_gpu":
                stage.poll(lambda: "GPUXIDError" not in stage.server.firing())
            if each.fault == "slow_rank":
                stage.poll(stage.has_caught_up)
        stage.run.send_signal(signal.SIGTERM)
        stage.watched.exitcode = stage.run.wait(TIMEOUT_S)
    finally:
        stage.close()
    stage.output.seek(0)
    stage.watched.said = stage.output.read()
    print("seconds to fire:", {name: round(s, 1) for name, s in stage.watched.seconds.items()})
    yield stage.watched


def is_busy() -> bool:
    """Whether ranks may have to wait for a core. Two ranks, Prometheus and what `make test` runs
    beside them need four."""
    cores = os.cpu_count() or 1
    return cores < 4 or os.getloadavg()[0] > cores


@pytest.mark.parametrize("each", CASES, ids=[each.fault for each in CASES])
def test_a_fault_fires_its_alerts_and_no_other(watched: Watched, each: Case) -> None:
    assert not each.fires & watched.before[each.fault]
    assert each.fires <= watched.during[each.fault]
    others = watched.during[each.fault] - each.fires - each.may_fire
    if watched.busy:
        others -= BUSY_NOISE
    assert others <= (NOISE if each.fault in NO_HISTORY else set())


def test_the_run_outlives_all_faults(watched: Watched) -> None:
    assert watched.exitcode == ExitCode.PREEMPTED, watched.said
    assert events_of(watched.run_dir, "rollback") == []
    reasons = [event["reason"] for event in events_of(watched.run_dir, "restart")]
    assert reasons == [f"rank {KILLED_RANK} failed: killed by signal SIGKILL"] * 2


def test_a_delay_of_200_ms_is_named_within_20_steps(watched: Watched) -> None:
    before = watched.last_step["slow_rank"]
    late = [e for e in events_of(watched.run_dir, "collectives") if e["straggler"]]
    first = late[0]
    assert first["straggler"]["rank"] == SLOW_RANK
    assert before < first["step"] <= before + 20
    assert first["straggler"]["behind_s"] == pytest.approx(0.2, abs=0.1)
    assert {e["straggler"]["rank"] for e in late} == {SLOW_RANK}
    assert f"ms per step for rank {SLOW_RANK}" in watched.said
    assert f"rank {SLOW_RANK} is in step with the others again" in watched.said


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SHARDWISE, *words], capture_output=True, text=True, check=False)


def test_verify_and_the_report_name_the_rank(watched: Watched) -> None:
    done = command("verify", str(watched.run_dir), "--json")
    assert done.returncode == ExitCode.VERIFY_FAILED, done.stderr
    gates: dict[str, Any] = {gate["name"]: gate for gate in json.loads(done.stdout)}
    assert gates["ranks"]["verdict"] == "fail"
    assert re.fullmatch(rf"rank {SLOW_RANK} \d+ ms late", gates["ranks"]["figure"])
    assert gates["gradient norm"]["verdict"] == "fail"
    done = command("report", str(watched.run_dir))
    assert done.returncode == 0, done.stderr
    page = (watched.run_dir / "report.html").read_text(encoding="utf-8")
    assert f"rank {SLOW_RANK} was up to" in page
    assert "straggler at step" in page
