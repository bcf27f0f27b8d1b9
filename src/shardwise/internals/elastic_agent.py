"""torchrun's agent, which asks for advice before it starts its ranks again and when it ends them.

torchrun makes a `LocalElasticAgent`, and has no option for another class. That agent starts its
ranks again after whatever happened, as often as `--max-restarts` allows. Here a subclass takes its
place while a block runs. It looks at what the agent has seen of its ranks, and sets the number of
restarts that are left to 0 where another start would not help. The agent then does what it always
does when none is left: it ends the ranks and reports their failures. Where the agent ends its
ranks, the subclass may shorten the time that they have for it, and acts once more afterwards. When
the agents of several nodes have met, the subclass corrects the number of restarts that are left,
because each agent counts only its own, and ranks that are told different numbers do not meet.
Without this part torchrun starts ranks again after every failure, and ends them in its own time.
"""

from __future__ import annotations

import inspect
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from torch.distributed import Store
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from shardwise.internals.parts import Changed


class Advice(Protocol):
    """The object that the agent asks."""

    def have_met(self, store: Store, number: int, count: int, failures: int) -> int:
        """This agent is `number` of `count` that have met, with a store that is of this start
        alone. It has counted `failures`; returns how many it shall count."""

    def before_a_look(self) -> None:
        """The agent is about to look at its ranks, which it does several times a second."""

    def may_restart(self, result: RunResult, allowed: int, left: int) -> bool:
        """Whether to start the ranks again. Of `allowed` restarts `left` are left."""

    def time_to_end_s(self, named_s: int | None, *, after_signal: bool) -> int:
        """How long ranks may take to end; `named_s` is torch's own limit, if it has one."""

    def after_the_end(self) -> None:
        """The agent has ended all ranks that it knows."""


class AskingAgent(LocalElasticAgent):
    """PyTorch's own agent, which asks `advice`."""

    def __init__(self, *args: Any, advice: Advice, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._advice = advice

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        spec, store = worker_group.spec, worker_group.store
        # A static rendezvous keeps its store, and what an earlier start has left in it.
        if store is None or spec.rdzv_handler.get_backend() == "static":
            return
        number, count = worker_group.group_rank or 0, worker_group.group_world_size or 1
        failures = spec.max_restarts - self._remaining_restarts
        failures = self._advice.have_met(store, number, count, failures)
        self._remaining_restarts = max(spec.max_restarts - failures, 0)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._advice.before_a_look()
        result = super()._monitor_workers(worker_group)
        allowed, left = worker_group.spec.max_restarts, self._remaining_restarts
        if result.is_failed() and not self._advice.may_restart(result, allowed, left):
            self._remaining_restarts = 0
        return result

    def _shutdown(
        self, death_sig: signal.Signals | None = None, timeout: int | None = None
    ) -> None:
        limit_s = self._advice.time_to_end_s(timeout, after_signal=death_sig is not None)
        death_sig = death_sig or signal.SIGTERM
        if self._pcontext is not None:
            self._pcontext.close(death_sig, limit_s)
        super()._shutdown(death_sig)  # whose own limit finds nobody left
        self._advice.after_the_end()


@contextmanager
def agent_that_asks(advice: Advice) -> Iterator[None]:
    """torchrun makes an `AskingAgent` while the block runs."""
    former = api.LocalElasticAgent
    api.LocalElasticAgent = partial(AskingAgent, advice=advice)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        api.LocalElasticAgent = former  # type: ignore[misc]


def check_agent() -> None:
    """The agent that torchrun makes is the one whose methods are overridden."""
    if api.LocalElasticAgent is not LocalElasticAgent:
        raise Changed("torchrun makes another agent")
    given = list(inspect.signature(LocalElasticAgent._shutdown).parameters)
    if given not in (["self", "death_sig"], ["self", "death_sig", "timeout"]):
        raise Changed(f"torchrun's agent ends its ranks by {', '.join(given)}")
    if "worker_group" not in inspect.signature(LocalElasticAgent._rendezvous).parameters:
        raise Changed("torchrun's agents meet in another way")
    if "worker_group" not in inspect.signature(LocalElasticAgent._monitor_workers).parameters:
        raise Changed("torchrun's agent looks at its ranks in another way")
