"""Where the run directory of a job is on a volume that its nodes share."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from shardwise.errors import UserError
from shardwise.platforms.job import Job


def runs_dir_on_volume(job: Job, mount: str) -> PurePosixPath:
    """The directory of runs as nodes see it, with the volume at `mount`.

    Where this machine has the volume at the same place, it is the same path. Otherwise a directory
    below the current one becomes one below the mount.
    """
    volume = PurePosixPath(mount)
    runs_dir = PurePosixPath(job.run_dir.parent)
    if runs_dir.is_relative_to(volume):
        return runs_dir
    here = Path(os.path.abspath(job.work_dir))
    if runs_dir.is_relative_to(here):
        return volume / runs_dir.relative_to(here)
    raise UserError(
        f"runs_dir={runs_dir} is not on the shared volume",
        why=f"nodes have the volume at {volume}, and lose what they write elsewhere",
        fix=f"write runs_dir=runs, which is {volume}/runs on the nodes, or runs_dir={volume}/runs",
    )
