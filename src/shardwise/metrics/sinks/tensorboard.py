"""TensorBoard: every curve of a run, in RUN/tensorboard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.metrics.events import Event
from shardwise.metrics.sinks.scalars import scalars_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """Writes event files. TensorBoard hides the steps that a restart or a rollback repeats."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def see(self, event: Event) -> None:
        """Add the event's points, in double precision, at the time of the event."""
        if event["event"] in ("start", "rollback"):
            self.close()
            self._writer = self._open(event["step"] + 1)
        for tag, value in scalars_of(event).items():
            if self._writer is None:
                self._writer = self._open(event["step"])
            self._writer.add_scalar(
                tag,
                value,
                event["step"],
                walltime=event["time"],
                new_style=True,
                double_precision=True,
            )

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, first_step: int) -> SummaryWriter:
        """A new file; TensorBoard forgets what earlier ones hold from `first_step` on."""
        # This import takes a second, so it is done in the feed's thread and not in the training
        # thread.
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._folder), purge_step=first_step)
