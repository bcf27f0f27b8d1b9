"""Known faults of FSDP in other tools' files and in scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.foreign.setup import FSDP1_CLASS, FSDP2_CALL, ForeignSetup
from shardwise.migrate.script import NamedCall

_NO = ("false", "0", "no")
_YES = ("true", "1", "yes")
_NARROW = ("torch.bfloat16", "torch.float16", "torch.half")
_FEW_PARAMS = 10_000_000
_SHARES_DATA = (
    "DistributedSampler",
    "StatefulDistributedSampler",
    "split_dataset_by_node",
    "accelerator.prepare",
    "fabric.setup_dataloaders",
)
_OFFLOADS = ("fsdp.CPUOffload", "fsdp.CPUOffloadPolicy")
Look = Callable[[ForeignSetup], Iterator[str]]


def _at(call: NamedCall) -> str:
    return f"line {call.line}: {call.name.rpartition('.')[2]}"


def _both(setup: ForeignSetup) -> Iterator[str]:
    first, second = setup.called(FSDP1_CLASS), setup.called(FSDP2_CALL)
    if first and second:
        yield f"{_at(first[0])}(...) beside {_at(second[0])}(...)"


def _flat_with_tensor_parallel(setup: ForeignSetup) -> Iterator[str]:
    wraps, splits = setup.called(FSDP1_CLASS), setup.called("parallelize_module")
    if wraps and splits:
        yield f"{_at(wraps[0])}(...) beside {_at(splits[0])}(...)"
    for key, value in setup.said("fsdp_version", "version"):
        for other, degree in setup.said("parallelism_config_tp_size", "tp_size"):
            if value == "1" and degree.isdecimal() and int(degree) > 1:
                yield f"{key}: {value} with {other}: {degree}"


def _root_alone(setup: ForeignSetup) -> Iterator[str]:
    for call in setup.called(FSDP1_CLASS):
        if "auto_wrap_policy" not in call.arguments and not setup.called("wrap.wrap"):
            yield f"{_at(call)}(...) without auto_wrap_policy"
            return
    calls = setup.called(FSDP2_CALL)
    if len(calls) == 1 and not calls[0].in_loop:
        yield f"{_at(calls[0])}(...) is the only call of it: blocks and the root need one each"
    for key, value in setup.said("fsdp_auto_wrap_policy", "auto_wrap_policy"):
        if value == "no_wrap":
            yield f"{key}: {value}"


def _fine_wrapping(setup: ForeignSetup) -> Iterator[str]:
    for key, value in setup.said("fsdp_min_num_params", "min_num_params"):
        if value.isdecimal() and 0 < int(value) < _FEW_PARAMS:
            yield f"{key}: {value}"


def _flattened(setup: ForeignSetup) -> Iterator[str]:
    for key, value in setup.said("fsdp_use_orig_params", "use_orig_params"):
        if value in _NO:
            yield f"{key}: {value}"
    for call in setup.called(FSDP1_CLASS):
        if call.arguments.get("use_orig_params") == "False":
            yield f"{_at(call)}(use_orig_params=False)"


def _whole_state(setup: ForeignSetup) -> Iterator[str]:
    for key, value in setup.said("fsdp_state_dict_type", "state_dict_type"):
        if "full" in value:
            yield f"{key}: {value}"
    for call in setup.called("fsdp.FullStateDictConfig", "fsdp.FullOptimStateDictConfig"):
        yield f"{_at(call)}(...)"
        return


def _no_prefetch(setup: ForeignSetup) -> Iterator[str]:
    for key, value in setup.said("fsdp_backward_prefetch", "backward_prefetch"):
        if value in ("no_prefetch", "none", ""):
            yield f"{key}: {value}"
    for call in setup.called(FSDP1_CLASS):
        if call.arguments.get("backward_prefetch") == "None":
            yield f"{_at(call)}(backward_prefetch=None)"


def _whole_load(setup: ForeignSetup) -> Iterator[str]:
    for key, value in setup.said("fsdp_cpu_ram_efficient_loading", "cpu_ram_efficient_loading"):
        if value in _NO:
            yield f"{key}: {value}"


def _unsynchronised(setup: ForeignSetup) -> Iterator[str]:
    for key, value in setup.said("fsdp_cpu_ram_efficient_loading", "cpu_ram_efficient_loading"):
        for other, synced in setup.said("fsdp_sync_module_states", "sync_module_states"):
            if value in _YES and synced in _NO:
                yield f"{key}: {value} with {other}: {synced}"


def _narrow_sums(setup: ForeignSetup) -> Iterator[str]:
    for call in setup.called("fsdp.MixedPrecision", "fsdp.MixedPrecisionPolicy"):
        if (given := call.arguments.get("reduce_dtype")) in _NARROW:
            yield f"{_at(call)}(reduce_dtype={given})"


def _flat_across_nodes(setup: ForeignSetup) -> Iterator[str]:
    for key, value in setup.said("num_machines"):
        strategies = setup.said("fsdp_sharding_strategy", "fsdp_reshard_after_forward")
        for other, strategy in strategies:
            if value.isdecimal() and int(value) > 1 and strategy in ("full_shard", "1"):
                yield f"{key}: {value} with {other}: {strategy}"


def _slow_offload(setup: ForeignSetup) -> Iterator[str]:
    if not setup.called(*_OFFLOADS):
        return
    for call in setup.called("optim.AdamW", "optim.Adam"):
        if call.arguments.get("fused") != "True":
            yield f"{_at(call)}(...) without fused=True beside {_at(setup.called(*_OFFLOADS)[0])}"
            return


def _fp16(setup: ForeignSetup) -> Iterator[str]:
    for key, value in setup.said("mixed_precision"):
        if value == "fp16":
            yield f"{key}: {value}"
    for key, value in setup.said("fp16"):
        if value in _YES:
            yield f"{key}: {value}"
    for call in setup.called("fsdp.MixedPrecision", "fsdp.MixedPrecisionPolicy"):
        if call.arguments.get("param_dtype") in ("torch.float16", "torch.half"):
            yield f"{_at(call)}(param_dtype={call.arguments['param_dtype']})"


def _unshared_data(setup: ForeignSetup) -> Iterator[str]:
    loaders = setup.called("utils.data.DataLoader")
    is_sharded = setup.called(FSDP1_CLASS, FSDP2_CALL, "DistributedDataParallel")
    has_sampler = any("sampler" in name for call in loaders for name in call.arguments)
    if loaders and is_sharded and not has_sampler and not setup.called(*_SHARES_DATA):
        yield f"{_at(loaders[0])}(...) without a sampler that shares the data between ranks"


def _unlimited(setup: ForeignSetup) -> Iterator[str]:
    for key, value in setup.said("fsdp_forward_prefetch", "forward_prefetch"):
        for other, limit in setup.said("limit_all_gathers", "fsdp_limit_all_gathers"):
            if value in _YES and limit in _NO:
                yield f"{key}: {value} with {other}: {limit}"


FOREIGN: tuple[Check[ForeignSetup], ...] = (
    Check(
        "SW150", "error", "FSDP1 and FSDP2 are mixed",
        "They shard by different code, and neither knows the other's parameters.",
        "use one: fully_shard everywhere; `shardwise migrate FILE` says what each call becomes",
        _both,
    ),
    Check(
        "SW151", "error", "FSDP1 is combined with tensor parallelism",
        "Flat parameters do not know the second axis of a mesh, and shapes do not fit.",
        "use fully_shard on a 2-D mesh of init_device_mesh",
        _flat_with_tensor_parallel,
    ),
    Check(
        "SW152", "error", "Only the root is wrapped",
        "The whole model is then gathered at once: it does not fit, and nothing overlaps.",
        "wrap every block, then the root: transformer_auto_wrap_policy, or fully_shard in a loop",
        _root_alone,
    ),
    Check(
        "SW153", "warning", "Wrapping is too fine",
        "Small messages do not reach the bandwidth of the links.",
        "wrap at the block: TRANSFORMER_BASED_WRAP",
        _fine_wrapping,
    ),
    Check(
        "SW154", "error", "Parameters are flattened",
        "With use_orig_params=False an optimizer and PEFT do not find single parameters: adapters "
        "do not update.",
        "write use_orig_params=True; FSDP2 always keeps them",
        _flattened,
    ),
    Check(
        "SW155", "warning", "Saves gather the whole model on one rank",
        "That takes minutes, and twice the model's size on rank 0.",
        "save SHARDED_STATE_DICT with torch.distributed.checkpoint, and convert for export",
        _whole_state,
    ),
    Check(
        "SW156", "warning", "All-gathers of backward are not prefetched",
        "The GPUs are idle during each all-gather.",
        "write BACKWARD_PRE",
        _no_prefetch,
    ),
    Check(
        "SW157", "warning", "Every rank loads the whole model",
        "Host memory holds it once for each rank of a node, and runs out before training.",
        "write fsdp_cpu_ram_efficient_loading: true",
        _whole_load,
    ),
    Check(
        "SW158", "error", "Weights that one rank loads are not sent to the others",
        "The other ranks then train from empty weights.",
        "write fsdp_sync_module_states: true",
        _unsynchronised,
    ),
    Check(
        "SW159", "warning", "Gradients are reduced in a narrow format",
        "Sums over many ranks lose bits in bf16 and fp16. Long runs can diverge.",
        "write reduce_dtype=torch.float32",
        _narrow_sums,
    ),
    Check(
        "SW160", "warning", "Units are gathered across nodes",
        "Every unit crosses the network twice in each pass. With HSDP only gradients cross it.",
        "write HYBRID_SHARD, with as many replicas as nodes",
        _flat_across_nodes,
    ),
    Check(
        "SW161", "warning", "Offload without the fused optimizer",
        "AdamW on the CPU then runs tensor by tensor, and a step can take many seconds.",
        "write fused=True",
        _slow_offload,
    ),
    Check(
        "SW162", "warning", "fp16 is asked for",
        "fp16 needs loss scaling. A scale that collapses gives NaN or stops learning.",
        "write bf16, on devices from Ampere on",
        _fp16,
    ),
    Check(
        "SW163", "error", "Ranks do not share the data",
        "Each rank reads all of it in its own order, so that gradient norms differ and epochs are "
        "longer than they seem.",
        "give the loader a DistributedSampler with one seed, and call set_epoch",
        _unshared_data,
    ),
    Check(
        "SW164", "warning", "All-gathers are not limited",
        "Prefetching without a limit gathers many units at once, and memory runs out.",
        "write limit_all_gathers: true",
        _unlimited,
    ),
)  # fmt: skip
