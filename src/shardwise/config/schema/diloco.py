"""How sites that train apart come together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class DilocoConfig:
    """DiLoCo, where `mesh.site` is more than one: each site trains by itself, and after some steps
    an outer step (SGD with Nesterov's momentum) joins what the sites have learnt."""

    steps: int = 100
    """Steps of a site between two outer steps. A save, an evaluation and a stop wait for an outer
    step."""

    lr: float = 0.7
    """Learning rate of the outer step."""

    momentum: float = 0.9
    """Nesterov's momentum of the outer step."""

    exchange: Literal["fp32", "int8"] = "fp32"
    """What sites send each other. `int8` sends a quarter of the bytes: 256 numbers share a
    scale."""

    fragments: int = 1
    """Parts of the model that are exchanged one after the other, at equal distances within
    `steps`. They divide the peak of the traffic, not its sum."""

    overlap_steps: int = 0
    """Steps that a site goes on with while an exchange is under way. What it learns meanwhile is
    kept. 0: it waits."""

    max_share: float = 0.1
    """The most of the time that sites should wait for exchanges. The plan names the fewest `steps`
    for it, and warns where `steps` are fewer."""

    meet: str | None = None
    """HOST:PORT of `shardwise sites`. Each site is then a job of its own, which may have other
    ranks than the others, and may die and come back. `cluster.name` is that of the site."""

    site: int = 0
    """With `meet`: which site this job is, from 0 on."""

    patience_s: float = 300.0
    """With `meet`: how long sites wait for one that is late or silent before they go on without
    it."""
