"""Which tool a file belongs to, told by its content."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.config.schema_text import TOP_LEVEL, field_types, section_classes
from shardwise.errors import UserError
from shardwise.migrate.accelerate import ACCELERATE
from shardwise.migrate.axolotl import AXOLOTL
from shardwise.migrate.deepspeed import DEEPSPEED
from shardwise.migrate.key_rules import Reader
from shardwise.migrate.llamafactory import LLAMAFACTORY
from shardwise.migrate.torchtitan import TORCHTITAN
from shardwise.migrate.torchtune import TORCHTUNE
from shardwise.migrate.trainer import TRAINER

Tree = dict[str, Any]


def _has(*keys: str, least: int = 1) -> Callable[[Tree], bool]:
    return lambda tree: sum(key in tree for key in keys) >= least


def _has_tables(*keys: str) -> Callable[[Tree], bool]:
    return lambda tree: sum(isinstance(tree.get(key), dict) for key in keys) >= 2


def _has_component(tree: Tree) -> bool:
    return any(isinstance(part, dict) and "_component_" in part for part in tree.values())


# The first that fits: the tools that are built on another come before it.
_SIGNS: tuple[tuple[Reader, Callable[[Tree], bool]], ...] = (
    (TORCHTUNE, _has_component),
    (ACCELERATE, _has("distributed_type", "compute_environment")),
    (
        DEEPSPEED,
        _has(
            "zero_optimization",
            "train_micro_batch_size_per_gpu",
            "train_batch_size",
            "zero_allow_untested_optimizer",
            "steps_per_print",
        ),
    ),
    (AXOLOTL, _has("base_model")),
    (
        TORCHTITAN,
        _has_tables("job", "training", "parallelism", "lr_scheduler", "activation_checkpoint"),
    ),
    (LLAMAFACTORY, _has("finetuning_type", "cutoff_len", "template", "dist_config", "peft_config")),
    (
        TRAINER,
        _has(
            "output_dir",
            "per_device_train_batch_size",
            "learning_rate",
            "num_train_epochs",
            "max_steps",
            "model_name_or_path",
            "gradient_accumulation_steps",
            "fsdp",
            "lr_scheduler_type",
            "bf16",
            "save_steps",
            "dataset_name",
            "logging_steps",
            least=2,
        ),
    ),
)
READERS: dict[str, Reader] = {reader.kind: reader for reader, _ in _SIGNS}


def reader_named(kind: str) -> Reader:
    """The reader of `--from`."""
    if kind not in READERS:
        raise UserError(f"--from {kind} is not known", fix=f"write one of {', '.join(READERS)}")
    return READERS[kind]


def recognise(tree: Tree, file: Path) -> Reader:
    """The reader of a file by its keys."""
    for reader, fits in _SIGNS:
        if fits(tree):
            return reader
    if set(tree) <= {*section_classes(), *field_types()[TOP_LEVEL]}:
        raise UserError(
            f"{file} is a configuration of shardwise already",
            fix=f"plan it: shardwise plan {file}; or write an Accelerate file of it: "
            f"shardwise migrate {file} --to accelerate",
        )
    raise UserError(
        f"{file}: its keys are of no tool that we know",
        why=f"it has {_some_keys(tree)}",
        fix=f"say which tool it is for: --from {'|'.join(READERS)}",
    )


def _some_keys(tree: Tree) -> str:
    return ", ".join(f"`{key}`" for key in list(tree)[:5]) or "no keys"
