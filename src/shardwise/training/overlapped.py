"""AdamW in host memory beside the next forward.

With offload the parameters and their state are in host memory, and the host updates them. Once the
norm of all gradients is known, units do not need each other. So a thread updates them one after the
other in the order of forward, while the next step begins: a unit is all-gathered when its own
update is made. The numbers are those of one update after the other; only the time differs.

Whoever else reads parameters or state must call `settle` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.blocks import Unit, UnitMap, iter_modules
from shardwise.plan.planned import Plan
from shardwise.training.lion import build_lion
from shardwise.training.optim import ShardAdamW, build_optimizer
from shardwise.training.paged import PagedAdamW
from shardwise.training.whole import build_whole

Part = list[tuple[dict[str, Any], list[Tensor], list[Tensor]]]
"""Of each group of settings: parameters that are updated together, and their gradients."""


class OverlappedAdamW(ShardAdamW):
    """The same updates by a thread, unit by unit, once `attach` has named the units."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._units: list[list[Tensor]] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adamw")
        self._pending: list[Future[None]] = []

    def attach(self, model: nn.Module, units: UnitMap, *, ahead: int) -> None:
        """Let units wait for their own updates. Each all-gathers itself and `ahead` units more.

        This comes after `fully_shard`, so that these hooks run before those of FSDP2.
        """
        order = sorted(units.units, key=lambda unit: not _begins_forward(model, unit))
        self._units = params_of_units(model, order)
        for place, unit in enumerate(units.units):
            wanted = [order.index(each) for each in units.units[place : place + 1 + ahead]]
            for module in iter_modules(model, unit):
                module.register_forward_pre_hook(self._waiter(max(wanted)), prepend=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Begin the update of each unit, and make those of parameters that are in none."""
        self.settle()
        every = [param for group in self.param_groups for param in group["params"]]
        # State in the usual order, which is that of a checkpoint's bytes.
        for param in every:
            if param.grad is not None:
                self.state_of(param)
        inside = {param for params in self._units for param in params}
        self._run(self._part([param for param in every if param not in inside]))
        # A caller forgets the gradients when this returns, so they go along.
        parts = [self._part(params) for params in self._units]
        self._pending = [self._thread.submit(self._run, part) for part in parts]

    def settle(self) -> None:
        """Wait until all updates are made."""
        self._wait_for(len(self._pending))
        self._pending = []

    def state_dict(self) -> dict[str, Any]:
        """The state after the last update."""
        self.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, which no update may change any more."""
        self.settle()
        super().load_state_dict(state_dict)

    def _part(self, params: Sequence[Tensor]) -> Part:
        chosen = set(params)
        found: Part = []
        for group in self.param_groups:
            own = [p for p in group["params"] if p in chosen and p.grad is not None]
            if own:
                found.append((group, own, [p.grad for p in own if p.grad is not None]))
        return found

    @torch.no_grad()
    def _run(self, part: Part) -> None:
        # Whether gradients are recorded is a matter of each thread.
        for group, params, grads in part:
            self.update_params(group, params, grads)

    def _wait_for(self, count: int) -> None:
        """Wait for the first units, and raise what went wrong with them."""
        for pending in self._pending[:count]:
            pending.result()

    def _waiter(self, last: int) -> Any:
        def wait(module: nn.Module, args: Any) -> None:
            self._wait_for(last + 1)

        return wait


def build_for(model: nn.Module, units: UnitMap, plan: Plan) -> torch.optim.Optimizer:
    """The optimizer of a plan, in pages or beside forward where the plan says so."""
    if plan.decided.optimizer == "lion":
        return build_lion(model, plan)
    if plan.decided.optimizer != "adamw":
        return build_whole(model, plan)
    if plan.decided.offload_optimizer:
        return build_optimizer(model, plan, PagedAdamW)
    if not plan.decided.overlap_optimizer:
        return build_optimizer(model, plan)
    optimizer = build_optimizer(model, plan, OverlappedAdamW)
    if isinstance(optimizer, OverlappedAdamW):
        optimizer.attach(model, units, ahead=plan.decided.forward_prefetch)
    return optimizer


def settle(optimizer: torch.optim.Optimizer) -> None:
    """Wait until the last update is made. Call it before anything but a step reads parameters or
    state."""
    if isinstance(optimizer, OverlappedAdamW | PagedAdamW):
        optimizer.settle()


def _begins_forward(model: nn.Module, unit: Unit) -> bool:
    """Whether forward looks tokens up in it. Tied to the head, it may be listed as the last."""
    return any(isinstance(module, nn.Embedding) for module in iter_modules(model, unit))


def params_of_units(model: nn.Module, order: Sequence[Unit]) -> list[list[Tensor]]:
    """The trained parameters of each unit. A unit inside another one has its own."""
    inner = sorted(order, key=lambda unit: -max(name.count(".") for name in unit.modules))
    owner: dict[Tensor, Unit] = {}
    for unit in inner:
        for module in iter_modules(model, unit):
            for param in module.parameters():
                if param.requires_grad:
                    owner.setdefault(param, unit)
    return [[param for param, its in owner.items() if its is unit] for unit in order]
