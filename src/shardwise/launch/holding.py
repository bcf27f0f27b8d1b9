"""How the ranks of a job hold its run directory together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from shardwise.errors import UserError
from shardwise.launch.say import say_on_console
from shardwise.lease.lease import UNFENCED, Fence, inherit_lease, renewed
from shardwise.lease.take import hold_run


@contextmanager
def hold_as_rank(run_dir: Path) -> Iterator[Fence]:
    """Hold the run directory while the block runs. All ranks call this together.

    The launcher has taken it already. Under torchrun or srun the first rank takes it, and where it
    cannot, all ranks end with its error. Only the first rank publishes anything, so only it has a
    fence to ask.
    """
    lease = inherit_lease(run_dir)
    is_first = dist.get_rank() == 0
    with ExitStack() as stack:
        fence: Fence = UNFENCED
        if lease is not None:
            fence = stack.enter_context(renewed(lease)) if is_first else UNFENCED
        else:
            refusal: list[UserError | None] = [None]
            if is_first:
                try:
                    fence = stack.enter_context(hold_run(run_dir, say=say_on_console))
                except UserError as error:
                    refusal = [error]
            dist.broadcast_object_list(refusal, src=0)
            if refusal[0] is not None:
                raise refusal[0]
        yield fence
