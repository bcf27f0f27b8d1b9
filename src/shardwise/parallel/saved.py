"""What each kind of block saves for backward, counted from the family's own code.

One block of each kind runs on tensors without data, and hooks see every tensor that autograd saves.
A compiled block is traced, and cut into forward and backward as the compiler does it, but not
compiled. Attention is taken to be a kernel that saves its inputs, its result and one sum per row,
as every attention but `eager` does.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from shardwise.facts.block_kind import BlockKind, Saved, way_of
from shardwise.internals.dispatch import TorchDispatchMode, tree_leaves
from shardwise.internals.hugging_face import unsearched_positions
from shardwise.internals.parts import CHANGES, is_open
from shardwise.internals.peerless import FakeTensorMode
from shardwise.kernels.attention import causal_attention
from shardwise.model.blocks import find_units, iter_modules
from shardwise.model.build import build_on_meta
from shardwise.parallel.experts import apply_experts
from shardwise.parallel.gated_mlp import apply_gated_mlp
from shardwise.parallel.remat import SAVED_OPS, apply_remat

_SEQ_LEN = 1032
_DTYPE = torch.bfloat16
_COUNTED = "shardwise_counted"
# A backend of torch.compile that cuts graphs as its default does, and then runs them as they are.
_PARTITIONER = "aot_eager_decomp_partition"


class CannotCount(Exception):
    """Why a family's blocks do not run on tensors without data."""


def count_saved(
    hf_config: Mapping[str, Any], *, attention: str, code_dir: str | None = None
) -> tuple[BlockKind, ...]:
    """The kinds of blocks of the model, and what each saves with this attention."""
    without_data = FakeTensorMode(allow_non_fake_inputs=True)
    # Checkpoints ask for this. The answer is kept for the whole process, and needs real tensors.
    is_open(CHANGES)
    try:
        with _quiet(), unsearched_positions():
            model = build_on_meta(hf_config, attention=_kernel(attention), code_dir=code_dir)
            nn.Module.to(model, dtype=_DTYPE)
            with without_data:
                model.to_empty(device="cpu")
            return tuple(
                BlockKind(count=count, saved=_ways_of(model, block, attention, without_data))
                for block, count in _kinds_of(model)
            )
    except Exception as error:
        # A family's own code may raise anything where values are missing.
        reason = str(error).strip().splitlines()
        raise CannotCount(f"{type(error).__name__}: {reason[0] if reason else ''}") from error


@dataclass(frozen=True, slots=True)
class _Call:
    """A block, and what it is called with."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def learns(self) -> Tensor:
        """The hidden state that it takes: the first tensor of floats."""
        return next(t for t in self.tensors() if t.requires_grad)

    def tensors(self) -> list[Tensor]:
        """Everything that it takes."""
        leaves = tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _kinds_of(model: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """The first block of each kind, and how many there are."""
    found: dict[Any, list[nn.Module]] = {}
    for unit in find_units(model).blocks:
        for block in iter_modules(model, unit):
            layers = tuple((name, type(module)) for name, module in block.named_modules())
            shapes = tuple(parameter.shape for parameter in block.parameters())
            found.setdefault((layers, shapes), []).append(block)
    return [(alike[0], len(alike)) for alike in found.values()]


def _ways_of(
    model: PreTrainedModel, block: nn.Module, attention: str, without_data: FakeTensorMode
) -> dict[str, Saved]:
    # Twice as many tokens show what grows with the sequence.
    lengths = (_SEQ_LEN, 2 * _SEQ_LEN) if attention == "eager" else (_SEQ_LEN,)
    counts = [_count_ways(model, block, length, without_data) for length in lengths]
    return {way: _without_scores([count[way] for count in counts]) for way in counts[0]}


def _without_scores(counts: Sequence[Saved]) -> Saved:
    """What does not grow with the sequence, and what does, from counts at one and two lengths."""
    if len(counts) == 1:
        return counts[0]
    short, long = counts
    channels = long.channels - short.channels
    fixed = long.fixed_bytes - short.fixed_bytes
    scores = (channels * _DTYPE.itemsize + fixed) / _SEQ_LEN
    return Saved(short.channels - channels, short.fixed_bytes - fixed, scores)


def _count_ways(
    model: PreTrainedModel, block: nn.Module, seq_len: int, without_data: FakeTensorMode
) -> dict[str, Saved]:
    with without_data:
        call = _capture(model, block, seq_len)
        known = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
        # What all blocks are called with, such as rotary tables, is saved once and not by each.
        known |= {_storage(tensor) for tensor in call.tensors() if not tensor.requires_grad}
    found: dict[str, Saved] = {}
    for own, compiled, selective in product((False, True), repeat=3):
        way, with_torch, eager = (
            way_of(compiled=is_compiled, own_kernels=is_own, selective=selective)
            for is_compiled, is_own in ((compiled, own), (compiled, False), (False, own))
        )
        with _changed(block, own=own, selective=selective) as is_same, without_data:
            if own and is_same:
                found[way] = found[with_torch]
                continue
            seen = _saved_by(call, known, compiled=compiled, selective=selective)
            # Where the compiler cannot trace a checkpoint, the block runs without it.
            is_traced = not (compiled and selective and len(seen) == 1)
            found[way] = _per_token(seen, seq_len) if is_traced else found[eager]
    return found


class _Captured(Exception):
    """The call of the block has been seen, and what follows does not matter."""


def _capture(model: PreTrainedModel, block: nn.Module, seq_len: int) -> _Call:
    """What the model calls the block with, for one sequence."""
    calls: list[_Call] = []

    def capture(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(_learning(block, args, kwargs))
        raise _Captured

    handle = block.register_forward_pre_hook(capture, with_kwargs=True)
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, seq_len, dtype=torch.long), use_cache=False)
    except _Captured:
        pass
    finally:
        handle.remove()
    return calls[0]


def _learning(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    """The call with a hidden state that needs a gradient, as it does in training."""
    states = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    hidden = next(state for state in states if state.is_floating_point())
    fresh = hidden.detach().requires_grad_()

    def swapped(value: Any) -> Any:
        return fresh if value is hidden else value

    return _Call(block, tuple(map(swapped, args)), {n: swapped(v) for n, v in kwargs.items()})


@contextmanager
def _changed(block: nn.Module, *, own: bool, selective: bool) -> Iterator[bool]:
    """Inside, the block is changed as `parallelize` would change it. Yields whether our kernels
    leave it as it is."""
    classes = [(module, type(module)) for module in block.modules()]
    if own:
        apply_gated_mlp([block])
        apply_experts([block])
    is_same = all(type(module) is cls for module, cls in classes)
    if selective:
        apply_remat([block], "selective")
    try:
        yield is_same
    finally:
        for module, cls in classes:
            module.__class__ = cls


def _saved_by(
    call: _Call, known: set[int], *, compiled: bool, selective: bool
) -> dict[int, Tensor]:
    """The tensors that one forward saves, by storage."""
    # A checkpoint saves what the block takes. Elsewhere it is saved if an operator needs it.
    seen: dict[int, Tensor] = {_storage(call.learns): call.learns} if selective else {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.numel() and _storage(tensor) not in known:
            seen[_storage(tensor)] = tensor
        return tensor

    run: Callable[..., Any] = call.block
    if compiled:
        torch.compiler.reset()
        run = torch.compile(call.block, backend=_PARTITIONER, dynamic=False)
    # Without the compiler, the results are not saved by autograd but by the checkpoint.
    results = _Results(note) if selective and not compiled else nullcontext()
    with saved_tensors_hooks(note, lambda tensor: tensor), results:
        run(*call.args, **call.kwargs)
    return seen


class _Results(TorchDispatchMode):
    """Shows the results of the operators that selective checkpointing saves."""

    def __init__(self, note: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator."""
        result = func(*args, **(kwargs or {}))
        if func in SAVED_OPS:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._note(leaf)
        return result


def _per_token(seen: Mapping[int, Tensor], seq_len: int) -> Saved:
    own = sum(_bytes(tensor) for tensor in seen.values() if tensor.dtype == _DTYPE)
    other = sum(_bytes(tensor) for tensor in seen.values() if tensor.dtype != _DTYPE)
    return Saved(own / _DTYPE.itemsize / seq_len, other / seq_len)


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _storage(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())


def _kernel(attention: str) -> str:
    if attention == "eager":
        return attention
    AttentionInterface.register(_COUNTED, _attend)
    AttentionMaskInterface.register(_COUNTED, lambda *_, **__: None)
    return _COUNTED


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    sides = (side.transpose(1, 2) for side in (query, key, value))
    return causal_attention(*sides, 1.0)[0], None


@contextmanager
def _quiet() -> Iterator[None]:
    """The compiler warns of what does not matter for counting."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
