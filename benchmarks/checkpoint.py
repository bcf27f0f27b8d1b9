"""What a checkpoint costs the loop: stall of a background save over that of a waiting one.

    python benchmarks/checkpoint.py [--rounds 3] [--mib 1200] [--ranks 2] [--dir DIR]

Both save the same sharded state of at least two seconds of writing, hashed and synced to disk, in
turn in one run. The stall is how long the training thread waits.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=1200, help="parameters a rank, in MiB of fp32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_rank(options, Path(options.child))
        return
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        flags = [f"--{name}={getattr(options, name)}" for name in ("rounds", "mib", "ranks")]
        command = [sys.executable, *launcher, f"--nproc-per-node={options.ranks}", __file__]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, *flags, "--child", folder], check=True, env=environ)
        report(json.loads(Path(folder, "rows.json").read_text()))


def report(rows: list[dict[str, float]]) -> None:
    waiting = [row["stall_s"] for row in rows if row["wait"]]
    behind = [row["stall_s"] for row in rows if not row["wait"]]
    for row in rows:
        kind = "waits     " if row["wait"] else "background"
        parts = " ".join(f"{key} {row[key]:.2f}" for key in ("stage_s", "write_s", "commit_s"))
        print(f"{kind} stall {row['stall_s']:6.3f} s   {parts}   {row['gib']:.2f} GiB a rank")
    print(f"median stall, waiting     {statistics.median(waiting):8.3f} s")
    print(f"median stall, background  {statistics.median(behind):8.3f} s")
    print(
        f"background / waiting      {statistics.median(behind) / statistics.median(waiting):8.3f}"
    )


def run_rank(options: argparse.Namespace, folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from shardwise.checkpoint.save import Progress, Saver
    from shardwise.config.plain import config_from_dict
    from shardwise.launch.prepare import choose_plan
    from shardwise.parallel.mesh import World

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    sections = {"cluster": {"name": f"{options.ranks}xCPU"}, "checkpoint": {"keep": 1}}
    plan = choose_plan(config_from_dict(sections), environ={})
    width = 1024
    layers = max(1, options.mib * 2**20 * options.ranks // (4 * width * width * 16))
    model = nn.Sequential(*[nn.Linear(width, 16 * width, bias=False) for _ in range(layers)])
    model.to(device)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    saver = Saver(folder / "checkpoints", plan, model, optimizer, World.joined())
    rows = []
    for step in range(1, 2 * options.rounds + 3):
        wait = step % 2 == 0
        dist.barrier()
        started = time.perf_counter()
        saver.start(Progress(step=step, position=step, tokens=0, loss=None, loss_scale=None))
        outcomes = saver.finish() if wait else []
        stall_s = time.perf_counter() - started
        (outcome,) = outcomes or saver.finish()
        if outcome.error:
            raise RuntimeError(outcome.error)
        gib = sum(buffer.nbytes for buffer in saver._buffers.values()) / 2**30
        # The first two allocate the staging memory.
        if step > 2:
            rows.append({"wait": wait, "stall_s": stall_s, "gib": gib, **outcome.to_dict()})
    saver.close()
    if dist.get_rank() == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
        shutil.rmtree(folder / "checkpoints")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
