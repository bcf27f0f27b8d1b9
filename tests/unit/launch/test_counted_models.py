"""Models that no formula knows: counted once, kept, and planned from what was counted."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shardwise.config.plain import config_from_dict
from shardwise.facts.block_kind import way_of
from shardwise.facts.counted import kept_spec, shipped_spec
from shardwise.facts.models import ModelSource, ModelSpec, read_model_config
from shardwise.facts.other_presets import OTHER_PRESETS
from shardwise.launch import patience, prepare
from shardwise.launch.prepare import choose_plan, count_model, measure_model
from shardwise.model.counted_sizes import count_on_meta
from shardwise.parallel import saved

SMALL: dict[str, Any] = {
    **OTHER_PRESETS["olmo-3-7b"],
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "eos_token_id": 1, "pad_token_id": 1},
}


# All ten ways take a second or two each. These are the ones that plans of these tests have.
WAYS = tuple(way for way in saved._WAYS if way[0] or way[2] == "none")


def write_model(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDWISE_CACHE", str(home / "cache"))
    monkeypatch.setattr(prepare, "COUNTED_PARAMS", 0)
    monkeypatch.setattr(saved, "_WAYS", WAYS)
    (home / "model").mkdir(exist_ok=True)
    (home / "model" / "config.json").write_text(json.dumps(SMALL))
    return home / "model"


@pytest.fixture
def model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that nothing is known of yet."""
    return write_model(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelSpec]:
    """A home with a model that was counted, and what was found."""
    home = tmp_path_factory.mktemp("counted")
    with pytest.MonkeyPatch.context() as patch:
        return home, measured(write_model(home, patch))[0]


@pytest.fixture
def counted_dir(counted: tuple[Path, ModelSpec], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model that was counted."""
    return write_model(counted[0], monkeypatch)


def config_of(model: Path | str) -> Any:
    return config_from_dict(
        {
            **{"model": {"name": str(model)}, "data": {"source": "synthetic", "seq_len": 4096}},
            **{"cluster": {"name": "8xH200"}, "train": {"micro_batch": 1, "global_batch": 8}},
            **{"memory": {"checkpoint_activations": "none"}},
        }
    )


def measured(model: Path) -> tuple[ModelSpec, ModelSource]:
    config = config_of(model)
    source = read_model_config(config.model)
    return measure_model(config, source), source


@pytest.mark.parametrize("name", OTHER_PRESETS)
def test_presets_come_counted(name: str) -> None:
    spec = shipped_spec(name, OTHER_PRESETS[name])
    assert spec is not None and spec.name == name
    assert sum(kind.count for kind in spec.kinds) == spec.num_layers


def test_what_was_shipped_is_what_the_code_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of a preset is counted again. Other releases may save a little more or less."""
    shipped = shipped_spec("smollm3-3b", OTHER_PRESETS["smollm3-3b"])
    assert shipped is not None
    ways = {way_of(own_kernels=o, compiled=c, recompute=r): (o, c, r) for o, c, r in saved._WAYS}
    assert set(ways) == set(shipped.kinds[0].saved)
    sample = ("eager", "compiled", "compiled own selective", "compiled own full")
    monkeypatch.setattr(saved, "_WAYS", tuple(ways[way] for way in sample))
    again = count_model("smollm3-3b", {**OTHER_PRESETS["smollm3-3b"], "num_hidden_layers": 4})
    for now, then in zip(again.kinds, shipped.kinds, strict=True):
        for way in sample:
            expected = pytest.approx(then.saved[way].bytes(2, 4096), rel=0.05)
            assert now.saved[way].bytes(2, 4096) == expected, way
    sizes = count_on_meta("smollm3-3b", OTHER_PRESETS["smollm3-3b"])
    assert (sizes.total_params, sizes.block_params, sizes.matmul_params_per_token) == (
        *(shipped.total_params, shipped.block_params, shipped.matmul_params_per_token),
    )


def test_a_model_is_counted_once(
    counted: tuple[Path, ModelSpec], counted_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = counted[1]
    assert sum(kind.count for kind in first.kinds) == first.num_layers == 2

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was counted again")

    monkeypatch.setattr(prepare, "count_model", fail)
    again, source = measured(counted_dir)
    assert again == first == kept_spec(first.name, source.hf_config)


class Terminal(StringIO):
    """A stream that people watch."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, StringIO])
def test_counting_is_one_line_on_a_terminal_and_none_in_a_pipe(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, stream: type[StringIO]
) -> None:
    def count(*_: Any, **__: Any) -> tuple[()]:
        time.sleep(0.1)
        return ()

    monkeypatch.setattr(saved, "count_saved", count)
    monkeypatch.setattr(patience, "_EVERY_S", 0.01)
    monkeypatch.setattr("sys.stderr", stream())
    for _ in range(2):  # the second plan counts nothing
        measured(model_dir)
    assert isinstance(sys.stderr, StringIO)
    text = sys.stderr.getvalue()
    if stream is StringIO:
        assert text == ""
        return
    assert text.count("\n") == 1 and text.endswith(" s\n")
    writes = text.split("\r")[1:]
    assert len(writes) > 3
    words = f"counting what the blocks of {model_dir} save and compute, once: 0 s"
    assert {write.rstrip() for write in writes} == {words}


@pytest.mark.long
def test_eager_attention_has_its_scores_in_memory(
    counted_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the plan adds for them is what a block saves more when it is counted with them."""
    monkeypatch.setattr(saved, "_WAYS", WAYS)
    (scored,) = saved.count_saved(SMALL, attentions=("eager",))

    def activations(attention: str, **changes: Any) -> int:
        config = config_of(counted_dir)
        model = replace(config.model, attention=attention)
        memory = replace(config.memory, **changes)
        return choose_plan(replace(config, memory=memory, model=model), {}).memory.activations

    for mode, compiled in product(("none", "selective", "full"), (True, False)):
        way = way_of(compiled=compiled, own_kernels=True, recompute=mode)
        scores = 0 if mode == "full" else 4096 * scored.saved[way].scores
        more, less = (
            activations(attention, checkpoint_activations=mode, compile=compiled)
            for attention in ("eager", "sdpa")
        )
        assert more - less == pytest.approx(2 * 4096 * scores, rel=1e-3), (mode, compiled)


def test_a_damaged_record_is_counted_anew(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What blocks save takes seconds to count, and is not what this is about.
    monkeypatch.setattr(prepare, "COUNTED_PARAMS", 10**9)
    first, _ = measured(model_dir)
    (kept,) = (tmp_path / "cache" / "models").iterdir()
    for text in ("", "{}", "[]", '{"kinds": 3}'):
        kept.write_text(text)
        assert measured(model_dir)[0] == first


def test_memory_is_that_of_the_counted_blocks(counted_dir: Path) -> None:
    plan = choose_plan(config_of(counted_dir), {})
    (kind,) = plan.model.kinds
    (way,) = [way for way in kind.saved if way == "compiled own"]
    assert plan.decided.compile and plan.decided.own_kernels
    assert plan.memory.activations == int(2 * 4096 * kind.saved[way].bytes(2, 4096))
    assert not [warning for warning in plan.warnings if "not be counted" in warning]


def test_a_model_that_cannot_be_counted_is_planned_with_a_warning(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise saved.CannotCount("its code reads values")

    monkeypatch.setattr(saved, "count_saved", refuse)
    plan = choose_plan(config_of(model_dir), {})
    (warning,) = [warning for warning in plan.warnings if "could not be counted" in warning]
    assert "its code reads values" in warning
    assert plan.memory.activations > 0
