"""Whether weight files are whole, by their headers. No tensor is read."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

from shardwise.errors import UserError
from shardwise.files import open_file, read_json, validate_file, why_no_path

SAFETENSORS_INDEX = "model.safetensors.index.json"
# What a directory of weights is known by, of all formats.
_NAMES = (
    *(SAFETENSORS_INDEX, "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin"),
    *("pytorch_model_fsdp.bin", ".metadata"),
)
_FETCH_ANEW = "fetch or save the file anew, or name another copy: model.weights_from=DIR"
# As safetensors itself allows; an index has one line per tensor.
_MAX_INDEX_BYTES = 100 * 2**20


def check_weight_files(place: Path) -> list[UserError]:
    """What is wrong with each safetensors file and its index, by name.

    `place` is a directory or one file. Other formats have no header to check, and the ranks read
    them. `torch.save` writes a zip file, whose end must be there.
    """
    return [
        UserError(f"{path} is not a whole file of weights", why=why, fix=_FETCH_ANEW)
        for path, why in _faults(place)
    ]


def stored_names(place: Path) -> set[str]:
    """The names of all tensors of safetensors files; none where they are of another format, or
    cannot be read, which `check_weight_files` tells of."""
    from safetensors import SafetensorError

    index = place / SAFETENSORS_INDEX
    file = place if place.is_file() else place / "model.safetensors"
    try:
        if index.is_file():
            return set().union(*_read_index(index).values())
        return _tensor_names(file) if file.suffix == ".safetensors" and file.is_file() else set()
    except (SafetensorError, OSError, ValueError):
        return set()


def _faults(place: Path) -> Iterator[tuple[Path, str]]:
    if place.is_dir():
        yield from _odd_files(place)
    index = place / SAFETENSORS_INDEX
    if index.is_file():
        yield from _index_faults(index)
        return
    files = (
        [place] if place.is_file() else [place / "model.safetensors", place / "pytorch_model.bin"]
    )
    for path in files:
        if path.is_file() and (why := _why_not_whole(path)) is not None:
            yield path, why


def _odd_files(place: Path) -> Iterator[tuple[Path, str]]:
    """Entries that are named like weight files but are no plain files, such as a pipe."""
    for name in _NAMES:
        path = place / name
        try:
            if path.is_symlink() or path.exists():
                validate_file(path)
        except OSError as error:
            yield path, error.strerror or str(error)


def _index_faults(index: Path) -> Iterator[tuple[Path, str]]:
    """Faults of the index itself, then of every file that it lists."""
    try:
        listed = _read_index(index)
    except (OSError, ValueError) as error:
        yield index, str(error)
        return
    for name, tensors in sorted(listed.items()):
        path = index.with_name(name)
        if not path.is_file():
            yield path, f"{index.name} lists it, but it does not exist"
        elif (why := _why_not_whole(path)) is not None:
            yield path, why
        elif absent := sorted(tensors - _tensor_names(path)):
            yield path, f"{index.name} lists {absent[0]!r} in it, but it has no such tensor"


def _read_index(index: Path) -> dict[str, set[str]]:
    """The tensors that the index lists, by file."""
    content = read_json(index, _MAX_INDEX_BYTES)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError("it has no weight_map, which names the file of each tensor")
    listed: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name or why_no_path(name) or Path(name).name != name:
            raise ValueError(f"it lists {tensor!r} in {name!r}, which is not a file beside it")
        listed.setdefault(name, set()).add(tensor)
    return listed


def _why_not_whole(path: Path) -> str | None:
    if path.suffix == ".safetensors":
        return _why_no_safetensors(path)
    if path.stat().st_size == 0:
        return "it is empty"
    with open_file(path) as file:
        is_zip = file.read(2) == b"PK"
    return "its end is missing" if is_zip and not zipfile.is_zipfile(path) else None


def _why_no_safetensors(path: Path) -> str | None:
    """The library's own judgement: names, dtypes, shapes and offsets against the file's size."""
    from safetensors import SafetensorError

    try:
        _tensor_names(path)
    except (SafetensorError, OSError) as error:
        return str(error)
    return None


def _tensor_names(path: Path) -> set[str]:
    from safetensors import safe_open

    # Only the header is read; `numpy` brings no torch.
    with safe_open(path, framework="numpy") as file:
        return set(file.keys())
