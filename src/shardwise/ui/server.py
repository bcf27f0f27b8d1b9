"""The server of the page: for this machine, for whoever has the token, and for nobody else."""

from __future__ import annotations

import json
import secrets
import socket
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qs, urlsplit

from shardwise.errors import ExitCode, UserError
from shardwise.report.markup import tag
from shardwise.report.page import PageKind, WebPage, policy_of, render_page
from shardwise.ui.follow import RunsFolder
from shardwise.ui.view import View, Wanted

PAGE = PageKind(
    "shardwise ui",
    "the page over runs",
    "--port",
    styles=("report/page.css", "ui/ui.css"),
    scripts=("report/page.js", "ui/ui.js"),
    is_served=True,
)
LOOPBACK = "127.0.0.1"
# A page of another host can have its own name lead here, but it cannot call itself so.
_NAMES = ("127.0.0.1", "localhost", "[::1]")
_SLOWEST_CLIENT_S = 10.0


class RunsServer(ThreadingHTTPServer):
    """Serves the page over one folder until it is shut down."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int, every_s: float, host: str = LOOPBACK) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.token = secrets.token_urlsafe(24)
        self.every_s = every_s
        self.folder = folder
        self._view = View(RunsFolder(folder))
        self._one_at_a_time = Lock()
        super().__init__((host, port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a browser that is gone; anything else is a fault of ours, and is shown."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        """Where the page is, with the token that it asks for."""
        host = f"[{self.server_address[0]!s}]" if ":" in str(self.server_address[0]) else LOOPBACK
        return f"http://{host}:{self.server_port}/?token={self.token}"

    def page(self) -> str:
        """The page, before it has asked for anything."""
        words = WebPage(
            title=str(self.folder),
            header=[
                tag("h1", f"Runs in {self.folder}"),
                tag("p", "this page needs JavaScript", class_="alert", id="word"),
            ],
            sections=[],
            every_s=self.every_s,
        )
        return render_page(PAGE, words)

    def view(self, wanted: Wanted) -> str:
        """The parts of the page as JSON. What is kept between requests is one request's alone."""
        with self._one_at_a_time:
            parts = self._view.answer(wanted)
        return json.dumps({"parts": parts})


def validate_loopback(host: str) -> str:
    """The address, or UserError for one that other machines reach."""
    try:
        is_here = ip_address("127.0.0.1" if host == "localhost" else host).is_loopback
    except ValueError:
        is_here = False
    if not is_here:
        raise UserError(
            f"--host {host} is not an address of this machine alone",
            why="the page shows logs and configurations, and its token would cross the network",
            fix="leave --host out; from another machine: ssh -L PORT:127.0.0.1:PORT THIS_MACHINE",
        )
    return LOOPBACK if host == "localhost" else host


def open_server(folder: Path, port: int, every_s: float, host: str) -> RunsServer:
    """A server that listens, or UserError."""
    try:
        return RunsServer(folder, port, every_s, validate_loopback(host))
    except OSError as error:
        raise UserError(
            f"port {port} of {host} cannot be listened on: {error.strerror}",
            fix="leave --port out, which takes any free port",
            code=ExitCode.ENVIRONMENT,
        ) from error


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: RunsServer
    server_version = "shardwise"
    sys_version = ""
    timeout = _SLOWEST_CLIENT_S

    def do_GET(self) -> None:
        """Answer who may ask."""
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        if why := self._why_not(query):
            self._send(HTTPStatus.FORBIDDEN, why)
        elif address.path == "/":
            self._send(HTTPStatus.OK, self.server.page(), "text/html")
        elif address.path == "/view":
            self._send_view(query)
        else:
            self._send(HTTPStatus.NOT_FOUND, "there is nothing here")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a line of each request would hold the token."""

    def _why_not(self, query: dict[str, list[str]]) -> str:
        """Why this request is refused; empty where it is not."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        name = host.rpartition(":")[0] if not host.endswith("]") else host
        if (name or host) not in _NAMES:
            return "only 127.0.0.1 and localhost are served; open the address that was printed"
        if origin is not None and origin != f"http://{host}":
            return "pages of other origins are refused"
        given = query.get("token", [""])[0].encode()
        if not secrets.compare_digest(given, self.server.token.encode()):
            return "the token is missing or wrong; open the address that `shardwise ui` printed"
        return ""

    def _send_view(self, query: dict[str, list[str]]) -> None:
        try:
            wanted = Wanted(
                runs=tuple(query.get("run", ())),
                rank=query.get("rank", [""])[0],
                have=query.get("have", ()),
            )
        except UserError as error:
            self._send(HTTPStatus.BAD_REQUEST, str(error))
            return
        self._send(HTTPStatus.OK, self.server.view(wanted), "application/json")

    def _send(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", f"{policy_of(PAGE)}; frame-ancestors 'none'")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)
