"""The weights of a checkpoint under Hugging Face's names, written one tensor at a time.

Tensors are named and split as `save_pretrained` does it (one tensor for each expert, tied tensors
once), so every tool that reads the hub's files reads these.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PreTrainedModel

from shardwise.checkpoint.index import Index, StoredTensor
from shardwise.checkpoint.manifest import PLAN_NAME
from shardwise.checkpoint.read import VerifiedCheckpoint, read_tensor
from shardwise.checkpoint.structure import check_model, refuse_tensors
from shardwise.errors import ExitCode, UserError, printable
from shardwise.internals.weight_conversions import revert_weight_conversion
from shardwise.model.build import build_on_meta
from shardwise.model.lora import apply_lora
from shardwise.model.stored import INDEX_NAME, TORCH_NAME

Layout = Literal["safetensors", "torch"]
Advance = Callable[[int], None]
# Each writer holds one tensor; more of them would not make a disk faster.
_NUM_WRITERS = 4
SAFETENSORS_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}


@dataclass(frozen=True, slots=True)
class _Group:
    """Stored tensors that are converted together, nearly always one, and what is written."""

    stored: dict[str, StoredTensor]
    outputs: dict[str, Tensor]
    """On meta: their names, shapes and dtypes."""

    @property
    def num_bytes(self) -> int:
        return sum(output.nbytes for output in self.outputs.values())


class Exporter:
    """The weights of one checkpoint, laid out for writing.

    `code_dir` holds the code of a model that has its own. The exporting user names it. What the
    checkpoint says about code is ignored.
    """

    def __init__(
        self,
        checkpoint: VerifiedCheckpoint,
        dtype: torch.dtype | None,
        advance: Advance,
        code_dir: Path | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.advance = advance
        self.code_dir = code_dir
        self.model = build_checked(checkpoint, code_dir)
        self.groups = self._build_groups()
        self.num_bytes = sum(group.num_bytes for group in self.groups)

    def write(self, directory: Path, layout: Layout, max_shard_size: str) -> None:
        """Write all weights, in files of `layout`."""
        if layout == "torch":
            self._write_torch(directory / TORCH_NAME)
        else:
            self._write_safetensors(directory, max_shard_size)

    def read(self) -> dict[str, Tensor]:
        """All weights by the names that they would be written under, in memory."""
        return {name: tensor for group in self.groups for name, tensor in self._read(group)}

    @property
    def main_dtype(self) -> torch.dtype:
        """What config.json says: the dtype of the first floating tensor."""
        outputs = (output for group in self.groups for output in group.outputs.values())
        return next((o.dtype for o in outputs if o.is_floating_point()), torch.float32)

    def _build_groups(self) -> list[_Group]:
        """Group by what comes out: tensors that share an output are converted together."""
        stored = _named_as_saved(self.model, self.checkpoint.index)
        wanted = {name: self._meta(tensor) for name, tensor in stored.items()}
        members: dict[str, list[str]] = {}
        first_of: dict[str, str] = {}
        for name, tensor in wanted.items():
            outputs = revert_weight_conversion(self.model, {name: tensor})
            first = next((first_of[o] for o in outputs if o in first_of), name)
            members.setdefault(first, []).append(name)
            first_of |= dict.fromkeys(outputs, first)
        groups = [
            _Group(
                {name: stored[name] for name in names},
                revert_weight_conversion(self.model, {name: wanted[name] for name in names}),
            )
            for names in members.values()
        ]
        separately = {name for group in groups for name in group.outputs}
        if separately != revert_weight_conversion(self.model, dict(wanted)).keys():
            # A family whose names depend on each other: from_pretrained reads the module's own
            # names as well.
            groups = [_Group({name: stored[name]}, {name: wanted[name]}) for name in wanted]
        return groups

    def _meta(self, stored: StoredTensor) -> Tensor:
        return torch.empty(stored.shape, dtype=self._dtype_of(stored), device="meta")

    def _dtype_of(self, stored: StoredTensor) -> torch.dtype:
        """The dtype to write. Integers and booleans stay what they are."""
        return self.dtype if self.dtype and stored.dtype.is_floating_point else stored.dtype

    def _read(self, group: _Group) -> Iterator[tuple[str, Tensor]]:
        """The outputs of a group with their values, in the order of `outputs`."""
        whole = {name: self._read_one(name, stored) for name, stored in group.stored.items()}
        if whole.keys() != group.outputs.keys():
            whole = revert_weight_conversion(self.model, whole)
        for name in group.outputs:
            # Popping it frees the memory of a tensor once it is written.
            tensor = whole.pop(name).contiguous()
            yield name, tensor
            self.advance(tensor.nbytes)

    def _read_one(self, name: str, stored: StoredTensor) -> Tensor:
        tensor = read_tensor(self.checkpoint.path, stored, self._dtype_of(stored))
        if tensor.dtype == torch.float16 and not torch.isfinite(tensor).all():
            raise UserError(
                f"{name} does not fit into fp16",
                why="it holds values that are beyond 65504 or not finite",
                fix="export with --dtype bf16",
            )
        return tensor

    def _write_safetensors(self, directory: Path, max_shard_size: str) -> None:
        shards = self._split(max_shard_size)
        with ThreadPoolExecutor(_NUM_WRITERS, thread_name_prefix="export") as writers:
            futures = [
                writers.submit(self._write_shard, directory / name, groups)
                for name, groups in shards.items()
            ]
            try:
                for future in futures:
                    future.result()
            finally:
                writers.shutdown(cancel_futures=True)
        if len(shards) > 1:
            index = {
                "metadata": {
                    "total_parameters": self.model.num_parameters(),
                    "total_size": self.num_bytes,
                },
                "weight_map": {
                    output: name
                    for name, groups in shards.items()
                    for group in groups
                    for output in group.outputs
                },
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (directory / INDEX_NAME).write_text(text, encoding="utf-8")

    def _split(self, max_shard_size: str) -> dict[str, list[_Group]]:
        by_name = {next(iter(group.outputs)): group for group in self.groups}
        # Its annotations name tensors, but it only asks for sizes.
        split: Any = split_state_dict_into_shards_factory
        try:
            found = split(
                by_name,
                get_storage_size=lambda group: group.num_bytes,
                get_storage_id=lambda group: None,
                filename_pattern="model{suffix}.safetensors",
                max_shard_size=max_shard_size,
            )
        except ValueError as error:
            raise UserError(
                f"{max_shard_size!r} is not a file size",
                why=str(error),
                fix="write --max-shard-size 5GB, or --max-shard-size 500MB",
            ) from error
        return {
            name: [by_name[key] for key in keys] for name, keys in found.filename_to_tensors.items()
        }

    def _write_shard(self, path: Path, groups: list[_Group]) -> None:
        """Write a safetensors file one tensor at a time, beside other files.

        The safetensors library takes all tensors of a file at once and holds the GIL while it
        writes them.
        """
        # Wider dtypes come first, as in the library, so that all tensors are aligned.
        groups = sorted(groups, key=lambda g: -max(o.itemsize for o in g.outputs.values()))
        with path.open("xb") as file:
            file.write(safetensors_header({n: o for g in groups for n, o in g.outputs.items()}))
            for group in groups:
                for _, tensor in self._read(group):
                    file.write(tensor.view(-1).view(torch.uint8).numpy().data)

    def _write_torch(self, path: Path) -> None:
        """Write one file with torch.save, which needs all tensors at once. They are memory-mapped
        files, so that the system can write their pages back and free the memory."""
        scratch = path.with_name("scratch")
        scratch.mkdir()
        state: dict[str, Tensor] = {}
        for group in self.groups:
            for name, tensor in self._read(group):
                file = str(scratch / str(len(state)))
                mapped = torch.from_file(file, True, tensor.numel(), dtype=tensor.dtype)
                state[name] = mapped.view(tensor.shape).copy_(tensor)
        torch.save(state, path)
        shutil.rmtree(scratch)


def build_checked(checkpoint: VerifiedCheckpoint, code_dir: Path | None) -> PreTrainedModel:
    """The model of a checkpoint on meta, with its adapters, whose tensors the checkpoint holds."""
    model = build_plain(checkpoint, code_dir)
    adapter = checkpoint.plan.settings.adapter
    if adapter.method != "none":
        apply_lora(model, adapter, torch.float32)
    if wrong := check_model(checkpoint.index, model):
        raise refuse_tensors(checkpoint.path, wrong)
    return model


def build_plain(checkpoint: VerifiedCheckpoint, code_dir: Path | None) -> PreTrainedModel:
    """The model of a checkpoint on meta, without adapters."""
    plan = checkpoint.plan
    if plan.settings.model.trust_remote_code and code_dir is None:
        raise UserError(
            f"the model of {checkpoint.path} has code of its own, and no code is run on a "
            "checkpoint's word",
            why="plan.json in it has model.trust_remote_code=true, which anyone could have written",
            fix="if you trust that code, name the directory that holds it: --code DIR",
        )
    # Nothing is computed, so `eager`, which every family has, will do.
    code = None if code_dir is None else str(code_dir)
    try:
        return build_on_meta(plan.hf_config, attention="eager", code_dir=code)
    except UserError as error:
        raise UserError(
            f"{checkpoint.path / PLAN_NAME} describes no model that can be built here",
            why=printable(f"{error.what}: {error.why}" if error.why else error.what),
            fix="install the transformers that it was trained with (manifest.json names it), or "
            "restore it from a backup",
            code=ExitCode.VERIFY_FAILED,
        ) from error


def _named_as_saved(model: PreTrainedModel, index: Index) -> dict[str, StoredTensor]:
    """The stored tensors of the model. A tied tensor has the name that save_pretrained keeps."""
    stored = {
        name.removeprefix("model."): tensor
        for name, tensor in index.items()
        if name.startswith("model.")
    }
    sharers: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        sharers.setdefault(id(param), []).append(name)
    targets: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    kept: dict[str, str] = {}
    for names in sharers.values():
        source = next((name for name in names if name not in targets), names[0])
        kept |= dict.fromkeys(names, source)
    return {kept.get(name, name): tensor for name, tensor in stored.items()}


def safetensors_header(outputs: Mapping[str, Tensor]) -> bytes:
    """The beginning of a safetensors file of such tensors, in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, output in outputs.items():
        start, end = end, end + output.nbytes
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[output.dtype],
            "shape": list(output.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
