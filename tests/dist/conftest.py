"""The rank processes of all distributed tests, and what the equivalence tests found."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from rank_pool import Ranks
from tiny_runs import Tally

TALLY = Tally()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(2)`: two ranks, started when they are first used."""
    pools: dict[int, Ranks] = {}
    yield lambda world: pools.setdefault(world, Ranks(world))
    for pool in pools.values():
        pool.stop()


@pytest.fixture(scope="session")
def tally() -> Tally:
    """Counts comparisons; its sum is printed at the end."""
    return TALLY


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line on how near the distributed runs came to one process."""
    if TALLY.count:
        terminalreporter.write_line(str(TALLY))
