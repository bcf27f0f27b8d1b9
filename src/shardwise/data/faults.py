"""Records that could not be read: named, counted, and refused beyond a limit."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.errors import UserError


class FaultBudget:
    """How many unreadable records a run bears; each one is kept by name."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._named: list[str] = []

    @property
    def named(self) -> tuple[str, ...]:
        """The skipped records so far, as `file:line: reason`."""
        return tuple(self._named)

    def skip(self, fault: str) -> None:
        """Count one record as skipped; raise once there are more than the limit."""
        self._named.append(fault)
        if len(self._named) > self.limit:
            raise UserError(
                f"{len(self._named)} records of the data cannot be read:\n"
                + "\n".join(f"    {name}" for name in self._named),
                why=f"data.max_corrupt allows {self.limit} to be skipped",
                fix="mend the records, or raise data.max_corrupt to skip them",
            )

    def skip_all(self, faults: Iterable[str]) -> None:
        """Count records that an earlier reading skipped, under this budget's own limit."""
        for fault in faults:
            self.skip(fault)
