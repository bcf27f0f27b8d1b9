"""Which number format is where: gathered weights, masters, gradients, Adam state, output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_pool import Ranks
from tiny_runs import Settings, run_steps, start, train, whole_params
from torch import Tensor, nn

from shardwise.training.session import build_loader
from shardwise.training.step import Stepper

pytestmark = pytest.mark.dist

# Half precision is slow on a CPU: as small as a model can be.
SMALL: Settings = {
    "model.overrides": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "data.seq_len": 8,
    "train.global_batch": 4,
    "shard.strategy": "full_shard",
    "optim.warmup_steps": 0,
}
BF16: Settings = {**SMALL, "precision.param": "bf16"}
FP16: Settings = {**SMALL, "precision.param": "fp16"}


def formats(world: int, settings: Settings) -> dict[str, Any]:
    """Every dtype that a step shows on this rank."""
    session = start(world, settings)
    model = session.model
    seen: dict[str, Any] = {"masters": {p.dtype for p in model.parameters()}}

    def look(block: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen["gathered"] = {p.dtype for p in block.parameters()}
        seen["activations"] = inputs[0].dtype

    hook = model.model.layers[0].register_forward_pre_hook(look)
    (batch,) = build_loader(session).step_batches(0)
    loss = model.sum_loss(batch.inputs, batch.labels)
    loss.backward()
    seen["loss"] = loss.dtype
    seen["grads"] = {p.grad.dtype for p in model.parameters()}
    hook.remove()
    run_steps(session, range(1))
    states = session.optimizer.state.values()
    seen["adam"] = {value.dtype for state in states for value in state.values()}
    seen["logits"] = model(input_ids=batch.inputs).logits.dtype
    return seen


def test_bf16_computes_and_fp32_keeps(ranks: Callable[[int], Ranks]) -> None:
    for seen in ranks(2).run(formats, 2, BF16):
        assert seen["gathered"] == {torch.bfloat16}
        assert seen["activations"] == seen["logits"] == torch.bfloat16
        assert seen["masters"] == seen["grads"] == seen["adam"] == {torch.float32}
        assert seen["loss"] == torch.float32


@pytest.mark.parametrize("loss", ["chunked", "full"])
def test_output_format_is_cast_at_the_end_only(ranks: Callable[[int], Ranks], loss: str) -> None:
    settings = {**BF16, "precision.output": "fp32", "memory.loss": loss}
    for seen in ranks(2).run(formats, 2, settings):
        assert seen["logits"] == seen["loss"] == torch.float32
        assert seen["activations"] == torch.bfloat16


@pytest.mark.parametrize("param", ["bf16", "fp16"])
def test_half_precision_stays_near_fp32(ranks: Callable[[int], Ranks], param: str) -> None:
    exact = ranks(2).run(train, 2, SMALL)[0]
    rough = ranks(2).run(train, 2, {**SMALL, "precision.param": param})[0]
    assert rough.losses == pytest.approx(exact.losses, rel=1e-2)
    # Norms are near only because the scale of fp16 is taken off before they are measured.
    assert rough.norms == pytest.approx(exact.norms, rel=5e-2)


def overflow(world: int, settings: Settings, times: int) -> dict[str, Any]:
    """A step whose gradient is infinite on the last rank alone, `times` times, and a good one."""
    session = start(world, settings)
    batches = build_loader(session).step_batches(0)
    stepper = Stepper(session.model, session.optimizer, session.plan, session.mesh)
    seen: dict[str, Any] = {"scaled_grads": [], "scales": [stepper.scale.value], "applied": []}

    def spoil(param: Tensor) -> None:
        seen["scaled_grads"].append(param.grad.full_tensor().abs().max().item())  # type: ignore[union-attr]
        if len(seen["scaled_grads"]) <= times and dist.get_rank() == world - 1:
            param.grad.to_local().fill_(float("inf"))  # type: ignore[union-attr]

    weight = session.model.model.layers[0].mlp.down_proj.weight
    weight.register_post_accumulate_grad_hook(spoil)
    seen["params"] = [whole_params(session.model)]
    for _ in range(2):
        result = stepper.run(batches, 1e-3)
        seen["applied"].append((result.applied, result.overflows))
        seen["scales"].append(stepper.scale.value)
        seen["params"].append(whole_params(session.model))
    return seen


def is_same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("fused", [True, False])
def test_fp16_computes_a_step_again_that_overflows_on_one_rank(
    ranks: Callable[[int], Ranks], fused: bool
) -> None:
    settings = {**FP16, "precision.loss_scale": 4096.0, "optim.fused": fused}
    smooth, _ = ranks(2).run(overflow, 2, {**settings, "precision.loss_scale": 1024.0}, 0)
    first, last = ranks(2).run(overflow, 2, settings, 2)
    for seen in (first, last):
        assert seen["scales"] == [4096.0, 1024.0, 1024.0]
        assert seen["applied"] == [(True, 2), (True, 0)]
    for one, other, quiet in zip(first["params"], last["params"], smooth["params"], strict=True):
        assert is_same(one, other)
        # As if nothing had overflowed.
        assert is_same(one, quiet)
    # The true gradient of this weight is below 1.
    assert first["scaled_grads"][0] > 1


def test_fp16_skips_a_step_that_no_scale_makes_finite(ranks: Callable[[int], Ranks]) -> None:
    """4096 is 12 doublings above one, below which the scale is not to blame; then it is back."""
    settings = {**FP16, "precision.loss_scale": 4096.0}
    for seen in ranks(2).run(overflow, 2, settings, 13):
        before, skipped, after = seen["params"]
        assert is_same(before, skipped)
        assert not is_same(skipped, after)
        assert seen["scales"] == [4096.0, 4096.0, 4096.0]
        assert seen["applied"] == [(False, 0), (True, 0)]


def infinite_loss(world: int, settings: Settings) -> dict[str, Any]:
    """The loss of the last rank is infinite, and its gradient is not."""
    session = start(world, settings)
    batches = build_loader(session).step_batches(0)
    sum_loss = session.model.sum_loss

    def spoilt(*batch: Tensor) -> Tensor:
        return sum_loss(*batch) + (float("inf") if dist.get_rank() == world - 1 else 0.0)

    session.model.sum_loss = spoilt
    before = whole_params(session.model)
    stepper = Stepper(session.model, session.optimizer, session.plan, session.mesh)
    result = stepper.run(batches, 1e-3)
    changed = not is_same(before, whole_params(session.model))
    return {"norm": result.grad_norm, "applied": result.applied, "changed": changed}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("param", ["fp32", "bf16", "fp16"])
def test_an_infinite_loss_is_skipped_in_every_precision(
    ranks: Callable[[int], Ranks], param: str, fused: bool
) -> None:
    settings = {**SMALL, "precision.param": param, "optim.fused": fused}
    for seen in ranks(2).run(infinite_loss, 2, settings):
        assert np.isfinite(seen["norm"])
        assert not seen["applied"] and not seen["changed"]
