"""Hugging Face Trainer on one GPU: bf16 autocast over fp32 weights, as `TrainingArguments` has it.

PYTHONPATH=benchmarks python -m peers.trainer --shape one-gpu --setting 2-none-compile
"""

from __future__ import annotations

import itertools
import tempfile
import time

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from peers.child import WARM_UP_STEPS, Task, answer, read_task


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
    fields = task.shape.hf_config | {"use_cache": False}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device(task.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    micro_batch, steps = task.setting.micro_batch, WARM_UP_STEPS + task.steps
    data = RandomTokens(steps * micro_batch, task.shape.seq_len, config.vocab_size)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = arguments_of(task, steps, folder)
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=[clock]).train()
    times = [later - earlier for earlier, later in itertools.pairwise(clock.ends)]
    answer(times[-task.steps :], task.device)


def arguments_of(task: Task, steps: int, folder: str) -> TrainingArguments:
    words, on_gpu = task.setting.words, task.device == "cuda"
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=task.setting.micro_batch,
        max_steps=steps,
        learning_rate=1e-5,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        optim="adamw_torch_fused",
        torch_compile="compile" in words,
        use_liger_kernel="liger" in words,
        gradient_checkpointing=task.setting.recompute == "full",
        dataloader_num_workers=4 if on_gpu else 0,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
