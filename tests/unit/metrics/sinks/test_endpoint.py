"""The endpoint serves one page, to this machine only, whatever its clients do."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from bad_clients import HALF, HUGE_HEADER, HUGE_LINE, PIPELINE, bombard, connect, get

from shardwise.metrics.sinks.endpoint import DEADLINE_S, MAX_CONNECTIONS, Endpoint

PAGE = b"training_step 1\n"


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    endpoint = Endpoint("127.0.0.1", 0, lambda: PAGE, "text/plain")
    yield "127.0.0.1", endpoint.port
    endpoint.close()


def send(address: tuple[str, int], request: bytes) -> bytes:
    with connect(address) as client:
        client.sendall(request)
        answer = b""
        while part := client.recv(65536):
            answer += part
    return answer


def test_the_page_is_served(address: tuple[str, int]) -> None:
    assert get(address) == (200, PAGE)
    assert get(address, "/metrics?name[]=training_step") == (200, PAGE)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/x HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"hello\r\n\r\n", 400),
        (b"\x00\xff\r\n\r\n", 400),
    ],
)
def test_all_else_is_refused(address: tuple[str, int], request_bytes: bytes, status: int) -> None:
    assert send(address, request_bytes).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize("request_bytes", [HUGE_LINE, HUGE_HEADER])
def test_a_huge_request_is_cut_short(address: tuple[str, int], request_bytes: bytes) -> None:
    # The refusal may be lost: the server closes while the client is still sending.
    with suppress(ConnectionError):
        assert send(address, request_bytes).startswith(b"HTTP/1.1 431 ")
    assert get(address) == (200, PAGE)


def test_a_connection_has_one_answer(address: tuple[str, int]) -> None:
    with suppress(ConnectionError):
        assert send(address, PIPELINE).count(b"HTTP/1.1 200") == 1


def test_a_slow_client_is_cut_off(address: tuple[str, int]) -> None:
    with connect(address, timeout=60) as client:
        started = time.monotonic()
        client.sendall(HALF)
        with suppress(ConnectionError):
            assert client.recv(100) == b""  # without a deadline this waits until it times out
    assert time.monotonic() - started > DEADLINE_S - 0.5


def test_slow_clients_do_not_shut_others_out(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times as many as there is room for: the oldest go, a proper client is served at once."""
    # No slow client is cut off by its own deadline while this test runs.
    monkeypatch.setattr("shardwise.metrics.sinks.endpoint.DEADLINE_S", 600.0)
    slow = [connect(address) for _ in range(4 * MAX_CONNECTIONS)]
    for client in slow:
        with suppress(ConnectionError):
            client.sendall(HALF)
    assert get(address) == (200, PAGE)
    for client in slow:
        client.close()


def test_a_thousand_bad_requests_leave_no_trace(address: tuple[str, int]) -> None:
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    bombard(address, 1000)
    assert get(address) == (200, PAGE)
    time.sleep(0.2)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= files + 2


def test_a_port_that_is_taken_is_said() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match="already in use"),
    ):
        Endpoint("127.0.0.1", taken.getsockname()[1], lambda: PAGE, "text/plain")


def test_it_gives_its_port_back() -> None:
    first = Endpoint("127.0.0.1", 0, lambda: PAGE, "text/plain")
    assert get(("127.0.0.1", first.port)) == (200, PAGE)
    first.close()
    second = Endpoint("127.0.0.1", first.port, lambda: PAGE, "text/plain")
    assert get(("127.0.0.1", second.port)) == (200, PAGE)
    second.close()


def test_another_network_reaches_it_only_when_asked_for() -> None:
    """Two networks joined by a cable: loopback, the default, is not to be seen from the other."""
    alone = ["unshare", "--net", "--map-root-user"]
    if shutil.which("ip") is None or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("needs `ip`, and the right to make network namespaces")
    script = Path(__file__).with_name("two_networks.py")
    done = subprocess.run(
        [*alone, sys.executable, script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "127.0.0.1 from outside: refused",
        "0.0.0.0 from outside: 200",
    ]
