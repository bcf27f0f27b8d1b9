"""AdamW over the shards, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from shardwise.config.schema import OptimConfig
from shardwise.errors import ExitCode, UserError
from shardwise.internals.functions import add_to_each
from shardwise.kernels.adamw import corrections, update
from shardwise.kernels.own import uses_own
from shardwise.model.head import embedding_of
from shardwise.parallel.torchao_float8 import bare, own_part
from shardwise.plan.planned import Plan
from shardwise.training.adam8 import Adam8

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardAdamW(torch.optim.AdamW):
    """torch's AdamW and its state, computed on this rank's own parts.

    AdamW is elementwise, so DTensor has nothing to decide. It would still work out how the list of
    all parameters is sharded, in the first step of every start.

    As in torch's own, `grad_scale` and `found_inf` carry the scale of the gradients and whether
    they are finite.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self.update_params(group, params, [p.grad for p in params if p.grad is not None])

    def update_params(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Update parameters of one group from these gradients."""
        states = [self.state_of(param) for param in params]
        self.compute(
            group,
            [own_part(param) for param in params],
            [own_part(grad) for grad in grads],
            [own_part(state["exp_avg"]) for state in states],
            [own_part(state["exp_avg_sq"]) for state in states],
            [state["step"] for state in states],
        )

    def compute(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        means: list[Tensor],
        squares: list[Tensor],
        steps: list[Tensor],
    ) -> None:
        """torch's AdamW over plain tensors. It counts `steps` up."""
        adamw(
            params,
            grads,
            means,
            squares,
            [],
            steps,
            fused=group["fused"],
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def state_of(self, param: Tensor) -> dict[str, Tensor]:
        """The initial state, as torch's own."""
        state: dict[str, Tensor] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            for name in MOMENTS:
                state[name] = self._narrow(torch.zeros_like(param))
        return state

    def _narrow(self, moment: Tensor) -> Tensor:
        return moment


class OnePassAdamW(ShardAdamW):
    """With an update that moves fewer bytes than torch's fused one.

    Moments have the dtype of the parameters, or `state_dtype`.
    """

    def __init__(self, *given: Any, state_dtype: torch.dtype | None = None, **named: Any) -> None:
        self.state_dtype = state_dtype
        super().__init__(*given, **named)

    def update_params(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Queue one update without waiting for the device."""
        states = [self.state_of(param) for param in params]
        counts = [state["step"] for state in states]
        found_inf = torch.zeros_like(counts[0]) if self.found_inf is None else self.found_inf
        scale = torch.ones_like(counts[0]) if self.grad_scale is None else self.grad_scale
        # There is one tensor for each count: torch would read a single one on the host, and wait
        # for it.
        add_to_each(counts, [1 - found_inf] * len(counts))
        update(
            [own_part(param) for param in params],
            [own_part(grad) for grad in grads],
            [own_part(state["exp_avg"]) for state in states],
            [own_part(state["exp_avg_sq"]) for state in states],
            torch.stack([found_inf, scale, *corrections(counts[0], group["betas"]), counts[0]]),
            [group["lr"], *group["betas"], group["eps"], group["weight_decay"]],
        )

    def allocate_state(self) -> None:
        """Allocate all moments now, not in the first step."""
        for group in self.param_groups:
            for param in group["params"]:
                self.state_of(param)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state. torch casts it to the dtype of the parameter, and here it is cast
        back."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({name: self._narrow(state[name]) for name in MOMENTS if name in state})

    def _narrow(self, moment: Tensor) -> Tensor:
        return moment if self.state_dtype is None else bare(moment).to(self.state_dtype)


def param_groups(model: nn.Module, plan: Plan) -> list[dict[str, Any]]:
    """What is trained: matrices, which decay, and vectors (norms, biases), which do not."""
    params = [p for p in model.parameters() if p.requires_grad]
    spared = set() if plan.decided.decay_embeddings else _embeddings(model)
    decayed = [p for p in params if p.dim() >= 2 and p not in spared]
    kept = set(params) - set(decayed)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": plan.settings.optim.weight_decay},
        {"params": [p for p in params if p in kept], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module, plan: Plan, usual: type[ShardAdamW] = ShardAdamW
) -> torch.optim.AdamW:
    """AdamW of the class `usual`, unless the plan wants other moments or our kernel."""
    optim = plan.settings.optim
    settings: dict[str, Any] = {
        "params": param_groups(model, plan),
        "lr": optim.lr,
        "betas": optim.betas,
        "eps": optim.eps,
        "fused": plan.decided.fused_optimizer,
    }
    if plan.decided.optimizer_state == "int8":
        return Adam8(**settings)
    if plan.decided.optimizer_state == "bf16":
        _check_kernels(plan)
        return OnePassAdamW(**settings, state_dtype=torch.bfloat16)
    on_device = not plan.decided.offload and not plan.decided.offload_optimizer
    one_pass = plan.decided.fused_optimizer and uses_own(plan) and on_device
    return (OnePassAdamW if one_pass else usual)(**settings)


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate Adam's moments on a GPU before the first step.

    At its end they would lie between freed activations, and never move: the space around them
    would be too small for the large buffers of later steps.
    """
    if isinstance(optimizer, OnePassAdamW):
        optimizer.allocate_state()


def _embeddings(model: nn.Module) -> set[Tensor]:
    """The tables of all embeddings. A head that is tied to one is the same parameter, and the last
    stage of a pipeline has it as a head alone."""
    named = embedding_of(model)
    return {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding) or (module is named and isinstance(module, nn.Linear))
    }


def _check_kernels(plan: Plan) -> None:
    """Compile our kernel now. On a CPU our operators are plain torch."""
    if plan.cluster.device == "cuda" and not uses_own(plan):
        raise UserError(
            "optim.state=bf16 needs our AdamW kernel and Triton, which is not installed here",
            fix="install the triton that this torch was built for, or leave optim.state out",
            code=ExitCode.ENVIRONMENT,
        )


def step_if_finite(
    optimizer: torch.optim.Optimizer, norm: Tensor, clip_norm: float | None, loss_scale: float = 1.0
) -> None:
    """One update with clipped gradients, where their norm is finite.

    The device skips the update where it is not, so the host does not read the norm first. A fused
    optimizer takes scale and flag as GradScaler passes them, and applies both as it reads the
    gradients. Clipping beforehand would read and write the gradients once more.
    """
    fused: Any = optimizer
    fused.found_inf = (~norm.isfinite()).float()
    fused.grad_scale = None
    if clip_norm is not None or loss_scale != 1.0:
        limit = float("inf") if clip_norm is None else clip_norm
        # clip_grad_norm_ multiplies by the inverse of this.
        fused.grad_scale = ((norm + 1e-6) / limit).clamp(min=1.0) * loss_scale
    optimizer.step()


def learning_rate(optim: OptimConfig, step: int, num_steps: int) -> float:
    """The rate of step `step`, counted from 0, in a run of `num_steps`."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    return optim.lr * _decay(optim, step, num_steps)


def _decay(optim: OptimConfig, step: int, num_steps: int) -> float:
    """The share of the peak rate after warm-up: 1 at its end, `min_lr_ratio` at the last step."""
    if optim.schedule == "constant":
        return 1.0
    start = optim.warmup_steps
    if optim.schedule == "wsd":
        # A plan leaves no `auto` in its settings.
        start = max(start, num_steps - 1 - int(optim.decay_steps))
    progress = min(1.0, max(0.0, (step - start) / max(1, num_steps - 1 - start)))
    if optim.schedule == "cosine":
        progress = 0.5 * (1 - math.cos(math.pi * progress))
    return 1.0 - (1.0 - optim.min_lr_ratio) * progress


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` in the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate
