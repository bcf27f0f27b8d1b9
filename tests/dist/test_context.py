"""Sequences that ranks divide train as whole ones do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from family_runs import HEADER, Compared, compare
from rank_pool import Ranks
from refused_families import NOT_BUILT, NOT_TRAINED
from tiny_families import FAMILIES, tiny_config
from tiny_runs import (
    Settings,
    Tally,
    Trained,
    assert_close,
    train,
    train_documents_apart,
    train_plainly,
)

from shardwise.model.counted_sizes import count_on_meta
from shardwise.model.split_trial import why_not_split

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
LLAMA: Settings = {"model.name": "tiny-llama", "data.seq_len": 32}
FSDP: Settings = {"shard.strategy": "full_shard"}
HSDP: Settings = {"shard.strategy": "hybrid_shard", "mesh.replicate": 2}
# The ranks that divide sequences, all ranks, and the rest of a mesh and of a run.
WAYS: dict[str, tuple[int, int, Settings]] = {
    "CP": (2, 2, {}),
    "CP over 4": (4, 4, {"train.micro_batch": 4}),
    "FSDP x CP": (2, 4, {**FSDP, "memory.checkpoint_activations": "selective"}),
    "HSDP x CP": (2, 4, {**HSDP, "memory.checkpoint_activations": "full"}),
}
LONG_WAYS: dict[str, tuple[int, int, Settings]] = {
    "CP over 8": (8, 8, {}),
    "FSDP x CP over 8": (2, 8, FSDP),
    "FSDP x CP 4": (4, 8, {**FSDP, "model.attention": "flash_attention_4"}),
    "HSDP x CP over 8": (2, 8, {**HSDP, "train.micro_batch": 2}),
    "compiled": (2, 2, {"memory.compile": True, "model.attention": "flash_attention_4"}),
    "compiled sdpa": (2, 2, {"memory.compile": True, "memory.checkpoint_activations": "selective"}),
    "TP x CP": (2, 4, {"mesh.tensor": 2}),
    "FSDP x TP x CP": (2, 8, {**FSDP, "mesh.tensor": 2}),
    "ZeRO-2": (2, 4, {"shard.strategy": "shard_grad_op", "memory.loss": "full"}),
}
# A window, windows in every other block, sinks, keys that are longer than values, routers' losses.
SAMPLE = ("gemma3_text", "gpt_oss", "deepseek_v3", "mixtral")
NAMED = (*SAMPLE, "llama", "qwen3", "mistral", "qwen3_moe")
# Chunks of 16 tokens, and windows of 8: only the ends of chunks travel.
FAMILY: Settings = {"data.seq_len": 64, "mesh.context": 2, "shard.strategy": "auto"}


@pytest.fixture(scope="module")
def whole(ranks: Pools) -> Trained:
    found: Trained = ranks(1).run(train_plainly, LLAMA)[0]
    return found


@pytest.mark.parametrize("way", WAYS)
def test_divided_sequences_train_as_whole_ones(
    ranks: Pools, whole: Trained, tally: Tally, way: str
) -> None:
    _check(ranks, whole, tally, *WAYS[way])


@pytest.mark.long
@pytest.mark.parametrize("way", LONG_WAYS)
def test_all_ways_train_as_whole_ones(ranks: Pools, whole: Trained, tally: Tally, way: str) -> None:
    _check(ranks, whole, tally, *LONG_WAYS[way])


def _check(
    ranks: Pools, whole: Trained, tally: Tally, context: int, world: int, more: Settings
) -> None:
    run = ranks(world).run(train, world, {**LLAMA, "mesh.context": context, **more})[0]
    assert_close(run, whole, tally)


@pytest.mark.parametrize(
    "attention", ["sdpa", pytest.param("flash_attention_4", marks=pytest.mark.long)]
)
def test_documents_train_as_if_each_were_alone(
    ranks: Pools, tmp_path_factory: pytest.TempPathFactory, tally: Tally, attention: str
) -> None:
    home = tmp_path_factory.mktemp("documents")
    texts = [f"{n} of {n * n}"[: 1 + n % 8] for n in range(400)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (home / "records.jsonl").write_text(lines)
    settings = {
        **{"runs_dir": str(home), "data.source": "jsonl", "data.path": str(home / "records.jsonl")},
        **{"data.document_mask": True, "data.seq_len": 16, "model.name": "tiny-llama"},
    }
    apart = ranks(1).run(train_documents_apart, settings)[0]
    divided = {**settings, "mesh.context": 2, "model.attention": attention, **FSDP}
    assert_close(ranks(4).run(train, 4, divided)[0], apart, tally)


@pytest.mark.parametrize("family", SAMPLE)
def test_a_family_trains_as_plain_pytorch_trains_it(
    family: str, ranks: Pools, tmp_path: Path
) -> None:
    _assert_equal(compare(ranks(2), family, tmp_path, FAMILY))


@pytest.mark.long
@pytest.mark.parametrize("family", NAMED)
@pytest.mark.parametrize("mesh", [FSDP, HSDP], ids=["FSDP", "HSDP"])
def test_families_on_other_meshes(
    family: str, mesh: Settings, ranks: Pools, tmp_path: Path
) -> None:
    _assert_equal(compare(ranks(4), family, tmp_path, {**FAMILY, **mesh}))


@pytest.mark.long
def test_every_family_that_is_not_refused(
    ranks: Pools, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The trial on meta lets no family through whose losses would differ."""
    wrong: dict[str, str] = {}
    equal = 0
    for family in FAMILIES:
        if family in NOT_BUILT or family in NOT_TRAINED or _is_refused(family):
            continue
        try:
            found = compare(ranks(2), family, tmp_path_factory.mktemp(family), FAMILY)
        except AssertionError as error:
            # A plan refuses some that the trial does not, such as tables of fewer positions.
            if "UserError" not in str(error):
                wrong[family] = str(error)[-200:]
            continue
        equal += 1
        if found.loss > 1e-5:
            wrong[family] = found.row()
    print(f"\n{equal} families divide their sequences; wrong: {wrong}")
    assert not wrong
    assert equal >= 90


def _is_refused(family: str) -> bool:
    config = tiny_config(family).to_dict()
    first, *_ = count_on_meta(family, config).attentions
    return why_not_split(first, config) is not None


def _assert_equal(found: Compared) -> None:
    assert found.is_equal, f"\n{HEADER}\n{found.row()}"
