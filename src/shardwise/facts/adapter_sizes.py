"""What adapters add to a model: as plain numbers, which a plan can use without torch."""

from __future__ import annotations

from dataclasses import dataclass

BASE_NAMES = {"nf4": "NF4", "float8": "float8", "mxfp4": "MXFP4", "fp8": "fp8 blocks"}
"""What messages call the formats of `adapter.base` that are not `param`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """The adapters of a model. All other parameters are frozen."""

    rank: int
    num_layers: int
    """Layers that have adapters."""

    num_params: int
    """Parameters that are trained."""

    largest_unit: int
    """The most of them in one block, outside of which are only modules that are trained whole."""

    channels: int
    """Channels of a token that go into such layers and come out of them, over the whole model."""

    packed_params: int = 0
    """Frozen weights that are stored in four bits or in eight."""

    packing: str = "param"
    """Their format, as `adapter.base` calls it."""

    why_packing: str = ""
    """Why it is that, where nobody asked for it."""

    packed_bytes: int = 0
    """Their bytes, with scales."""

    packed_tensors: int = 0
    """The tensors that they are in; 0 by a plan that is older than the count."""

    unpacked: tuple[str, ...] = ()
    """Patterns of modules that files in this format have as floats."""

    largest_packed: int = 0
    """Weights of the largest tensor of them. They are floats while a layer computes with them."""

    left: tuple[str, ...] = ()
    """Kinds of layers without adapters, each with the reason."""

    whole: tuple[str, ...] = ()
    """Modules that are trained themselves."""

    whole_params: int = 0
    """Their parameters, which `num_params` counts too."""

    table: int = 0
    head: int = 0
    """Those of the embedding and of the head; tied, they are the same ones."""
