"""Names that files, traces, stacks and logs carry: those that this torch writes."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.profiler import profile

from shardwise.internals import private_names
from shardwise.internals.dispatch_mode import TorchDispatchMode
from shardwise.internals.fsdp2 import SCHEMAS
from shardwise.internals.tensor_collectives import exchanged
from shardwise.tunnel.world import rank_zero_of


class Seen(TorchDispatchMode):
    """Notes operators of torch.distributed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        if "c10d" in name:
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def test_every_collective_of_a_step_is_known() -> None:
    with rank_zero_of(2):
        mesh = init_device_mesh("cpu", (2,))
        sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        with Seen() as seen:
            dist.all_reduce(torch.ones(1))
            dist.barrier()
            sharded.redistribute(mesh, [Replicate()]).to_local() + 0
            sharded.sum().full_tensor() + 0
            exchanged(torch.ones(2), [1, 1], [1, 1], str(mesh.get_group().group_name))
    known = {*private_names.DISPATCHED_CALLS, *private_names.MOVE_NOTHING}
    assert seen.names <= known
    assert {private_names.DISPATCHED_CALLS.get(name) for name in seen.names} >= {
        "all_reduce",
        "all_gather",
    }


def test_a_trace_names_collectives_as_we_read_them(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        whole, part = torch.ones(2), torch.ones(2)
        with profile() as taken:
            dist.all_gather_into_tensor(whole, part)
            dist.reduce_scatter_tensor(part, whole)
            dist.all_reduce(whole)
    finally:
        dist.destroy_process_group()
    called = {event.name for event in taken.events()} & private_names.TRACED_CALLS.keys()
    assert {private_names.TRACED_CALLS[name] for name in called} == {
        *("all_gather", "reduce_scatter", "all_reduce"),
    }


def test_fsdp2s_copies_are_those_with_a_schema() -> None:
    assert {name.removeprefix("fsdp::") for name in private_names.FSDP_COPIES} <= SCHEMAS.keys()


@pytest.mark.parametrize("name", private_names.STORE_HELPERS)
def test_helpers_of_the_store_are_torchs(name: str) -> None:
    assert callable(getattr(distributed_c10d, name))


def test_wrappers_leave_these_words_in_names() -> None:
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1)), nn.Linear(1, 1))
    wrapped[1] = torch.compile(wrapped[1])
    words = {part for name, _ in wrapped.named_parameters() for part in name.split(".")}
    assert words & set(private_names.WRAPPERS) == {"_checkpoint_wrapped_module", "_orig_mod"}


class Finder(pickle.Unpickler):
    """Notes the classes and functions that a pickle names."""

    found: ClassVar[set[tuple[str, str]]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.found.add((module, name))
        return super().find_class(module, name)


def test_dcp_writes_private_names_that_we_read(tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(3), "step": 1}, checkpoint_id=tmp_path, no_dist=True)
    with (tmp_path / ".metadata").open("rb") as file:
        Finder(file).load()
    of_torch = {pair for pair in Finder.found if pair[0].startswith("torch")}
    private = {pair for pair in of_torch if "._" in pair[0] or pair[1].startswith("_")}
    assert private
    assert private <= set(private_names.DCP_METADATA)


def test_the_logger_of_pytrees_is_torchs() -> None:
    # torch 2.11 logs nothing there, so that there is nothing to silence.
    if torch.__version__ >= (2, 13):
        assert private_names.PYTREE_LOGGER in logging.root.manager.loggerDict
