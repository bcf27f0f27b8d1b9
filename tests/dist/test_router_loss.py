"""The losses of routers over all ranks are those of one process that runs the whole
micro-batch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_pool import Ranks
from tiny_runs import (
    TOLERANCE,
    Settings,
    Trained,
    differences,
    on_first,
    plain_adamw,
    plain_twin,
    start,
    whole_params,
)
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoConfig

from shardwise.data.loader import BatchLoader
from shardwise.metrics.progress_line import ExpertLoad
from shardwise.training.expert_load import load_of
from shardwise.training.optim import learning_rate
from shardwise.training.session import Session, build_loader
from shardwise.training.step import Stepper
from traced import without_kernels

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
WORLD = 2
GLOBAL_BATCH = 8
# Large, so that a wrong gradient of it shows in the parameters.
COEFFICIENT = 0.5
Z_COEFFICIENT = 0.1
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 301,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": COEFFICIENT,
    "output_router_logits": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 6},
    "olmoe": {"num_experts": 6},
    "gpt_oss": {"num_local_experts": 4},
}


@dataclass(frozen=True, slots=True)
class Routed:
    """A run, and what its routers did."""

    run: Trained
    aux: list[float]
    z: list[float]
    loads: list[ExpertLoad]


@pytest.fixture(scope="module")
def settings_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Settings]:
    """`settings_of(family)`: a run from a made directory of it."""

    @cache
    def make(family: str) -> Settings:
        folder = tmp_path_factory.mktemp(family)
        config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
        (folder / "config.json").write_text(json.dumps(config.to_dict()))
        return {
            "model.name": str(folder),
            "model.overrides": {},
            "model.attention": "eager",
            "train.global_batch": GLOBAL_BATCH,
        }

    return make


@pytest.fixture(scope="module")
def plain(ranks: Pools, settings_of: Callable[[str], Settings]) -> Callable[[str, int], Routed]:
    """`plain(family, accumulation)`: the run of one process, computed once."""

    @cache
    def run(family: str, accumulation: int) -> Routed:
        return ranks(1).run(train_plainly, settings_of(family), accumulation)[0]

    return run


def train_plainly(settings: Settings, accumulation: int) -> Routed:
    """Plain PyTorch, with the family's own load-balancing loss of each global micro-batch, and a
    z-loss where the settings ask for it."""
    z_coefficient = settings.get("train.router_z_loss", 0.0)
    session = start(1, settings)
    plan, model, optim = session.plan, plain_twin(session), session.plan.config.optim
    params = list(model.parameters())
    optimizer = plain_adamw(model, optim)
    losses, norms, aux, z, loads = [], [], [], [], []
    for step in range(plan.config.train.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(optim, step, plan.config.train.steps)
        optimizer.zero_grad()
        loss_sum, aux_sum, z_sum, chosen = 0.0, 0.0, 0.0, []
        for inputs, labels in global_micro_batches(build_loader(session), step, accumulation):
            out = model(input_ids=inputs, use_cache=False, output_router_logits=True)
            loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten()) / accumulation
            squares = torch.cat(out.router_logits).logsumexp(-1) ** 2
            routers = COEFFICIENT * out.aux_loss + z_coefficient * squares.mean()
            (loss + routers / accumulation).backward()
            loss_sum += loss.item()
            aux_sum += out.aux_loss.item() / accumulation
            z_sum += squares.mean().item() / accumulation
            chosen.append(
                torch.stack([each.topk(2).indices.flatten() for each in out.router_logits])
            )
        norms.append(torch.nn.utils.clip_grad_norm_(params, optim.clip_norm or 0.0).item())
        optimizer.step()
        losses.append(loss_sum)
        aux.append(aux_sum)
        z.append(z_sum)
        loads.append(load_of_choices(torch.cat(chosen, 1), out.router_logits[0].shape[-1]))
    return Routed(Trained(losses, norms, whole_params(model)), aux, z, loads)


def load_of_choices(chosen: Tensor, num_experts: int) -> ExpertLoad:
    """Out of the experts of all tokens, by block."""
    counts = torch.stack([each.bincount(minlength=num_experts) for each in chosen]).double()
    ratios = counts / counts.mean(1, keepdim=True)
    shares = counts / counts.sum(1, keepdim=True)
    entropy = torch.special.entr(shares).sum(1).mean() / math.log(num_experts)
    return ExpertLoad(
        most=ratios.max().item(), least=ratios.min().item(), entropy=entropy.item(), dropped=0
    )


def global_micro_batches(
    loader: BatchLoader, step: int, accumulation: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """What all ranks together put through each of their forwards."""
    (whole,) = loader.step_batches(step)
    rows = torch.arange(GLOBAL_BATCH).view(WORLD, accumulation, -1)
    for index in range(accumulation):
        mine = rows[:, index].flatten()
        yield whole.inputs[mine], whole.labels[mine]


def train_spread(world: int, settings: Settings) -> Routed | None:
    """On every rank: all steps; the result comes from rank 0."""
    return run_steps(start(world, settings))


def run_steps(session: Session) -> Routed | None:
    plan, loader = session.plan, build_loader(session)
    stepper = Stepper(session.model, session.optimizer, plan, session.mesh)
    losses, norms, aux, z, loads = [], [], [], [], []
    for step in range(plan.config.train.steps):
        rate = learning_rate(plan.config.optim, step, plan.config.train.steps)
        result = stepper.run(loader.step_batches(step), rate)
        losses.append((result.loss_sum.double() / result.num_tokens).item())
        norms.append(result.grad_norm)
        assert result.routing is not None and result.routing.aux_loss is not None
        aux.append(result.routing.aux_loss.item())
        if result.routing.z_loss is not None:
            z.append(result.routing.z_loss.item())
        assert result.experts is not None
        loads.append(load_of(result.experts, session.mesh.token_group))
    return on_first(Routed(Trained(losses, norms, whole_params(session.model)), aux, z, loads))


def assert_same_routing(run: Routed, reference: Routed) -> None:
    assert run.aux == pytest.approx(reference.aux, rel=TOLERANCE)
    for ours, plain in zip(run.loads, reference.loads, strict=True):
        assert asdict(ours) == pytest.approx(asdict(plain), rel=TOLERANCE)
    loss, params = differences(run.run, reference.run)
    assert loss <= TOLERANCE
    assert params <= TOLERANCE


# Each family and each setting in the usual suite; all of them together in `make chaos`.
SAMPLE = {
    ("mixtral", 1, "none"),
    ("qwen3_moe", 2, "full"),
    ("olmoe", 2, "selective"),
    ("gpt_oss", 1, "full"),
}
GRID = [
    pytest.param(*each, marks=[] if each in SAMPLE else pytest.mark.long)
    for each in product(FAMILIES, (1, 2), ("none", "full", "selective"))
    # gpt-oss changes a tensor in place that selective recomputation keeps, with or without a loss.
    if (each[0], each[2]) != ("gpt_oss", "selective")
]


@pytest.mark.parametrize(("family", "accumulation", "remat"), GRID)
def test_it_is_that_of_the_global_micro_batch(
    ranks: Pools,
    plain: Callable[[str, int], Routed],
    settings_of: Callable[[str], Settings],
    family: str,
    accumulation: int,
    remat: str,
) -> None:
    settings = {
        **settings_of(family),
        "train.accumulation": accumulation,
        "memory.checkpoint_activations": remat,
        "shard.strategy": "full_shard",
    }
    run = ranks(WORLD).run(train_spread, WORLD, settings)[0]
    assert_same_routing(run, plain(family, accumulation))


@pytest.mark.parametrize(
    ("family", "accumulation"), [("mixtral", 2), pytest.param("gpt_oss", 1, marks=pytest.mark.long)]
)
def test_a_z_loss_is_added(
    ranks: Pools, settings_of: Callable[[str], Settings], family: str, accumulation: int
) -> None:
    settings = {**settings_of(family), "train.router_z_loss": Z_COEFFICIENT}
    spread = {**settings, "train.accumulation": accumulation, "shard.strategy": "full_shard"}
    run = ranks(WORLD).run(train_spread, WORLD, spread)[0]
    reference = ranks(1).run(train_plainly, settings, accumulation)[0]
    assert run.z == pytest.approx(reference.z, rel=TOLERANCE)
    assert_same_routing(run, reference)


def test_a_z_loss_needs_no_other(ranks: Pools, settings_of: Callable[[str], Settings]) -> None:
    """Its gradient alone, which is large beside that of the loss, makes routers' logits smaller."""
    settings = {
        **settings_of("mixtral"),
        "train.router_aux_loss": "off",
        "train.router_z_loss": 100.0,
    }
    losses = ranks(WORLD).run(z_losses, settings)[0]
    assert losses[-1] < losses[0]


def z_losses(settings: Settings) -> list[float]:
    session = start(WORLD, settings)
    stepper = Stepper(session.model, session.optimizer, session.plan, session.mesh)
    found = []
    for step in range(3):
        routing = stepper.run(build_loader(session).step_batches(step), 1e-2).routing
        assert routing is not None and routing.aux_loss is None and routing.z_loss is not None
        found.append(routing.z_loss.item())
    return found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("remat", "kernels"), [("full", False), ("full", True), ("selective", True)]
)
def test_compiled_blocks_stay_one_graph(
    ranks: Pools,
    plain: Callable[[str, int], Routed],
    settings_of: Callable[[str], Settings],
    remat: str,
    kernels: bool,
) -> None:
    settings = {
        **settings_of("mixtral"),
        "memory.compile": True,
        "memory.checkpoint_activations": remat,
        "train.accumulation": 1,
    }
    # Each rank compiles for itself, and what it compiles does not depend on how many there are.
    run = ranks(1).run(train_compiled, 1, settings, kernels)[0]
    reference = plain("mixtral", 1)
    assert run.aux == pytest.approx(reference.aux, rel=1e-4)
    assert run.run.losses == pytest.approx(reference.run.losses, rel=1e-4)
    assert run.run.norms == pytest.approx(reference.run.norms, rel=1e-3)


def train_compiled(world: int, settings: Settings, kernels: bool) -> Routed | None:
    """With experts that a CPU's compiler can follow; `grouped_mm` is for GPUs."""
    torch._dynamo.reset()
    counters.clear()
    with nullcontext() if kernels else without_kernels():
        session = start(world, settings)
        session.model.set_experts_implementation("batched_mm")
        run = run_steps(session)
    assert not counters["graph_break"], dict(counters["graph_break"])
    return run


def test_a_run_without_it_counts_tokens_all_the_same(
    ranks: Pools,
    plain: Callable[[str, int], Routed],
    settings_of: Callable[[str], Settings],
) -> None:
    settings = {**settings_of("mixtral"), "train.router_aux_loss": "off"}
    has_aux, load = ranks(WORLD).run(one_step, settings)[0]
    assert not has_aux
    # The first step is the same with and without a loss of routers.
    assert asdict(load) == pytest.approx(asdict(plain("mixtral", 1).loads[0]), rel=TOLERANCE)


def one_step(settings: Settings) -> tuple[bool, ExpertLoad]:
    session = start(WORLD, settings)
    stepper = Stepper(session.model, session.optimizer, session.plan, session.mesh)
    result = stepper.run(build_loader(session).step_batches(0), 1e-3)
    assert result.experts is not None
    return result.routing is not None, load_of(result.experts, session.mesh.token_group)
