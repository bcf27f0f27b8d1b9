"""Words that say how a run of another stack was set up, beside what numbers say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType

from shardwise.errors import UserError

_NOTES = "notes"
# What each word says, as a row of the table of published runs would have it.
_WORDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "compile": ("compile", "yes"),
        "no-compile": ("compile", "no"),
        "flash1": ("attention_impl", "flash_attention_1"),
        "flash2": ("attention_impl", "flash_attention_2"),
        "flash3": ("attention_impl", "flash_attention_3"),
        "cudnn": ("attention_impl", "cudnn"),
        "ddp": ("strategy", "DDP"),
        "zero1": ("strategy", "ZERO1"),
        "zero2": ("strategy", "SHARD_GRAD_OP"),
        "zero3": ("strategy", "FULL_SHARD"),
        # Before FSDP2, which came with torch 2.4.
        "fsdp1": ("source_date", "2024-01"),
        "lora": ("method", "lora"),
        "qlora": ("method", "qlora"),
        "offload": ("cpu_offload", "params"),
        "bf16-states": ("states", "bf16 weights"),
        "bf16-reduce": (_NOTES, "reduce bf16"),
        "fused-norms": (_NOTES, "fused norm"),
        "async-tp": (_NOTES, "async tp"),
        "rowwise": (_NOTES, "rowwise"),
        "rl": (_NOTES, "type=rl"),
        "power-limited": (_NOTES, "power-limited"),
        "deepep": (_NOTES, "deepep"),
        "cuda-graphs": (_NOTES, "cuda graphs"),
    }
)
# Words with a number behind them.
_COUNTS = MappingProxyType(
    {"replicas": "dp_replicate", "memory": "gpu_mem_gb", "vp": _NOTES, "loss-chunk": _NOTES}
)
EXAMPLE = "compile,flash3,zero1"


def fields_of(text: str | None) -> dict[str, str]:
    """The fields of a row that words, with commas in between, stand for."""
    said: dict[str, tuple[str, str]] = {}
    notes: list[str] = []
    for word in _split(text):
        name, value = _field_of(word)
        if name == _NOTES:
            notes.append(value)
        elif name in said:
            raise UserError(
                f"--with has both {said[name][0]} and {word}, which say the same thing",
                fix=f"leave {said[name][0]} or {word} out",
            )
        else:
            said[name] = word, value
    fields = {name: value for name, (_, value) in said.items()}
    return {**fields, **({_NOTES: "; ".join(notes)} if notes else {})}


def _split(text: str | None) -> Sequence[str]:
    return [word for part in (text or "").lower().split(",") if (word := part.strip())]


def _field_of(word: str) -> tuple[str, str]:
    if word in _WORDS:
        return _WORDS[word]
    name, _, number = word.partition("=")
    if name in _COUNTS:
        if not number.isdecimal() or int(number) < 1:
            raise UserError(
                f"--with {word}: {name} wants a whole number from 1 on", fix=f"write {name}=2"
            )
        field = _COUNTS[name]
        # As notes have it: "vp 2", "loss chunk 2048".
        return field, number if field != _NOTES else f"{name.replace('-', ' ')} {number}"
    known = [*_WORDS, *(f"{each}=N" for each in _COUNTS)]
    near = get_close_matches(word, known, n=2, cutoff=0.6)
    raise UserError(
        f"--with {word}: unknown",
        why=f"the known words are {', '.join(known)}",
        fix=f"did you mean {' or '.join(near)}?" if near else f"write --with {EXAMPLE}",
    )
