"""A training script, read and never run: which of its calls become what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from shardwise.errors import UserError
from shardwise.files import read_bytes
from shardwise.migrate.fsdp_section import SECTION, fsdp_rules
from shardwise.migrate.key_rules import KeyRule
from shardwise.migrate.script_names import ARGUMENTS, CALLS, FSDP1, METHODS
from shardwise.migrate.source import Source
from shardwise.migrate.trainer import LORA, TRAINING
from shardwise.migrate.trl import TRL

_MAX_BYTES = 2**20
_ARGUMENTS_OF_TRAINER = ("transformers.TrainingArguments", "trl.SFTConfig")
_FSDP_CALLS = (f"{FSDP1}.FullyShardedDataParallel", f"{FSDP1}.fully_shard")
# Where else a name can be imported from.
_SAME = {
    f"{FSDP1}.fully_sharded_data_parallel.": f"{FSDP1}.",
    "torch.distributed.fsdp.api.": f"{FSDP1}.",
    "torch.distributed.fsdp._fully_shard.": f"{FSDP1}.",
    "torch.distributed._tensor.": "torch.distributed.device_mesh.",
    "torch.distributed._composable.fsdp.": f"{FSDP1}.",
}


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """One call, or one argument of it, at its line."""

    line: int
    what: str
    becomes: str


@dataclass(frozen=True, slots=True)
class NamedCall:
    """Any call by the full name of what is called, such as `torch.optim.AdamW`."""

    line: int
    name: str
    arguments: dict[str, str]
    """Its named arguments, as they are written."""

    in_loop: bool
    """Whether it may be made several times."""


def read_script(file: Path) -> list[ScriptCall]:
    """What a script calls, in the order of its lines."""
    found = set(_found(_parsed(file)))
    return sorted(found, key=lambda item: (item.line, item.what.startswith(" "), item.what))


def named_calls(file: Path) -> list[NamedCall]:
    """All calls of a script whose names can be told."""
    tree = _parsed(file)
    names = _imported(tree)
    repeated = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.While | ast.ListComp | ast.GeneratorExp)
        for inner in ast.walk(node)
    }
    return [
        NamedCall(
            line=node.lineno,
            name=_full_name(spelled, names),
            arguments={word.arg: ast.unparse(word.value) for word in node.keywords if word.arg},
            in_loop=id(node) in repeated,
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (spelled := _dotted(node.func)) is not None
    ]


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(read_bytes(file, _MAX_BYTES))
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read: {error.strerror}",
            fix="name a script of at most 1 MiB: `shardwise migrate FILE`",
        ) from error
    except SyntaxError as error:
        raise UserError(
            f"{file}:{error.lineno or 1}: not valid Python: {error.msg}",
            fix=f"see what Python says: python -m py_compile {quote(str(file))}",
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(
            f"{file}: not valid Python: it holds NUL bytes, or is nested too deeply",
            fix="name a script: `shardwise migrate FILE`",
        ) from error


def _found(tree: ast.Module) -> Iterator[ScriptCall]:
    names = _imported(tree)
    objects = _objects(tree, names)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        spelled = _dotted(node.func)
        if spelled is None:
            continue
        full = _full_name(spelled, names)
        if full == "functools.partial" and node.args:
            # A policy is handed on with its arguments, and called inside of FSDP.
            spelled = _dotted(node.args[0]) or ""
            full = _full_name(spelled, names)
        if full in CALLS:
            yield ScriptCall(node.lineno, f"{spelled}(...)", CALLS[full])
            yield from _arguments(node, full)
            continue
        owner, _, method = spelled.rpartition(".")
        kind = objects.get(owner, _full_name(owner, names) if owner else "")
        if (known := METHODS.get(kind, {}).get(method)) is not None:
            yield ScriptCall(node.lineno, f"{spelled}(...)", known)


def _imported(tree: ast.Module) -> dict[str, str]:
    """Names of a script, by the full names that imports gave them."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                first = item.name.partition(".")[0]
                names[item.asname or first] = item.name if item.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for item in node.names:
                names[item.asname or item.name] = f"{node.module}.{item.name}"
    return names


def _full_name(spelled: str, names: dict[str, str]) -> str:
    first, dot, rest = spelled.partition(".")
    full = f"{names.get(first, first)}{dot}{rest}"
    for other, usual in _SAME.items():
        if full.startswith(other):
            return usual + full.removeprefix(other)
    return full


def _objects(tree: ast.Module, names: dict[str, str]) -> dict[str, str]:
    """Variables that hold what a known call returned; of several targets the first one."""
    objects: dict[str, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        full = _full_name(_dotted(node.value.func) or "", names)
        target = node.targets[0]
        if isinstance(target, ast.Tuple) and target.elts:
            target = target.elts[0]
        name = _dotted(target)
        if full in METHODS and name is not None:
            objects[name] = full
    return objects


def _dotted(node: ast.expr) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def _arguments(call: ast.Call, full: str) -> Iterator[ScriptCall]:
    """Arguments of FSDP itself, of TrainingArguments and of LoraConfig, each with its rule."""
    rules = _rules_of(full)
    for word in call.keywords if rules else ():
        if word.arg is not None:
            shown = f"  {word.arg}={ast.unparse(word.value)[:60]}"
            yield ScriptCall(word.value.lineno, shown, _told(rules.get(word.arg), word.value))


def _rules_of(full: str) -> dict[str, KeyRule]:
    if full in _FSDP_CALLS:
        return {name: fsdp_rules()[f"{SECTION}.{key}"] for name, key in ARGUMENTS.items()}
    if full in _ARGUMENTS_OF_TRAINER:
        return {**TRAINING, **TRL}
    if full == "peft.LoraConfig":
        return {**LORA, **{name.removeprefix("lora_"): rule for name, rule in LORA.items()}}
    return {}


def _told(rule: KeyRule | None, node: ast.expr) -> str:
    if rule is None:
        return "unknown: no argument that we know"
    try:
        outcome = rule.translate(_value(node), Source({}))
    except ValueError:
        return "the script computes it: see what it is, and write the setting"
    settings = " ".join(f"{path}={value}" for path, value in outcome.settings.items())
    return f"{settings}   ({outcome.why})" if settings else outcome.why


def _value(node: ast.expr) -> object:
    """A literal, or the last part of a name such as `ShardingStrategy.FULL_SHARD`."""
    dotted = _dotted(node)
    if dotted is not None:
        return dotted.rpartition(".")[2]
    return ast.literal_eval(node)
