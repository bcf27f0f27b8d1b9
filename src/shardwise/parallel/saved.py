"""What each kind of block saves for backward and computes, counted from the family's own code.

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
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from shardwise.config.schema import AdapterConfig
from shardwise.facts.block_kind import BlockKind, Saved, way_of
from shardwise.facts.block_work import Attention, Moved, Work
from shardwise.internals.dispatch_mode import TorchDispatchMode, tree_leaves
from shardwise.internals.graphs import Graphs, noting_backend
from shardwise.internals.hugging_face import unsearched_positions
from shardwise.internals.parts import CHANGES, SUMS, is_open
from shardwise.internals.peerless import FakeTensorMode
from shardwise.model.build import build_on_meta
from shardwise.model.lora import apply_lora
from shardwise.parallel.backward_peak import compiled_peak, eager_peak
from shardwise.parallel.block_call import (
    Alike,
    BlockCall,
    capture_call,
    changed,
    counted_attention,
    find_alike,
)
from shardwise.parallel.keep_sums import KeepSums
from shardwise.parallel.remat import is_costly
from shardwise.parallel.work import (
    compiled_passes,
    eager_passes,
    last_flops,
    matmuls_of,
    scale_of,
    scores_of,
    storage_of,
    watch,
)

_SEQ_LEN = 1032
_DTYPE = torch.bfloat16
# With and without our kernels, with and without the compiler, and what is recomputed. Without the
# compiler, full recompute saves what the block takes, and backward has all that forward has.
_WAYS = tuple(
    way
    for way in product((False, True), (False, True), ("none", "selective", "full"))
    if way[1:] != (False, "full")
)


class CannotCount(Exception):
    """Why a family's blocks do not run on tensors without data."""


def count_saved(
    hf_config: Mapping[str, Any],
    *,
    attentions: Sequence[str],
    code_dir: str | None = None,
    adapter: AdapterConfig | None = None,
) -> tuple[BlockKind, ...]:
    """The kinds of blocks of the model, and what each saves and computes with a kernel for
    attention. Where the first of its `attentions` is none, scores are counted besides. With an
    `adapter` its weights are frozen."""

    def count(attention: str) -> tuple[BlockKind, ...]:
        return _count(lambda kernel: _empty_model(hf_config, kernel, code_dir, adapter), attention)

    # Checkpoints ask for this. The answer is kept for the whole process, and needs real tensors.
    is_open(CHANGES)
    has_kernel = bool({"flash_attention_4", "flex_attention"} & set(attentions))
    try:
        with _quiet(), unsearched_positions():
            if attentions[0] != "eager":
                return count("kernel")
            scored = count("eager")
            if not has_kernel:
                return scored
            return tuple(map(_with_scores, count("kernel"), scored))
    except Exception as error:
        # A family's own code may raise anything where values are missing.
        reason = str(error).strip().splitlines()
        raise CannotCount(f"{type(error).__name__}: {reason[0] if reason else ''}") from error


def _with_scores(kind: BlockKind, scored: BlockKind) -> BlockKind:
    """What a block saves and moves with a kernel, and the scores that it has without one."""
    passes = scored.work.passes
    return replace(
        kind,
        saved={
            way: replace(saved, scores=scored.saved[way].scores)
            for way, saved in kind.saved.items()
        },
        work=replace(
            kind.work,
            passes={
                way: replace(each, scores=passes[way].scores)
                for way, each in kind.work.passes.items()
            },
        ),
    )


def _empty_model(
    hf_config: Mapping[str, Any],
    kernel: str,
    code_dir: str | None,
    adapter: AdapterConfig | None,
) -> PreTrainedModel:
    """The model on meta, in the dtype that it computes in."""
    model = build_on_meta(hf_config, attention=kernel, code_dir=code_dir)
    if adapter is not None:
        apply_lora(model, adapter, _DTYPE)
    nn.Module.to(model, dtype=_DTYPE)
    return model


def _count(build: Callable[[str], PreTrainedModel], attention: str) -> tuple[BlockKind, ...]:
    without_data = FakeTensorMode(allow_non_fake_inputs=True)
    seen: list[Attention] = []
    model = build(counted_attention(attention, seen))
    with without_data:
        model.to_empty(device="cpu")
    return tuple(
        kind
        for alike in find_alike(model)
        for kind in _kinds_of(model, alike, attention, seen, without_data)
    )


@dataclass(frozen=True, slots=True)
class _Counted:
    """One way to run a block."""

    saved: Saved
    moved: Moved
    graphs: Graphs


def _kinds_of(
    model: PreTrainedModel,
    alike: Alike,
    attention: str,
    attentions: list[Attention],
    without_data: FakeTensorMode,
) -> Iterator[BlockKind]:
    # Twice as many tokens show what grows with the sequence.
    lengths = (_SEQ_LEN, 2 * _SEQ_LEN) if attention == "eager" else (_SEQ_LEN,)
    counts = [_count_ways(model, alike.first, length, without_data) for length in lengths]
    saved = {way: _without_scores([ways[way].saved for ways in counts]) for way in counts[0]}
    passes = {way: _passes_of([ways[way].moved for ways in counts]) for way in counts[0]}
    with without_data:
        call = capture_call(model, alike.first, _SEQ_LEN)
        attentions.clear()
        forward = watch(call, set()).forward
    work = Work(
        matmuls=matmuls_of(forward, _SEQ_LEN),
        attentions=tuple(attentions) or scores_of(forward, _SEQ_LEN),
        passes=passes,
        last_flops=last_flops(counts[0]["compiled"].graphs, _SEQ_LEN),
    )
    for window, count in alike.windows.items():
        seen = work.attentions
        if len(alike.windows) > 1 or attention == "eager":
            seen = tuple(replace(each, window=window) for each in seen)
        yield BlockKind(count=count, saved=saved, work=replace(work, attentions=seen))


def _without_scores(counts: Sequence[Saved]) -> Saved:
    """What does not grow with the sequence, and what does, from counts at one and two lengths."""
    if len(counts) == 1:
        return counts[0]
    short, long = counts
    channels = long.channels - short.channels
    fixed = long.fixed_bytes - short.fixed_bytes
    scores = (channels * _DTYPE.itemsize + fixed) / _SEQ_LEN
    return Saved(short.channels - channels, short.fixed_bytes - fixed, scores)


def _passes_of(counts: Sequence[Moved]) -> Moved:
    """The same of the bytes that are moved."""
    if len(counts) == 1:
        return counts[0]
    short, long = counts
    scores = (long.forward + long.backward - short.forward - short.backward) / _SEQ_LEN
    forward, backward = 2 * short.forward - long.forward, 2 * short.backward - long.backward
    return Moved(forward, backward, short.kernels, round(scores))


def _count_ways(
    model: PreTrainedModel, block: nn.Module, seq_len: int, without_data: FakeTensorMode
) -> dict[str, _Counted]:
    with without_data:
        call = capture_call(model, block, seq_len)
        known = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        # What all blocks are called with, such as rotary tables, is saved once and not by each.
        known |= {storage_of(tensor) for tensor in call.tensors() if not tensor.requires_grad}
    scale = scale_of(call, seq_len)
    found: dict[str, _Counted] = {}
    for own, compiled, recompute in _WAYS:
        way, with_torch, eager, whole = (
            way_of(compiled=is_compiled, own_kernels=is_own, recompute=mode)
            for is_compiled, is_own, mode in (
                (compiled, own, recompute),
                (compiled, False, recompute),
                (False, own, recompute),
                (False, own, "none"),
            )
        )
        with changed(block, own=own, recompute=recompute) as is_same, without_data:
            if own and is_same:
                found[way] = found[with_torch]
                continue
            seen, graphs = _saved_by(call, known, compiled=compiled, recompute=recompute)
            # Where the compiler cannot trace a checkpoint, the block runs without it.
            if compiled and recompute == "selective" and len(seen) == 1:
                found[way] = found[eager]
                continue
            peak = None
            if compiled:
                moved, peak = compiled_passes(graphs, scale), compiled_peak(graphs, scale)
            elif recompute == "selective":
                moved = _again(found[whole].moved)
            else:
                watched = watch(call, known)
                moved, peak = eager_passes(watched, scale), eager_peak(watched, scale)
            saved = replace(_per_token(seen, seq_len), backward_bytes=peak)
            found[way] = _Counted(saved, moved, graphs)
    return found


def _again(passes: Moved) -> Moved:
    """What a block moves that computes its forward again in backward, all but matmuls."""
    return replace(passes, backward=passes.backward + passes.forward)


def _saved_by(
    call: BlockCall, known: set[int], *, compiled: bool, recompute: str
) -> tuple[dict[int, Tensor], Graphs]:
    """The tensors that one forward saves, by storage, and the graphs that it was traced into."""
    # A checkpoint saves what the block takes. Elsewhere it is saved if an operator needs it.
    has_checkpoint = recompute != "none"
    seen: dict[int, Tensor] = {storage_of(call.learns): call.learns} if has_checkpoint else {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.numel() and storage_of(tensor) not in known:
            seen[storage_of(tensor)] = tensor
        return tensor

    run: Callable[..., Any] = call.block
    graphs = Graphs()
    if compiled:
        torch.compiler.reset()
        backend = noting_backend(graphs, KeepSums() if is_open(SUMS) else None)
        run = torch.compile(call.block, backend=backend, dynamic=False)
    # Without the compiler, the results are not saved by autograd but by the checkpoint.
    results = _Results(note) if has_checkpoint and not compiled else nullcontext()
    with saved_tensors_hooks(note, lambda tensor: tensor), results:
        run(*call.args, **call.kwargs)
    return seen, graphs


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
        if is_costly(func, args):
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
