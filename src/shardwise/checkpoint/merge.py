"""Adapters added to the weights that they were trained over: one tensor at a time, each in its own
dtype and in the file that it was in. Packed weights become plain ones: a sum that is rounded to the
few bits of theirs would lose most of what was added."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from shardwise.checkpoint.adapter_export import read_adapters
from shardwise.checkpoint.base import validate_under
from shardwise.checkpoint.beside import copy_code, copy_tokenizer, write_configs
from shardwise.checkpoint.export_model import Exported
from shardwise.checkpoint.export_target import written_aside
from shardwise.checkpoint.exporter import SAFETENSORS_DTYPES, safetensors_header
from shardwise.checkpoint.manifest import read_manifest
from shardwise.checkpoint.read import VerifiedCheckpoint
from shardwise.errors import ExitCode, UserError
from shardwise.facts.adapter_sizes import BASE_NAMES
from shardwise.files import user_path
from shardwise.model.boxes import whole_box
from shardwise.model.dequantised import open_dequantised
from shardwise.model.lora import adapters_of, summed, whole_params
from shardwise.model.pretrained import stored_parts
from shardwise.model.stored import INDEX_NAME, SINGLE_NAME, find_weights
from shardwise.plan.frozen_base import SHIPPED

Advance = Callable[[int], None]
# Rounding of a sum to its dtype is at most half of this, relative.
_ROUNDINGS = 2.0
_PROBES = 4
# Of packed weights, unless the user names another: MXFP4's values are exact in it.
_PLAIN = torch.bfloat16


class Merger:
    """One checkpoint of adapters, and the weights under them."""

    def __init__(
        self, checkpoint: VerifiedCheckpoint, base: Path | None, code_dir: Path | None
    ) -> None:
        self.checkpoint, self.code_dir = checkpoint, code_dir
        self.place = _find_base(checkpoint, base)
        self.model, self.adapters = read_adapters(checkpoint, code_dir)
        self.files = _files_of(self.place)
        self.of_weights = adapters_of(self.model)
        self.whole = {n: first for first, names in whole_params(self.model).items() for n in names}
        self.weights = open_dequantised(self.place.parent)
        parts = stored_parts(self.model, self.weights)
        changed = self.of_weights.keys() | self.whole.keys()
        self.parts = {key: part for key, part in parts.items() if part[0] in changed}
        self.packed = list(filter(self.weights.is_packed, self.weights.keys()))
        self.num_bytes = sum(file.stat().st_size for file in self.files)
        self.num_bytes += sum(prod(self.weights.shape(key)) for key in self.packed)

    def write(self, target: Path, dtype: torch.dtype | None, advance: Advance) -> Exported:
        """Write a model directory that from_pretrained loads."""
        plan = self.checkpoint.plan
        with written_aside(user_path(str(target)).resolve()) as aside:
            merged: dict[str, list[Tensor]] = {}
            for file in self.files:
                for name, output in self._write_file(file, aside / file.name, dtype, advance):
                    merged.setdefault(name, []).append(output)
            self._validate_merged(merged)
            if self.place.name == INDEX_NAME:
                self._write_index(aside)
            write_configs(self.model, plan, next(iter(merged.values()))[0].dtype, aside)
            if self.code_dir is not None:
                copy_code(self.code_dir, aside)
            notes = [
                f"{len(self.of_weights)} adapters merged into {self.place.parent}",
                *_note_packed(plan.settings.adapter.base),
                *self._note_plain(dtype),
                *copy_tokenizer(plan, aside),
            ]
            num_files = len(list(aside.iterdir()))
            written = sum(file.stat().st_size for file in aside.glob("*.safetensors"))
        return Exported(written, num_files, notes)

    def _write_file(
        self, source: Path, target: Path, dtype: torch.dtype | None, advance: Advance
    ) -> list[tuple[str, Tensor]]:
        """Copy one file with merged weights. Returns the weights that have changed, and for each
        what was written of it, on meta."""
        merged: list[tuple[str, Tensor]] = []
        with safe_open(source, framework="pt") as file, target.open("xb") as out:
            own = {stored: self.weights.own_name(stored) for stored in list(file.keys())}
            found = [(key, self._output(key, file, dtype)) for key in own.values() if key]
            # Wider dtypes come first, so that all tensors are aligned.
            outputs = dict(sorted(found, key=lambda item: -item[1].itemsize))
            out.write(safetensors_header(outputs))
            for key, output in outputs.items():
                tensor: Tensor = (
                    self.weights.read(key, whole_box(output.shape))
                    if self.weights.is_packed(key)
                    else file.get_tensor(key)
                )
                if key in self.parts:
                    merged.append((self.parts[key][0], output))
                    tensor = self._merged(key, tensor, output.dtype)
                tensor = tensor.to(output.dtype).contiguous()
                out.write(tensor.view(-1).view(torch.uint8).numpy().data)
                advance(tensor.nbytes)
        return merged

    def _output(self, key: str, file: Any, dtype: torch.dtype | None) -> Tensor:
        """A tensor without data, as it will be written. Tables may have got more rows."""
        if self.weights.is_packed(key):
            plain = dtype or _PLAIN
            return torch.empty(self.weights.shape(key), dtype=plain, device="meta")
        like = _like(file.get_slice(key), dtype)
        name = self.parts[key][0] if key in self.parts else None
        return like.new_empty(self.adapters[self.whole[name]].shape) if name in self.whole else like

    def _merged(self, key: str, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum of a weight and its adapter, rounded once, and checked by other arithmetic."""
        name, box = self.parts[key]
        if name in self.whole:
            return self.adapters[self.whole[name]]
        each, (*experts, rows, columns) = self.of_weights[name], box.slices
        weight = stored.reshape(box.sizes)
        if each.is_transposed:
            weight, rows, columns = weight.mT, columns, rows
        a = self.adapters[each.a][(*experts, slice(None), columns)]
        b = self.adapters[each.b][(*experts, rows, slice(None))]
        # Files may have a tensor for each expert.
        scale = each.scale
        total = summed(weight, a, b, scale)
        lengths = torch.ones(total.shape[-2])
        if each.magnitude is not None:
            lengths = self.adapters[each.magnitude][rows] / total.norm(dim=-1)
        rounded = (lengths[:, None] * total).to(dtype)
        x = torch.randn(a.shape[-1], _PROBES, generator=torch.Generator().manual_seed(0))
        apart = lengths[:, None] * (weight.float() @ x + scale * (b @ (a @ x)))
        off = (rounded.float() @ x - apart).norm() / apart.norm()
        if not off <= _ROUNDINGS * max(torch.finfo(dtype).eps, 1e-6):
            raise UserError(
                f"{key} does not compute the same after its adapter was merged",
                why=f"its results differ by {off:.2g}, which is more than rounding",
                fix="export the adapters without --merge",
                code=ExitCode.VERIFY_FAILED,
            )
        return (rounded.mT if each.is_transposed else rounded).reshape(stored.shape)

    def _write_index(self, directory: Path) -> None:
        """The index, with the names and sizes of what was written."""
        index: Mapping[str, Any] = json.loads(self.place.read_text(encoding="utf-8"))
        own = {self.weights.own_name(key): file for key, file in index["weight_map"].items()}
        named = {name: file for name, file in own.items() if name is not None}
        size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        changed = {**index, "weight_map": named, "metadata": {"total_size": size}}
        text = json.dumps(changed, indent=2, sort_keys=True)
        (directory / INDEX_NAME).write_text(text + "\n", encoding="utf-8")

    def _note_plain(self, dtype: torch.dtype | None) -> list[str]:
        if not self.packed:
            return []
        name = str(dtype or _PLAIN).removeprefix("torch.")
        return [
            f"{len(self.packed)} packed tensors became plain ones in {name}: a sum that is rounded "
            "to their few bits would lose most of what was added"
        ]

    def _validate_merged(self, merged: Mapping[str, Sequence[Tensor]]) -> None:
        """Raise unless every adapter went into all of its weight."""
        sizes = {name: sum(part.numel() for part in parts) for name, parts in merged.items()}
        # Of tied names, files may have one or all.
        own = {name: self.whole.get(name, name) for name in merged}
        sizes |= {own[name]: size for name, size in sizes.items()}
        names = (*self.of_weights, *self.whole.values())
        whole = {name: self.model.get_parameter(name).numel() for name in names}
        if missing := sorted(name for name, size in whole.items() if sizes.get(name) != size):
            raise UserError(
                f"{len(missing)} of {len(whole)} adapters were not merged",
                why=f"{self.place.parent} does not have {missing[0]} in parts that add up to it",
                fix="export the adapters without --merge",
                code=ExitCode.VERIFY_FAILED,
            )


def _find_base(checkpoint: VerifiedCheckpoint, given: Path | None) -> Path:
    """The file that names the weights under the adapters, which must be those of the manifest."""
    plan, saved = checkpoint.plan, read_manifest(checkpoint.path).base
    place = given or (Path(plan.weights_dir) if plan.weights_dir else None)
    if place is None:
        raise UserError(
            f"the adapters of {checkpoint.path} were trained over {saved}, which are in no file",
            fix="export the adapters without --merge",
        )
    found = find_weights(place)
    if found.name not in (INDEX_NAME, SINGLE_NAME):
        raise UserError(
            f"adapters are merged into safetensors files, and {found} is none",
            fix="save the model with save_pretrained, and name that directory: --base DIR; or "
            "export the adapters without --merge",
        )
    validate_under(place, saved)
    return found


def _files_of(found: Path) -> list[Path]:
    if found.name == SINGLE_NAME:
        return [found]
    names = json.loads(found.read_text(encoding="utf-8"))["weight_map"].values()
    return [found.parent / name for name in sorted(set(names))]


def _note_packed(base: str) -> list[str]:
    """What differs from training, where that had the weights in fewer bits."""
    if base not in BASE_NAMES or base in SHIPPED:
        return []
    return [
        f"they were trained over these weights in {BASE_NAMES[base]}, and are merged into the "
        "weights as their files have them"
    ]


def _like(stored: Any, dtype: torch.dtype | None) -> Tensor:
    """A tensor without data, as it will be written."""
    own = next(d for d, word in SAFETENSORS_DTYPES.items() if word == stored.get_dtype())
    wanted = dtype if dtype is not None and own.is_floating_point else own
    return torch.empty(stored.get_shape(), dtype=wanted, device="meta")
