"""This machine: one script that starts `shardwise train` in the background."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote

from shardwise.errors import ExitCode, UserError
from shardwise.files import read_tail
from shardwise.platforms.job import Job, Setting
from shardwise.platforms.launcher import JobState, Output, Rendered, RenderedFile
from shardwise.platforms.rendered import config_file, environment_lines
from shardwise.platforms.submission import Submission
from shardwise.platforms.suitable import validate_of_use
from shardwise.training.heartbeat import birth_of, stat_of

_OUTPUT = "output.log"


class LocalLauncher:
    """Starts a run on this machine that outlives the terminal."""

    name = "local"
    about = "this machine, in the background"

    def render(self, job: Job) -> Rendered:
        """A shell script; no scheduler reads it."""
        if job.nodes > 1:
            raise UserError(
                f"cluster {job.cluster.name} has {job.nodes} nodes, and --on local is one machine",
                fix="name a platform that has them, such as --on slurm, or write "
                f"cluster.name={job.ranks_per_node}x{job.device_kind}",
                code=ExitCode.ENVIRONMENT,
            )
        validate_of_use(
            job,
            "this machine",
            *("launch.options", "launch.exclude", "launch.walltime_s", "launch.grace_s"),
            "launch.elastic",
            why="they are for a scheduler, which --on local has not",
        )
        where = Setting("cd", quote(str(job.work_dir)), "relative paths of the run begin here")
        command = f"{job.command} train {quote(str(job.config_path))}"
        run = Setting("exec", command, "the launcher itself gets signals, and passes them on")
        lines = [
            "#!/bin/sh",
            f"# {where.why}",
            f"cd {where.value} || exit 4",
            *environment_lines(job),
            *job.launch.setup,
            f"# {run.why}",
            f"exec {run.value}",
        ]
        script = RenderedFile(
            path=job.files_dir / "run.sh",
            text="\n".join(lines) + "\n",
            settings=(where, *job.environment, run),
            executable=True,
        )
        return Rendered(files=(script, config_file(job)))

    def submit(self, job: Job, rendered: Rendered) -> str:
        """Start it in a session of its own, so that it does not end with the terminal."""
        with (job.files_dir / _OUTPUT).open("ab") as output:
            process = subprocess.Popen(
                [str(rendered.main.path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        # The number of a process that has ended may be given to another one.
        return f"{process.pid}.{birth_of(process.pid)}"

    def status(self, submission: Submission) -> JobState:
        """Whether the process is there. How it ended stands in the run directory."""
        pid, born = _process_of(submission)
        # A container without an init keeps the number of a process that has ended.
        fields = stat_of(pid)
        if fields and fields[0] not in "ZX" and birth_of(pid) == born:
            return JobState(state="running", words=f"process {pid}", nodes=(os.uname().nodename,))
        return JobState(state="ended", words=f"process {pid} has ended")

    def logs(self, submission: Submission) -> Sequence[Output]:
        """What the launcher has printed."""
        path = Path(submission.files_dir, _OUTPUT)
        with suppress(FileNotFoundError):
            return [Output(name=str(path), text=read_tail(path).decode(errors="replace"))]
        return []

    def stop(self, submission: Submission) -> None:
        """SIGTERM: the ranks save and end."""
        if self.status(submission).state == "running":
            with suppress(ProcessLookupError):
                os.kill(_process_of(submission)[0], signal.SIGTERM)

    def exclude(self, submission: Submission, nodes: Sequence[str]) -> None:
        """One machine has no node to leave out."""
        raise UserError(
            f"{', '.join(nodes)} cannot be left out of a run on one machine",
            fix="name a platform with several nodes, such as --on slurm",
        )


def _process_of(submission: Submission) -> tuple[int, int]:
    """The number of the launcher, and when it was born."""
    words = submission.id.split(".")
    if len(words) != 2 or not all(word.isdecimal() and len(word) < 20 for word in words):
        raise UserError(
            f"{submission.run_dir} does not say which process was started",
            why=f"the job is called {submission.id}, and no process is",
            fix="look for it by its files: pgrep -f " + quote(submission.files_dir),
            code=ExitCode.VERIFY_FAILED,
        )
    return int(words[0]), int(words[1])
