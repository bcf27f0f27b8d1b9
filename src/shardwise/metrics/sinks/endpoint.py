"""GET /metrics and nothing else: a small HTTP endpoint that bad clients cannot exhaust.

One thread and one event loop serve all connections, so ten thousand slow clients need no threads.
Every connection has one request, a few seconds and a few kilobytes. Where too many are open at
once, the one that has waited longest is closed, so a proper request is served while others are
slow.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

MAX_REQUEST_BYTES = 8192
MAX_CONNECTIONS = 64
DEADLINE_S = 3.0

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed"}
_REASONS |= {408: "Request Timeout", 431: "Request Header Fields Too Large"}


class Endpoint:
    """Serves `render()` as /metrics on an address of this machine until it is closed."""

    def __init__(
        self, host: str, port: int, render: Callable[[], bytes], content_type: str
    ) -> None:
        self._render = render
        self._content_type = content_type
        self._waiting: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.new_event_loop()
        # The port is bound here and not in the thread, so the caller learns that it is taken.
        try:
            self._server = self._loop.run_until_complete(
                asyncio.start_server(self._accept, host, port, limit=MAX_REQUEST_BYTES)
            )
        except OSError:
            self._loop.close()
            raise
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True, name="metrics-endpoint")
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._server.close()
            for task in list(self._waiting):
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._waiting, return_exceptions=True))
            self._loop.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._converse(reader, writer))
        self._waiting[task] = None
        task.add_done_callback(lambda done: self._waiting.pop(done, None))
        if len(self._waiting) > MAX_CONNECTIONS:
            next(iter(self._waiting)).cancel()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one request and close the connection, whatever the client does."""
        try:
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(DEADLINE_S):
                    writer.write(self._answer(await _read_head(reader)))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        finally:
            writer.transport.abort()

    def _answer(self, head: bytes | int) -> bytes:
        if isinstance(head, int):
            return _refusal(head)
        words = head.partition(b"\r\n")[0].split(b" ")
        if len(words) != 3 or words[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
            return _refusal(400)
        if words[0] != b"GET":
            return _refusal(405)
        if words[1].partition(b"?")[0] != b"/metrics":
            return _refusal(404)
        return _response(200, self._render(), self._content_type)


async def _read_head(reader: asyncio.StreamReader) -> bytes | int:
    """The request up to the blank line, or the status that refuses it."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return 431
    except asyncio.IncompleteReadError:
        return 400


def _refusal(status: int) -> bytes:
    return _response(status, f"{_REASONS[status]}; try GET /metrics\n".encode(), "text/plain")


def _response(status: int, body: bytes, content_type: str) -> bytes:
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\n"
        f"Content-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body
