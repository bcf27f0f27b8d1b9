"""`--with`: what its words say is what rows of the table of published runs say."""

from __future__ import annotations

import csv
import re

import pytest

from commands import run_installed
from shardwise.compare.profiles import stack_of
from shardwise.compare.published_rows import PUBLISHED, PublishedRun, read_table
from shardwise.compare.said_words import fields_of
from shardwise.compare.stated import HABITS, StatedRun, read_stated
from shardwise.errors import UserError
from shardwise.facts.cluster import parse_cluster
from shardwise.facts.gpus import match_gpu

_BY_COLUMN = {
    "compile": {"yes": "compile", "no": "no-compile"},
    "strategy": {
        "FULL_SHARD": "zero3",
        "ZERO3": "zero3",
        "ZERO1": "zero1",
        "NO_SHARD": "ddp",
        "DDP": "ddp",
        "SHARD_GRAD_OP": "zero2",
    },
}
_BY_NOTE = {
    "reduce bf16": "bf16-reduce",
    "fused norm": "fused-norms",
    "async[ -]?tp": "async-tp",
    "deepep|hybridep": "deepep",
    "cuda graphs": "cuda-graphs",
    "rowwise": "rowwise",
    "type=rl": "rl",
}
_FLASH = {1: "flash1", 2: "flash2", 3: "flash3"}


def rows() -> list[dict[str, str]]:
    with PUBLISHED.open(newline="", encoding="utf-8", errors="replace") as file:
        return [{k: (v or "").strip() for k, v in row.items()} for row in csv.DictReader(file)]


def words_of(run: PublishedRun, row: dict[str, str]) -> str:
    """What a user would say of a row."""
    notes, method = row["notes"].lower(), row["method"].lower()
    found = [kinds.get(row[column], "") for column, kinds in _BY_COLUMN.items()]
    found += [word for note, word in _BY_NOTE.items() if re.search(note, notes)]
    found += [f"{n}={m[1]}" for n in ("vp", "loss chunk") if (m := re.search(f"{n} (\\d+)", notes))]
    found.append(_FLASH[run.traits.flash])
    found.append(next((word for word in ("qlora", "lora") if word in method), ""))
    found.append("offload" if "params" in row["cpu_offload"] else "")
    found.append("bf16-states" if run.traits.light_states else "")
    found.append("fsdp1" if run.traits.adapter_units else "")
    found.append(card_of(run))
    if row["dp_replicate"] not in ("", "1"):
        found.append(f"replicas={row['dp_replicate']}")
    return ",".join(filter(None, found)).replace("loss chunk", "loss-chunk")


def card_of(run: PublishedRun) -> str:
    """An H100 with 96 GB is one of 500 W, with slower memory."""
    named = match_gpu(run.gpu.name)
    assert named is not None
    if run.gpu.memory_bandwidth != named.memory_bandwidth:
        return "memory=96"
    return "power-limited" if run.gpu.peak_flops != named.peak_flops else ""


def stated(run: PublishedRun, row: dict[str, str]) -> StatedRun:
    decided, stack = run.decided, stack_of(run.source)
    habit = next((n for n, h in HABITS.items() if stack and h.source == stack.name), "fsdp")
    precision = row["precision"].lower()
    devices, per_node = (int(float(row[n] or 8)) for n in ("n_gpus", "gpus_per_node"))
    shape = f"{max(1, devices // per_node)}x{min(devices, per_node)}x{run.gpu.name}"
    return StatedRun(
        model=run.model,
        cluster=parse_cluster(shape),
        tokens_per_s=run.published,
        stack=habit,
        seq=decided.seq_len,
        tensor=decided.tensor,
        pipeline=decided.pipeline,
        context=decided.context,
        expert=decided.expert,
        micro_batch=decided.micro_batch,
        global_batch=(
            decided.micro_batch * decided.accumulation * decided.replicate * decided.shard
        ),
        precision=next((fmt for fmt in ("fp8", "fp16") if fmt in precision), "bf16"),
        recompute=str(decided.checkpoint_activations),
        network=row["interconnect"] or None,
        set_up=fields_of(words_of(run, row)),
    )


def test_rows_that_are_said_in_words_are_asked_about_as_the_table_asks() -> None:
    table, by_line = read_table(PUBLISHED), dict(enumerate(rows(), start=2))
    other = []
    for run in table.runs:
        found, _ = read_stated(stated(run, by_line[run.line]))
        parts = ("decided", "traits", "rates", "fabric")
        if differ := [part for part in parts if getattr(run, part) != getattr(found, part)]:
            other.append((run.label, differ))
    # What words cannot say: ZeRO-3 of its first year, a share of blocks, a library's own schedule.
    assert len(table.runs) > 230 and len(other) <= 0.1 * len(table.runs), other


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (None, {}),
        ("", {}),
        ("Compile, flash3", {"compile": "yes", "attention_impl": "flash_attention_3"}),
        ("vp=2,async-tp", {"notes": "vp 2; async tp"}),
        ("loss-chunk=2048,replicas=4", {"dp_replicate": "4", "notes": "loss chunk 2048"}),
    ],
)
def test_words_are_fields_of_a_row(text: str | None, fields: dict[str, str]) -> None:
    assert fields_of(text) == fields


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("flash4", "did you mean flash"),
        ("sorcery", "the known words are"),
        ("flash2,cudnn", "--with has both flash2 and cudnn"),
        ("vp=two", "a whole number"),
        ("vp", "a whole number"),
    ],
)
def test_words_that_say_nothing_are_errors(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        fields_of(text)
    assert said in str(caught.value)


def test_the_command_takes_them_and_assumes_less() -> None:
    words = ("compare", "--model", "llama-3.1-8b", "--cluster", "8xH100", "--tokens-per-s", "7000")
    plain = run_installed(*words, "--json").stdout
    assert "no fused kernels, FlashAttention 2 or as fast, as fsdp usually runs" in plain
    said = run_installed(*words, "--with", "compile,flash3,zero2", "--json").stdout
    assert "usually runs" not in said
    for text, why in (
        ("replicas=3", "does not divide the 8 ranks"),
        ("vp=2", "there is one stage"),
    ):
        assert why in run_installed(*words, "--with", text, expect=2).stderr
    alone = run_installed("compare", "--published", "--with", "compile", expect=2)
    assert "and nothing else" in alone.stderr
    refused = run_installed("compare", "x.yaml", *words[5:], "--with", "compile", expect=2)
    assert "--with would be ignored" in refused.stderr
