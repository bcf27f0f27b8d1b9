"""When torchrun's agent restarts its ranks, how it ends them, and why they ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.agent.server import RunResult
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from shardwise.errors import UserError, brief
from shardwise.internals.parts import RESTARTS, public_note
from shardwise.launch.agents import Agents
from shardwise.launch.failure import Passing, details_of, known_exit_code, may_pass
from shardwise.launch.hang import describe_hang
from shardwise.launch.heard import HeardSignals
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


@dataclass(slots=True)
class Adviser:
    """The advice that torchrun's agent gets when ranks fail, and when they are to end.

    PyTorch's own agent restarts ranks after any failure, also after a request to stop.
    """

    watchdog: Watchdog
    lookout: Lookout
    shutdown_timeout_s: int
    """The time that ranks have to save after a signal. torch 2.11 has no option for it, and would
    kill them after 30 s."""

    heard: HeardSignals
    least_nodes: int = 1
    """The fewest nodes that the ranks may start on."""

    agents: Agents | None = None
    """All agents of this start, where they have met."""

    error: UserError | None = None
    """Why the ranks of the last start failed."""

    def have_met(self, store: dist.Store, number: int, count: int, failures: int) -> int:
        """Count failures as the agent that has counted most of them."""
        self.agents, self.error = Agents(store, number, count), None
        return self.agents.begin(failures)

    def before_a_look(self) -> None:
        """Raise for a signal that the agent does not know of. PyTorch's handler raises too, but
        where its exception was swallowed, the agent goes on as if no signal had come."""
        if (missed := self.heard.first()) is not None:
            raise SignalException(f"{missed.name} came, and its exception was lost", sigval=missed)
        if self.agents is not None:
            self.agents.beat()

    def may_restart(self, result: RunResult, allowed: int, left: int) -> bool:
        """Whether it may help to start the ranks again."""
        self.error = error = self._first_error(error_of_start(result.failures, self.watchdog))
        if not isinstance(error, Passing):
            return False
        if left > 0:
            cause = f"{error.what} ({error.why})" if error.why else error.what
            number = allowed - left + 1
            say_on_console(f"ALERT: {cause}; starting the ranks again ({number} of {allowed})")
            self.watchdog.hang = None
        return True

    def _first_error(self, own: UserError) -> UserError:
        """The error that all nodes report; no restart helps where too few of them are left."""
        if self.agents is None:
            return own
        error, gone = self.agents.first_error(own), self.agents.gone
        if self.agents.count - len(gone) >= self.least_nodes:
            return error
        reason = f"the ranks were not started again, because {' and '.join(gone)} does not answer"
        return _with_reason(error, reason)

    def time_to_end_s(self, named_s: int | None, *, after_signal: bool) -> int:
        """How long ranks may take to end: long only where they have something to save.

        A rank that has not made its first step dies of the request. A rank that already handles
        signals would then wait for the dead one.
        """
        if named_s is None:
            named_s = self.shutdown_timeout_s if after_signal else _SAVES_WITHIN_S
        have_begun = all(one.has_begun for one in self.lookout.look())
        return named_s if have_begun else min(named_s, _NOTHING_TO_SAVE_S)

    def after_the_end(self) -> None:
        """End ranks that are left: a signal that arrives while ranks are being started misses those
        that PyTorch's agent has not noted yet."""
        kill_ranks(self.lookout)


def has_adviser() -> bool:
    """Whether the agent of the installed torch can ask for advice."""
    return public_note([RESTARTS]) is None


@contextmanager
def restarting_where_it_helps(
    watchdog: Watchdog, lookout: Lookout, shutdown_timeout_s: int, least_nodes: int
) -> Iterator[None]:
    """torchrun's agent asks for advice while the block runs, where its torch is one we know. A
    failure of its ranks is raised in the words of the node that failed first."""
    if note := public_note([RESTARTS]):
        say_on_console(note)
        yield
        return
    from shardwise.internals.elastic_agent import agent_that_asks

    with HeardSignals() as heard:
        adviser = Adviser(watchdog, lookout, shutdown_timeout_s, heard, least_nodes)
        try:
            with agent_that_asks(adviser):
                yield
        except ChildFailedError:
            if adviser.error is None:
                raise
            raise adviser.error from None
        except (RendezvousError, dist.DistError) as absent:
            if adviser.error is None:
                raise
            reason = "the ranks were not started again, because the nodes did not meet: "
            raise _with_reason(adviser.error, reason + brief(absent)) from None


def _with_reason(error: UserError, reason: str) -> UserError:
    """The error after which the ranks do not start again."""
    why = f"{error.why}; {reason}" if error.why else reason
    return UserError(error.what, why=why, fix=error.fix, code=error.code)


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
