"""Activations of some blocks stay in host memory until backward.

Copies to the host start when a block's forward is done, and must be complete some blocks later. The
compute stream then waits for them, so their memory is free in that stream's own order, however far
the host is ahead. The copies back start some blocks before backward needs them. Tensors that the
block did not create stay on the device: parameters, which FSDP2 frees and gathers again, and inputs
that all blocks share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.errors import ExitCode, UserError
from shardwise.facts.host import memory_left
from shardwise.model.override import override_forward
from shardwise.plan.host_activations import chosen, patience
from shardwise.units import format_bytes

# The number of backward blocks during which the copies back of one block run.
_AHEAD = 2
# Smaller tensors cost more to handle than they free.
_LEAST_BYTES = 2**16
# Page-locked memory is allocated in powers of two, so it is taken in chunks that waste none.
_CHUNK_BYTES = 2**27
# The share of host memory that is left to everything else.
_LEAST_LEFT = 2**31


@dataclass(slots=True)
class Parcel:
    """One tensor that a block saves for backward."""

    tensor: Tensor | None
    """On the device; None while it is in host memory alone, and after its last use."""

    like: Tensor
    """A meta tensor of the same shape and dtype."""

    uses: int = 0


@dataclass(slots=True)
class Load:
    """Everything that one block saves for backward."""

    parcels: dict[tuple[Any, ...], Parcel] = field(default_factory=dict)
    in_host: list[Tensor] = field(default_factory=list)
    """Chunks of bytes, one tensor after the other."""

    moved: Any = None
    """The event after the last copy, in either direction."""

    is_back: bool = False
    is_lost: bool = False
    """Another forward of the block has taken its place in host memory."""

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are on the device."""
        return [each.tensor for each in self.parcels.values() if each.tensor is not None]

    def take_in(self, tensor: Tensor) -> Parcel:
        """Take a tensor. One that several operators save is copied once."""
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self.parcels:
            self.parcels[key] = Parcel(tensor, torch.empty_like(tensor, device="meta"))
        self.parcels[key].uses += 1
        return self.parcels[key]


class Ticket(NamedTuple):
    """What autograd saves instead of a tensor."""

    load: Load
    parcel: Parcel


class Offloader:
    """Copies saved activations to the host and back, on two streams of its own."""

    def __init__(self, device: torch.device, patience: int, last: int) -> None:
        """`patience` is the number of forward blocks that the copies of one block take at most.
        `last` is the block that forward ends with."""
        self._device = device
        self._patience, self._last = patience, last
        self._module: Any = torch.get_device_module(device)
        self._away, self._home = self._module.Stream(), self._module.Stream()
        self._loads: dict[int, Load] = {}
        self._leaving: dict[int, Load] = {}
        self._chunks: dict[int, list[Tensor]] = {}

    def packing(self, block: int, stays: set[int]) -> saved_tensors_hooks:
        """A context for the forward of a block that replaces saved tensors by tickets.

        `stays` are addresses of memory that is not the block's own.
        """
        if block in self._loads:
            self._loads[block].is_lost = True
        load = self._loads[block] = Load()

        def pack(tensor: Tensor) -> Tensor | Ticket:
            if not _may_travel(tensor) or tensor.untyped_storage().data_ptr() in stays:
                return tensor
            return Ticket(load, load.take_in(tensor))

        return saved_tensors_hooks(pack, self._unpack)

    def send(self, block: int) -> None:
        """Start the copies of a block whose forward is done."""
        load = self._loads[block]
        tensors = load.tensors
        if not tensors:
            del self._loads[block]
            return
        load.in_host = self._chunks_for(block, sum(map(_bytes, tensors)))
        # The copies back of the last step read the same host memory.
        self._away.wait_stream(self._home)
        load.moved = self._copy(self._away, _pieces(load.in_host, tensors))
        self._leaving[block] = load

    def pass_by(self, block: int) -> None:
        """Called when forward leaves a block: copies that started long ago must be complete.

        Before its last block forward has memory to spare, so it does not wait for copies that are a
        little late.
        """
        ago = self._patience if block == self._last else 2 * self._patience
        self._let_go([sent for sent in self._leaving if sent <= block - ago])

    def arrive(self, block: int) -> None:
        """Called when backward enters a block: blocks before it are done, and the next ones are
        copied back."""
        self._let_go([*self._leaving])
        for done in [key for key in self._loads if key > block + 1]:
            del self._loads[done]
        for wanted in sorted(self._loads, reverse=True):
            if wanted >= block - _AHEAD:
                self._fetch(self._loads[wanted])

    def _let_go(self, blocks: list[int]) -> None:
        """Free the device memory of what was sent, once its copy is complete."""
        for block in blocks:
            load = self._leaving.pop(block)
            self._module.current_stream().wait_event(load.moved)
            for parcel in load.parcels.values():
                parcel.tensor = None

    def _fetch(self, load: Load) -> None:
        if load.is_back:
            return
        # This is memory of the compute stream, whose earlier work has finished with it.
        for parcel in load.parcels.values():
            parcel.tensor = torch.empty_like(parcel.like, device=self._device)
        pairs = _pieces(load.in_host, load.tensors)
        self._home.wait_event(load.moved)
        load.moved = self._copy(self._home, ((there, here) for here, there in pairs))
        load.is_back = True

    def _copy(self, stream: Any, pairs: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """Copy each second tensor to each first one, after all compute so far. Returns an event."""
        stream.wait_stream(self._module.current_stream())
        with self._module.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return stream.record_event()

    def _unpack(self, kept: Tensor | Ticket) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        load, parcel = kept
        if load.is_lost or parcel.uses == 0:
            raise RuntimeError(
                "memory.offload_activations: a block needs one backward after each forward"
            )
        self._fetch(load)
        self._module.current_stream().wait_event(load.moved)
        tensor = cast(Tensor, parcel.tensor)
        parcel.uses -= 1
        if parcel.uses == 0:
            parcel.tensor = None
        return tensor

    def _chunks_for(self, block: int, num_bytes: int) -> list[Tensor]:
        """Host memory of a block, kept from step to step, because page-locking takes long."""
        chunks = self._chunks.setdefault(block, [])
        while len(chunks) * _CHUNK_BYTES < num_bytes:
            _validate_memory_left()
            locked = self._device.type == "cuda"
            chunks.append(torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=locked))
        return chunks


def _validate_memory_left() -> None:
    """Raise before the system kills a process that takes too much memory without a message."""
    left = memory_left()
    if left is not None and left < _LEAST_LEFT:
        raise UserError(
            f"activations have no room in host memory: {format_bytes(left)} of it are left",
            why="memory.offload_activations keeps those of a share of the blocks there, for every "
            "rank of this host",
            fix="write a smaller share, such as memory.offload_activations=0; `shardwise plan` "
            "says how much host memory it takes",
            code=ExitCode.DOES_NOT_FIT,
        )


def _pieces(chunks: list[Tensor], tensors: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """The chunks' bytes beside the bytes of the tensors that they hold in turn."""
    place = 0
    for tensor in tensors:
        flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        start = 0
        while start < len(flat):
            index, begin = divmod(place, _CHUNK_BYTES)
            size = min(_CHUNK_BYTES - begin, len(flat) - start)
            yield chunks[index][begin : begin + size], flat[start : start + size]
            place, start = place + size, start + size


def apply_offload(blocks: list[nn.Module], share: float, device: torch.device) -> None:
    """Let `share` of the blocks keep their activations in host memory.

    This comes after compilation, so that it moves what a compiled block saves.
    """
    if not share:
        return
    offloader = Offloader(device, patience(share), last=len(blocks) - 1)
    travels = set(chosen(len(blocks), share))
    for index, block in enumerate(blocks):
        block.place_in_model = index  # type: ignore[assignment]
    override_forward(blocks, "Offloaded", partial(_offloaded, offloader, travels))


def _offloaded(offloader: Offloader, travels: set[int], cls: type[nn.Module]) -> Callable[..., Any]:
    def forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        place: int = self.place_in_model
        if not torch.is_grad_enabled():
            return cls.forward(self, hidden, *args, **kwargs)
        if place not in travels:
            out = cls.forward(self, hidden, *args, **kwargs)
        else:
            given = (*self.parameters(), *self.buffers(), args, kwargs)
            stays = {each.untyped_storage().data_ptr() for each in _tensors_in(given)}
            with offloader.packing(place, stays):
                out = cls.forward(self, hidden, *args, **kwargs)
            offloader.send(place)
        offloader.pass_by(place)
        for tensor in _tensors_in(out):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: offloader.arrive(place))
                break
        return out

    return forward


def _tensors_in(thing: Any) -> Iterator[Tensor]:
    """The tensors inside containers, and inside tensors that wrap others."""
    if isinstance(thing, Tensor):
        yield from _wrapped_in(thing) or (thing,)
    elif isinstance(thing, dict):
        yield from _tensors_in(tuple(thing.values()))
    elif isinstance(thing, list | tuple):
        for each in thing:
            yield from _tensors_in(each)


def _wrapped_in(tensor: Any) -> list[Tensor]:
    """The tensors that a wrapper subclass, such as a float8 weight, holds; none for other
    tensors."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return []
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def _may_travel(tensor: Tensor) -> bool:
    """Whether a tensor is large, and owns all memory between its first and last element."""
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return _bytes(tensor) >= _LEAST_BYTES and extent == tensor.numel() and not _wrapped_in(tensor)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
