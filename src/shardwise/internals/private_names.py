"""Private names that files, traces, stacks and logs carry. They are only compared as text and
never imported. Of a release with other names, only the known names are recognised."""

from __future__ import annotations

from typing import Literal

# Operators that call a collective, as a profiler's trace names them.
TRACED_CALLS = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
}
COLLECTIVE_PREFIXES = ("c10d::", "_c10d_functional::")

# Those that a dispatch mode sees in a step beside FSDP2's hooks, and those that move nothing.
Called = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
DISPATCHED_CALLS: dict[str, Called] = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_to_all_single": "all_to_all",
}
MOVE_NOTHING = (
    *("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"),
    "c10d::barrier",
)

# FSDP2's copies, whose inputs are shards to be gathered and whole gradients to be reduced.
FSDP_COPIES = ("fsdp::all_gather_copy_in", "fsdp::chunk_cat")

# Functions of torch's file of collectives that are none.
STORE_HELPERS = ("_get_default_store", "_store_based_barrier")

# What FSDP1, activation checkpointing and torch.compile put into the names of parameters.
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")

# The class that says where DCP has put a piece of a tensor.
STORAGE_INFO = "_StorageInfo"
# Classes and functions in the `.metadata` of DCP, by module. Before torch 2.3 the properties of a
# tensor were ShardedTensor's.
DCP_METADATA = (
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", STORAGE_INFO),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
)

# Functions by which `torch.save` describes a tensor, a parameter, and a tensor with attributes.
REBUILD_TENSOR = ("torch._utils", "_rebuild_tensor_v2")
REBUILD_PARAMETER = ("torch._utils", "_rebuild_parameter")
REBUILD_WITH_ATTRIBUTES = ("torch._tensor", "_rebuild_from_type_v2")

# The logger that warns of torchao's enums.
PYTREE_LOGGER = "torch.utils._pytree"
