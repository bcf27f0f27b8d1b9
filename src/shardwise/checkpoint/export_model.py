"""Export: a checkpoint as a Hugging Face directory, by one process and one tensor at a time."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.beside import copy_code, copy_tokenizer, write_configs
from shardwise.checkpoint.export_target import written_aside
from shardwise.checkpoint.exporter import Exporter, Layout
from shardwise.errors import ExitCode, UserError, printable
from shardwise.facts.quantization import quant_method
from shardwise.files import user_path
from shardwise.units import format_bytes


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export left behind."""

    num_bytes: int
    num_files: int
    notes: list[str]


def export_checkpoint(
    exporter: Exporter, target: Path, *, layout: Layout, max_shard_size: str
) -> Exported:
    """Write weights, configuration and tokenizer to `target`: all of it or nothing."""
    target = user_path(str(target)).resolve()
    plan = exporter.checkpoint.plan
    try:
        with written_aside(target) as aside:
            _validate_space(aside, exporter.num_bytes * (2 if layout == "torch" else 1))
            exporter.write(aside, layout, max_shard_size)
            write_configs(exporter.model, plan, exporter.main_dtype, aside)
            if exporter.code_dir is not None:
                copy_code(exporter.code_dir, aside)
            notes = [*_note_plain(plan.hf_config), *copy_tokenizer(plan, aside)]
            num_files = len(list(aside.iterdir()))
    except OSError as error:
        raise UserError(
            f"cannot write {target}",
            why=str(error),
            fix="write --to DIR on a disk that has room and that you may write to",
            code=ExitCode.ENVIRONMENT,
        ) from error
    return Exported(exporter.num_bytes, num_files, notes)


def _note_plain(hf_config: Mapping[str, Any]) -> list[str]:
    method = quant_method(hf_config)
    if method is None:
        return []
    return [f"plain weights: the {printable(method)} of the model's own config.json is left out"]


def _validate_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise UserError(
            f"the export needs {format_bytes(needed)}; {format_bytes(free)} are free",
            fix="write --to DIR on another disk, or halve it with --dtype bf16",
            code=ExitCode.ENVIRONMENT,
        )
