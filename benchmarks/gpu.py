"""shardwise against its peers on one GPU: tokens/s, MFU, memory and share of the limit, one table.

    python benchmarks/gpu.py [--shapes 8b-4096 one-gpu ...] [--contenders ours torchtitan trainer]
        [--settings 4-none torchtitan:5-none ...] [--rounds 2] [--steps 10] [--cap-gib 60]
        [--seconds 3600] [--json FILE]
    python benchmarks/gpu.py --table FILE ...

Every contender trains the same shape on random tokens with bf16 compute over fp32 weights and Adam
state: rank 0 of eight with links that take no time (`shardwise tunnel`, torchtitan), or one GPU
alone (`shardwise train`, Hugging Face Trainer). Each run has a process of its own; a round runs
every setting of every contender once, in turn, and every other round the other way round. What
cannot run is a row that says why. The limit is that of `ceilings.py`, measured in the same go. MFU
is a share of the dense bf16 peak, by the convention of `facts/flops.py`, in float8 too.

A setting is `4-none-float8`: the micro-batch, what is recomputed (none, selective, full, or a share
of the blocks such as 0.5), then words: float8 (linear layers of blocks), keep (parameters stay
gathered from forward to backward), host0.4 (that share of the blocks has its activations in host
memory until backward; ours alone), and Trainer's modes compile and liger. torchtitan is 0.2.2,
with its dependencies importable.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ceilings import Ceilings, limit_s
from peers.contenders import BENCHMARKS, Contender, contenders_on
from peers.process import Outcome, environment, run_job
from peers.shapes import CPU_SHAPES, GPU_SHAPES, SHAPES, Setting
from peers.table import markdown
from shardwise.facts.cluster import probe_cluster
from shardwise.facts.flops import flops_per_token
from shardwise.facts.gpus import GpuSpec
from shardwise.files import replace_file
from shardwise.units import GIB

CONTENDERS = ("ours", "torchtitan", "trainer")
PACKAGES = (
    "torch",
    "transformers",
    "torchtitan",
    "torchao",
    "liger-kernel",
    "flash-attn-4",
    "quack-kernels",
)
DEFAULT_SHAPES = {
    "cuda": [name for name in GPU_SHAPES if name != "8b-32768"],
    "cpu": list(CPU_SHAPES),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One setting of one contender on one shape."""

    shape: str
    contender: str
    setting: Setting

    def __str__(self) -> str:
        return f"{self.shape} {self.contender} {self.setting}"


def main() -> None:
    given = parse()
    if given.table:
        print("\n\n".join(markdown(json.loads(path.read_text("utf-8"))) for path in given.table))
        return
    started = time.monotonic()
    gpu = None if given.device == "cpu" else this_gpu()
    name = "CPU" if gpu is None else gpu.name
    given.logs.mkdir(parents=True, exist_ok=True)
    racers = contenders_on(given.device, name, given.logs, tuple(given.ours))
    planned = [run for shape in given.shapes for run in runs_of(shape, given)]
    if not planned:
        sys.exit("none of these contenders runs these shapes with these settings")
    found = measure_ceilings(planned, given)
    results: dict[str, Any] = {
        "machine": {"gpu": name, "driver": driver(), "cuda": found["cuda"], **versions()},
        "steps": given.steps,
        "cap_gib": given.cap_gib,
        "ceilings": found["ceilings"],
        "runs": [],
    }
    book = Book(results, gpu, given.json)
    race(planned, racers, given, book, ends=started + given.seconds)
    print(f"\n{markdown(results)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--settings", nargs="+", type=one_setting, help="for all, or contender:...")
    parser.add_argument("--ours", nargs="+", default=[], metavar="A.B=V", help="more of our config")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="measured in each run")
    parser.add_argument("--cap-gib", type=float, default=60, help="reserved, for the second table")
    parser.add_argument("--seconds", type=float, default=3600, help="after which nothing runs")
    parser.add_argument("--json", type=Path, help="results, written after every run")
    parser.add_argument("--logs", type=Path, default=Path("runs/gpu"), help="what processes said")
    parser.add_argument("--table", nargs="+", type=Path, help="only print results as markdown")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the code, no more"
    )
    given = parser.parse_args()
    given.shapes = given.shapes or DEFAULT_SHAPES[given.device]
    return given


def one_setting(text: str) -> tuple[str | None, Setting]:
    """`torchtitan:5-none` is for one contender, `5-none` for all."""
    contender, colon, rest = text.partition(":")
    if colon and contender not in CONTENDERS:
        raise argparse.ArgumentTypeError(f"{contender!r} is none of {', '.join(CONTENDERS)}")
    try:
        return (contender, Setting.parse(rest)) if colon else (None, Setting.parse(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no setting: {error}") from error


def runs_of(shape: str, given: argparse.Namespace) -> list[Run]:
    """The contenders in turn: the first setting of each, then the second of each."""
    usual = SHAPES[shape].settings
    columns = []
    for contender in (name for name in given.contenders if name in usual):
        settings = (
            [setting for whose, setting in given.settings if whose in (None, contender)]
            if given.settings
            else map(Setting.parse, usual[contender])
        )
        columns.append([Run(shape, contender, setting) for setting in settings])
    return [run for row in zip_longest(*columns) for run in row if run is not None]


def race(
    planned: Sequence[Run],
    racers: dict[str, Contender],
    given: argparse.Namespace,
    book: Book,
    *,
    ends: float,
) -> None:
    """All rounds, until the time is up; what failed once is not tried again."""
    failed: set[Run] = set()
    for number in range(1, given.rounds + 1):
        for run in planned if number % 2 else reversed(planned):
            if run in failed:
                continue
            left_s = ends - time.monotonic()
            missing = racers[run.contender].why_not(run.setting)
            if missing or left_s <= 0:
                outcome, command = Outcome(None, missing or "skipped: the time was up", 0.0), []
            else:
                shape = SHAPES[run.shape]
                job = racers[run.contender].job(run.shape, shape, run.setting, given.steps)
                log = given.logs / f"{str(run).replace(' ', '_')}_{number}.log"
                outcome, command = run_job(job, log, left_s), job.command
            if outcome.measured is None:
                failed.add(run)
            book.write(run, number, outcome, command)


@dataclass(frozen=True, slots=True)
class Book:
    """The results so far, said and written down as they come: a run may be ended at any time."""

    results: dict[str, Any]
    gpu: GpuSpec | None
    file: Path | None

    def write(self, run: Run, number: int, outcome: Outcome, command: list[str]) -> None:
        """One more."""
        row = {
            "shape": run.shape,
            "precision": run.setting.precision,
            "contender": run.contender,
            "setting": str(run.setting),
            "round": number,
            "problem": outcome.problem,
            "took_s": round(outcome.took_s, 1),
            "command": " ".join(["python", *command[1:]]).replace(f"{BENCHMARKS}", "benchmarks"),
            **self._figures(run, outcome),
        }
        self.results["runs"].append(row)
        if self.file:
            replace_file(self.file, f"{json.dumps(self.results, indent=1)}\n".encode())
        said = outcome.problem or (
            f"{row['tokens_per_s']:>9,.0f} tok/s, {row['reserved_gib']:6.1f} GiB reserved"
        )
        print(f"round {number}  {run!s:<40} {said}   ({outcome.took_s:.0f} s)", flush=True)

    def _figures(self, run: Run, outcome: Outcome) -> dict[str, float | None]:
        measured, shape = outcome.measured, SHAPES[run.shape]
        if measured is None:
            return {}
        spec, tokens = shape.spec, shape.tokens(run.setting)
        limit = self._limit_s(run, tokens)
        speed = tokens / measured.step_s
        flops = flops_per_token(spec, shape.seq_len)
        return {
            "step_s": measured.step_s,
            "tokens_per_s": speed,
            "mfu": speed * flops / self.gpu.peak_flops["bf16"] if self.gpu else None,
            "limit_tokens_per_s": None if limit is None else tokens / limit,
            "allocated_gib": measured.allocated_bytes / GIB,
            "reserved_gib": measured.reserved_bytes / GIB,
        }

    def _limit_s(self, run: Run, tokens: int) -> float | None:
        found = self.results["ceilings"].get(run.shape)
        if found is None:
            return None
        shape, precision = SHAPES[run.shape], run.setting.precision
        return limit_s(
            Ceilings(**found), shape.spec, tokens=tokens, world=shape.world, precision=precision
        )


def measure_ceilings(planned: Sequence[Run], given: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own, which is gone from the GPU when the first contender starts.

    Where it fails, which it says itself, rows are without a limit.
    """
    float8 = {run.shape for run in planned if run.setting.precision == "float8"}
    command = [sys.executable, str(BENCHMARKS / "ceilings.py"), "--device", given.device]
    command += ["--shapes", *dict.fromkeys(run.shape for run in planned)]
    command += ["--float8", *sorted(float8)]
    print("ceilings of this device", flush=True)
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, text=True, env=environment()
    )
    if done.returncode != 0:
        print("the ceilings could not be measured: no limits", flush=True)
        return {"cuda": None, "ceilings": {}}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def this_gpu() -> GpuSpec:
    """A GPU that the catalogue knows: MFU needs its peak, an emulated cluster its name."""
    cluster = probe_cluster()
    if cluster.gpu is None:
        sys.exit(
            f"no GPU of the catalogue here: {cluster.device_name}. --device cpu tries the code"
        )
    return cluster.gpu


def driver() -> str | None:
    """As nvidia-smi gives it."""
    return output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def versions() -> dict[str, str | None]:
    """Packages, this repository, and today."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    commit = output_of("git", "-C", str(BENCHMARKS), "describe", "--always", "--dirty")
    return found | {"commit": commit, "date": time.strftime("%Y-%m-%d")}


def output_of(*command: str) -> str | None:
    """The first line; None where there is no such command, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


if __name__ == "__main__":
    main()
