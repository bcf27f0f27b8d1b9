"""How a save ended, and the cause where it failed."""

from __future__ import annotations

import errno
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed.checkpoint import CheckpointException

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """How a save ended, and how long its parts took. The loop waited for `stage_s`."""

    step: int
    stage_s: float
    write_s: float
    commit_s: float
    error: str | None
    no_room: bool = False
    """Whether it failed because the disk is full."""

    check_s: float = 0.0
    """The time to read the checkpoint back, which happens in the background too."""

    misread: bool = False
    """Whether it failed because the disk does not give back what was written to it."""

    @property
    def ails_disk(self) -> bool:
        """Whether the disk is at fault, so that the next save would hardly succeed either."""
        return self.no_room or self.misread

    def to_dict(self) -> dict[str, Any]:
        """For events.jsonl."""
        return asdict(self)


def is_no_room(failure: BaseException) -> bool:
    """Whether a rank found the disk or its quota full."""
    causes: list[Any] = [failure]
    if isinstance(failure, CheckpointException):
        causes = [one[0] if isinstance(one, tuple) else one for one in failure.failures.values()]
    return any(getattr(cause, "errno", None) in _NO_ROOM for cause in causes)


def first_cause(failure: BaseException) -> str:
    """The first error that a rank raised. DCP wraps all of them."""
    if isinstance(failure, CheckpointException) and failure.failures:
        rank, wrapped = next(iter(failure.failures.items()))
        cause = wrapped[0] if isinstance(wrapped, tuple) else wrapped
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return str(failure)
