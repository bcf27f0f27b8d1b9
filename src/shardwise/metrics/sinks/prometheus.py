"""A Prometheus endpoint in the first rank of a node, fed by events."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from shardwise.metrics.events import Event
from shardwise.metrics.sinks.endpoint import Endpoint
from shardwise.metrics.sinks.exposition import Exposition, Told


class PrometheusSink:
    """Serves the state of a run. `history` is its record, which has the counts of earlier starts.

    So counters go on rising over restarts, and the launcher's own events are counted too.
    """

    def __init__(self, told: Told, host: str, port: int, history: Iterable[Event] = ()) -> None:
        self._page = Page(told)
        for event in history:
            self._page.see(event)
        self._endpoint = Endpoint(host, port, self._page.render, CONTENT_TYPE_LATEST)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._endpoint.port

    def see(self, event: Event) -> None:
        """Show the event from the next scrape on."""
        self._page.see(event)

    def close(self) -> None:
        """Free the port."""
        self._endpoint.close()


class Page:
    """The text of /metrics. It is made again only when something changed, so many requests cost
    little."""

    def __init__(self, told: Told) -> None:
        self._exposition = Exposition(told)
        # With a registry of its own, no metric of another library gets onto this page.
        self._registry = CollectorRegistry()
        self._registry.register(self._exposition)
        self._rendered = (-1, b"")

    def see(self, event: Event) -> None:
        """Take one event in."""
        self._exposition.see(event)

    def render(self) -> bytes:
        """The page as it is now; called by the endpoint's one thread."""
        version = self._exposition.version
        if self._rendered[0] != version:
            self._rendered = (version, generate_latest(self._registry))
        return self._rendered[1]
