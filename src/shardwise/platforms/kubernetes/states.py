"""What the controllers of Kubernetes say about a job, in the words of every platform."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.platforms.kubernetes.client import PodSeen
from shardwise.platforms.kubernetes.pods import LEAST_NODES
from shardwise.platforms.launcher import JobState, State

# Phases of a Volcano Job.
_PHASES: Mapping[str, State] = {
    "Pending": "waiting",
    "Restarting": "waiting",
    "Running": "running",
    "Completing": "running",
    "Completed": "ended",
    "Aborting": "failed",
    "Aborted": "failed",
    "Terminating": "failed",
    "Terminated": "failed",
    "Failed": "failed",
}
# Conditions of a JobSet and of a TrainJob, the strongest first.
_CONDITIONS: Mapping[str, State] = {
    "Completed": "ended",
    "Complete": "ended",
    "Failed": "failed",
    "Suspended": "waiting",
}


def state_of(found: Mapping[str, Any], pods: Sequence[PodSeen]) -> JobState:
    """The state of a job by its own status and by its pods."""
    nodes = tuple(one.node for one in pods if one.node)
    if found["metadata"].get("deletionTimestamp"):
        words = f"stopping: {_counted(pods)} to end"
        return JobState(state="running" if pods else "stopped", words=words, nodes=nodes)
    least = (found["metadata"].get("annotations") or {}).get(LEAST_NODES)
    state, words = _said(found.get("status") or {}) or _by_pods(pods, least)
    if state in ("waiting", "running"):
        words = "; ".join([words, *_troubles(pods)])
    return JobState(state=state, words=words, nodes=nodes)


def _said(status: Mapping[str, Any]) -> tuple[State, str] | None:
    phase = (status.get("state") or {}).get("phase")
    if phase is not None:
        message = status["state"].get("message") or status["state"].get("reason") or ""
        return _PHASES.get(phase, "unknown"), f"{phase}: {message}".rstrip(": ")
    true = {one["type"]: one for one in status.get("conditions") or [] if one["status"] == "True"}
    for name, state in _CONDITIONS.items():
        if name in true:
            return state, f"{name}: {true[name].get('message') or ''}".rstrip(": ")
    return None


def _by_pods(pods: Sequence[PodSeen], least: str | None) -> tuple[State, str]:
    running = sum(one.phase == "Running" for one in pods)
    enough = int(least) if least and least.isdecimal() and len(least) < 9 else len(pods)
    state: State = "running" if pods and running >= enough else "waiting"
    return state, f"{running} of {_counted(pods)} running"


def _counted(pods: Sequence[PodSeen]) -> str:
    return "1 pod" if len(pods) == 1 else f"{len(pods)} pods"


def _troubles(pods: Sequence[PodSeen]) -> list[str]:
    """Each cause once, with the first pod that has it."""
    first: dict[str, str] = {}
    for one in pods:
        if one.trouble:
            first.setdefault(one.trouble, one.name)
    return [f"{name}: {trouble}" for trouble, name in first.items()]
