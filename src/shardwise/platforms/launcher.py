"""What every platform can do: files from a job, and a job that is submitted, watched and stopped.

A launcher has no state. What is known about a submitted job is a `Submission`, which is kept in the
run directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from shardwise.platforms.job import Job, Setting
from shardwise.platforms.submission import Submission

State = Literal["waiting", "running", "ended", "failed", "stopped", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedFile:
    """One file, with the reason for each setting in it."""

    path: Path
    text: str
    settings: tuple[Setting, ...] = ()
    executable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """All files of a job; the first one is submitted."""

    files: tuple[RenderedFile, ...]

    @property
    def main(self) -> RenderedFile:
        """The file that is submitted."""
        return self.files[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What the platform says about a submitted job."""

    state: State
    words: str
    """The platform's own words, such as `PENDING (Resources)`."""

    nodes: tuple[str, ...] = ()
    """The nodes that it runs on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Text that the platform has kept of a job, besides the logs in the run directory."""

    name: str
    text: str


class Launcher(Protocol):
    """One platform. Each method raises a UserError where the platform refuses."""

    @property
    def name(self) -> str:
        """The word after `--on`."""

    @property
    def about(self) -> str:
        """Half a line for the help."""

    def render(self, job: Job) -> Rendered:
        """The files of a job. It writes nothing, and raises where the job does not suit."""

    def submit(self, job: Job, rendered: Rendered) -> str:
        """Submit the written files through the platform's own client; returns the job's id."""

    def status(self, submission: Submission) -> JobState:
        """How it goes, by the platform."""

    def logs(self, submission: Submission) -> Sequence[Output]:
        """The output that only the platform has."""

    def stop(self, submission: Submission) -> None:
        """Ask it to save and to end for good. It returns before that is done."""

    def exclude(self, submission: Submission, nodes: Sequence[str]) -> None:
        """Keep these nodes out of its next start."""


def write_files(rendered: Rendered) -> None:
    """Write every file whole. A file of an earlier launch is replaced."""
    from shardwise.files import replace_file

    for file in rendered.files:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file.path, file.text.encode())
        if file.executable:
            file.path.chmod(0o755)
