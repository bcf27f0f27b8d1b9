"""A first run.yaml from five answers: it plans, and every line of it says what it is for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.config.load import load_config
from shardwise.config.schema import ModelConfig
from shardwise.errors import ExitCode, UserError
from shardwise.facts.cluster import resolve_cluster
from shardwise.facts.config_source import read_model_config
from shardwise.facts.positions import rotary_limit
from shardwise.facts.tokenizer_files import has_own_tokenizer
from shardwise.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from shardwise.plan.planned import Plan

METHODS = ("full", "lora", "qlora")
_METHOD_WORDS = {
    "full": "all weights",
    "lora": "adapters (LoRA)",
    "qlora": "adapters over four bits (QLoRA)",
}
_USUAL_SEQ = 4096
# What planning says of a family whose layers are of its own classes, such as GPT-2.
_TAKES_NONE = "adapter.targets=all-linear matches no layer"
_PLAIN = re.compile(r"[A-Za-z0-9_./~-]+")
# Keys of a row that make it a conversation or a comparison.
_TURNS = {"messages", "conversations", "instruction", "completion"}
_WIDENINGS = (1, 2, 4, 8, 16, 32, 64)
_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a user has said."""

    model: str
    cluster: str
    method: str
    data: str
    tokens: float

    @property
    def adapts(self) -> bool:
        """Whether the model's own weights are frozen."""
        return self.method != "full"


@dataclass(frozen=True, slots=True)
class Starter:
    """A file and its plan."""

    text: str
    plan: Plan
    steps: int
    notes: tuple[str, ...]
    """What is otherwise than it was answered, and what `train` will still ask for."""


def make_starter(answers: Answers) -> Starter:
    """The file for these answers, on more devices where theirs are too few."""
    tried = _cluster_names(answers.cluster)
    for name in tried:
        fitting = replace(answers, cluster=name)
        try:
            plan = _plan_of(fitting, 1000)
        except UserError as error:
            if answers.adapts and _TAKES_NONE in error.what:
                return _with_note(
                    make_starter(replace(answers, method="full")),
                    f"{answers.model} takes no adapters, so all its weights are trained.",
                )
            if error.code != ExitCode.DOES_NOT_FIT or name == tried[-1]:
                raise
            continue
        steps = max(1, round(answers.tokens / plan.tokens_per_step))
        plan = _plan_of(fitting, steps)
        notes = tuple(_notes(answers, fitting, plan))
        text = "\n".join(_file_lines(fitting, plan, steps, notes)) + "\n"
        return Starter(text, plan, steps, notes)
    raise AssertionError(tried)


def _with_note(starter: Starter, note: str) -> Starter:
    return replace(starter, text=f"# Note: {note}\n{starter.text}", notes=(note, *starter.notes))


def validate_model(name: str) -> str:
    """The name, where a model has it."""
    read_model_config(ModelConfig(name=name))
    return name


def validate_cluster(name: str) -> str:
    """The name, where it is a cluster."""
    resolve_cluster(load_config(None, [f"cluster.name={name}"]).cluster)
    return name


def validate_data(words: str) -> str:
    """What is named, where it is data."""
    from shardwise.data.paths import find_files

    data = load_config(None, [f"data={_as_yaml(words)}"]).data
    if data.source in ("text", "jsonl", "parquet"):
        find_files(data)
    return words


def validate_method(word: str) -> str:
    """The word, where it is a method."""
    if word not in METHODS:
        raise UserError(
            f"{word!r} is no way to train",
            fix="write --method full, --method lora or --method qlora",
        )
    return word


def _plan_of(answers: Answers, steps: int) -> Plan:
    from shardwise.launch.prepare import choose_plan

    return choose_plan(load_config(None, list(_settings(answers, steps))))


def _settings(answers: Answers, steps: int) -> Iterator[str]:
    """What the file says, as settings: its lines are made of these."""
    seq_len = _seq_len(answers)
    yield f"model.name={answers.model}"
    yield f"data={_as_yaml(answers.data)}"
    yield f"data.seq_len={seq_len}"
    if _holds_turns(answers.data):
        yield "data.format=auto"
    if answers.data != "synthetic":
        yield "data.eval_fraction=0.01"
    yield f"cluster.name={answers.cluster}"
    if answers.adapts:
        yield "adapter.method=lora"
    if answers.method == "qlora":
        yield "adapter.base=nf4"
    yield f"optim.lr={'2e-4' if answers.adapts else '3e-4'}"
    yield f"optim.warmup_steps={min(2000, steps // 20)}"
    yield f"train.steps={steps}"
    yield f"checkpoint.every={max(1, min(500, steps // 4))}"


_COMMENTS = {
    "model.name": "a preset (shardwise config ls), a hub id, or a directory with config.json",
    "data.source": "stdlib is Python's own source text, synthetic is random tokens",
    "data.path": "a file, a directory, a glob, or a list of them",
    "data.format": "conversations: the loss is on the assistant's turns alone",
    "data.seq_len": "tokens of a sequence",
    "data.eval_fraction": "of the documents, held out for the evaluation loss",
    "cluster.name": "NODESxGPUSxKIND, or local: what this machine has",
    "adapter.method": "the model's own weights are frozen",
    "adapter.base": "frozen weights are kept in four bits",
    "optim.lr": "the peak; it falls to a tenth by a cosine",
    "optim.warmup_steps": "over which the rate rises to the peak",
    "checkpoint.every": "steps between checkpoints; the same command goes on from the newest",
}


def _file_lines(answers: Answers, plan: Plan, steps: int, notes: tuple[str, ...]) -> Iterator[str]:
    yield f"# {answers.model}, {_METHOD_WORDS[answers.method]}, on {answers.cluster}."
    yield "# Any line may be changed. `shardwise config schema SECTION` says what else there is."
    yield from (f"# {line}" for line in plan_lines(plan))
    yield from (f"# Note: {note}" for note in notes)
    section = ""
    for name, value in _written(answers, steps):
        at, _, key = name.partition(".")
        if at != section:
            section = at
            yield f"{at}:"
        comment = _COMMENTS.get(name, "")
        if name == "train.steps":
            total = format_count(steps * plan.tokens_per_step)
            comment = f"{total} tokens, {format_count(plan.tokens_per_step)} in each step"
        yield f"  {key}: {_as_yaml(value)}{f'  # {comment}' if comment else ''}"


def _written(answers: Answers, steps: int) -> Iterator[tuple[str, str]]:
    for setting in _settings(answers, steps):
        name, _, value = setting.partition("=")
        if name != "data":
            yield name, value
            continue
        data = load_config(None, [setting]).data
        yield "data.source", data.source
        if isinstance(data.path, str):
            yield "data.path", data.path


def plan_lines(plan: Plan) -> Iterator[str]:
    """The plan in two lines of 80 columns."""
    held, limit = format_bytes(plan.memory.total), format_bytes(plan.cluster.memory_bytes)
    forecast, steps = plan.forecast, plan.config.train.steps
    yield f"By its plan: {plan.decided.strategy}, {held} of {limit} on each device,"
    if forecast is None:
        yield "at a speed that nobody knows: `shardwise plan --calibrate` measures it."
        return
    rate = forecast.usd_per_billion_tokens
    cost = "" if rate is None else f", USD {rate * steps * plan.tokens_per_step / 1e9:,.0f}"
    time = format_duration(steps * forecast.step_s)
    yield f"{format_count(forecast.tokens_per_s)} tokens/s on each, {time} in all{cost}."


def _notes(said: Answers, fitting: Answers, plan: Plan) -> Iterator[str]:
    if fitting.cluster != said.cluster:
        yield f"{said.cluster} is too small for this; {fitting.cluster} is not."
    if plan.decided.tokenizer == "byte" and plan.model.vocab_size > 1000:
        yield "this model comes without a tokenizer; name one in data.tokenizer to train."


def _seq_len(answers: Answers) -> int:
    hf_config = read_model_config(ModelConfig(name=answers.model)).hf_config
    limit = rotary_limit(hf_config) or hf_config.get("n_positions") or _USUAL_SEQ
    return min(_USUAL_SEQ, int(limit))


def _holds_turns(data: str) -> bool:
    """Whether the first row of a file is a conversation. Such a model must have a template."""
    config = load_config(None, [f"data={_as_yaml(data)}"]).data
    if config.source != "jsonl" or not isinstance(config.path, str):
        return False
    try:
        with Path(config.path).expanduser().open(encoding="utf-8") as file:
            row = json.loads(file.readline())
    except (OSError, ValueError):
        return False
    return isinstance(row, dict) and not _TURNS.isdisjoint(row)


def validate_template(answers: Answers) -> None:
    """Raise where conversations have no template to be rendered with."""
    if _holds_turns(answers.data) and not has_own_tokenizer(answers.model):
        raise UserError(
            f"{answers.data} holds conversations, and {answers.model} has no chat template",
            why="a preset is a shape without a tokenizer",
            fix="name a hub id or a directory, such as --model Qwen/Qwen3-8B",
        )


def _cluster_names(name: str) -> list[str]:
    """The cluster itself, then larger ones of the same devices: a node, then nodes."""
    cluster = resolve_cluster(load_config(None, [f"cluster.name={name}"]).cluster)
    if cluster.gpu is None or cluster.source != "named":
        return [name]
    kind, node = cluster.gpu.name, min(_NODE, cluster.gpu.most_in_a_node)
    sizes = [size for size in (2, 4, 8) if cluster.world_size < size <= node]
    wider = [nodes for nodes in _WIDENINGS[1:] if nodes * node > cluster.world_size]
    return [name, *(f"{size}x{kind}" for size in sizes), *(f"{n}x{node}x{kind}" for n in wider)]


def _as_yaml(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
