"""How a `fix:` is read: as ways out that can be typed, or that only the user can take.

A way out is one of
  settings     `optim.lr=3e-4`; several with one blank between them belong together
  a default    `leave optim.lr out`, `leave --step out`
  an option    `--step 60`, for the same command
  a line       `model: tiny-llama` in backticks, for the file
  a command    `shardwise config ls`, in backticks or after a colon or at the beginning
  a name       `did you mean X or Y?`, "there are X, Y", in place of the one that was wrong
  a place      `write optim.lr`, for a key that stands elsewhere
or has a word of PLACEHOLDERS or of VOCABULARY. A fix with none of these fails the tests: spell it
so that it can be typed, or, where nobody but the user can know, add a row with the reason.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.config.schema_text import describe_fields, section_classes

# Words in capitals stand for what only the user knows.
PLACEHOLDERS = {
    "DIR": "where the user keeps a model, weights, a tokenizer or room on a disk",
    "FILES": "where the user keeps text",
    "FILE": "which file the user means",
    "RUN": "which run the user means",
    "NAME": "what the user calls a run",
    "VALUE": "a value that the user left out",
    "TEXT": "text that YAML has read as a number, so that its spelling is lost",
    "SECTION.FIELD": "a setting that the user left out",
    "COMMIT_HASH": "which code of the hub the user trusts",
    "NODESxGPUSxKIND": "which machines the user has",
    "KIND": "which GPU the user has",
    "NUMBER": "a figure of the user's machine or model",
    "CLASS": "which class of a strange model is its block; the classes are listed",
    "KEY": "which key of the user's records holds the text",
    "HOST": "the address of one of the user's nodes",
    "SHARE": "how far below the expected bandwidth the user can live with",
}


class Words(NamedTuple):
    pattern: str
    why: str


# What nobody can type for the user, and why.
VOCABULARY = (
    Words(r"check indentation .* quotes and brackets", "only its author knows what a file means"),
    Words(r"keep one of them", "which of two lines was meant"),
    Words(r"`section:` lines with fields below", "a file that is no mapping says nothing of a run"),
    Words(r"save it as UTF-8", "the encoding that it was saved in is not known"),
    Words(r"(section `\w+`|a file|it) takes ", "a key that is like none: all there are follow"),
    Words(r"name the directory that `shardwise train` printed", "where the user's runs are"),
    Words(r"name a run directory", "where the user's runs are"),
    Words(r"name a file in a directory that you may write to", "where the user may write"),
    Words(r"name a file that is there", "what the user's file is called"),
    Words(r"a directory that is there and that you may write to", "where the user may write"),
    Words(r"on a disk that has room", "which disks the user has"),
    Words(r"a smaller model\.name, or a cluster\.name of devices with more memory", "the budget"),
    Words(r"low-communication method", "another program"),
    Words(r"sets them aside and goes on", "nothing needs to be done"),
    Words(r"restore it from a backup", "whether the user has one"),
    Words(
        r"same command goes on|same command again|the same torchrun command", "it was just typed"
    ),
    Words(r"make room|mend the disk", "what on the disk may go"),
    Words(
        r"(fetch|copy|save)( or (save|export))? the (weights|file|checkpoint) anew", "the source"
    ),
    Words(r"save the (model|checkpoint)|save model\.state_dict\(\)", "the program that made it"),
    Words(r"load it where you trust it", "whom the user trusts"),
    Words(r'add the family of the model, such as "model_type"', "what the directory holds"),
    Words(r"add an eos_token", "which token ends the user's documents"),
    Words(r"give (more text|the text as several documents)", "the user's text"),
    Words(r"mend the records", "the user's text"),
    Words(r"check data\.path, data\.name and data\.split", "what the user's dataset is called"),
    Words(r"the dataset has no columns", "the user's dataset"),
    Words(r"mend or leave out what is named", "the user's cables"),
    Words(r"can the nodes reach each other", "the user's network"),
    Words(r"kubectl (auth|cluster-info|config|delete|get) ", "the user's Kubernetes cluster"),
    Words(r"kubectl cordon NODE", "the user's Kubernetes cluster"),
    Words(r"its last words are above", "what a rank printed"),
    Words(r"stacks of all ranks are in", "where ranks hung"),
    Words(r"read ARG; then run the same command", "what a rank printed"),
    Words(r"run the job with NCCL_DEBUG=INFO", "the user's job"),
    Words(
        r"keep the whole output|run the binary to its end|name the file after its binary",
        "nccl-tests",
    ),
    Words(r"(run it on|on) (one|a machine) with (such )?a GPU", "which machines the user has"),
    Words(
        r"start (the run|ARG ranks) with torchrun|start ARG ranks|start it on every node", "nodes"
    ),
    Words(r"install the triton that this torch was built for", "how torch was installed"),
    Words(r"uninstall quack-kernels", "why it is there"),
    Words(r"train both with the same observe\.log_every", "two runs of the user"),
    Words(r"run `nvidia-smi` by hand", "what is wrong with the driver"),
    Words(r"log in with `hf auth login`", "the user's account"),
    Words(r"write one of these", "all there are follow or stand in the reason"),
    Words(r"write fields below it", "which fields were meant; an example follows"),
    Words(r"or the number of ranks of a group", "how many the user wants"),
    Words(r"leave it out; the fields are", "which field was meant"),
    Words(r"check that path, its permissions, and the space on its disk", "the user's disk"),
    Words(r"check that MASTER_ADDR is rank 0's node", "the user's network"),
    Words(r"look for an error on the nodes of these ranks", "what another node printed"),
)

_SECTIONS = "|".join(section_classes())
# A whole section only as the command line takes it: a bare word, or a mapping.
_WHOLE = rf"(?:model|data|cluster)(?==)|(?:{_SECTIONS})(?==\{{)"
_PATH = rf"(?:{_SECTIONS})\.[a-z]\w*(?:\.[a-z]\w*)*|name|runs_dir|{_WHOLE}"
_VALUE = r"\"[^\"]*\"|\[[^\]]*\]|\{[^}]*\}|[^\s,;?)('`\"]+"
SETTING = re.compile(rf"(?<![\w.-])({_PATH})=({_VALUE})")
_LEFT_OUT = re.compile(r"leave (--[\w-]+|[a-z]\w*\.[\w.]+) out")
_OPTION = re.compile(r"(?<![\w-])(--[a-z][\w-]*)(?: (\"[^\"]*\"|[^\s,;)(]+))?")
_PROGRAMS = r"(?:shardwise|torchrun|pip|mkdir|rm|mv|cp|ls|export|unset|hf|nvidia-smi)"
_COMMAND = re.compile(
    rf"`({_PROGRAMS}\b[^`]*)`|(?:^|: |, or )({_PROGRAMS} .*?)(?=, or |; |, | {{2,}}| \(|$)"
)
_LINE = re.compile(r"`(\w+: [^`]+)`")
_MEANT = re.compile(
    r"did you mean (?:the preset )?([^?]*)\?|(?:^|: )there are ([^;]*)|such as (\S+)$"
)
_PLACE = re.compile(
    rf"write ((?:{_SECTIONS})\.\w+)(?=$|;)|write `(\w+):` indented below `(\w+):`|"
    r"`(\w+)` belongs to the top level"
)
_PLACEHOLDER = re.compile(r"\b(" + "|".join(map(re.escape, PLACEHOLDERS)) + r")\b")


@dataclass(frozen=True)
class Settings:
    """Written together after the same command."""

    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class LeftOut:
    """A setting or an option that goes back to its default."""

    name: str


@dataclass(frozen=True)
class Option:
    """Of the same command."""

    name: str
    value: str | None


@dataclass(frozen=True)
class Line:
    """In the file, in place of the line with this key."""

    text: str


@dataclass(frozen=True)
class Command:
    """Typed as it is."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Meant:
    """In place of the word that was wrong."""

    name: str


@dataclass(frozen=True)
class Place:
    """Where a key belongs."""

    path: str


Way = Settings | LeftOut | Option | Line | Command | Meant | Place


def ways_of(fix: str) -> list[Way]:
    """Everything in a fix that can be typed."""
    found: list[Way] = []
    commands = list(_COMMAND.finditer(fix))
    found += [Command(tuple(shlex.split(match[1] or match[2]))) for match in commands]
    rest = _blank(fix, [match.span() for match in commands])
    lines = list(_LINE.finditer(rest))
    found += [Line(match[1]) for match in lines]
    rest = _blank(rest, [match.span() for match in lines])
    left_out = list(_LEFT_OUT.finditer(rest))
    found += [LeftOut(match[1]) for match in left_out]
    rest = _blank(rest, [match.span() for match in left_out])
    found += _settings(rest)
    found += [Option(match[1], match[2]) for match in _OPTION.finditer(rest)]
    for match in _PLACE.finditer(rest):
        found.append(Place(match[1] or (f"{match[3]}.{match[2]}" if match[2] else match[4])))
    for match in _MEANT.finditer(rest):
        names = re.split(r",? or |, ", next(filter(None, match.groups())))
        found += [Meant(name.strip("`'")) for name in names if "=" not in name and name.strip()]
    return found


def _settings(text: str) -> list[Settings]:
    """Settings with one blank between them are one way."""
    groups: list[list[re.Match[str]]] = []
    for match in SETTING.finditer(text):
        if groups and text[groups[-1][-1].end() : match.start()] == " ":
            groups[-1].append(match)
        else:
            groups.append([match])
    return [
        Settings(tuple((match[1], match[2].rstrip(".:")) for match in group)) for group in groups
    ]


def _blank(text: str, spans: list[tuple[int, int]]) -> str:
    for start, end in spans:
        text = text[:start] + "\0" * (end - start) + text[end:]
    return text


def has_placeholder(text: str) -> bool:
    return _PLACEHOLDER.search(text) is not None


def is_spoken(fix: str) -> bool:
    """Whether a fix says something that only the user can do."""
    return any(re.search(words.pattern, fix) for words in VOCABULARY)


def real_fields() -> set[str]:
    return {field.path for field in describe_fields()}
