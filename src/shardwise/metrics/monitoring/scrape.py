"""Scrape configuration: where Prometheus finds the endpoints of runs and of DCGM."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from shardwise.errors import UserError
from shardwise.metrics.monitoring.alert_rules import dump_document
from shardwise.metrics.monitoring.durations import spell_duration

Place = Literal["static", "slurm", "kubernetes"]
# Far from the ports that common exporters have.
DEFAULT_PORT = 9630
DCGM_PORT = 9400
EVERY_S = 15.0
# A list of nodes such as n[1-1000000000] must not fill the memory.
MAX_NODES = 10_000

_HEADS = {
    "static": "# Runs on machines that are known by name.",
    "slurm": "# Runs of a Slurm job, one endpoint per node. Inside the job:\n"
    '#   shardwise observe scrape --on slurm --nodes "$SLURM_JOB_NODELIST" --to scrape.yaml',
    "kubernetes": "# Runs in pods that have the label shardwise.io/run and a port named metrics.",
}
_NOTE = """\
# Written by `shardwise observe scrape`. Endpoints listen on loopback unless the run says
# otherwise: a server on another machine needs observe.prometheus_host=0.0.0.0 and a network
# that only it can reach.
"""


def scrape_text(
    place: Place, nodes: Sequence[str], port: int, server_rules: str, every_s: float = EVERY_S
) -> str:
    """prometheus.yml for runs at `place`, with the rules file named."""
    every = spell_duration(every_s)
    document = {
        "global": {"scrape_interval": every, "evaluation_interval": every},
        "rule_files": [server_rules],
        "scrape_configs": list(_jobs(place, nodes, port)),
    }
    return f"{_HEADS[place]}\n{_NOTE}{dump_document(document)}"


def _jobs(place: Place, nodes: Sequence[str], port: int) -> Iterator[dict[str, Any]]:
    if place == "kubernetes":
        yield _pods("shardwise", "__meta_kubernetes_pod_label_shardwise_io_run", ".+", "metrics")
        yield _pods("dcgm", "__meta_kubernetes_pod_label_app", ".*dcgm-exporter", "metrics")
        return
    expand = expand_nodes if place == "slurm" else _split_nodes
    hosts = [host for text in nodes for host in expand(text)] or ["127.0.0.1"]
    yield _hosts("shardwise", [_target(host, port) for host in hosts])
    # A port that a host names is the run's: scraped twice, its series would have two owners.
    bare = dict.fromkeys(re.sub(r":\d+$", "", host) if _has_port(host) else host for host in hosts)
    yield _hosts("dcgm", [_target(host, DCGM_PORT) for host in bare])


def _hosts(job: str, targets: Sequence[str]) -> dict[str, Any]:
    return {
        "job_name": job,
        # The endpoint's labels are bounded; anything beyond is another server on the port.
        "sample_limit": 50_000,
        "static_configs": [{"targets": list(targets)}],
    }


def _target(host: str, port: int) -> str:
    """A host that names its own port keeps it."""
    return host if _has_port(host) else f"{host}:{port}"


def _has_port(host: str) -> bool:
    return re.fullmatch(r"[^:]+:\d+|\[.+\]:\d+", host) is not None


def _pods(job: str, label: str, value: str, port_name: str) -> dict[str, Any]:
    return {
        "job_name": job,
        "sample_limit": 50_000,
        "kubernetes_sd_configs": [{"role": "pod"}],
        "relabel_configs": [
            {"source_labels": [label], "action": "keep", "regex": value},
            {
                "source_labels": ["__meta_kubernetes_pod_container_port_name"],
                "action": "keep",
                "regex": port_name,
            },
            {"source_labels": ["__meta_kubernetes_pod_node_name"], "target_label": "node"},
            {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        ],
    }


def _split_nodes(text: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", text) if word]


def expand_nodes(text: str) -> list[str]:
    """Slurm's lists: 'gpu[01-03,7],login' -> gpu01, gpu02, gpu03, gpu7, login."""
    # A comma inside brackets belongs to its node.
    words = re.findall(r"(?:[^,\s\[]|\[[^\]]*\])+", text)
    found = [name for word in words for name in _expand_word(word, text)]
    if not found or text.count("[") != text.count("]"):
        raise UserError(f"{text!r} is not a list of nodes", fix='write --nodes "gpu[01-04]"')
    return found


def _expand_word(word: str, whole: str) -> list[str]:
    head, bracket, rest = word.partition("[")
    if not bracket:
        return [word]
    inside, _, tail = rest.partition("]")
    ends = _expand_word(tail, whole) if tail else [""]
    return [f"{head}{number}{end}" for number in _numbers(inside, whole) for end in ends]


def _numbers(inside: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or len(part) > 20:
            raise UserError(
                f"{whole!r} is not a list of nodes: {part!r} is no range",
                fix='write it as Slurm does, such as --nodes "gpu[01-04,08]"',
            )
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) + len(numbers) >= MAX_NODES:
            raise UserError(
                f"{whole!r} names over {MAX_NODES} nodes",
                fix='name the nodes of one job: --nodes "gpu[01-04]"',
            )
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers
