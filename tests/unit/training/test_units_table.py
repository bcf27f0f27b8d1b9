from __future__ import annotations

from shardwise.config.schema import ClusterConfig, ModelConfig, PrecisionConfig, RunConfig
from shardwise.launch.prepare import choose_plan
from shardwise.model.blocks import Unit, UnitMap
from shardwise.training.model_lines import unit_table


def table(units: UnitMap, dtype: str = "fp32") -> list[str]:
    config = RunConfig(
        model=ModelConfig(name="tiny-llama"),
        cluster=ClusterConfig(name="2xCPU"),
        precision=PrecisionConfig(param=dtype),  # type: ignore[arg-type]
    )
    return unit_table(units, choose_plan(config, {}))


def block(index: int, size: int = 2048) -> Unit:
    name = f"model.layers.{index}"
    return Unit(name, (name,), size, True)


EMBED = Unit("model.embed_tokens", ("model.embed_tokens",), 1024, False)
TAIL = Unit("[norm, lm_head]", ("model.norm", "lm_head"), 1536, False)


def test_equal_neighbours_share_a_line() -> None:
    units = UnitMap((EMBED, block(0), block(1), block(2), TAIL), 0, "the model's own lists")
    assert table(units) == [
        "5 units, found by the model's own lists:",
        "  model.embed_tokens            1.0k  gathers 4.0 KiB",
        "  model.layers.0 … 2 (3 x)      2.0k  gathers 8.0 KiB",
        "  [norm, lm_head]               1.5k  gathers 6.0 KiB",
    ]


def test_blocks_of_other_sizes_get_lines_of_their_own() -> None:
    units = UnitMap((block(0), block(1, 4096), block(2, 4096)), 0, "x")
    assert [line.split("  ")[1] for line in table(units)[1:]] == [
        "model.layers.0",
        "model.layers.1 … 2 (2 x)",
    ]


def test_what_is_left_to_the_root_is_shown() -> None:
    lines = table(UnitMap((block(0), block(1)), 100, "x"))
    assert lines[-1].split() == ["the", "root", "100", "gathers", "400", "B"]


def test_gathered_bytes_follow_the_format() -> None:
    lines = table(UnitMap((block(0), block(1)), 0, "x"), "bf16")
    assert lines[1].endswith("gathers 4.0 KiB")
