"""Ranks that are not there, and tensors without data: what the tunnel is made of.

torch has no public process group without peers. Importing `FakeStore`'s module registers the
backend `fake`, whose collectives return at once and leave their tensors as they were. Nor is there
a public form of fake tensors, which have a shape, a dtype, a device and a storage, and no values.
The tunnel has no public path; on a torch without these names it ends with an error that says so.
"""

from __future__ import annotations

from shardwise.internals.parts import no_public_path

try:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._mode_utils import no_dispatch
except ImportError as error:
    raise no_public_path("torch", "the tunnel", error) from error

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeStore",
    "FakeTensor",
    "FakeTensorMode",
    "no_dispatch",
]
