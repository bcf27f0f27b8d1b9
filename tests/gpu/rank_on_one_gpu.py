"""One rank of several that share one GPU. It trains the runs that it is given, one after the other.

NCCL refuses two ranks on one device, and gloo lacks some collectives for CUDA tensors. So each
collective goes through host memory: the input is copied to the host on the stream that asked for
the collective, gloo exchanges it, and the result is copied back on the same stream. The copy back
begins late, so that a reader that does not wait for that stream reads what was there before.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.config.load import load_config
from shardwise.launch.prepare import choose_plan
from shardwise.parallel.comm import Carrier
from shardwise.training.rank_run import run

# About a millisecond: longer than a block of the model computes.
LATE_CYCLES = 2_000_000


def staged(collective: Callable[..., Any]) -> Callable[..., Any]:
    """`collective(output, input, ...)` through host memory where its tensors are on the GPU."""
    signature = inspect.signature(collective)
    output_name, input_name = list(signature.parameters)[:2]

    def through_host(*given: Any, **named: Any) -> Any:
        call = signature.bind(*given, **named).arguments
        output, shard = call[output_name], call[input_name]
        if not output.is_cuda:
            return collective(**call)
        received = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        # gloo's threads read the host's copy next, so that it must be complete.
        host = {output_name: received, input_name: shard.cpu(), "async_op": False}
        collective(**{**call, **host})
        torch.cuda._sleep(LATE_CYCLES)
        output.copy_(received, non_blocking=True)
        return None

    return through_host


def all_gather_each(
    self: Carrier,
    unit: str,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> None:
    """gloo gathers several tensors one after the other."""
    for output, shard in zip(outputs, inputs, strict=True):
        dist.all_gather_into_tensor(output, shard, group)


def main(folder: Path, runs: dict[str, list[str]]) -> None:
    """Train the named runs with the changes that each of them has to run.yaml."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.cuda.set_device(0)
    dist.all_gather_into_tensor = staged(dist.all_gather_into_tensor)
    dist.reduce_scatter_tensor = staged(dist.reduce_scatter_tensor)
    Carrier.all_gather = all_gather_each  # type: ignore[method-assign]
    for name, changes in runs.items():
        words = [f"runs_dir={folder}", f"name={name.partition('/')[0]}", *changes]
        plan = choose_plan(load_config(str(folder / "run.yaml"), words))
        run(plan, print if dist.get_rank() == 0 else lambda text: None)
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
