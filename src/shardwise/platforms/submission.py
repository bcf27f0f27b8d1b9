"""What is kept about a submitted job: `launch/submission.json` in its run directory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from shardwise.errors import ExitCode, UserError
from shardwise.files import read_json, replace_file
from shardwise.platforms.job import FOLDER, Job

_NAME = "submission.json"
_MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job that a platform has accepted."""

    platform: str
    id: str
    """The platform's own name of the job."""

    run_dir: str
    files_dir: str
    time: float

    def save(self) -> None:
        """Write it whole or not at all."""
        path = Path(self.run_dir, FOLDER, _NAME)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (json.dumps(asdict(self), indent=2) + "\n").encode())


def submission_of(job: Job, platform: str, id: str, time: float) -> Submission:
    """What is kept of a job."""
    return Submission(
        platform=platform,
        id=id,
        run_dir=str(job.run_dir),
        files_dir=str(job.files_dir),
        time=time,
    )


def find_submission(run_dir: Path) -> Submission | None:
    """The newest submission of a run; None where it was not launched by `shardwise launch`."""
    path = run_dir / FOLDER / _NAME
    try:
        found = read_json(path, _MAX_BYTES)
        submission = Submission(**found)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, OSError) as error:
        raise _unreadable(path, str(error)) from error
    for item in fields(Submission):
        if type(getattr(submission, item.name)).__name__ != item.type:
            raise _unreadable(path, f"{item.name} is no {item.type}")
    if not submission.id.isprintable() or not submission.id:
        raise _unreadable(path, f"id is {submission.id!r}")
    return submission


def _unreadable(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} does not say which job was submitted",
        why=why,
        fix=f"ask the platform for the job, and move the file away: mv {path} {path}.broken",
        code=ExitCode.VERIFY_FAILED,
    )
