"""Why an axis along which ranks share work has as many ranks as it has."""

from __future__ import annotations

from shardwise.facts.cluster import ClusterSpec
from shardwise.plan.search import Option, fits, why_not

_UNSHARED = {
    "tensor": "each rank computes whole matmuls",
    "context": "each rank has whole sequences",
    "expert": "every rank gathers all experts",
}


def why_axis(name: str, best: Option, options: list[Option], cluster: ClusterSpec) -> str:
    """The reason for the size of the axis `name` in the best option."""
    is_used = getattr(best.decided, name) > 1
    others = [each for each in options if (getattr(each.decided, name) > 1) is not is_used]
    rival = max(others, key=lambda each: _merit(each, cluster), default=None)
    if is_used:
        return _why_used(name, best, rival, cluster)
    if rival is None:
        return _UNSHARED[name]
    tried = f"{name}={getattr(rival.decided, name)}"
    return f"{_UNSHARED[name]}; {tried}: {why_not(rival, best, cluster)}"


def _why_used(name: str, best: Option, rival: Option | None, cluster: ClusterSpec) -> str:
    if rival is None or not fits(rival.memory, cluster):
        return f"with {name}=1 nothing fits"
    if best.forecast is None:
        return "the first that fits"
    return f"{best.speed / rival.speed - 1:.0%} faster than {name}=1"


def _merit(option: Option, cluster: ClusterSpec) -> tuple[bool, float, int]:
    fitting = fits(option.memory, cluster)
    return fitting, option.speed if fitting else 0.0, -option.memory.total
