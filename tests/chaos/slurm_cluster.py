"""A real Slurm of two nodes on this machine: one controller, two slurmd, free ports, no munge.

Debian's packages are installed where they are missing and apt can get them. All else is in one
folder, and no daemon outlives the tests.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

NODES = ("nodea", "nodeb")
PACKAGES = ("slurmctld", "slurmd", "slurm-client")
DAEMONS = ("slurmctld", "slurmd", "sbatch", "srun")
TIMEOUT_S = 120.0
# Of all of apt's work. It takes ten seconds where there is a mirror.
_INSTALL_S = 90.0

_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=20
SlurmctldTimeout=60
KillWait=30
MinJobAge=3600
JobRequeue=1
PlugStackConfig=/dev/null
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class NoSlurm(Exception):
    """Why there is no Slurm here."""


def install() -> None:
    """Get the packages where they are missing. Raises NoSlurm with the reason."""
    if not [name for name in DAEMONS if shutil.which(name) is None]:
        return
    if os.getuid() != 0 or shutil.which("apt-get") is None:
        raise NoSlurm("slurmd is not installed, and only root can install it with apt-get")
    # In runlevel 1 no package starts a daemon.
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    deadline = time.monotonic() + _INSTALL_S
    quiet = ("-qq", "-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=10")
    wanted = ("install", "-y", "--no-install-recommends", *PACKAGES)
    # An image often comes without apt's lists.
    for words in (wanted, ("update",), wanted):
        try:
            done = subprocess.run(
                ["apt-get", *quiet, *words],
                env=environ,
                capture_output=True,
                text=True,
                timeout=max(1.0, deadline - time.monotonic()),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise NoSlurm(f"apt-get {words[0]} was not done within {_INSTALL_S:.0f} s") from error
        if done.returncode == 0 and words is wanted:
            return
    last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    raise NoSlurm(f"apt-get install {' '.join(PACKAGES)} failed: {' '.join(last)}")


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


class SlurmCluster:
    """The daemons of one cluster, and its clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").mkdir(parents=True)
        controller, *ports = free_ports(1 + len(NODES))
        # Slurm goes by the short name.
        host = socket.gethostname().split(".")[0]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1"
            for name, port in zip(NODES, ports, strict=True)
        )
        self.conf = folder / "slurm.conf"
        self.conf.write_text(
            _CONF.format(host=host, controller=controller, folder=folder, nodes=nodes)
        )
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environ(self) -> dict[str, str]:
        """What clients need to find it."""
        return {"SLURM_CONF": str(self.conf)}

    def start(self) -> None:
        """Start the daemons and wait until both nodes are idle. Raises NoSlurm where they do not
        come up."""
        self._start("slurmctld", "slurmctld", "-D", "-c", "-f", str(self.conf))
        for name in NODES:
            self.start_node(name)
        deadline = time.monotonic() + TIMEOUT_S
        while self.states() != dict.fromkeys(NODES, "idle"):
            dead = [name for name, process in self._daemons.items() if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                raise NoSlurm(f"{dead or 'the nodes'} did not come up: {self.daemon_words()}")
            time.sleep(0.2)

    def start_node(self, name: str) -> None:
        """One slurmd; a node that was down comes back by it."""
        self._start(name, "slurmd", "-D", "-N", name, "-f", str(self.conf))

    def kill_node(self, name: str) -> None:
        """What the loss of a machine is to the others: its daemon and all that it started die."""
        daemon = self._daemons.pop(name)
        # Steps have left the daemon's session, so they are found by the node that they are for.
        self._kill_processes(f"SLURMD_NODENAME={name}")
        daemon.kill()
        daemon.wait(TIMEOUT_S)

    def kill_daemon(self, name: str) -> None:
        """The daemon alone; its steps go on."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait(TIMEOUT_S)

    def mend(self) -> None:
        """Cancel what a failed test has left, and bring its nodes back."""
        for state in ("PENDING", "RUNNING"):
            self.client("scancel", f"--state={state}")
        for name in NODES:
            if name not in self._daemons:
                self.start_node(name)
            if self.states().get(name) in ("drained", "draining", "down"):
                self.client("scontrol", "update", f"NodeName={name}", "State=RESUME")

    def stop(self) -> None:
        """End all daemons and what they started."""
        self._kill_processes()
        for daemon in self._daemons.values():
            daemon.kill()
        for daemon in self._daemons.values():
            daemon.wait(TIMEOUT_S)

    def client(self, *words: str, environ: Mapping[str, str] | None = None) -> str:
        """One of Slurm's own commands."""
        done = subprocess.run(
            words,
            env=os.environ | self.environ | dict(environ or {}),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return done.stdout if done.returncode == 0 else f"{words[0]}: {done.stderr}"

    def states(self) -> dict[str, str]:
        """What Slurm says of each node, such as idle or drained."""
        lines = self.client("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
        pairs = (line.split() for line in lines)
        return {words[0]: words[1].rstrip("*") for words in pairs if len(words) == 2}

    def daemon_words(self) -> str:
        """The last lines of the daemons' logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(
            f"{log.name}: {line}"
            for log in logs
            for line in log.read_text(errors="replace").splitlines()[-8:]
        )

    def _kill_processes(self, *variables: str) -> None:
        """All that has these variables and is of this cluster: another one on this machine, of
        another run of the tests, has nodes of the same names."""
        wanted = {word.encode() for word in (*variables, f"SLURM_CONF={self.conf}")}
        for process in Path("/proc").iterdir():
            if not process.name.isdecimal():
                continue
            with suppress(OSError):  # it is gone
                if wanted <= set((process / "environ").read_bytes().split(b"\0")):
                    os.kill(int(process.name), signal.SIGKILL)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                command, env=os.environ | self.environ, stdout=output, stderr=output
            )
