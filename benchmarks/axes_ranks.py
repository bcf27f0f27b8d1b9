"""Real ranks on one device, over gloo: do runs whose ranks share work have one process's losses?

NCCL refuses two ranks on one GPU, so every collective of CUDA tensors goes through host memory. The
forms of gloo that know CUDA tensors are not all there, and sums of bf16 are made in fp32.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from forked_measures import plan_of
from shardwise.facts.cluster import parse_cluster
from shardwise.plan.planned import Plan

STEPS, _BATCH = 4, 4
_WAIT = timedelta(seconds=60)
_SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 512,
}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("tiny-llama", _SHAPE),
    "experts": ("tiny-mixtral", {**_SHAPE, "num_local_experts": 8}),
}
# Collectives, and how many of their first arguments are tensors.
_TENSORS = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2, "all_reduce": 1}
_AXES = {"llama": ("tensor", "context"), "experts": ("expert",)}


@dataclass(frozen=True, slots=True)
class Case:
    """One run: a model, a format, and the axis that its ranks are on."""

    model: str
    dtype: str
    axis: str
    world: int
    compiled: bool = False

    def __str__(self) -> str:
        how = f"{self.dtype}, compiled" if self.compiled else self.dtype
        return f"{self.model}, {how}, {self.axis} {self.world}"

    @property
    def reference(self) -> Case:
        """The same by one process."""
        return Case(self.model, self.dtype, "rank", 1, self.compiled)


def cases_of(*, compiled: bool) -> list[Case]:
    """References first, then two ranks, then four; compiled in bf16 by two ranks only."""
    dtypes, worlds = (("bf16",), (2,)) if compiled else (("fp32", "bf16"), (2, 4))
    cases = [
        Case(model, dtype, axis, world, compiled)
        for world in worlds
        for dtype in dtypes
        for model, axes in _AXES.items()
        for axis in axes
    ]
    return [*dict.fromkeys(case.reference for case in cases), *cases]


def losses_of(case: Case, rank: int, device: str, folder: Path) -> list[float]:
    """On every rank of a case: the losses of its steps."""
    import torch
    import torch.distributed as dist

    from shardwise.parallel.mesh import build_mesh
    from shardwise.training.session import attach_training_loss, build_loader, build_session
    from shardwise.training.step import Stepper
    from shardwise.training.surroundings import fast_attention

    plan = _plan(case, device)
    store = dist.FileStore(str(folder / f"store-{case}".replace(" ", "")), case.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world, timeout=_WAIT)
    if device == "cuda":
        torch.cuda.set_device(0)
    mesh = build_mesh(plan)
    with _through_host(device, mesh.groups):
        session = build_session(plan, mesh, print)
        attach_training_loss(session, print)
        stepper, loader = (
            Stepper(session.model, session.optimizer, plan, session.mesh),
            build_loader(session),
        )
        losses = []
        with fast_attention(session.device):
            for step in range(STEPS):
                result = stepper.run(loader.step_batches(step), 1e-3)
                losses.append((result.loss_sum.double() / result.num_tokens).item())
                print(f"step {step}: loss {losses[-1]}, norm {result.grad_norm}", flush=True)
        stepper.settle()
    return losses


def _plan(case: Case, device: str) -> Plan:
    name, shape = _MODELS[case.model]
    parts = case.world if case.axis == "expert" else 1
    mesh = {case.axis: case.world} if case.world > 1 else {}
    return plan_of(
        parse_cluster(f"{case.world}x{'H200' if device == 'cuda' else 'CPU'}"),
        {
            "model": {"name": name, "overrides": shape, "attention": "sdpa"},
            "mesh": mesh,
            "data": {"seq_len": 256},
            "memory": {"compile": case.compiled, "checkpoint_activations": "none"},
            "precision": {"param": case.dtype},
            # What balances experts is a loss of a micro-batch, so each step has one.
            "train": {"micro_batch": _BATCH // parts, "global_batch": _BATCH},
        },
    )


def _through_host(device: str, groups: Iterable[Any]) -> AbstractContextManager[Any]:
    """Collectives through host memory while the block runs; gloo takes a CPU's tensors as they
    are."""
    import torch.distributed as dist

    from shardwise.internals.tensor_collectives import EXCHANGE, GATHER, replaced
    from shardwise.parallel.comm import Carrier

    stack = ExitStack()
    if device != "cuda":
        return stack
    by_name = {str(group.group_name): group for group in groups}

    def gathered(mine: Any, num_ranks: int, group: str) -> Any:
        whole = mine.new_empty(num_ranks * len(mine), *mine.shape[1:])
        dist.all_gather_into_tensor(whole, mine.contiguous(), by_name[group])
        return whole

    def exchanged(mine: Any, takes: Sequence[int], gives: Sequence[int], group: str) -> Any:
        here = mine.cpu()
        came = here.new_empty(sum(takes), *here.shape[1:])
        dist.all_to_all_single(came, here, list(takes), list(gives), by_name[group])
        return came.to(mine.device)

    for name, count in _TENSORS.items():
        stack.enter_context(mock.patch.object(dist, name, _staged(getattr(dist, name), count)))
    stack.enter_context(mock.patch.object(Carrier, "all_gather", _gather_each))
    stack.enter_context(replaced({GATHER: gathered, EXCHANGE: exchanged}))
    return stack


def _staged(collective: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The collective on copies in host memory, where its first arguments are on the GPU."""
    import torch

    signature = inspect.signature(collective)
    tensors = list(signature.parameters)[:count]

    def through_host(*given: Any, **named: Any) -> Any:
        call = signature.bind(*given, **named).arguments
        output = call[tensors[0]]
        if not output.is_cuda:
            return collective(**call)
        wide = torch.float32 if output.dtype == torch.bfloat16 else output.dtype
        host = {name: call[name].to("cpu", wide) for name in tensors}
        collective(**{**call, **host, "async_op": False})
        output.copy_(host[tensors[0]])
        return None

    return through_host


def _gather_each(
    carrier: Any,
    unit: str,
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    group: Any,
    async_op: bool = False,
) -> None:
    """gloo gathers several tensors one after the other."""
    import torch.distributed as dist

    for output, shard in zip(outputs, inputs, strict=True):
        dist.all_gather_into_tensor(output, shard, group)


def worst_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of a step's loss."""
    return max(abs(a / b - 1) for a, b in zip(losses, reference, strict=True))


def table_of(results: Mapping[str, Any]) -> str:
    """A line for each case."""
    lines = ["| ranks | loss of the last step | off one process | problem |", "|---|---|---|---|"]
    for name, found in results.items():
        losses, off = found.get("losses"), found.get("off")
        last = f"{losses[-1]:.6f}" if losses else "-"
        shown = "-" if off is None else f"{off:.1e}"
        lines.append(f"| {name} | {last} | {shown} | {found.get('problem', '')} |")
    return "\n".join(lines)
