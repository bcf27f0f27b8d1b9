"""The file of a trace: where a run keeps it, and how it is read."""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path

from shardwise.errors import UserError
from shardwise.files import open_file, parse_json
from shardwise.metrics.trace import Trace, parse_trace

FOLDER = "profile"
"""Where a run keeps its traces."""

_FILE = re.compile(r"step-(\d+)-rank-(\d+)\.json\.gz")
# The limit of the unpacked trace. A step of a large model has some tens of megabytes.
_MAX_BYTES = 2**30
# Errors that a damaged file, or one that is no trace, can cause.
_BROKEN = (
    *(OSError, EOFError, zlib.error, ValueError, ArithmeticError),
    *(LookupError, TypeError, AttributeError),
)


def trace_path(run_dir: Path, step: int, rank: int) -> Path:
    """Where a rank's trace of the steps from `step` on is."""
    return run_dir / FOLDER / f"step-{step}-rank-{rank}.json.gz"


def newest_trace(run_dir: Path) -> Path | None:
    """The newest trace, of its lowest rank."""
    named = [(_FILE.fullmatch(path.name), path) for path in (run_dir / FOLDER).glob("*.json.gz")]
    traces = [(-int(match[1]), int(match[2]), path) for match, path in named if match]
    return min(traces)[-1] if traces else None


def read_trace(path: Path) -> Trace:
    """The trace that `observe.profile` had written to `path`."""
    try:
        with open_file(path) as packed, gzip.open(packed) as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ValueError(f"it holds more than {_MAX_BYTES} bytes")
        return parse_trace(parse_json(text))
    except FileNotFoundError as error:
        raise UserError(
            f"there is no trace {path}",
            fix="name a run directory, or a .json.gz of RUN/profile; train with observe.profile=20 "
            "to have one written at step 20",
        ) from error
    except _BROKEN as error:
        raise UserError(
            f"{path} is no trace of a shardwise run",
            why=f"{type(error).__name__}: {error}",
            fix="name a .json.gz of RUN/profile; train with observe.profile=20 to have one written "
            "at step 20",
        ) from error
