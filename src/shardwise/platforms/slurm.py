"""Slurm: one sbatch script, submitted, watched and stopped through Slurm's own commands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwise.errors import ExitCode, UserError, brief
from shardwise.files import read_tail
from shardwise.platforms.clients import run_client
from shardwise.platforms.job import Job
from shardwise.platforms.launcher import JobState, Output, Rendered, RenderedFile, State
from shardwise.platforms.rendered import config_file
from shardwise.platforms.sbatch import options_of, script_of
from shardwise.platforms.submission import Submission
from shardwise.platforms.suitable import validate_other_nodes

# What an administrator or a user reads in `squeue`, in our words.
_STATES: dict[str, State] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD"), "waiting"),
    **dict.fromkeys(("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING"), "running"),
    "COMPLETED": "ended",
    "CANCELLED": "stopped",
}
_UNIT = "\x1f"


class SlurmLauncher:
    """A batch job with one torchrun on each node."""

    name = "slurm"
    about = "a batch job"

    def render(self, job: Job) -> Rendered:
        """The script, and the configuration that it names."""
        validate_other_nodes(job, "Slurm's nodes")
        options = options_of(job)
        script = RenderedFile(
            path=job.files_dir / "job.sbatch",
            text=script_of(job, options),
            settings=(*options, *job.environment),
        )
        return Rendered(files=(script, config_file(job)))

    def submit(self, job: Job, rendered: Rendered) -> str:
        """`sbatch`; it answers with the job's number, and a cluster's name where there are many."""
        said = run_client(["sbatch", "--parsable", str(rendered.main.path)], platform="Slurm")
        return said.strip().split(";")[0]

    def status(self, submission: Submission) -> JobState:
        """What `squeue` says; Slurm forgets a job some minutes after its end."""
        form = f"%T{_UNIT}%r{_UNIT}%N"
        words = ["squeue", "--noheader", "--states=all", f"--jobs={submission.id}", "-o", form]
        try:
            lines = run_client(words, platform="Slurm").splitlines()
        except UserError as error:
            if "Invalid job id" not in error.why:
                raise
            lines = []
        if not lines:
            return JobState(state="unknown", words=f"Slurm has forgotten job {submission.id}")
        found, reason, nodes = lines[0].split(_UNIT)
        said = found if reason in ("None", "") else f"{found} ({reason})"
        return JobState(state=_STATES.get(found, "failed"), words=said, nodes=expand_nodes(nodes))

    def logs(self, submission: Submission) -> Sequence[Output]:
        """What the script and the agents of the nodes have printed."""
        path = Path(submission.files_dir, f"slurm-{submission.id}.out")
        with suppress(FileNotFoundError):
            return [Output(name=str(path), text=read_tail(path).decode(errors="replace"))]
        return []

    def stop(self, submission: Submission) -> None:
        """A job that waits is cancelled; one that runs is told to save, and not to start again."""
        found = self.status(submission)
        if found.state == "waiting":
            run_client(["scancel", submission.id], platform="Slurm")
        elif found.state == "running":
            with _files(submission) as folder:
                (folder / f"stop-{submission.id}").touch()
            words = ["scancel", "--batch", "--signal=USR2", submission.id]
            run_client(words, platform="Slurm")

    def exclude(self, submission: Submission, nodes: Sequence[str]) -> None:
        """Leave a list that the script reads before it starts again; a job that waits is changed
        at once."""
        with _files(submission) as folder:
            path = folder / "exclude"
            known = path.read_text(encoding="utf-8").split() if path.exists() else []
            names = list(dict.fromkeys([*known, *nodes]))
            path.write_text("\n".join(names) + "\n", encoding="utf-8")
        if self.status(submission).state == "waiting":
            change = [f"JobId={submission.id}", f"ExcNodeList={','.join(names)}"]
            run_client(["scontrol", "update", *change], platform="Slurm")


@contextmanager
def _files(submission: Submission) -> Iterator[Path]:
    """The folder in which the script looks, for what it is to read."""
    try:
        yield Path(submission.files_dir)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the files of job {submission.id} cannot be changed",
            why=brief(error),
            fix=f"make {submission.files_dir} writable, and type the same command again",
            code=ExitCode.ENVIRONMENT,
        ) from error


def expand_nodes(text: str) -> tuple[str, ...]:
    """`node[1-3,7],gpu9` as five names; widths such as 001 are kept."""
    names: list[str] = []
    for stem, ranges in re.findall(r"([^,\[\]]+)(?:\[([^\]]*)\])?", text):
        names += [stem + number for number in _numbers(ranges)] if ranges else [stem]
    return tuple(names)


def _numbers(ranges: str) -> list[str]:
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        count = range(int(first), int(last or first) + 1)
        numbers += [str(number).zfill(len(first)) for number in count]
    return numbers
