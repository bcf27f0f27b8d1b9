"""How a rank joins the others."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardwise.errors import ExitCode, UserError
from shardwise.launch.rank_environment import RENDEZVOUS_VARIABLE
from shardwise.training.heartbeat import LONG_S

# Our agents name each start of the ranks. torchrun counts failures instead, and a node that comes
# later is none.
START_VARIABLE = "SHARDWISE_START"
# Long enough for one rank to tokenise a corpus while the others wait.
TIMEOUT = timedelta(seconds=LONG_S)
# torchrun's agent has its store before it starts ranks, so the store answers at once or is gone. A
# store in rank 0's own process, as under srun, may come late.
_AGENT_ANSWERS_WITHIN = timedelta(minutes=2)


def join_process_group(
    device: str, timeout: timedelta = TIMEOUT, store: dist.Store | None = None
) -> None:
    """Join the process group: gloo for host tensors everywhere, NCCL for those of GPUs."""
    store = store or open_store(timeout)
    if device == "cuda":
        local = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(local)
        _join("cpu:gloo,cuda:nccl", local, store, timeout)
    else:
        _join("gloo", None, store, timeout)


def open_store(timeout: timedelta) -> dist.Store:
    """The store that all ranks see: in the file that our launcher names, or at torchrun's
    address."""
    try:
        store, _, _ = next(
            rendezvous(
                os.environ.get(RENDEZVOUS_VARIABLE, "env://"),
                int(os.environ["RANK"]),
                int(os.environ["WORLD_SIZE"]),
                timeout=min(timeout, _AGENT_ANSWERS_WITHIN) if _is_of_agent() else timeout,
            )
        )
    except dist.DistError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"rank {os.environ['RANK']} could not meet the others at {address}",
            why=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
            fix="check that MASTER_ADDR is rank 0's node, that all nodes reach it, and that "
            "MASTER_PORT is free there",
            code=ExitCode.ENVIRONMENT,
        ) from error
    store.set_timeout(timeout)
    # torchrun may keep its store when it restarts ranks. What dead ranks wrote is not read.
    start = os.environ.get(START_VARIABLE) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"start-{start}", store)


def _is_of_agent() -> bool:
    """Whether ranks use the store of torchrun's agent, as PyTorch's own rendezvous reads it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _join(backend: str, device: torch.device | None, store: dist.Store, timeout: timedelta) -> None:
    dist.init_process_group(
        backend,
        # The prefix keeps it apart from what the ranks have settled through the same store.
        store=dist.PrefixStore("group", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
        device_id=device,
    )
