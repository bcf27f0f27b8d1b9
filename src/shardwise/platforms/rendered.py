"""What shell scripts of several platforms share."""

from __future__ import annotations

from shlex import quote

from shardwise.platforms.job import Job

CONFIG_HEADER = "# What the ranks read; `shardwise launch` has written every setting down.\n"


def environment_lines(job: Job) -> list[str]:
    """One `export` for each variable, below its reason."""
    return [
        line
        for one in job.environment
        for line in (f"# {one.why}", f"export {one.name}={quote(one.value)}")
    ]
