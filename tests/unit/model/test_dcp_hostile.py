"""DCP checkpoints made to do harm: refused by name, nothing is run, nothing large is allocated."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_saves import STATE, change_metadata, save_dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from shardwise.errors import UserError
from shardwise.model.boxes import whole_box
from shardwise.model.stored import open_weights

KEY = "model.embed.weight"  # as it was saved: in no container
SIZE = torch.Size


class Call:
    """Calls `function` when it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_dcp(tmp_path / "dcp", dict(STATE))


def read_whole(path: Path, name: str) -> Tensor:
    weights = open_weights(path)
    return weights.read(name, whole_box(weights.shape(name)))


def refuse(path: Path, name: str | None = None) -> str:
    """Read everything; the error must come, cost little, and be one that users see."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="cannot read") as caught:
        read_whole(path, name or KEY)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024
    assert caught.value.fix
    return caught.value.why


# ---- code -------------------------------------------------------------------------------------


def put_in(place: str) -> Callable[[Metadata, Any], Any]:
    def change(metadata: Metadata, trap: Any) -> Any:
        entries: Any = metadata.state_dict_metadata
        if place == "file":
            return trap
        if place == "planner":
            metadata.planner_data = {**metadata.planner_data, "x": trap}
        elif place == "meta":
            metadata.storage_meta = trap
        elif place == "tensor":
            entries["x"] = trap
        elif place == "size":
            entries[KEY].size = trap
        elif place == "place":
            next(iter(metadata.storage_data.values())).relative_path = trap
        return metadata

    return change


PLACES = ("file", "planner", "meta", "tensor", "size", "place")


@pytest.mark.parametrize("place", PLACES)
def test_code_anywhere_in_the_metadata_is_refused_and_not_run(
    place: str, path: Path, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    trap = Call(os.system, f"touch {canary}")
    change_metadata(path, lambda metadata: put_in(place)(metadata, trap))
    assert "it names 'posix.system'; nothing in it was run" in refuse(path)
    assert not canary.exists()
    pickle.loads((path / ".metadata").read_bytes())
    assert canary.exists(), "the trap is a real one"


def saved_trap(canary: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save(Call(os.mkdir, str(canary)), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (builtins.eval, ("__import__('os').mkdir(CANARY)",), "builtins.eval"),
        (builtins.exec, ("__import__('os').mkdir(CANARY)",), "builtins.exec"),
        (builtins.__import__, ("antigravity",), "builtins.__import__"),
        (torch.storage._load_from_bytes, (b"TRAP",), "torch.storage._load_from_bytes"),
        (torch.load, ("FILE",), "torch.serialization.load"),
        (torch.hub.load, ("FILE", "x"), "torch.hub.load"),
        (torch.zeros, (2**40,), "torch._C._VariableFunctionsClass"),
        (torch._utils._rebuild_tensor_v2, (None, 0, (1,), (1,), False, {}), "_rebuild_tensor_v2"),
        (bytearray, (2**40,), "builtins.bytearray"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_function_that_can_do_harm_is_named(
    function: Any, arguments: tuple[Any, ...], name: str, path: Path, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    words = {"FILE": str(tmp_path / "trap.pt"), b"TRAP": saved_trap(canary)}
    (tmp_path / "trap.pt").write_bytes(saved_trap(canary))
    arguments = tuple(
        words.get(a, a.replace("CANARY", repr(str(canary))) if isinstance(a, str) else a)
        if isinstance(a, str | bytes)
        else a
        for a in arguments
    )
    change_metadata(path, lambda metadata: put_in("meta")(metadata, Call(function, *arguments)))
    assert name in refuse(path)
    assert not canary.exists()


def test_allowed_names_cannot_be_chained(path: Path) -> None:
    """`getattr`, which members of an enum are pickled by, would reach everything."""
    inner = Call(getattr, torch.Size, "__subclasses__")
    steps = pickle.dumps(Call(getattr, inner, "__call__"))
    # What was made is called: REDUCE on a REDUCE.
    change_metadata(path, lambda metadata: steps[:-1] + b")R.")
    assert "calls what is not a name" in refuse(path)
    (path / ".metadata").write_bytes(pickle.dumps(inner))
    assert "a Metadata is missing" in refuse(path)


# ---- lies -------------------------------------------------------------------------------------


def place_of(metadata: Metadata, key: str = KEY) -> Any:
    return next(p for index, p in metadata.storage_data.items() if index.fqn == key)


def entry(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata[KEY]


def set_place(**values: Any) -> Callable[[Metadata], None]:
    return lambda metadata: [setattr(place_of(metadata), k, v) for k, v in values.items()] and None


def set_chunks(*chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        entry(metadata).chunks = [ChunkStorageMetadata(SIZE(o), SIZE(s)) for o, s in chunks]

    return change


def set_entry(**values: Any) -> Callable[[Metadata], None]:
    return lambda metadata: [setattr(entry(metadata), k, v) for k, v in values.items()] and None


def share_bytes(metadata: Metadata) -> None:
    other = place_of(metadata, "lm_head.weight")
    place_of(metadata).offset = other.offset
    place_of(metadata).length = other.length


def drop(name: str) -> Callable[[Metadata], None]:
    return lambda metadata: setattr(metadata, name, None)


LIES: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "absolute": (set_place(relative_path="/etc/passwd"), "'/etc/passwd', which is no .distcp"),
    "upwards": (set_place(relative_path="../__0_0.distcp"), "which is no .distcp"),
    "downwards": (set_place(relative_path="x/__0_0.distcp"), "which is no .distcp"),
    "newline": (set_place(relative_path="__0_0.distcp\n"), "which is no .distcp"),
    "metadata": (set_place(relative_path=".metadata"), "which is no .distcp"),
    "no text": (set_place(relative_path=7), "which is no .distcp"),
    "absent": (set_place(relative_path="__9_0.distcp"), "is missing, or is not a regular file"),
    "before": (set_place(offset=-1), "not sizes"),
    "beyond": (set_place(offset=2**40), "shorter than its items"),
    "far beyond": (set_place(offset=2**70), "not sizes"),
    "long": (set_place(length=2**40), "share bytes"),
    "short": (set_place(length=10), "larger than its bytes"),
    "fraction": (set_place(length=10.5), "not sizes"),
    "true": (set_place(offset=True), "not sizes"),
    "shared": (share_bytes, "share bytes"),
    "extension": (set_place(transform_descriptors=["zstd"]), "extension"),
    "large": (set_entry(size=SIZE([2**46, 16])), "do not cover it exactly once"),
    "large too": (set_chunks(((0, 0), (2**46, 16))), "do not cover it exactly once"),
    "large both": (
        lambda m: (set_entry(size=SIZE([2**46, 16]))(m), set_chunks(((0, 0), (2**46, 16)))(m))[0],
        "larger than its bytes",
    ),
    "many dims": (set_entry(size=SIZE([1] * 100)), "100 dims"),
    "a hole": (set_chunks(((0, 0), (60, 16))), "do not cover it exactly once"),
    "no chunks": (set_chunks(), "do not cover it exactly once"),
    "twice": (set_chunks(((0, 0), (61, 16)), ((0, 0), (61, 16))), "do not cover it exactly once"),
    "outside": (set_chunks(((1, 0), (61, 16))), "not what DCP writes"),
    "other dims": (set_chunks(((0,), (976,))), "not what DCP writes"),
    "no sizes": (set_entry(size=(61, 16)), "torch.Size is missing"),
    "no chunk list": (set_entry(chunks=7), "not what DCP writes"),
    "no properties": (set_entry(properties=None), "not what DCP writes"),
    "no storage": (drop("storage_data"), "not what DCP writes"),
    "no tensors": (drop("state_dict_metadata"), "not what DCP writes"),
    "another root": (lambda m: [m], "Metadata is missing"),
    "empty": (lambda m: b"", "not a whole pickle"),
    "json": (lambda m: b'{"a": 1}', "not a whole pickle"),
}


@pytest.mark.parametrize(("change", "why"), LIES.values(), ids=LIES.keys())
def test_metadata_that_lies_is_refused(change: Any, why: str, path: Path) -> None:
    change_metadata(path, change)
    assert why in refuse(path)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_links_are_not_followed(name: str, path: Path, tmp_path: Path) -> None:
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    assert "regular file" in refuse(path)


def test_a_pipe_does_not_hang(path: Path) -> None:
    (path / "__0_0.distcp").unlink()
    os.mkfifo(path / "__0_0.distcp")
    assert "regular file" in refuse(path)


def test_a_cut_file_is_told(path: Path) -> None:
    file = path / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    assert "it may have been cut" in refuse(path)


# ---- items ------------------------------------------------------------------------------------


def put_item(path: Path, content: bytes) -> None:
    """Append an item, and say that it is the tensor `KEY`."""
    file = path / "__0_0.distcp"
    start = file.stat().st_size
    file.write_bytes(file.read_bytes() + content)
    change_metadata(path, set_place(offset=start, length=len(content)))


def saved(value: Any, **how: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **how)
    return buffer.getvalue()


def packed(content: bytes) -> bytes:
    """The same zip, deflated: a few bytes may then unpack to any number."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w", 8) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return buffer.getvalue() + bytes(len(content))


def test_an_honest_item_passes(path: Path) -> None:
    put_item(path, saved(STATE[KEY]))
    assert torch.equal(read_whole(path, KEY), STATE[KEY])


def test_code_in_an_item_is_refused_and_not_run(path: Path, tmp_path: Path) -> None:
    trap = Call(os.mkdir, str(tmp_path / "canary"))
    put_item(path, saved([STATE[KEY], trap]))
    assert "posix.mkdir" in refuse(path)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (saved(STATE[KEY].double()), "not the tensor that .metadata describes"),
        (saved(STATE[KEY].t().contiguous()), "not the tensor that .metadata describes"),
        (saved(torch.arange(2000.0)), "not the tensor that .metadata describes"),
        (saved([STATE[KEY], STATE[KEY] + 1]), "not one tensor of torch.save"),
        (saved("text" * 2000), "not one tensor of torch.save"),
        (saved(STATE[KEY], _use_new_zipfile_serialization=False), "not one tensor of torch.save"),
        (packed(saved(STATE[KEY])), "not one tensor of torch.save"),
        (bytes(5000), "not one tensor of torch.save"),
        (saved(STATE[KEY])[:-30] + bytes(30), "not one tensor of torch.save"),
    ],
    ids=["dtype", "shape", "sizes", "two", "text", "old", "packed", "zeros", "cut"],
)
def test_an_item_that_is_another_thing_is_refused(content: bytes, why: str, path: Path) -> None:
    put_item(path, content)
    assert why in refuse(path)
