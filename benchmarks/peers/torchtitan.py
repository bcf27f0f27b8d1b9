"""torchtitan 0.2.2 as rank 0 of N on one GPU: its own model, sharding, compilation and step.

    PYTHONPATH=benchmarks python -m peers.torchtitan --shape 8b-4096 --setting 4-none

torchtitan must be importable; 0.2.2 is the newest release that works with torch 2.11:

    pip install --no-deps torchtitan==0.2.2 torchdata tyro docstring_parser typeguard

`datasets` and `tensorboard`, which only its data and its curves need, are stood in for where they
are missing. What is not torchtitan's own:

- the shape, and one batch of random tokens that is there at once;
- its collectives. Its fake backend moves nothing, so gathered weights and reduced gradients would
  be whatever lay in memory, and free. Here the emulator of `shardwise tunnel` carries them, through
  the hooks of FSDP2 that ours go through: an all-gather copies the local shard into every slot, a
  reduce-scatter sums over the slots, and both of one group queue behind each other;
- the loop around its step, which takes the time of each as the tunnel's does, and a learning rate
  of 0, as the tunnel has: AdamW does the same work, and weights stay finite.
"""

from __future__ import annotations

import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from peers.child import WARM_UP_STEPS, Task, answer, read_task
from shardwise.facts.cluster import parse_cluster
from shardwise.parallel.comm import apply_to_unit
from shardwise.tunnel.emulate import Emulator
from shardwise.tunnel.emulated_links import Links
from shardwise.tunnel.link_clock import CudaClock, HostClock, LinkClock
from shardwise.tunnel.timed import time_steps

NAME = "llama3_of_this_shape"


def main() -> None:
    task = read_task()
    stand_in_for_missing()
    if task.device == "cpu":
        take_the_cpu_for_a_gpu()
    os.environ |= {"LOCAL_RANK": "0", "NGPU": str(task.shape.world)}
    # They ask for the device when they are imported.
    from torchtitan.config import ConfigManager
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

    emulator = emulator_of(task)
    register_train_spec(NAME, spec_of(task, emulator))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            ConfigManager().parse_args([*flags_of(task), "--job.dump_folder", folder])
        )
        validate_size(trainer, task)
        times = run_steps(trainer, emulator, task)
    validate_work(trainer, emulator)
    answer(times, task.device)


def stand_in_for_missing() -> None:
    """Modules that torchtitan imports and that no step here calls."""
    if find_spec("datasets") is None:
        stand_in("datasets", "Dataset", "load_dataset")
        stand_in("datasets.distributed", "split_dataset_by_node")
    if find_spec("tensorboard") is None:
        stand_in("torch.utils.tensorboard", "SummaryWriter")


def stand_in(name: str, *attributes: str) -> None:
    module = types.ModuleType(name)
    for attribute in attributes:
        setattr(module, attribute, type(attribute, (), {}))
    sys.modules[name] = module


def take_the_cpu_for_a_gpu() -> None:
    """To try this file without a GPU: torchtitan asks a device for more than torch.cpu answers."""
    if find_spec("triton") is None:
        stand_in("torchtitan.models.moe.kernels", "generate_permute_indices")
    torch._utils._get_available_device_type = lambda: "cpu"
    answers: dict[str, Callable[..., Any]] = {
        "get_device_name": lambda *_: "a CPU",
        "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=2**34),
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
    }
    for name, function in answers.items():
        setattr(torch.cpu, name, function)


def emulator_of(task: Task) -> Emulator:
    """Links of infinite speed, whichever cluster's they are."""
    clock: LinkClock = CudaClock() if task.device == "cuda" else HostClock()
    fabric = parse_cluster(f"{task.shape.world}xH200").fabric
    return Emulator(Links.of(fabric, float("inf")), clock, free=True)


def spec_of(task: Task, emulator: Emulator) -> Any:
    """torchtitan's Llama 3, with this shape, random tokens, and collectives that move data."""
    from torchtitan.models import llama3

    own = llama3.get_train_spec()

    def parallelize(model: torch.nn.Module, *arguments: Any) -> torch.nn.Module:
        sharded: torch.nn.Module = own.parallelize_fn(model, *arguments)
        for name, module in sharded.named_modules():
            if isinstance(module, FSDPModule):
                # Its gradients have memory of their own, as FSDP2 gives it.
                apply_to_unit(module, name, emulator, shares=False)
        return sharded

    return replace(
        own,
        model_args={NAME: model_args_of(task)},
        parallelize_fn=parallelize,
        build_dataloader_fn=lambda **_: OneBatch(task),
        build_tokenizer_fn=None,
    )


def model_args_of(task: Task) -> Any:
    from torchtitan.models.llama3 import TransformerModelArgs

    spec, fields = task.shape.spec, task.shape.hf_config
    return TransformerModelArgs(
        dim=spec.hidden_size,
        n_layers=spec.num_layers,
        n_heads=spec.num_heads,
        n_kv_heads=spec.num_kv_heads,
        vocab_size=spec.vocab_size,
        # The width of the MLP is two thirds of four times `dim`, rounded up to a multiple of this.
        multiple_of=spec.ffn_size,
        norm_eps=fields["rms_norm_eps"],
        rope_theta=fields["rope_theta"],
    )


class OneBatch:
    """The same random tokens for every step; torchtitan's checkpointer asks for a state."""

    def __init__(self, task: Task) -> None:
        shape = (task.setting.micro_batch, task.shape.seq_len + 1)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(task.shape.spec.vocab_size, shape, generator=generator)
        self.tokens = tokens.pin_memory() if task.device == "cuda" else tokens

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            yield {"input": self.tokens[:, :-1]}, self.tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Nothing to go on from."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to go on from."""


def flags_of(task: Task) -> list[str]:
    """The setting as torchtitan's command line has it."""
    setting, on_gpu = task.setting, task.device == "cuda"
    given: dict[str, str | int] = {
        "model.name": NAME,
        "model.flavor": NAME,
        "comm.mode": "fake_backend",
        "training.seq_len": task.shape.seq_len,
        "training.local_batch_size": setting.micro_batch,
        "training.steps": WARM_UP_STEPS + task.steps,
        "training.mixed_precision_param": "bfloat16" if on_gpu else "float32",
        "optimizer.lr": 0,
        "optimizer.implementation": "fused",
        "lr_scheduler.warmup_steps": 1,
        # Its lines read numbers from the device, which a step need not wait for.
        "metrics.log_freq": 10**6,
        **recompute_flags(setting.recompute),
    }
    switches = ["compile.enable"] if on_gpu else []
    if "keep" in setting.words:
        given["parallelism.fsdp_reshard_after_forward"] = "never"
    if "float8" in setting.words:
        float8 = "quantize.linear.float8"
        given |= {"model.converters": float8, f"{float8}.filter_fqns": "output"}
        switches.append(f"{float8}.enable_fsdp_float8_all_gather")
        switches.append(f"{float8}.precompute_float8_dynamic_scale_for_fsdp")
    pairs = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [*pairs, *(f"--{name}" for name in switches)]


def recompute_flags(recompute: str) -> dict[str, str | int]:
    mode = "activation_checkpoint.mode"
    if recompute in ("none", "full"):
        return {mode: recompute}
    # A share of the blocks is every so-manyeth one to torchtitan.
    every = "op" if recompute == "selective" else str(round(1 / float(recompute)))
    return {mode: "selective", "activation_checkpoint.selective_ac_option": every}


def run_steps(trainer: Any, emulator: Emulator, task: Task) -> list[float]:
    """Seconds of each measured step; the peak of memory is theirs too."""
    batches = trainer.batch_generator(trainer.dataloader)

    def step() -> None:
        trainer.step += 1
        emulator.traffic.forget()
        trainer.train_step(batches)

    for _ in range(WARM_UP_STEPS):
        step()
    return time_steps(emulator.clock, torch.device(task.device), [step] * task.steps)


def validate_size(trainer: Any, task: Task) -> None:
    """A model of another size would be another race."""
    found = sum(param.numel() for part in trainer.model_parts for param in part.parameters())
    if found != task.shape.spec.total_params:
        raise ValueError(f"{found:,} parameters instead of {task.shape.spec.total_params:,}")


def validate_work(trainer: Any, emulator: Emulator) -> None:
    """Data was moved in both directions, and a GPU computes faster where it is not finite."""
    kinds = {item.kind for item in emulator.traffic.items}
    if not {"all_gather", "reduce_scatter"} <= kinds:
        raise ValueError(f"the last step moved no data but for {kinds}")
    params = [param for part in trainer.model_parts for param in part.parameters()]
    if not all(torch.isfinite(param.grad.to_local()).all() for param in params):
        raise ValueError("gradients are not finite")


if __name__ == "__main__":
    main()
