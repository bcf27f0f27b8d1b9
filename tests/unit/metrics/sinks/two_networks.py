"""Runs inside a network namespace of its own: makes a second one and looks in from there."""

from __future__ import annotations

import subprocess
import sys

from bad_clients import get

from shardwise.config.schema import ObserveConfig
from shardwise.metrics.sinks.endpoint import Endpoint

INSIDE, OUTSIDE = "10.213.77.1", "10.213.77.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def look_in(port: int) -> None:
    """In the other network, after the cable is plugged in: what comes back from the port?"""
    sys.stdin.readline()
    ip("addr", "add", f"{OUTSIDE}/30", "dev", "outside")
    ip("link", "set", "outside", "up")
    try:
        print(get((INSIDE, port))[0])
    except ConnectionRefusedError:
        print("refused")


def ask_from_outside(port: int) -> str:
    command = ["unshare", "--net", sys.executable, __file__, str(port)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        # `unshare` has made its network when the process can be named as its owner.
        ip("link", "add", "inside", "type", "veth", "peer", "name", "outside")
        move = ["ip", "link", "set", "outside", "netns", str(other.pid)]
        subprocess.run(["sleep", "0.5"], check=True)
        subprocess.run(move, check=True)
        ip("addr", "add", f"{INSIDE}/30", "dev", "inside")
        ip("link", "set", "inside", "up")
        answer = other.communicate("go\n")[0].strip()
    subprocess.run(["ip", "link", "del", "inside"], check=False, capture_output=True)
    return answer


def main() -> None:
    ip("link", "set", "lo", "up")
    for host in (ObserveConfig().prometheus_host, "0.0.0.0"):
        endpoint = Endpoint(host, 0, lambda: b"page\n", "text/plain")
        print(f"{host} from outside: {ask_from_outside(endpoint.port)}", flush=True)
        endpoint.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        look_in(int(sys.argv[1]))
    else:
        main()
