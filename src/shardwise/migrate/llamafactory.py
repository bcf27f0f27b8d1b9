"""LLaMA-Factory's YAML, of both of its generations, built on the Trainer's arguments."""

from __future__ import annotations

from typing import Any

from shardwise.migrate.foreign_axes import CONTEXT, EXPERT, TENSOR, pipeline
from shardwise.migrate.foreign_values import flag, names, number, positive, text, whole
from shardwise.migrate.key_rules import (
    Assumed,
    KeyRule,
    Reader,
    drop,
    each,
    kept,
    nearly,
    otherwise,
    task,
    to,
    unless,
)
from shardwise.migrate.line import Outcome, always, changed, dropped, mapped, other_task
from shardwise.migrate.loop_rules import LOOP, half_format, lora_targets, other_optimizer
from shardwise.migrate.preferences import (
    BETA,
    DESIRABLE,
    GAMMA,
    SMOOTHING,
    UNDESIRABLE,
    objective,
)
from shardwise.migrate.source import Source
from shardwise.migrate.trainer import LORA, TRAINER_ASSUMED, TRAINING

_NEXT = "losses are cross-entropy, DPO, KTO, ORPO and SimPO"
_NAMES = "it is a name in dataset_info.json: write data.source and data.path"
_QUANTISED = "weights are not quantised: frozen ones are in precision.param"


def _muon(value: Any, _: Source) -> Outcome:
    return other_optimizer("muon") if flag(value) else always("`optim` names the optimizer")


def _stage(value: Any, source: Source) -> Outcome:
    word = str(value).strip().lower()
    if word == "sft":
        return changed({}, "write data.format=auto, so that answers alone are trained on")
    if word == "pt":
        return mapped({"data.format": "text"}, "the next token of plain text")
    if word == "dpo":
        loss = str(source.get("pref_loss", "sigmoid")).strip().lower()
        return objective("dpo" if loss == "sigmoid" else loss)
    return objective(word)


def _method(value: Any, _: Source) -> Outcome:
    word = str(value).strip().lower()
    if word in ("lora", "full"):
        return mapped({"adapter.method": "lora" if word == "lora" else "none"}, "what is trained")
    return other_task("either all parameters are trained, or LoRA's alone")


def _files(value: Any, _: Source) -> Outcome:
    return dropped(_NAMES if isinstance(value, str) else "write data.source and data.path")


def _template(value: Any, _: Source) -> Outcome:
    text(value)
    return changed({}, "the tokenizer's own template is used; data.chat_template names a file")


def _attention(value: Any, source: Source) -> Outcome:
    names = {"fa2": "flash_attention_2", "disabled": "eager"}
    word = str(value).strip().lower()
    return LOOP["attn_implementation"].translate(names.get(word, word), source)


def _no_recompute(value: Any, _: Source) -> Outcome:
    off = flag(value)
    why = "nothing is recomputed" if off else "blocks are recomputed in backward"
    return mapped({"memory.checkpoint_activations": "none" if off else "full"}, why)


def _held_out(value: Any, _: Source) -> Outcome:
    share = number(value)
    if not 0 <= share <= 0.5:
        return dropped("data.eval_fraction is a share of the records, 0 to 0.5")
    return mapped({"data.eval_fraction": share}, "the share that is held out")


def _bits(value: Any, _: Source) -> Outcome:
    if whole(value) == 4:
        return mapped({"adapter.base": "nf4"}, "frozen linear layers are in NF4")
    return dropped("frozen weights are in precision.param, or in four bits: adapter.base=nf4")


def _float8(value: Any, _: Source) -> Outcome:
    if flag(value):
        return mapped({"precision.linear": "float8"}, "float8 matmuls of torchao")
    return always("no float8, in the file and here")


def _dist(value: Any, _: Source) -> Outcome:
    if str(value).strip().lower() == "fsdp2":
        return mapped({"shard.strategy": "full_shard"}, "FSDP2 over all ranks")
    return dropped("runs are FSDP2; the plan chooses the strategy")


def _packing(value: Any, source: Source) -> Outcome:
    if flag(value):
        return always("sequences are packed")
    return mapped({"data.packing": "one"}, "each conversation has a sequence of its own")


_OWN: dict[str, KeyRule] = {
    "model_name_or_path": to("model.name", text, "a hub id or a directory"),
    "model": to("model.name", text, "a hub id or a directory"),
    "model_revision": to("model.revision", text, "the revision of the hub"),
    "trust_remote_code": to("model.trust_remote_code", flag, "code that comes with the model"),
    "stage": KeyRule(_stage),
    "finetuning_type": KeyRule(_method),
    "pref_loss": otherwise("preference.objective has it"),
    "pref_beta": BETA,
    "simpo_gamma": GAMMA,
    "dpo_label_smoothing": SMOOTHING,
    "kto_chosen_weight": DESIRABLE,
    "kto_rejected_weight": UNDESIRABLE,
    "lora_rank": to("adapter.rank", positive, "rows of A"),
    "lora_target": KeyRule(lora_targets),
    "adapter_name_or_path": to("adapter.weights_from", text, "adapters that training begins with"),
    "pure_bf16": nearly(
        "precision.param",
        lambda value: "bf16" if flag(value) else "auto",
        "master weights are fp32, which pure_bf16 saves",
    ),
    **each(KeyRule(_files), "dataset eval_dataset train_dataset dataset_dir media_dir"),
    "template": KeyRule(_template),
    "custom_chat_template": KeyRule(_template),
    "cutoff_len": to("data.seq_len", positive, "tokens of a sequence"),
    "val_size": KeyRule(_held_out),
    "packing": KeyRule(_packing),
    "neat_packing": kept("conversations that share a sequence are kept apart"),
    "train_on_prompt": unless("of conversations the assistant's turns are trained on"),
    "mask_history": unless("all turns of the assistant are trained on"),
    "disable_shuffling": to("data.shuffle", lambda value: not flag(value), "by a seed"),
    "flash_attn": KeyRule(_attention),
    "disable_gradient_checkpointing": KeyRule(_no_recompute),
    "enable_activation_checkpointing": LOOP["gradient_checkpointing"],
    "moe_aux_loss_coef": to("train.router_aux_loss", number, "of a mixture of experts"),
    "fp8": KeyRule(_float8),
    "fp8_backend": otherwise("float8 is torchao's"),
    "fp8_enable_fsdp_float8_all_gather": otherwise("precision.linear=float8 gathers eight bits"),
    "micro_batch_size": to("train.micro_batch", positive, "of one forward pass"),
    "global_batch_size": to("train.global_batch", positive, "sequences of one step over all ranks"),
    "dist_config.name": KeyRule(_dist),
    "dist_config.dcp_path": to("model.weights_from", text, "a checkpoint of DCP"),
    "dist_config.config_file": drop("that file cannot be read; migrate it by itself"),
    "dist_config.*": drop("runs are FSDP2"),
    "mp_replicate_size": to("mesh.replicate", positive, "an axis of the mesh"),
    "mp_shard_size": to("mesh.shard", positive, "an axis of the mesh"),
    "peft_config.name": KeyRule(_method),
    "peft_config.r": to("adapter.rank", positive, "rows of A"),
    "peft_config.lora_alpha": LORA["lora_alpha"],
    "peft_config.lora_dropout": LORA["lora_dropout"],
    "peft_config.target_modules": KeyRule(lora_targets),
    "peft_config.adapter_name_or_path": to("adapter.weights_from", text, "adapters to begin with"),
    "peft_config.*": drop("adapters are LoRA's: adapter has their settings"),
    "optim_config.adamw_betas": to("optim.betas", list, "Adam's two decay rates"),
    "optim_config.adamw_eps": to("optim.eps", number, "Adam's epsilon"),
    "optim_config.wd": to("optim.weight_decay", number, "norms and biases are left out"),
    "optim_config.*": otherwise("AdamW is used, with what optim has"),
    "lr_scheduler_config.*": drop("optim.schedule and optim.warmup_steps say it"),
    "init_config.*": otherwise("each rank reads its own rows of the weights"),
    "kernel_config.*": otherwise("kernels of our own, or torch's: train.kernels"),
    **each(KeyRule(_bits), "quantization_bit quant_config.quantization_bit"),
    **each(
        otherwise("four bits are NF4, with one way to keep their scales"),
        "quantization_method double_quantization quant_config.*",
    ),
    "use_muon": KeyRule(_muon),
    "additional_target": to("adapter.modules_to_save", names, "trained whole"),
    "early_stopping_steps": to("train.patience", positive, "evaluations without a gain"),
    "batching_strategy": otherwise("sequences are packed to data.seq_len"),
    "save_ckpt_as_hf": otherwise("`shardwise export` writes safetensors"),
    "bf16": half_format("bf16"),
    "model_class": unless("only causal language models are trained", "llm"),
    **each(CONTEXT, "cp_size context_parallel_size hyper_parallel_cp_size"),
    "tensor_model_parallel_size": TENSOR,
    "expert_model_parallel_size": EXPERT,
    "sequence_parallel": to("mesh.sequence_parallel", flag, "with mesh.tensor"),
    **pipeline("pipeline_model_parallel_size"),
}
_DROPS: dict[str, KeyRule] = {
    **each(
        drop("it is read by export, chat and prediction, not by training"),
        "export_dir export_size export_device export_quantization_bit export_legacy_format "
        "export_quantization_dataset export_quantization_nsamples export_quantization_maxlen "
        "export_hub_model_id infer_backend infer_dtype max_new_tokens do_sample temperature top_p "
        "top_k num_beams repetition_penalty length_penalty skip_special_tokens sample_backend "
        "predict_with_generate vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank "
        "vllm_config.* sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config.* "
        "sglang_lora_backend offload_folder use_kv_cache export_hf_on_finish eval_num_beams",
    ),
    **each(
        drop(_QUANTISED),
        "quantization_type quantization_device_map",
    ),
    **each(
        drop("only text is trained on"),
        "image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels "
        "video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate "
        "freeze_vision_tower freeze_multi_modal_projector freeze_language_model",
    ),
    **each(
        drop(_NEXT),
        "pref_ftx pref_bco_weight ppo_buffer_size ppo_epochs ppo_score_norm ppo_target "
        "ppo_whiten_rewards ref_model ref_model_adapters ref_model_quantization_bit reward_model "
        "reward_model_adapters reward_model_quantization_bit reward_model_type ld_alpha asft_alpha "
        "eaft_alpha",
    ),
    **each(task(_NEXT), "use_dft_loss use_asft_loss use_eaft_loss mixture_of_depths"),
    **each(
        drop("adapters are LoRA, rsLoRA or DoRA, begun at random"),
        "loraplus_lr_ratio loraplus_lr_embedding pissa_init pissa_iter "
        "pissa_convert create_new_adapter module_dropout oft_rank oft_block_size oft_target "
        "adapter_folder",
    ),
    **each(
        drop("either all parameters are trained, or adapters alone"),
        "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules use_llama_pro",
    ),
    **each(
        drop("AdamW, Muon, Adafactor and Lion are the optimizers"),
        "use_galore galore_target galore_rank galore_update_interval galore_scale galore_proj_type "
        "galore_layerwise use_apollo apollo_target apollo_rank apollo_update_interval apollo_scale "
        "apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front "
        "use_badam badam_mode badam_start_block badam_switch_mode badam_switch_interval "
        "badam_update_ratio badam_mask_mode badam_verbose use_adam_mini",
    ),
    **each(
        drop("there is no Megatron, Ray or KTransformers"),
        "use_mca use_megatron_bridge megatron_bridge_args.* use_hyper_parallel "
        "hyper_parallel_args.* ray_num_workers ray_init_kwargs.* master_addr master_port "
        "use_kt kt_config.* "
        "kt_cpu_activation kt_weight_path kt_non_expert_weight_path kt_expert_checkpoint_path "
        "kt_use_lora_experts kt_lora_expert_num kt_lora_expert_intermediate_size "
        "apply_rope_fusion bias_activation_fusion moe_grouped_gemm moe_token_dispatcher_type "
        "overlap_grad_reduce overlap_param_gather recompute_granularity use_distributed_optimizer "
        "cp_mode mixed_precision use_packed_sequences dp_size",
    ),
    **each(
        otherwise("data is tokenised once, packed, and kept in a cache"),
        "preprocessing_batch_size overwrite_cache streaming buffer_size tokenized_path "
        "data_shared_file_system ignore_pad_token_for_loss batching_workers",
    ),
    **each(
        drop("all records of one dataset are read"),
        "max_samples mix_strategy interleave_probs eval_on_each_dataset",
    ),
    **each(
        drop("the tokenizer, its template and the model are used as they are"),
        "tool_format default_system enable_thinking preserve_thinking use_fast_tokenizer "
        "resize_vocab split_special_tokens add_tokens add_special_tokens "
        "new_special_tokens_config init_special_tokens rope_scaling shift_attn use_unsloth "
        "use_unsloth_gc upcast_layernorm upcast_lmhead_output cache_dir device_map",
    ),
    **each(
        otherwise("kernels of our own, or torch's: train.kernels"),
        "enable_liger_kernel use_v1_kernels use_reentrant_gc low_cpu_mem_usage",
    ),
    **each(
        otherwise("events.jsonl and `shardwise report` show it"),
        "plot_loss compute_accuracy include_effective_tokens_per_second print_param_status "
        "use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode "
        "swanlab_api_key swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret "
        "enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps "
        "profiler_active_steps profiler_repeat profiler_record_shapes profiler_profile_memory "
        "profiler_with_stack profile_modules",
    ),
    **each(
        drop("there is no counterpart"),
        "train_from_scratch hf_hub_token ms_hub_token om_hub_token dist_timeout save_epochs",
    ),
}


def _is_lora(source: Source) -> bool:
    return str(source.get("finetuning_type")).lower() == "lora"


def _alpha(source: Source) -> bool:
    return _is_lora(source) and source.get("lora_rank") in (None, 8)


LLAMAFACTORY = Reader(
    "llamafactory",
    "LLaMA-Factory",
    {**TRAINING, **LORA, **_DROPS, **_OWN},
    (
        Assumed(("lora_rank",), 8, {"adapter.rank": 8}, "LLaMA-Factory's default", _is_lora),
        Assumed(
            ("lora_alpha",), 16, {"adapter.alpha": 16.0}, "twice the rank is the default", _alpha
        ),
        *TRAINER_ASSUMED,
    ),
    links={"deepspeed": "deepspeed", "dist_config.config_file": "deepspeed"},
    auto="`auto` leaves it to LLaMA-Factory; here the plan or the default decides",
)
