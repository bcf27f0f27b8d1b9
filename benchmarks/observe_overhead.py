"""What watching costs: tokens/s with every sink and the timing of collectives on, over both off.

    python benchmarks/observe_overhead.py [run.yaml a.b=v ...] [--ranks 2] [--blocks 20]

Without a file: four layers of small-llama on gloo ranks. On GPUs: --ranks 8 cluster.name=local and
a model that fits on a device twice. On one GPU: --rank-of 8 cluster.name=8xH200; it is then rank 0
of 8, whose collectives are copies inside the device.

Both contenders live in the same processes: two models with two loops, whose own code makes the
steps and the logs. They take turns in short blocks of steps, off on on off, and every two blocks
beside each other give one ratio; so whatever else the machine does meets both alike. Blocks end
midway between two logs, for the sinks' threads to be done by then. While the watched one is on,
/metrics is scraped every second.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest.mock import patch
from urllib.request import urlopen

CONFIG = """
model: {name: small-llama, overrides: {num_hidden_layers: 4}}
data: {source: synthetic, seq_len: 128}
cluster: RANKSxCPU
shard: {strategy: full_shard}
train: {micro_batch: 2, steps: 1000000}
checkpoint: {every: 0, at_end: false}
"""
OFF = ("name=off", "observe.collectives=false")
ON = ("name=on", "observe.collectives=true", "observe.tensorboard=true")
HAS_WANDB = importlib.util.find_spec("wandb") is not None
BLOCK = LOG_EVERY = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="a configuration file first, then overrides")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank-of", type=int, help="be rank 0 of so many that are not there")
    parser.add_argument("--blocks", type=int, default=20, help="blocks of ten steps of each")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.out:
        run_rank(options, Path(options.out))
        return
    with tempfile.TemporaryDirectory() as folder:
        result = launch(options, Path(folder))
    report(result)


def launch(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    words = list(options.words)
    if not words or "=" in words[0]:
        file = folder / "run.yaml"
        file.write_text(CONFIG.replace("RANKS", str(options.ranks)))
        words.insert(0, str(file))
    words += [f"runs_dir={folder}", f"observe.log_every={LOG_EVERY}"]
    ranks = 1 if options.rank_of else options.ranks
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc-per-node={ranks}", __file__, *words]
    launcher += [f"--rank-of={options.rank_of}"] if options.rank_of else []
    out = folder / "times.json"
    subprocess.run(
        [sys.executable, *launcher, f"--blocks={options.blocks}", f"--out={out}"],
        check=True,
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )
    return dict(json.loads(out.read_text()))


def report(times: dict[str, list[float]]) -> None:
    ratios = sorted(off / on for off, on in zip(times["off"], times["on"], strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    for name in ("off", "on"):
        print(f"{name:<4} {1e3 * statistics.median(times[name]) / BLOCK:8.2f} ms a step, median")
    half = f"half of {len(ratios)} pairs: {low:.4f} to {high:.4f}"
    print(f"tokens/s on / off  {middle:.4f}  ({half})")
    if not HAS_WANDB:
        print("without W&B, which is not installed")


# ---- inside a rank ---------------------------------------------------------------------------


def run_rank(options: argparse.Namespace, out: Path) -> None:
    import torch.distributed as dist

    from shardwise.config.load import load_config
    from shardwise.launch.group import join_process_group
    from shardwise.launch.prepare import choose_plan

    words, blocks = options.words, options.blocks
    port = free_port(out)
    on = [*ON, f"observe.prometheus_port={port}", *["observe.wandb=offline"] * HAS_WANDB]
    plans = {
        name: choose_plan(load_config(words[0], [*words[1:], *changes]))
        for name, changes in (("off", OFF), ("on", on))
    }
    with ExitStack() as stack:
        if options.rank_of:
            stack.enter_context(alone_of(options.rank_of))
        else:
            join_process_group(plans["off"].cluster.device)
            stack.callback(dist.destroy_process_group)
        runs = {name: stack.enter_context(contender(plan)) for name, plan in plans.items()}
        scraped = stack.enter_context(scraping(port if dist.get_rank() == 0 else None))
        # Warm-up, and then midway between two logs.
        for run in runs.values():
            run.advance(LOG_EVERY + LOG_EVERY // 2)
        times: dict[str, list[float]] = {"off": [], "on": []}
        for pair in range(blocks):
            for name in ("off", "on") if pair % 2 == 0 else ("on", "off"):
                (scraped.set if name == "on" else scraped.clear)()
                times[name].append(runs[name].timed(BLOCK))
            if dist.get_rank() == 0:
                print(f"pair {pair + 1}: on / off {times['off'][-1] / times['on'][-1]:.4f}")
        if dist.get_rank() == 0:
            out.write_text(json.dumps(times))


@contextmanager
def alone_of(world_size: int) -> Iterator[None]:
    """Rank 0 of a world without peers, for both contenders: every other rank's shard is a copy of
    this one's, and a reduce-scatter adds up this rank's own slots."""
    import torch
    import torch.distributed as dist

    from shardwise.tunnel.world import rank_zero_of

    def gather(output_tensor, input_tensor, group=None, async_op=False):
        slots = output_tensor.view(dist.get_world_size(group), -1)
        slots[1:].copy_(input_tensor.view(-1))
        if slots.data_ptr() != input_tensor.data_ptr():
            slots[0].copy_(input_tensor.view(-1))

    def scatter(output, input, op=None, group=None, async_op=False):
        torch.sum(input.view(dist.get_world_size(group), -1), dim=0, out=output.view(-1))

    def same_group(*args, **kwargs):
        return dist.group.WORLD

    # FSDP2 of torch 2.13 calls the two by new names.
    gathers, scatters = (
        ("all_gather_into_tensor", "all_gather_single"),
        ("reduce_scatter_tensor", "reduce_scatter_single"),
    )
    copies = {**dict.fromkeys(gathers, gather), **dict.fromkeys(scatters, scatter)}
    copies = {name: call for name, call in copies.items() if hasattr(dist, name)}
    with rank_zero_of(world_size), patch.multiple(dist, new_group=same_group, **copies):
        yield


def free_port(out: Path) -> int:
    """The same for all ranks of one machine: the first to come chooses."""
    file = out.with_name("port")
    with suppress(FileExistsError), file.open("x") as handle, socket.create_server(("", 0)) as free:
        handle.write(f"{free.getsockname()[1]}\n")
    while not (text := file.read_text()).endswith("\n"):
        time.sleep(0.01)
    return int(text)


class Contender:
    """One loop, driven a few steps at a time."""

    def __init__(self, loop, batches) -> None:
        self.loop, self.batches = loop, batches
        self.window = loop._window(batches)

    def advance(self, steps: int) -> None:
        """As `Loop` itself goes on, without saves and evaluations."""
        for _ in range(steps):
            assert self.loop._step(self.batches, self.window)
            if self.loop.reached.step % LOG_EVERY == 0:
                self.loop._log(self.window, self.batches)
                self.window = self.loop._window(self.batches)

    def timed(self, steps: int) -> float:
        """Seconds of these steps."""
        import torch
        import torch.distributed as dist

        dist.barrier()
        # Of the pause in which the other one had its turn nothing may count.
        self.window = self.loop._window(self.batches)
        started = time.perf_counter()
        self.advance(steps)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter() - started


@contextmanager
def contender(plan) -> Iterator[Contender]:
    import torch

    from shardwise.data.prefetch import prefetching
    from shardwise.metrics.collectives import CollectiveTimer
    from shardwise.metrics.events import EventLog
    from shardwise.metrics.sinks.open import open_sinks
    from shardwise.parallel.mesh import build_mesh
    from shardwise.plan.run_directory import write_run_directory
    from shardwise.training.channels import Channels
    from shardwise.training.heartbeat import Heartbeat
    from shardwise.training.loop import Loop
    from shardwise.training.session import attach_training_loss, build_loader, build_session
    from shardwise.training.signals import StopRequest
    from shardwise.training.surroundings import fast_attention, steady_collector

    mesh = build_mesh(plan)
    world = mesh.world
    world.decide(lambda: write_run_directory(plan))
    sinks = open_sinks(plan, rank=world.rank, local_rank=world.local_rank)
    record = plan.run_dir / "events.jsonl"
    with EventLog(record, enabled=world.is_first, observers=sinks, say=print) as events:
        timer = CollectiveTimer(torch.device(plan.cluster.device), world)
        carrier = timer if plan.settings.observe.collectives else None
        session = build_session(plan, mesh, lambda text: None, carrier=carrier)
        attach_training_loss(session, lambda text: None)
        heartbeat = Heartbeat(world.rank)
        channels = Channels(events, lambda text: None, StopRequest(), heartbeat)
        loop = Loop(session, channels, timer)
        pin = session.device.type == "cuda"
        with (
            prefetching(build_loader(session), 0, 2**40, pin_memory=pin) as batches,
            steady_collector(),
            fast_attention(session.device),
        ):
            yield Contender(loop, batches)
        loop.saving.close()


@contextmanager
def scraping(port: int | None) -> Iterator[threading.Event]:
    """Ask for /metrics every second while the event is set."""
    wanted, over = threading.Event(), threading.Event()

    def scrape() -> None:
        while port is not None and not over.wait(1.0):
            if wanted.is_set():
                with suppress(OSError):
                    urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read()

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    yield wanted
    over.set()


if __name__ == "__main__":
    main()
