"""What surrounds the steps of a run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from transformers.masking_utils import create_causal_mask

from shardwise.config.load import load_config
from shardwise.kernels import own
from shardwise.launch.prepare import choose_plan
from shardwise.training import surroundings
from shardwise.training.surroundings import fast_attention, host_keeps_up, prepare_matmuls


def mask() -> torch.Tensor | None:
    """The mask that a model asks for, of positions whose values nobody can read."""
    config = AutoConfig.for_model(
        "llama", hidden_size=8, num_attention_heads=1, attn_implementation="sdpa"
    )
    with torch.device("meta"):
        states, positions = torch.empty(2, 4, 8), torch.arange(4)[None]
    made: torch.Tensor | None = create_causal_mask(
        config, states, attention_mask=None, past_key_values=None, position_ids=positions
    )
    return made


def test_the_host_reads_no_positions_to_find_packed_sequences() -> None:
    with fast_attention(torch.device("cpu")):
        assert mask() is None
    with pytest.raises(RuntimeError, match="meta"):
        mask()


WORKSPACE, APART = "CUBLAS_WORKSPACE_CONFIG", "TORCH_CUBLASLT_UNIFIED_WORKSPACE"


def test_matmuls_keep_it_where_the_host_would_be_late(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: llama-3.1-8b\ncluster: 8xH100\n")
    plan = choose_plan(load_config(file, ()), {})
    assert plan.forecast is not None and host_keeps_up(plan)
    assert not host_keeps_up(replace(plan, forecast=replace(plan.forecast, step_s=0.1)))
    # A step that is long because the GPU waits for the host has no time to spare.
    late = {**plan.forecast.terms, "launch": plan.forecast.step_s - 0.1}
    assert not host_keeps_up(replace(plan, forecast=replace(plan.forecast, terms=late)))


@pytest.mark.parametrize(
    ("words", "hopper", "given", "expected"),
    [
        ((), True, None, (":0:0", "0")),
        ((), True, ":16:8", (":16:8", "0")),
        ((), False, None, (None, None)),
        (("train.kernels=torch",), True, None, (None, None)),
        (("train.deterministic=true",), True, None, (":4096:8", None)),
    ],
)
def test_matmuls_have_no_workspace_where_that_was_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    hopper: bool,
    given: str | None,
    expected: tuple[str | None, str | None],
) -> None:
    monkeypatch.setattr(own, "_has_triton", lambda: True)
    monkeypatch.setattr(surroundings, "on_hopper", lambda: hopper)
    environ = {} if given is None else {WORKSPACE: given}
    file = tmp_path / "run.yaml"
    file.write_text("model: llama-3.1-8b\ncluster: 8xH100\n")
    plan = choose_plan(load_config(file, words), {})
    monkeypatch.setattr(os, "environ", environ)
    prepare_matmuls(plan)
    assert (environ.get(WORKSPACE), environ.get(APART)) == expected
