"""Live tensor bytes over a step. Each storage is counted once, however many views it has.

Storages are allocated and freed during a step, and what each was for is often known later (a buffer
turns out to be a gradient). So both are logged, classes can be assigned at any time, and the peak
is found by reading the log.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.parallel.torchao_float8 import bare

Class = Literal["params", "grads", "optimizer", "gathered", "activations", "loss", "other"]
Moment = Literal["at rest", "forward", "loss", "backward", "update"]

# The class of a tensor that nobody named, by the moment at which it was allocated.
_USUAL: dict[Moment, Class] = {
    "at rest": "other",
    "forward": "activations",
    "loss": "loss",
    "backward": "activations",
    "update": "other",
}


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that was held at once."""

    total: int
    classes: dict[Class, int]
    """What it was made of."""

    largest: dict[Class, int]
    """The most of each class, each at its own time."""

    moment: Moment


@dataclass(frozen=True, slots=True)
class _Change:
    serial: int
    num_bytes: int
    moment: Moment


class Ledger:
    """Storages of tensors, from the first time they are seen to their end."""

    def __init__(self) -> None:
        self.moment: Moment = "at rest"
        self._log: list[_Change] = []
        self._classes: list[Class] = []
        self._held: dict[int, tuple[weakref.ref[Any], int, int]] = {}

    def note(self, tensor: Tensor) -> int:
        """Count the tensor's storage, and return the storage's number."""
        storage = tensor.untyped_storage()
        known = self._held.get(id(storage))
        if known is not None:
            return known[1]
        serial, num_bytes = len(self._classes), storage.nbytes()
        self._classes.append(_USUAL[self.moment])
        self._hold(storage, serial, num_bytes)
        self._log.append(_Change(serial, num_bytes, self.moment))
        return serial

    def classify(self, tensors: Iterable[Tensor], as_class: Class) -> None:
        """Say what tensors are for. The last call counts."""
        for tensor in tensors:
            self._classes[self.note(local(tensor))] = as_class

    def class_of(self, tensor: Tensor) -> Class:
        """What a tensor's storage is for, as far as is known."""
        return self._classes[self.note(local(tensor))]

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage has another size: FSDP2 allocates and frees gathered parameters
        that way."""
        known = self._held.get(id(storage))
        if known is None:
            return
        _, serial, before = known
        self._classes[serial] = "gathered"
        self._hold(storage, serial, storage.nbytes())
        self._log.append(_Change(serial, storage.nbytes() - before, self.moment))

    def peak(self, leave_out: Collection[Class] = ()) -> Peak:
        """The largest sum of all classes but those that are held elsewhere."""
        held: dict[Class, int] = defaultdict(int)
        largest: dict[Class, int] = defaultdict(int)
        best = Peak(0, {}, largest, "at rest")
        total = 0
        for change in self._log:
            kind = self._classes[change.serial]
            if kind in leave_out:
                continue
            held[kind] += change.num_bytes
            total += change.num_bytes
            largest[kind] = max(largest[kind], held[kind])
            if total > best.total:
                best = Peak(total, dict(held), largest, change.moment)
        return best

    def _hold(self, storage: torch.UntypedStorage, serial: int, num_bytes: int) -> None:
        key = id(storage)
        end = weakref.ref(storage, partial(self._end, key))
        self._held[key] = (end, serial, num_bytes)

    def _end(self, key: int, _: object) -> None:
        _, serial, num_bytes = self._held.pop(key)
        self._log.append(_Change(serial, -num_bytes, self.moment))


@contextmanager
def resizes_seen(ledger: Ledger) -> Iterator[None]:
    """Tell the ledger about storages that change their size, which no operator shows."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        ledger.resize(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


def local(tensor: Tensor) -> Tensor:
    """This rank's part. Without a gradient it is the tensor itself, not a view that autograd
    made."""
    with torch.no_grad():
        return bare(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def held_bytes(tensors: Iterable[Tensor], device: str) -> int:
    """Bytes of the distinct storages of `tensors` that lie on that kind of device."""
    storages = {}
    for tensor in map(local, tensors):
        if tensor.device.type == device:
            storage = tensor.untyped_storage()
            storages[id(storage)] = storage
    return sum(storage.nbytes() for storage in storages.values())
