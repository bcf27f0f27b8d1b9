"""torchrun asks before it starts its ranks again: the real torchrun, with ranks that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import Store
from torch.distributed.elastic.agent.server import RunResult
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api
from torch.distributed.run import get_args_parser, run

from shardwise.internals.elastic_agent import agent_that_asks, check_agent


def start(folder: Path, max_restarts: int) -> int:
    """How often a rank that always fails was started."""
    script = folder / "rank.py"
    script.write_text(f"open({str(folder / 'starts')!r}, 'a').write('x')\nraise SystemExit(3)\n")
    words = ["--standalone", "--nproc-per-node", "1", "--max-restarts", str(max_restarts)]
    with pytest.raises(ChildFailedError):
        run(get_args_parser().parse_args([*words, "--monitor-interval", "0.1", str(script)]))
    return len((folder / "starts").read_text())


class Told:
    """Someone who is asked, with one answer."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer
        self.asked: list[tuple[int, int, int]] = []
        self.ends: list[str] = []
        self.looks = 0
        self.met: list[int] = []

    def have_met(self, store: Store, number: int, count: int, failures: int) -> int:
        assert (number, count) == (0, 1) and not store.check(["mine"])
        store.set("mine", "")
        self.met.append(failures)
        return failures

    def before_a_look(self) -> None:
        self.looks += 1

    def may_restart(self, result: RunResult, allowed: int, left: int) -> bool:
        self.asked.append((next(iter(result.failures.values())).exitcode, allowed, left))
        return self.answer

    def time_to_end_s(self, named_s: int | None, *, after_signal: bool) -> int:
        self.ends.append("after a signal" if after_signal else "by itself")
        return named_s or 30

    def after_the_end(self) -> None:
        self.ends.append("ended")


@pytest.mark.parametrize(("answer", "starts"), [(True, 3), (False, 1)])
def test_ranks_are_started_again_as_often_as_it_is_allowed(
    tmp_path: Path, answer: bool, starts: int
) -> None:
    told = Told(answer)
    with agent_that_asks(told):
        assert start(tmp_path, max_restarts=2) == starts
    assert told.asked == [(3, 2, left) for left in (2, 1, 0)][:starts]
    assert told.looks >= starts
    # Each start has a store of its own.
    assert told.met == list(range(starts))
    assert len(told.ends) >= 2 and set(told.ends) == {"by itself", "ended"}


def test_failures_of_other_nodes_are_counted(tmp_path: Path) -> None:
    """Another agent has counted one more at each start."""
    told = Told(True)
    told.have_met = lambda store, number, count, failures: failures + 1  # type: ignore[method-assign]
    with agent_that_asks(told):
        assert start(tmp_path, max_restarts=3) == 2
    assert [left for _, _, left in told.asked] == [2, 0]


def test_torchruns_own_agent_is_there_again_afterwards() -> None:
    own = api.LocalElasticAgent
    with agent_that_asks(Told(True)):
        assert api.LocalElasticAgent is not own
    assert api.LocalElasticAgent is own
    check_agent()
