"""What all the kills of the session came to."""

from __future__ import annotations

import pytest
from chaos_ranks import Tally

TALLY = Tally()


@pytest.fixture(scope="session")
def tally() -> Tally:
    """Counts kills; its sum is printed at the end."""
    return TALLY


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line: kills, resumes, and end states that were not the uninterrupted run's."""
    if TALLY.kills:
        terminalreporter.write_line(f"chaos: {TALLY}")
