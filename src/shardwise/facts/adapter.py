"""What adapters add to a model: as plain numbers, which a plan can use without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """The adapters of a model. All other parameters are frozen."""

    rank: int
    num_layers: int
    """Layers that have adapters."""

    num_params: int
    """Parameters that are trained."""

    largest_unit: int
    """The most of them in one block."""

    channels: int
    """Channels of a token that go into such layers and come out of them, over the whole model."""

    left: tuple[str, ...] = ()
    """Kinds of layers without adapters, each with the reason."""
