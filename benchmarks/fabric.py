"""Does `shardwise fabric` see what a link carries? Two nodes, and a link of a known speed.

    python benchmarks/fabric.py [--speeds 50 200 800] [--expect 1600] [--sizes 64KiB,4MiB]

Two network namespaces play the nodes (namespaces.py), two ranks each. `cluster.interconnect` says
what the network should carry; the pairs that `shardwise fabric` names are those that do not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from namespaces import CLUSTER, run_ranks, shape, two_nodes, why_not_here

COMMAND = [sys.executable, "-m", "shardwise", "fabric", "--cluster", CLUSTER, "--json"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speeds", type=int, nargs="+", default=[50, 200, 800], help="Mbit/s")
    parser.add_argument("--expect", type=int, default=1600, help="Mbit/s that are said to be there")
    parser.add_argument("--sizes", default="64KiB,4MiB")
    options = parser.parse_args()
    reason = why_not_here()
    if reason is not None:
        sys.exit(f"cannot be measured here: {reason}")
    print("| link | pairs, one way | all_reduce of all ranks, bus | pairs named slow | exit | s |")
    print("|---|---|---|---|---|---|")
    for speed in options.speeds:
        started = time.perf_counter()
        code, report = measure(speed, options.expect, "--sizes", options.sizes)
        show(speed, code, report, time.perf_counter() - started)


def measure(speed: int, expected: int, *words: str) -> tuple[int, dict[str, Any]]:
    """(exit code, what the first rank printed) over a link of `speed` Mbit/s."""
    with tempfile.TemporaryDirectory() as folder, two_nodes() as nodes:
        shape(nodes, speed)
        network = f"cluster.interconnect={expected / 8000}"
        codes = run_ranks(nodes, [*COMMAND, network, *words], Path(folder))
        said = Path(folder, "rank-0.out").read_text()
        if not said or any(codes[1:]):
            errors = "\n".join(path.read_text() for path in sorted(Path(folder).glob("*.err")))
            sys.exit(f"exit codes {codes}\n{errors}")
        return codes[0], json.loads(said)


def show(speed: int, code: int, report: dict[str, Any], seconds: float) -> None:
    pairs = [each for each in report["pairs"] if each["group"] == "between"]
    bits = ", ".join(
        f"{8e-6 * each['bytes_per_s']:.0f} ({8e-6 * each['bytes_per_s'] / speed:.2f} x)"
        for each in pairs
    )
    rates = [
        8e-6 * each["bus_bytes_per_s"]
        for each in report["collectives"]
        if (each["group"], each["kind"]) == ("all", "all_reduce")
    ]
    slow = "; ".join(each["slowest"] for each in pairs if each["verdict"] == "slow")
    print(
        f"| {speed} Mbit/s | {bits} Mbit/s | {rates[-1]:.0f} Mbit/s | {slow or 'none'} | {code} | "
        f"{seconds:.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
