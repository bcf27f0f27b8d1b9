"""The plan of a run with adapters, beside the bytes of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardwise.parallel import saved
from shardwise.plan.planned import Plan
from shardwise.tunnel.emulated_links import Links
from shardwise.tunnel.fake import run_fake

# Large enough for its blocks to be counted. Fake tensors run without the compiler and our kernels.
MODEL = (
    "model={name: llama-3.2-1b, overrides: {num_hidden_layers: 4}}",
    *("adapter={method: lora, rank: 16}", "data.seq_len=2048"),
    *("memory.compile=false", "train.kernels=torch", "shard.gather_in_place=false"),
)


# What such plans ask for, and the compiled way that flops are counted in. All ten take 10 seconds.
WAYS = ((False, False, "none"), (False, False, "selective"), (False, True, "none"))


@pytest.fixture(scope="module", autouse=True)
def counted_in_few_ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """In a cache of its own, because what is counted is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved, "_WAYS", WAYS)
        patch.setenv("SHARDWISE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ("cluster.name=8xH100", "memory.checkpoint_activations=selective"),
            marks=pytest.mark.long,
        ),
        ("cluster.name=1xH100", "shard.strategy=no_shard", "memory.checkpoint_activations=none"),
    ],
)
def test_planned_bytes_are_those_of_tensors(
    plan_of: Callable[..., Plan], words: tuple[str, ...]
) -> None:
    plan = plan_of(*MODEL, *words)
    found = run_fake(plan, Links.of(plan.cluster.fabric)).memory
    memory = plan.memory
    assert found.classes["params"] == pytest.approx(memory.params, rel=0.001)
    assert found.largest["optimizer"] == pytest.approx(memory.optimizer, rel=0.001)
    # What the last norm keeps is of the loss in the plan, and an activation in the tunnel.
    kept = found.classes["activations"] + found.classes["loss"]
    assert kept == pytest.approx(memory.activations + memory.loss, rel=0.05)
    assert memory.allocated == pytest.approx(found.allocated_bytes, rel=0.05)
    # Only adapters have gradients.
    assert found.largest["grads"] == pytest.approx(memory.optimizer / 2, rel=0.001)


def test_gradients_of_adapters_alone_are_reduced(tunnel: Callable[..., dict[str, Any]]) -> None:
    words = ("--cluster", "4xH100", "--device", "fake", "adapter={method: lora, rank: 4}")
    found = tunnel(*words)
    named = [(item["kind"], item["unit"], item["num_bytes"]) for item in found["sequence"]]
    reduced = [item[1:] for item in named if item[0] == "reduce_scatter"]
    # In fp32, with the rows of B padded to a multiple of the ranks.
    pairs = [(32, 32), (16, 32), (16, 32), (32, 32), (68, 32), (68, 32), (32, 66)]
    each = 4 * sum(4 * inner + 4 * width for width, inner in pairs)
    assert reduced == [("model.layers.1", each), ("model.layers.0", each)]
    gathered = [unit for kind, unit, _ in named if kind == "all_gather" and unit]
    units = ["model.embed_tokens", "model.layers.0", "model.layers.1", "[norm, lm_head]"]
    assert gathered[:4] == units
