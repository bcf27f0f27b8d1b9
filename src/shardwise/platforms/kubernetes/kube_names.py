"""Names that Kubernetes accepts."""

from __future__ import annotations

import hashlib
import re

# A pod is called NAME-node-0-127-abcde, and a label has 63 characters.
LONGEST = 63 - len("-node-0-9999-abcde")
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def kube_name(name: str) -> str:
    """The run's name as a DNS label. A name that had to be changed gets a few letters of its hash,
    so that two runs never share one."""
    if len(name) <= LONGEST and _LABEL.fullmatch(name):
        return name
    cleaned = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    mark = hashlib.sha256(name.encode()).hexdigest()[:6]
    start = cleaned if cleaned[:1].isalpha() else f"run-{cleaned}"
    return f"{start[: LONGEST - 7].rstrip('-')}-{mark}"
