"""Sites as jobs of their own: the council and the sites, as processes that may be killed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from chaos_ranks import ranks_of

from commands import SHARDWISE, Command, rank_environment
from shardwise.checkpoint.index import read_index
from shardwise.checkpoint.read import read_tensor
from shardwise.checkpoint.store import list_checkpoints
from shardwise.council.history import Past, read_record

TIMEOUT_S = 240.0
CONFIG = """\
model:
  name: tiny-llama
  overrides: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2}
data: {source: synthetic, seq_len: 16}
mesh: {site: 2}
train: {global_batch: 12, check_loss: false, max_restarts: 100}
checkpoint: {keep: 2}
observe: {log_every: 1, collectives: false}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
    return port


@dataclass
class Sites:
    """Two sites and their council in a folder."""

    folder: Path
    ranks: Sequence[int]
    """Of each site."""

    words: Sequence[str] = ()
    replay: Path | None = None
    patience_s: int = 60
    host: str = "127.0.0.1"
    nodes: Sequence[str] = ()
    """Network namespaces of the sites, the first of which is also the council's."""

    port: int = field(default_factory=free_port)
    running: dict[str, Command | subprocess.Popen[bytes]] = field(default_factory=dict)
    outputs: dict[str, Path] = field(default_factory=dict)
    starts: int = 0

    @property
    def record(self) -> Path:
        return self.folder / "sites.jsonl"

    def start_council(self) -> None:
        words = ["sites", f"{self.host}:{self.port}", "--record", self.record]
        words += ["--patience", str(self.patience_s)]
        words += [] if self.replay is None else ["--replay", self.replay]
        self._start("council", words, 0)

    def start_site(self, site: int) -> None:
        file = self.folder / "run.yaml"
        file.write_text(CONFIG)
        words = [f"diloco.meet={self.host}:{self.port}", f"diloco.site={site}", "diloco.steps=2"]
        words += [f"cluster.name={self.ranks[site]}xCPU", f"diloco.patience_s={self.patience_s}"]
        words += [f"runs_dir={self.folder / str(site)}", "name=run", *self.words]
        self._start(f"site-{site}", ["train", file, *words], site)

    def _start(self, name: str, words: Sequence[str | Path], node: int) -> None:
        self.starts += 1
        self.outputs[name] = self.folder / f"{name}-{self.starts}.txt"
        if self.nodes:
            inside = ["ip", "netns", "exec", self.nodes[node], SHARDWISE, *map(str, words)]
            with self.outputs[name].open("w") as out:
                environ = {**rank_environment(), "GLOO_SOCKET_IFNAME": "lo"}
                self.running[name] = subprocess.Popen(inside, stdout=out, stderr=out, env=environ)
        else:
            self.running[name] = Command(words, self.outputs[name])

    def said(self, name: str) -> str:
        """What its last start printed so far."""
        output = self.outputs[name]
        return output.read_text() if output.exists() else ""

    def kill_site(self, site: int) -> None:
        """All its processes at once."""
        process = self.running.pop(f"site-{site}")
        for pid in [process.pid, *ranks_of(process.pid).values()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(TIMEOUT_S)

    def past(self) -> Past:
        return read_record(self.record) if self.record.exists() else Past()

    def events(self) -> list[dict[str, Any]]:
        lines = self.record.read_text().split("\n") if self.record.exists() else []
        return [json.loads(line) for line in lines[:-1]]

    def wait(self, condition: Callable[[], Any], limit_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            codes = {name: process.poll() for name, process in self.running.items()}
            ended = {name: code for name, code in codes.items() if code not in (None, 0, 75)}
            is_late = time.monotonic() > deadline
            assert not ended and not is_late, (ended, *map(self.said, self.running))
            time.sleep(0.02)

    def wait_for_round(self, *members: int) -> None:
        """Until an outer step of just these sites has been made that was not there before."""
        before = len(self.events())
        wanted = {"event": "round", "members": [*members]}
        self.wait(lambda: any(wanted.items() <= each.items() for each in self.events()[before:]))

    def wait_until_lost(self, before: int) -> None:
        """Until sites have been lost more often than `before`."""
        self.wait(lambda: sum(each["event"] == "lost" for each in self.events()) > before)

    def wait_until_it_waits(self, site: int) -> None:
        self.wait(lambda: "waits for the others" in self.said(f"site-{site}"))

    def finish(self) -> None:
        for process in list(self.running.values()):
            self.wait(lambda process=process: process.poll() is not None)
        ended = {name: process.poll() for name, process in self.running.items()}
        assert set(ended.values()) == {0}, (ended, *map(self.said, self.running))

    def end(self) -> None:
        """Leave nothing behind."""
        for name, process in list(self.running.items()):
            if process.poll() is None:
                for pid in [*ranks_of(process.pid).values(), process.pid]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            del self.running[name]

    def bits(self, site: int, step: int) -> str:
        """A hash of what all sites have in common in a site's last checkpoint."""
        newest = list_checkpoints(self.folder / str(site) / "run" / "checkpoints")[-1]
        assert newest.step == step
        digest = hashlib.sha256(f"{newest.manifest.position}".encode())
        for name, stored in sorted(read_index(newest.path).items()):
            if name.startswith(("model.", "outer.momentum.")):
                digest.update(name.encode())
                digest.update(read_tensor(newest.path, stored, torch.float32).numpy().tobytes())
        return digest.hexdigest()
