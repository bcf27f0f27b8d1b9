"""The command as launchers start it: watched processes, and two agents as two nodes."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos_ranks import LONG

from commands import SHARDWISE, Command, rank_environment

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TIMEOUT_S = 300.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Started:
    """A process whose output goes to a file, so that it can be watched. It is forked off, as are
    its ranks, but for the long tests and where its start matters."""

    def __init__(
        self,
        command: Sequence[str],
        output: Path,
        environ: Mapping[str, str] | None = None,
        *,
        is_forked: bool = not LONG,
    ) -> None:
        self._output = output
        output.touch()
        env = rank_environment() | dict(environ or {})
        self.process: Command | subprocess.Popen[bytes]
        if is_forked:
            ours = command[0] == SHARDWISE
            module, *words = ("shardwise", *command[1:]) if ours else command[2:]
            self.process = Command(words, output, environ=env, module=module)
        else:
            with output.open("wb") as stream:
                self.process = subprocess.Popen(command, stdout=stream, stderr=stream, env=env)

    @property
    def text(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_for(self, words: str, after: str = "") -> None:
        """Until it has printed these words, after these others."""
        deadline = time.monotonic() + TIMEOUT_S
        while words not in (self.text.partition(after)[2] if after else self.text):
            assert self.process.poll() is None and time.monotonic() < deadline, self.text
            time.sleep(0.1)

    def end(self) -> int:
        try:
            return self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running:\n{self.text}") from None


@dataclass(frozen=True)
class Node:
    """What a node is given besides its place: changes of the configuration, and variables."""

    words: tuple[str, ...] = ()
    environ: Mapping[str, str] | None = None


def run_nodes(folder: Path, config: Path, *nodes: Node) -> list[Started]:
    """One agent a node, of one rank each, on this machine; returns them when all have ended."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()

    def start(number: int, node: Node) -> Started:
        place = ("--nnodes", str(len(nodes)), "--node-rank", str(number), "--nproc-per-node", "1")
        address = ("--master-addr", "127.0.0.1", "--master-port", str(port))
        command = (SHARDWISE, "torchrun", *place, *address, str(config), *node.words)
        return Started(command, folder / f"node-{number}.txt", node.environ)

    agents = [start(number, node) for number, node in enumerate(nodes)]
    for agent in agents:
        agent.end()
    return agents
