"""Records that cannot be trained on: named, counted, and refused beyond a limit."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.data.records import CorruptRecord
from shardwise.errors import UserError


class FaultBudget:
    """How many such records a run tolerates. Each is kept by name."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._named: list[str] = []
        self._fixes: dict[str, None] = {}

    @property
    def named(self) -> tuple[str, ...]:
        """The skipped records so far, as `file:line: reason`."""
        return tuple(self._named)

    @property
    def fix(self) -> str:
        """What would mend the records so far."""
        return ", or ".join(self._fixes)

    def skip(self, fault: str, fix: str = "mend the records") -> None:
        """Count one record as skipped; raise once there are more than the limit."""
        self._named.append(fault)
        self._fixes[fix] = None
        if len(self._named) > self.limit:
            raise UserError(
                f"{len(self._named)} records of the data cannot be trained on:\n"
                + "\n".join(f"    {name}" for name in self._named),
                why=f"data.max_corrupt allows {self.limit} to be skipped",
                fix=f"{self.fix}, or skip more of them: data.max_corrupt={10 * max(1, self.limit)}",
            )

    def skip_record(self, name: str, fault: CorruptRecord) -> None:
        """Count a record that has a name."""
        self.skip(f"{name}: {fault}", fault.fix)

    def skip_all(self, faults: Iterable[str]) -> None:
        """Count records that an earlier reading skipped, under this budget's own limit."""
        for fault in faults:
            self.skip(fault)
