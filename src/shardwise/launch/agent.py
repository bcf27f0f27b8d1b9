"""torchrun's agent, which restarts its ranks only where that may help, and leaves none behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api

from shardwise.errors import UserError
from shardwise.launch.failure import Passing, details_of, known_exit_code, may_pass
from shardwise.launch.hang import describe_hang
from shardwise.launch.lookout import Lookout
from shardwise.launch.ranks import RankFailure
from shardwise.launch.say import say_on_console
from shardwise.launch.stopping import kill_ranks
from shardwise.launch.watchdog import Watchdog

# A failure so soon after the first may still be its cause: the agent polls ten times a second, and
# notes whole seconds. Ranks that it had to kill come 30 s later.
_TOGETHER_S = 5
# PyTorch's own time limit for ranks to end, where the user names none.
_SAVES_WITHIN_S = 30
# The limit where one rank has not made its first step.
_NOTHING_TO_SAVE_S = 10


class Agent(LocalElasticAgent):
    """PyTorch's own agent restarts ranks after any failure, also after a request to stop. This
    one does not."""

    def __init__(
        self,
        *args: Any,
        watchdog: Watchdog,
        lookout: Lookout,
        shutdown_timeout_s: int,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self._watchdog = watchdog
        self._lookout = lookout
        self._shutdown_timeout_s = shutdown_timeout_s

    def _shutdown(
        self, death_sig: signal.Signals | None = None, timeout: int | None = None
    ) -> None:
        """Ask the ranks to end, and wait for them only where they have something to save.

        A rank that has not made its first step dies of the request, and one that already handles
        signals would wait for it. A signal that arrives while ranks are being started misses those
        that PyTorch's agent has not noted yet. torch 2.11 has no option for the limit: after a
        signal it would kill ranks that save after 30 s.
        """
        if timeout is None:
            timeout = _SAVES_WITHIN_S if death_sig is None else self._shutdown_timeout_s
        death_sig = death_sig or signal.SIGTERM
        ranks = self._lookout.look()
        if not all(one.has_begun for one in ranks):
            timeout = min(timeout, _NOTHING_TO_SAVE_S)
        if self._pcontext is not None:
            self._pcontext.close(death_sig, timeout)
        super()._shutdown(death_sig)  # whose own limit finds nobody left
        kill_ranks(self._lookout)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if not result.is_failed():
            return result
        error = error_of_start(result.failures, self._watchdog)
        budget = worker_group.spec.max_restarts
        if not isinstance(error, Passing):
            self._remaining_restarts = 0
        elif self._remaining_restarts > 0:
            number = budget - self._remaining_restarts + 1
            cause = f"{error.what} ({error.why})" if error.why else error.what
            say_on_console(f"ALERT: {cause}; starting the ranks again ({number} of {budget})")
            self._watchdog.hang = None
        return result


@contextmanager
def restarting_where_it_helps(
    watchdog: Watchdog, lookout: Lookout, shutdown_timeout_s: int
) -> Iterator[None]:
    """Let torchrun create our agent while the block runs. torchrun has no option for another
    agent."""
    former = api.LocalElasticAgent
    api.LocalElasticAgent = partial(  # type: ignore[misc, assignment]
        Agent, watchdog=watchdog, lookout=lookout, shutdown_timeout_s=shutdown_timeout_s
    )
    try:
        yield
    finally:
        api.LocalElasticAgent = former  # type: ignore[misc]


def error_of_start(failures: Mapping[int, ProcessFailure], watchdog: Watchdog) -> UserError:
    """Why the ranks of this node ended: they hung, or the first of them failed."""
    if watchdog.hang is not None:
        return describe_hang(watchdog.hang)
    return error_of_ranks(failures)


def error_of_ranks(failures: Mapping[int, ProcessFailure]) -> UserError:
    """The first cause among the ranks of this node, in the rank's own words where it left any."""
    first = _first_failure(failures)
    details = details_of(first)
    code = known_exit_code(first.exitcode)
    what = details.get("what") or f"it ended with exit code {first.exitcode} and no message"
    if first.exitcode < 0 or not details:
        what = f"rank {first.rank} on {os.uname().nodename} failed: {what}"
    fix = details.get("fix") or "run the same command again to resume"
    kind = Passing if may_pass(first, details) else UserError
    return kind(what, why=details.get("why", ""), fix=fix, code=code)


def _first_failure(failures: Mapping[int, ProcessFailure]) -> RankFailure:
    """The first failure. SIGTERM is how the agent ends the others; a rank that died of another
    signal is a cause."""
    ended = [
        RankFailure(rank, failure.exitcode, Path(failure.error_file), float(failure.timestamp))
        for rank, failure in failures.items()
    ]
    causes = [one for one in ended if one.exitcode != -signal.SIGTERM] or ended
    begin = min(one.time for one in causes)
    together = [one for one in causes if one.time <= begin + _TOGETHER_S]
    killed = [one for one in together if one.exitcode < 0]
    return min(killed or together, key=lambda one: one.time)
