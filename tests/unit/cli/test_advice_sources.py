"""Every `fix:`, `next:` and example in the sources names settings, verbs and options that exist."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import advice
import typer.main
from torch.distributed.run import get_args_parser

from shardwise.cli.main import app
from shardwise.config.load import load_config
from shardwise.config.rules import RULES
from shardwise.config.schema import RunConfig
from shardwise.config.schema_text import section_classes
from shardwise.errors import UserError

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "src" / "shardwise"
COMPUTED = "ARG"  # what a text has in place of a value that is computed
HOW_TO_MEND = (
    "spell it so that it can be typed (section.field=value, --option VALUE, a whole command), or "
    "add a row to VOCABULARY or PLACEHOLDERS of tests/unit/advice.py with the reason"
)


class Text(NamedTuple):
    where: str
    text: str


# ---- what the sources say --------------------------------------------------------------------


@cache
def files() -> list[tuple[str, ast.Module]]:
    return [
        (str(path.relative_to(SOURCES)), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(SOURCES.rglob("*.py"))
    ]


def texts_of(node: ast.expr | None, module: ast.Module) -> Iterator[str]:
    """What an expression can say: both sides of an `if`, returned texts of a function."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield "".join(p.value if isinstance(p, ast.Constant) else COMPUTED for p in parts)
        case ast.IfExp(body=body, orelse=orelse):
            yield from texts_of(body, module)
            yield from texts_of(orelse, module)
        case ast.BoolOp(values=values):
            for value in values:
                yield from texts_of(value, module)
        case ast.Name(id=name):
            for value in values_of(name, module):
                yield from texts_of(value, module)
        case ast.Call(func=ast.Name(id=name)):
            for value in returns_of(name, module):
                yield from texts_of(value, module)


def values_of(name: str, module: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(module):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(each, ast.Name) and each.id == name for each in targets):
            yield node.value


def returns_of(name: str, module: ast.Module) -> Iterator[ast.expr | None]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            for statement in ast.walk(node):
                if isinstance(statement, ast.Return):
                    yield statement.value


@cache
def fixes() -> tuple[Text, ...]:
    return tuple(_fixes())


def _fixes() -> Iterator[Text]:
    """Every `fix=` of a call, and every third word of a Fault; those of the rules as they come."""
    for where, module in files():
        for node in ast.walk(module):
            if not isinstance(node, ast.Call):
                continue
            given = [word.value for word in node.keywords if word.arg == "fix"]
            if isinstance(node.func, ast.Name) and node.func.id == "Fault" and len(node.args) == 3:
                given.append(node.args[2])
            for value in given:
                for text in texts_of(value, module):
                    yield Text(f"{where}:{node.lineno}", text)
    for rule in RULES:
        text = rule.fix.format(c=RunConfig()) if isinstance(rule.fix, str) else COMPUTED
        yield Text(f"config/rules.py, {rule.id}", text)


@cache
def all_strings() -> tuple[Text, ...]:
    return tuple(_all_strings())


def _all_strings() -> Iterator[Text]:
    for where, module in files():
        for node in ast.walk(module):
            for text in texts_of(node, module) if isinstance(node, ast.JoinedStr) else ():
                yield Text(f"{where}:{node.lineno}", text)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield Text(f"{where}:{node.lineno}", node.value)


@cache
def commands() -> tuple[Text, ...]:
    return tuple(_commands())


def _commands() -> Iterator[Text]:
    """In backticks, after `next:`, and in the examples of help texts."""
    for where, text in all_strings():
        for quoted in re.findall(r"`(shardwise [^`]*)`", text):
            yield Text(where, quoted)
        for line in text.splitlines():
            if match := re.match(r"\s*(?:[Nn]ext: | {6})?(shardwise [a-z].*)$", line):
                if match[0].startswith("shardwise "):
                    continue  # a sentence about the program, not a line to type
                for part in re.split(r", or (?=shardwise)", match[1]):
                    yield Text(where, re.split(r"   ?\(| > | goes on", part)[0])


# ---- what the program takes ------------------------------------------------------------------

# `shardwise torchrun` hands its options on.
TORCHRUN = {name for action in get_args_parser()._actions for name in action.option_strings}
# Of programs beside ours that a fix may name.
OTHERS = {"--ntasks-per-node", "--partition"}


@cache
def program() -> Any:
    return typer.main.get_command(app)


def verb_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that words such as `checkpoint ls runs/demo` are for, and the rest of them."""
    found = program()
    while found is not None and hasattr(found, "commands") and words:
        found, words = found.commands.get(words[0]), words[1:]
    return found, words


def options_of(command: Any) -> set[str]:
    own = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    return own | TORCHRUN if command.name == "torchrun" else own


@cache
def all_options() -> set[str]:
    def below(command: Any) -> Iterator[str]:
        yield from options_of(command)
        for each in getattr(command, "commands", {}).values():
            yield from below(each)

    return set(below(program()))


@cache
def all_extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


def assert_setting(where: str, path: str, value: str) -> None:
    if path.startswith("model.overrides") or path in section_classes():
        return
    assert path in advice.real_fields(), f"{where}: there is no setting {path}"
    if COMPUTED in value or "{c." in value or advice.has_placeholder(value) or value == "v":
        return
    try:
        load_config(None, [f"{path}={value}"])
    except UserError as error:
        # Rules may want other settings beside it; the value itself must be of the field's type.
        assert ", expected " not in error.what, f"{where}: {path}={value} is refused: {error}"


# ---- the tests -------------------------------------------------------------------------------


def test_the_sources_were_read() -> None:
    assert len(fixes()) > 150
    assert len(commands()) > 40
    assert any(text == "shardwise checkpoint ls runs/demo" for _, text in commands())


def test_a_fix_can_be_typed_or_is_the_users_to_know() -> None:
    unknown = [f"{fix.where}: {fix.text!r}" for fix in fixes() if not is_known(fix.text)]
    assert not unknown, "\n".join([*unknown, HOW_TO_MEND])


def is_known(fix: str) -> bool:
    can_be_typed = bool(advice.ways_of(fix)) or COMPUTED in fix
    return can_be_typed or advice.is_spoken(fix) or advice.has_placeholder(fix)


def test_what_a_fix_names_exists() -> None:
    known = {path.partition(".")[0] for path in advice.real_fields() if "." in path}
    for fix in fixes():
        assert_exists(fix, known)


def assert_exists(fix: Text, known: set[str]) -> None:
    """Settings, options and places of one fix; `known` are the sections of a configuration."""
    for way in advice.ways_of(fix.text):
        match way:
            case advice.Settings(values=values):
                for path, value in values:
                    assert_setting(fix.where, path, value)
            case advice.LeftOut(name=name):
                assert name in advice.real_fields() | all_options(), f"{fix.where}: {name}"
            case advice.Option(name=name):
                assert name in all_options() | OTHERS, f"{fix.where}: there is no option {name}"
            case advice.Place(path=path) if COMPUTED not in path:
                assert path in advice.real_fields(), f"{fix.where}: {path}"
            case advice.Command(words=("pip", *words)):
                for extra in re.findall(r"shardwise\[(\w+)\]", " ".join(words)):
                    assert extra in all_extras(), f"{fix.where}: there is no shardwise[{extra}]"
    for section, name in re.findall(r"(?<![\w./])(\w+)\.(\w+)(?![\w(])", fix.text):
        if section in known and (section, name) not in (("model", "state_dict"),):
            assert f"{section}.{name}" in advice.real_fields(), f"{fix.where}: {section}.{name}"


def test_settings_in_all_strings_exist() -> None:
    for where, text in all_strings():
        for match in advice.SETTING.finditer(text):
            if "." in match[1]:
                assert_setting(where, match[1], match[2].rstrip(".:"))


def test_commands_name_verbs_and_options_that_exist() -> None:
    for command in commands():
        assert_can_be_typed(command)


def assert_can_be_typed(command: Text) -> None:
    # A line that goes on in the next one ends with a backslash.
    words = shlex.split(command.text.replace("\0", "").rstrip("\\"))[1:]
    if words[0].isupper():
        return  # `shardwise COMMAND` stands for any of them
    found, rest = verb_of(words)
    assert found is not None, f"{command.where}: there is no `{command.text}`"
    for word in rest:
        if word.startswith("--"):
            name = word.partition("=")[0]
            assert name in options_of(found), f"{command.where}: {command.text} has no {name}"


def test_the_examples_of_help_texts_are_complete() -> None:
    """Each verb that does something has an example of itself, which its own parser takes."""
    for name in ("plan", "train", "tunnel", "verify", "report", "profile", "export", "fabric"):
        assert any(text.split()[1:2] == [name] for _, text in commands()), name
