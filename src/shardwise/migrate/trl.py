"""What TRL's recipes say beside the Trainer's arguments: model, data, and the loss of SFT."""

from __future__ import annotations

from typing import Any

from shardwise.migrate.datasets import first_of, placed
from shardwise.migrate.foreign_values import flag, number, positive, text
from shardwise.migrate.key_rules import KeyRule, drop, each, kept, otherwise, task, to
from shardwise.migrate.line import Outcome, always, changed, mapped
from shardwise.migrate.source import Source

_PREFERENCE = "it is of a preference loss: preference.objective has dpo, kto, orpo and simpo"
_MIXTURE = "dataset_mixture.datasets"


def _packing(value: Any, _: Source) -> Outcome:
    if flag(value):
        return always("sequences are packed")
    return mapped({"data.packing": "one"}, "each conversation has a sequence of its own")


def _dataset(value: Any, _: Source) -> Outcome:
    settings = {"data.source": "datasets", "data.path": text(value)}
    return changed(settings, "data.format says what a record is: text, or auto for conversations")


TRL: dict[str, KeyRule] = {
    "model_name_or_path": to("model.name", text, "a hub id or a directory"),
    "model_revision": to("model.revision", text, "the revision of the hub"),
    "trust_remote_code": to("model.trust_remote_code", flag, "code that comes with the model"),
    **each(otherwise("precision.param is the format of compute"), "dtype torch_dtype"),
    "model_init_kwargs.*": drop("model.overrides changes fields of config.json"),
    "router_aux_loss_coef": to("train.router_aux_loss", number, "of a mixture of experts"),
    "dataset_name": KeyRule(_dataset),
    "dataset_config": to("data.name", text, "the configuration of the dataset"),
    "dataset_train_split": to("data.split", text, "the split"),
    "dataset_test_split": otherwise("data.eval_fraction holds sequences out of the training split"),
    "dataset_streaming": otherwise("data is indexed once, and then read in any order"),
    "dataset_text_field": to("data.field", text, "the column of the text"),
    **each(
        KeyRule(lambda value, _: mapped({"data.seq_len": positive(value)}, "tokens of a sequence")),
        "max_length max_seq_length",
    ),
    "packing": KeyRule(_packing),
    "packing_strategy": otherwise("data.packing has best_fit, one and cut"),
    "eval_packing": otherwise("evaluation packs as training does"),
    "padding_free": kept("there is no padding between packed sequences"),
    "completion_only_loss": otherwise("data.format=prompt trains on completions alone"),
    "assistant_only_loss": otherwise("data.format=chat trains on the assistant's turns alone"),
    "chat_template_path": to("data.chat_template", text, "a file with a Jinja template"),
    "shuffle_dataset": to("data.shuffle", flag, "by a seed"),
    "loss_type": otherwise("cross-entropy over all valid tokens"),
    "activation_offloading": KeyRule(
        lambda value, _: mapped(
            {"memory.offload_activations": 1.0 if flag(value) else 0.0},
            "the share of blocks whose activations are in host memory",
        )
    ),
    **each(
        drop("the tokenizer's own is used"),
        "eos_token pad_token pad_to_multiple_of",
    ),
    "truncation_mode": otherwise("conversations that do not fit are named and left out"),
    "ignore_bias_buffers": otherwise("FSDP2 is not DDP, and needs no such setting"),
    "chat_template": otherwise("the tokenizer's own is used; data.chat_template names a file"),
    "system_prompt": drop("a system prompt is part of the records"),
    f"{_MIXTURE}[].id": first_of(_MIXTURE, "id", placed("a hub id or a directory")),
    f"{_MIXTURE}[].config": first_of(
        _MIXTURE, "config", to("data.name", text, "the configuration of the dataset")
    ),
    f"{_MIXTURE}[].split": first_of(_MIXTURE, "split", to("data.split", text, "the split")),
    "dataset_mixture.test_split_size": to("data.eval_fraction", number, "the share held out"),
    "dataset_mixture.seed": otherwise("train.seed orders the data"),
    **each(
        drop("a run has one dataset, of which all records and known keys are read"),
        (
            f"{_MIXTURE}[].*",
            "dataset_mixture.*",
            "dataset_mixer.*",
            "dataset_splits",
            "datasets[].*",
        ),
    ),
    "dataset_kwargs.*": otherwise("the loader reads ahead by itself"),
    "wandb_project": to("observe.wandb_project", text, "the project of W&B"),
    "wandb_entity": otherwise("wandb's own setting is used"),
    **each(task(_PREFERENCE), "beta reward_funcs"),
    **each(
        drop(_PREFERENCE),
        "max_prompt_length max_completion_length num_generations reward_weights use_vllm "
        "dataset_prompt_column temperature top_p log_completions scale_rewards vllm_device "
        "vllm_gpu_memory_utilization vllm_mode vllm_server_host mask_truncated_completions "
        "epsilon num_iterations sync_ref_model precompute_ref_log_probs label_smoothing",
    ),
    "hub_model_revision": drop("`shardwise export` writes a directory, which `hf upload` takes"),
}
