"""Frozen weights that keep the bytes of files in MXFP4 and in fp8 blocks, on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from adapted_runs import start_moved, train_adapted, train_adapted_plainly
from legs import join, run_leg
from rank_pool import Ranks
from tiny_runs import TOLERANCE, Arrays, Settings, Tally, Trained, assert_close, differences
from torch import Tensor

from quantised_models import BLOCK, read_all, save_both
from shardwise.model import stored
from shardwise.model.weights import local_part
from traced import without_kernels

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
FULL: Settings = {"shard.strategy": "full_shard"}
HYBRID: Settings = {"shard.strategy": "hybrid_shard", "mesh.replicate": 2}
EXPERT_PARALLEL: Settings = {"mesh.shard": 2, "mesh.expert": 2}
RECOMPUTED: Settings = {**FULL, "memory.checkpoint_activations": "full", "train.accumulation": 2}
OFFLOADED: Settings = {
    **FULL,
    "memory.checkpoint_activations": "selective",
    "memory.offload": "cpu",
}
MESHES: dict[str, list[Any]] = {
    "gpt_oss": [(2, EXPERT_PARALLEL), (4, HYBRID)],
    "deepseek_v3": [(2, RECOMPUTED)],
}
OTHERS: dict[str, list[Any]] = {
    "gpt_oss": [(1, {}), (2, RECOMPUTED), (2, OFFLOADED), (4, FULL)],
    "deepseek_v3": [(1, {}), (2, EXPERT_PARALLEL), (2, OFFLOADED), (4, FULL), (4, HYBRID)],
}
FAMILIES = tuple(MESHES)
LORA: Settings = {
    "model.overrides": {},
    "adapter.method": "lora",
    "adapter.rank": 8,
    "adapter.targets": ["all-linear", "experts.*"],
    "train.steps": 2,
    "train.seed": 1,
}


class Shipped:
    """A directory as a family is published, and the rows that its bytes are."""

    def __init__(self, family: str, place: Path) -> None:
        save_both(family, place / "shipped", place / "plain")
        self.settings: Settings = {**LORA, "model.name": str(place / "shipped")}
        files = read_all(place / "shipped")
        self.rows: Arrays = (_of_mxfp4 if family == "gpt_oss" else _of_fp8)(files)


def _of_mxfp4(files: dict[str, Tensor]) -> Arrays:
    names = [name.removesuffix("_blocks") for name in files if name.endswith("_blocks")]
    return {
        name: _padded(16, files[f"{name}_blocks"].flatten(-2), files[f"{name}_scales"]).view(
            "int32"
        )
        for name in names
    }


def _of_fp8(files: dict[str, Tensor]) -> Arrays:
    def rows_of(name: str) -> Tensor:
        values, scales = files[f"{name}.weight"], files[f"{name}.weight_scale_inv"]
        copies = scales.repeat_interleave(BLOCK, 0)[: len(values)].contiguous()
        both = values.view(torch.uint8), copies.view(torch.uint8)
        return torch.from_numpy(_padded(8, *both))

    made: Arrays = {}
    for name in (n.removesuffix(".weight_scale_inv") for n in files if n.endswith("_inv")):
        before, _, expert = name.partition(".experts.")
        if not expert:
            made[f"{name}.weight"] = rows_of(name).numpy().view("int64")
        elif expert == "0.down_proj":
            each = [f"{before}.experts.{number}" for number in range(4)]
            gates = [rows_of(f"{e}.gate_proj") for e in each]
            ups = [rows_of(f"{e}.up_proj") for e in each]
            halves = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
            downs = torch.stack([rows_of(f"{e}.down_proj") for e in each])
            made[f"{before}.experts.gate_up_proj"] = halves.numpy().view("int64")
            made[f"{before}.experts.down_proj"] = downs.numpy().view("int64")
    return made


def _padded(multiple: int, *parts: Tensor) -> Any:
    row = torch.cat(parts, dim=-1)
    return F.pad(row, (0, -row.shape[-1] % multiple)).contiguous().numpy()


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Shipped]:
    """`shipped(family)`: made once."""
    made: dict[str, Shipped] = {}

    def make(family: str) -> Shipped:
        if family not in made:
            made[family] = Shipped(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


@pytest.fixture(scope="module")
def references(ranks: Pools, shipped: Callable[[str], Shipped]) -> Callable[[str], Trained]:
    """`references(family)`: one process over the same weights as floats, run once."""
    made: dict[str, Trained] = {}

    def run(family: str) -> Trained:
        if family not in made:
            made[family] = ranks(1).run(train_adapted_plainly, shipped(family).settings)[0]
        return made[family]

    return run


def assert_bytes(found: Trained, shipped: Shipped) -> None:
    packed = {name for name, value in found.params.items() if value.dtype.kind == "i"}
    assert packed == shipped.rows.keys() and packed
    for name in packed:
        assert np.array_equal(found.params[name], shipped.rows[name]), name


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(f, marks=pytest.mark.long, id=f"{f}-all") for f in OTHERS)]
)
def test_bytes_are_kept_and_losses_are_those_over_floats(
    ranks: Pools,
    tally: Tally,
    shipped: Callable[[str], Shipped],
    references: Callable[[str], Trained],
    request: pytest.FixtureRequest,
    family: str,
) -> None:
    """Also before and after steps: `train_adapted` compares what is frozen on every rank."""
    is_long = request.node.callspec.id.endswith("-all")
    for world, mesh in (OTHERS if is_long else MESHES)[family]:
        settings = {**shipped(family).settings, **mesh}
        found = ranks(world).run(train_adapted, world, settings)[0]
        assert_bytes(found, shipped(family))
        assert_close(found, references(family), tally)


@pytest.mark.parametrize("family", FAMILIES)
def test_floats_of_the_same_files_learn_the_same(
    ranks: Pools,
    shipped: Callable[[str], Shipped],
    references: Callable[[str], Trained],
    family: str,
) -> None:
    settings = {**shipped(family).settings, **FULL, "adapter.base": "param"}
    floats = ranks(2).run(train_adapted, 2, settings)[0]
    kept = references(family)
    trained = [name for name in kept.params if "lora" in name]
    assert trained and not any(value.dtype.kind == "i" for value in floats.params.values())
    alike = (
        Trained(each.losses, each.norms, {name: each.params[name] for name in trained})
        for each in (floats, kept)
    )
    assert max(differences(*alike)) <= TOLERANCE


def train_compiled(world: int, settings: Settings, has_kernels: bool) -> Any:
    """On every rank, with compiled blocks: all steps; the result comes from rank 0."""
    torch.compiler.reset()
    with nullcontext() if has_kernels else without_kernels():
        return train_adapted(world, {**settings, "memory.compile": True})


def compiled(family: str, remat: str, *, has_kernels: bool) -> Any:
    marks = pytest.mark.long if has_kernels or family == "deepseek_v3" else ()
    made = "kernels" if has_kernels else "graphs"
    return pytest.param(family, remat, has_kernels, marks=marks, id=f"{family}-{remat}-{made}")


COMPILED = [
    compiled("gpt_oss", "selective", has_kernels=False),
    compiled("deepseek_v3", "selective", has_kernels=False),
    *(
        compiled(family, remat, has_kernels=True)
        for family in FAMILIES
        for remat in ("none", "selective", "full")
    ),
]


@pytest.mark.parametrize(("family", "remat", "has_kernels"), COMPILED)
def test_compiled_blocks_learn_the_same(
    ranks: Pools,
    shipped: Callable[[str], Shipped],
    references: Callable[[str], Trained],
    family: str,
    remat: str,
    has_kernels: bool,
) -> None:
    how = {"memory.checkpoint_activations": remat, **FULL}
    world = 2 if has_kernels else 1
    settings = {**shipped(family).settings, **how}
    found = ranks(world).run(train_compiled, world, settings, has_kernels)[0]
    assert_bytes(found, shipped(family))
    reference = references(family)
    assert found.losses == pytest.approx(reference.losses, rel=1e-5)
    assert found.norms == pytest.approx(reference.norms, rel=1e-4)


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("deepseek_v3", marks=pytest.mark.long)])
def test_a_resume_on_another_mesh_reads_the_same_bytes(
    ranks: Pools, tmp_path: Path, shipped: Callable[[str], Shipped], family: str
) -> None:
    settings = {**shipped(family).settings, **FULL}
    unbroken = ranks(2).run(run_leg, 2, settings, tmp_path / "unbroken", 2)[0]
    begun = ranks(2).run(run_leg, 2, settings, tmp_path / "legs", 1)[0]
    same = ranks(2).run(run_leg, 2, settings, tmp_path / "legs", 2)[0]
    other = ranks(4).run(run_leg, 4, {**settings, **HYBRID}, tmp_path / "legs", 2)[0]
    for leg in (begun, same, other):
        assert_bytes(leg, shipped(family))
    assert join(begun, same).losses == unbroken.losses
    assert max(differences(join(begun, other), unbroken)) <= TOLERANCE
    files = [file for file in (tmp_path / "legs").rglob("*") if file.is_file()]
    assert not any(b"shared_experts.up_proj.weight" in file.read_bytes() for file in files)


def look(world: int, settings: Settings) -> dict[str, int]:
    """On every rank: the bytes that it reads of each dtype, and the bytes of rows that it keeps."""
    found: dict[str, int] = {}
    read = stored._Safetensors.read

    def counted(self: Any, key: str, box: Any) -> Tensor:
        part: Tensor = read(self, key, box)
        found[str(part.dtype)] = found.get(str(part.dtype), 0) + part.nbytes
        return part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored._Safetensors, "read", counted)
        session = start_moved(world, settings)
    params = session.model.parameters()
    own = (local_part(p) for p in params if p.dtype in (torch.int32, torch.int64))
    return {**found, "kept": sum(part.nbytes for part in own)}


# Three ranks cannot share four experts out, so each keeps a part of the rows of all.
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_reads_its_rows_alone(
    ranks: Pools, shipped: Callable[[str], Shipped], family: str, world: int
) -> None:
    settings = {**shipped(family).settings, **FULL, "train.global_batch": 12}
    everyone = ranks(world).run(look, world, settings)
    dtype = "torch.uint8" if family == "gpt_oss" else "torch.float8_e4m3fn"
    files = read_all(Path(settings["model.name"]))
    stored_bytes = sum(t.nbytes for t in files.values() if str(t.dtype) == dtype)
    assert sum(each[dtype] for each in everyone) == stored_bytes
    kept_bytes = sum(rows.nbytes for rows in shipped(family).rows.values())
    assert sum(each["kept"] for each in everyone) == kept_bytes
    for each in everyone:
        assert each[dtype] / stored_bytes == pytest.approx(each["kept"] / kept_bytes, rel=0.05)
        assert each[dtype] < 1.2 * stored_bytes / world
