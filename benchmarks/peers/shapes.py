"""The shapes that contenders are compared on, and the settings that each of them tries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.facts.families import spec_from_config
from shardwise.facts.models import ModelSpec
from shardwise.facts.presets import PRESETS

# float8: linear layers of the blocks, by tensor; keep: parameters stay gathered from forward to
# backward; compile, liger: modes of Hugging Face Trainer. host0.4: two blocks in five have their
# activations in host memory until backward, ours alone.
# How transformers is told to compute stacked experts; without a word it decides by itself.
EXPERTS = ("eager", "grouped_mm")
WORDS = ("float8", "keep", "compile", "liger", *EXPERTS)
_HOST = re.compile(r"host(0\.\d+|1)")
_MODES = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Setting:
    """How a run is set up, written `4-none-float8`: micro-batch, what is recomputed, words."""

    micro_batch: int
    recompute: str
    """none, selective, full, or a share of the blocks such as 0.5."""

    words: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Raises ValueError where the text is no setting."""
        micro_batch, recompute, *words = text.split("-")
        if unknown := [each for each in words if each not in WORDS and not _HOST.fullmatch(each)]:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(WORDS)}, host0.5")
        if recompute not in _MODES and not 0 < float(recompute) < 1:
            raise ValueError(f"{recompute!r} is neither one of {', '.join(_MODES)} nor a share")
        return cls(int(micro_batch), recompute, tuple(words))

    def __str__(self) -> str:
        return "-".join((str(self.micro_batch), self.recompute, *self.words))

    @property
    def in_host(self) -> float:
        """The share of the blocks whose activations wait in host memory."""
        return next((float(each[4:]) for each in self.words if _HOST.fullmatch(each)), 0.0)

    @property
    def precision(self) -> str:
        """What contenders are compared within."""
        return "float8" if "float8" in self.words else "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model, a length of sequences, and the number of ranks that the GPU is rank 0 of."""

    model: str
    """A preset."""

    seq_len: int
    world: int = 8
    """1 is really one GPU, trained on; more are emulated."""

    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Of the model's config.json."""

    ceiling_sequences: int
    """How many the ceilings are measured with: a usual micro-batch of this shape."""

    settings: Mapping[str, tuple[str, ...]]
    """By contender, where the command line names none."""

    @property
    def hf_config(self) -> dict[str, Any]:
        """The fields of config.json."""
        return {**PRESETS[self.model], **self.overrides}

    @property
    def spec(self) -> ModelSpec:
        """The model's sizes."""
        return spec_from_config(self.model, self.hf_config)

    def tokens(self, setting: Setting) -> int:
        """Of one step of one rank."""
        return setting.micro_batch * self.seq_len


GPU_SHAPES = {
    "8b-4096": Shape(
        model="llama-3.1-8b",
        seq_len=4096,
        ceiling_sequences=4,
        # The best of those tried on an H200: with all of its memory, in 60 GiB, in float8.
        settings={
            "ours": ("12-none-host0.3125", "5-selective-host0.34375", "8-none-float8-keep"),
            "torchtitan": ("6-none", "2-none", "7-none-float8-keep"),
        },
    ),
    "8b-8192": Shape(
        model="llama-3.1-8b",
        seq_len=8192,
        ceiling_sequences=2,
        settings={
            "ours": ("3-none", "4-none-float8-keep"),
            "torchtitan": ("3-none", "3-none-float8"),
        },
    ),
    # torchtitan ties no weights, so neither does ours.
    "1b": Shape(
        model="llama-3.2-1b",
        overrides={"tie_word_embeddings": False},
        seq_len=4096,
        ceiling_sequences=8,
        settings={"ours": ("8-none", "16-none"), "torchtitan": ("8-none", "4-none")},
    ),
    "70b-cut": Shape(
        model="llama-3.1-70b",
        overrides={"num_hidden_layers": 16},
        seq_len=4096,
        ceiling_sequences=4,
        settings=dict.fromkeys(("ours", "torchtitan"), ("4-none", "2-none", "4-none-float8")),
    ),
    "one-gpu": Shape(
        model="llama-3.1-8b",
        overrides={"num_hidden_layers": 16},
        seq_len=4096,
        world=1,
        ceiling_sequences=2,
        settings={"ours": ("2-none",), "trainer": ("2-none", "2-none-compile", "2-none-liger")},
    ),
    "8b-32768": Shape(
        model="llama-3.1-8b",
        seq_len=32768,
        ceiling_sequences=1,
        settings=dict.fromkeys(("ours", "torchtitan"), ("1-full",)),
    ),
}
_TINY = {"num_hidden_layers": 2}
CPU_SHAPES = {
    "tiny": Shape(
        model="tiny-llama",
        overrides=_TINY,
        seq_len=64,
        ceiling_sequences=2,
        settings=dict.fromkeys(("ours", "torchtitan"), ("2-none", "2-selective")),
    ),
    "tiny-one": Shape(
        model="tiny-llama",
        overrides=_TINY,
        seq_len=64,
        world=1,
        ceiling_sequences=2,
        settings={"ours": ("2-none",), "trainer": ("2-none", "2-none-liger")},
    ),
}
SHAPES = GPU_SHAPES | CPU_SHAPES
