"""What a command is at, on stderr: one line that is drawn over itself, or lines in a file."""

from __future__ import annotations

import sys
import time

import typer


class ToldStages:
    """Tells of each stage when it begins, with the seconds since the command's first."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._is_drawn_over = sys.stderr.isatty()

    def tell(self, stage: str) -> None:
        """A stage begins."""
        text = f"{time.monotonic() - self._began:5.1f} s  {stage}"
        if self._is_drawn_over:
            # The rest of an older, longer line is erased.
            typer.echo(f"\r{text}\x1b[K", err=True, nl=False)
        else:
            typer.echo(text, err=True)

    def end(self) -> None:
        """Nothing more comes, and what follows begins at the left."""
        if self._is_drawn_over:
            typer.echo("\r\x1b[K", err=True, nl=False)
