"""A node of a run on Ray: an agent of torchrun in a process of its own.

Ray calls a training function in a thread. A rank handles signals, for which it must be the main
thread of a process, so none runs inside of Ray's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.launch.parent import PR_SET_PDEATHSIG

_POLL_S = 0.5
# Workers start within moments of each other, but imports and a busy file system take their time.
_MEETING_S = 600


class AgentEnded(Exception):
    """The agent of a node ended with an error after which a restart may help."""


def run_node(settings: Mapping[str, Any]) -> None:
    """What Ray's worker runs. It raises where Ray should start all workers again."""
    import ray
    from ray import train

    context, desk = train.get_context(), settings["desk"]
    node = context.get_world_rank()
    endpoint, attempt = _meet(node, ray.util.get_node_ip_address())
    words = [
        f"--nnodes={context.get_world_size()}",
        f"--nproc-per-node={settings['ranks']}",
        f"--node-rank={node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={attempt}",
        f"--rdzv-conf=join_timeout={_MEETING_S},read_timeout={_MEETING_S}",
        f"--local-addr={ray.util.get_node_ip_address()}",
    ]
    code = _run_agent(
        _with_setup(settings["setup"], _placed(settings["command"], words)),
        os.environ | dict(settings["environment"]),
        settings["work_dir"],
        lambda: bool(ray.get(desk.is_stopping.remote())),
    )
    ray.get(desk.note.remote(node, code))
    if code != 0 and ray.get(desk.verdict.remote()) is None:
        raise AgentEnded(f"the agent of node {node} ended with exit code {code}")


def _meet(node: int, address: str) -> tuple[str, str]:
    """Where the agents meet, and an id of this start, from the first node to all."""
    import torch.distributed as dist

    place = [f"{address}:{_free_port()}", uuid.uuid4().hex] if node == 0 else ["", ""]
    dist.broadcast_object_list(place, src=0)
    return place[0], place[1]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _placed(command: Sequence[str], words: Sequence[str]) -> list[str]:
    """The command with the options of this start after `torchrun`."""
    at = command.index("torchrun") + 1
    return [*command[:at], *words, *command[at:]]


def _with_setup(lines: Sequence[str], words: list[str]) -> list[str]:
    """The command after some lines of shell, in whose place it runs, so that it gets signals."""
    if not lines:
        return words
    return ["/bin/sh", "-c", "\n".join(["set -e", *lines, 'exec "$@"']), "sh", *words]


def _run_agent(
    words: Sequence[str],
    environ: Mapping[str, str],
    folder: str,
    should_stop: Callable[[], bool],
) -> int:
    """Run it to its end; a request to stop becomes SIGTERM, after which ranks save."""
    # When Ray kills its worker the agent gets SIGTERM too, so that no rank is left on a device.
    agent = subprocess.Popen(
        words,
        env={name: value for name, value in environ.items() if name not in _OF_RAY},
        cwd=folder,
        preexec_fn=_die_with_parent,
    )
    is_asked = False
    while True:
        try:
            return _exit_code(agent.wait(_POLL_S))
        except subprocess.TimeoutExpired:
            if not is_asked and should_stop():
                is_asked = True
                agent.send_signal(signal.SIGTERM)


# What Ray tells its worker about ranks is about workers, and an agent would take it for its own.
_OF_RAY = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
}


def _exit_code(status: int) -> int:
    """A shell's code for a process that a signal has ended."""
    return status if status >= 0 else 128 - status


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
