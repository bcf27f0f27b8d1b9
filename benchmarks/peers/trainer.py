"""Hugging Face Trainer on one GPU: bf16 autocast over fp32 weights, as `TrainingArguments` has it.

PYTHONPATH=benchmarks python -m peers.trainer --shape one-gpu --setting 2-none-compile
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from peers.child import WARM_UP_STEPS, answer, read_task
from peers.shapes import EXPERTS, Setting
from shardwise.errors import UserError

if TYPE_CHECKING:
    from peft import PeftModel


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """Made when they are asked for, by workers that the steps do not wait for."""

    def __init__(self, count: int, seq_len: int, vocab: int) -> None:
        self.count, self.seq_len, self.vocab = count, seq_len, vocab

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.vocab, (self.seq_len,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


class Clock(TrainerCallback):
    """When each step had ended, on the device too."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        """Called by the Trainer."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def main() -> None:
    task = read_task()
    shape, device = task.shape, task.device
    times = step_times(shape.hf_config, task.setting, shape.seq_len, task.steps, device)
    answer(times, device)


def step_times(
    hf_config: Mapping[str, Any], setting: Setting, seq_len: int, steps: int, device: str
) -> list[float]:
    """Seconds of each of the last `steps` steps of any model."""
    return time_steps(build(hf_config, setting, device), setting, seq_len, steps, device)


def time_steps(
    model: PreTrainedModel | PeftModel, setting: Setting, seq_len: int, steps: int, device: str
) -> list[float]:
    """The same of a model that is built."""
    total = WARM_UP_STEPS + steps
    tokens = RandomTokens(total * setting.micro_batch, seq_len, model.config.vocab_size)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = arguments_of(setting, total, device, folder)
        Trainer(model=model, args=arguments, train_dataset=tokens, callbacks=[clock]).train()
    return [later - earlier for earlier, later in itertools.pairwise(clock.ends)][-steps:]


def build(
    hf_config: Mapping[str, Any],
    setting: Setting,
    device: str,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """As transformers builds it by itself, but for the experts that a setting names."""
    if "liger" in setting.words:
        validate_liger(hf_config["model_type"])
    fields = {**hf_config, "use_cache": False}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    experts = next((word for word in setting.words if word in EXPERTS), None)
    named = {} if experts is None else {"experts_implementation": experts}
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **named)


def validate_liger(model_type: str) -> None:
    """Trainer only warns of a family that Liger has nothing for."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(f"Liger has no kernels for {model_type}")


def arguments_of(setting: Setting, steps: int, device: str, folder: str) -> TrainingArguments:
    words, on_gpu = setting.words, device == "cuda"
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=setting.micro_batch,
        max_steps=steps,
        learning_rate=1e-5,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        optim="adamw_torch_fused",
        torch_compile="compile" in words,
        use_liger_kernel="liger" in words,
        gradient_checkpointing=setting.recompute == "full",
        dataloader_num_workers=4 if on_gpu else 0,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
