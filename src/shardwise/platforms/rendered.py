"""Files that several platforms write in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote
from typing import Any

from shardwise.platforms.explained import reasons_of, to_yaml
from shardwise.platforms.job import Job, Setting
from shardwise.platforms.launcher import RenderedFile

_CONFIG_HEADER = "# What the ranks read; `shardwise launch` has written every setting down.\n"


def config_file(job: Job, text: str | None = None) -> RenderedFile:
    """The configuration of the ranks; the job's own, unless another text is given."""
    return RenderedFile(path=job.config_path, text=_CONFIG_HEADER + (text or job.config_text))


def explained_file(job: Job, name: str, *manifests: Mapping[str, Any]) -> RenderedFile:
    """A YAML file with the reason for each setting above it."""
    settings = tuple(
        Setting(place, str(value), why)
        for manifest in manifests
        for place, value, why in reasons_of(manifest)
    )
    return RenderedFile(path=job.files_dir / name, text=to_yaml(*manifests), settings=settings)


def environment_lines(job: Job) -> list[str]:
    """One `export` of a shell for each variable, below its reason."""
    return [
        line
        for one in job.environment
        for line in (f"# {one.why}", f"export {one.name}={quote(one.value)}")
    ]
