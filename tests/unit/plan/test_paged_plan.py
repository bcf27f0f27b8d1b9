"""Adam's moments in host memory, in a plan: what stays on the GPU, and what copies cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise.errors import UserError
from shardwise.plan.planned import Plan
from shardwise.units import GIB

WORDS = ("model=llama-3.1-8b", "data=synthetic", "cluster=1xH200", "train.micro_batch=1")


def test_two_pages_stay_on_the_device(plan_of: Callable[..., Plan]) -> None:
    plain, paged = plan_of(*WORDS), plan_of(*WORDS, "memory.offload_optimizer=true")
    assert plain.memory.optimizer == 8 * plain.model.total_params
    assert paged.memory.optimizer == 1 * GIB
    assert "host memory needed on a node: at least 59.8 GiB" in (
        paged.choices["offload_optimizer"].why
    )
    assert plain.forecast is not None and paged.forecast is not None
    # 64 GB each way at 50 GB/s, whatever the batch.
    assert paged.forecast.terms["optimizer"] == pytest.approx(8 * 8.03e9 / 50e9, rel=1e-3)
    assert Plan.from_dict(paged.to_dict()) == paged


def test_a_few_parameters_take_no_whole_pages(plan_of: Callable[..., Plan]) -> None:
    paged = plan_of("model=gpt2", "data.seq_len=1024", *WORDS[1:], "memory.offload_optimizer=true")
    assert paged.memory.optimizer == 8 * paged.model.total_params < 1 * GIB


@pytest.mark.parametrize("other", ["memory.offload=cpu", "optim.state=bf16", "optim.state=int8"])
def test_moments_are_in_one_place_and_format(plan_of: Callable[..., Plan], other: str) -> None:
    with pytest.raises(UserError, match=r"memory\.offload_optimizer") as failure:
        plan_of(*WORDS, "memory.offload_optimizer=true", other)
    assert "leave memory.offload_optimizer out" in str(failure.value.fix)
