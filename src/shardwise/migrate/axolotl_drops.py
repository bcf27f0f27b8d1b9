"""Keys of axolotl that have no setting of ours, by the reason."""

from __future__ import annotations

from shardwise.migrate.key_rules import KeyRule, drop, each, otherwise, unless

_TOKENS = "the tokenizer and the embeddings are used as they are"
_KERNELS = "train.kernels and memory.loss choose kernels; the numbers agree to rounding"
_SINKS = "events.jsonl, TensorBoard, W&B and Prometheus are the sinks"
_QUANTISED = "weights are not quantised: frozen ones are in precision.param"
_TEXT = "only text is trained on"
_ADAPTER = "adapters are LoRA, rsLoRA or DoRA, all with one rank"
_ONE_RATE = "one rate is for all parameters"
_OPTIMIZERS = "AdamW, Muon, Adafactor and Lion are the optimizers"
_EPOCHS = "a run counts steps, not epochs: set train.eval_every and checkpoint.every"

DROPS: dict[str, KeyRule] = {
    **each(
        drop(_TOKENS),
        (
            "special_tokens special_tokens.* tokens tokens.* added_tokens_overrides.* "
            "resize_token_embeddings_to_32x mean_resizing_embeddings shrink_embeddings "
            "embeddings_skip_upcast fix_untrained_tokens tokenizer_use_fast tokenizer_legacy "
            "tokenizer_use_mistral_common tokenizer_save_jinja_files"
        ),
    ),
    **each(
        otherwise("the model's own classes are used"),
        "model_type tokenizer_type base_model_config cls_model_config type_of_model "
        "is_falcon_derived_model is_llama_derived_model is_mistral_derived_model "
        "is_qwen_derived_model base_model_ignore_patterns torch_dtype",
    ),
    **each(
        otherwise(_KERNELS),
        "plugins liger_fused_linear_cross_entropy liger_glu_activation liger_layer_norm "
        "liger_rms_norm liger_rms_norm_gated liger_rope liger_cross_entropy liger_swiglu "
        "liger_use_token_scaling cut_cross_entropy chunked_cross_entropy "
        "chunked_cross_entropy_num_chunks flash_attn_cross_entropy flash_attn_rms_norm "
        "flash_attn_fuse_mlp flash_attn_fuse_qkv flash_optimum flash_attn_d512 sdpa_varlen "
        "flex_attn_compile_kwargs.* fused_attn_kernel gemma4_hybrid_attn_impl "
        "large_head_attention lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel "
        "use_kernels use_scattermoe use_sonicmoe experts_implementation llama4_linearized_experts "
        "tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp use_dsv4_kernels "
        "use_glm_dsa_kernels dsv4_fp4_grouped_mode xformers_attention s2_attention",
    ),
    **each(
        otherwise(_SINKS),
        (
            "wandb_entity wandb_log_model wandb_name wandb_run_id wandb_watch wandb_mode use_wandb "
            "use_mlflow mlflow_tracking_uri mlflow_experiment_name mlflow_run_name "
            "hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace comet_project_name "
            "comet_experiment_key comet_mode comet_online comet_experiment_config.* use_trackio "
            "trackio_project_name trackio_run_name use_otel_metrics otel_metrics_host "
            "otel_metrics_port use_swanlab swanlab_project swanlab_experiment_name "
            "swanlab_description swanlab_mode swanlab_workspace swanlab_log_model "
            "swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer "
            "include_tkps"
        ),
    ),
    **each(
        drop(_QUANTISED),
        (
            "model_quantization_config model_quantization_config_kwargs.* "
            "quantize_moe_experts qat.* quantization.* gptq_groupsize gptq_model_v1 "
            "gptq_disable_exllama use_onebitllms nvfp4_merge_aware llmcompressor.*"
        ),
    ),
    "gptq": unless(_QUANTISED),
    **each(
        drop(_TEXT),
        "processor_type processor_kwargs.* image_size image_resize_algorithm role_boundaries "
        "freeze_mm_modules",
    ),
    **each(
        drop(_ADAPTER),
        (
            "lora_fan_in_fan_out lora_rank_pattern.* lora_alpha_pattern.* lora_on_cpu "
            "peft_layers_to_transform peft_layers_pattern peft.* peft_layer_replication "
            "peft_init_lora_weights peft_trainable_token_indices peft_ensure_weight_tying "
            "peft_autocast_adapter_dtype qlora_sharded_model_loading loraplus_lr_ratio "
            "loraplus_lr_embedding merge_lora merge_method relora_prune_ratio "
            "relora_prune_method relora_cpu_offload lisa_n_layers lisa_step_interval "
            "lisa_layers_attribute"
        ),
    ),
    "unfrozen_parameters": drop("either all parameters are trained, or adapters alone"),
    **each(drop(_ONE_RATE), "embedding_lr embedding_lr_scale lr_groups"),
    **each(
        drop(_OPTIMIZERS),
        "adam_epsilon2 adam_beta3 dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of "
        "qgalore_rank torchdistx_path",
    ),
    **each(
        drop("optim.schedule has cosine, linear, wsd and constant"),
        "lr_quadratic_warmup cosine_constant_lr_ratio lr_div_factor eta_min jagged_restart_steps "
        "jagged_restart_warmup_steps jagged_restart_anneal_steps",
    ),
    **each(otherwise(_EPOCHS), "evals_per_epoch saves_per_epoch"),
    **each(
        otherwise("the same command resumes from its run directory"),
        "auto_resume_from_checkpoints save_first_step dynamic_checkpoint.*",
    ),
    **each(
        otherwise("alerts of `shardwise observe`, and a NaN that is skipped, take its place"),
        "loss_watchdog_threshold loss_watchdog_patience",
    ),
    **each(
        otherwise("an evaluation is the loss over held-out sequences, in the same batches"),
        "eval_batch_size eval_table_size eval_max_new_tokens do_causal_lm_eval "
        "eval_causal_lm_metrics bench_dataset bench_split generate_samples num_generation_samples "
        "generation_max_new_tokens generation_temperature generation_top_p generation_top_k "
        "generation_prompt_ratio generation_do_sample",
    ),
    **each(
        otherwise("each rank reads its own rows of the weights, on devices of cluster.name"),
        "device device_map device_map.* max_memory gpu_memory_limit low_cpu_mem_usage "
        "experimental_skip_move_to_device ddp world_size reinit_weights",
    ),
    **each(
        drop("there is no Ray, cloud or image beside the run"),
        "use_ray ray_run_name ray_num_workers resources_per_worker.* provider gpu gpu_count "
        "node_count memory memory_preprocess timeout timeout_preprocess secrets volumes[].* "
        "dockerfile_commands branch project_name",
    ),
    **each(
        drop("there is no counterpart"),
        (
            "strict full_finetune test_value trainer_cls gc_steps gc_collect_steps "
            "env_capabilities.* capabilities.* axolotl_config_path gradio_title gradio_share "
            "gradio_server_name gradio_server_port gradio_max_new_tokens gradio_temperature "
            "profiler_steps profiler_steps_start layer_offloading.* selective_checkpointing "
            "selective_checkpointing.* "
            "scaling_softmax scaling_softmax_factor scaling_softmax_bias use_pose "
            "pose_split_on_token_ids pose_max_context_len pose_num_chunks heads_k_stride "
            "ring_attn_func deepcompile fp32_norms fp32_norm_classes fsdp_final_state_dict_type "
            "torch_compile_options.* rope_scaling rope_scaling.* noisy_embedding_alpha "
            "hf_use_auth_token expert_parallel_num_nvl_bytes expert_parallel_token_capacity"
        ),
    ),
    **each(
        drop("losses are cross-entropy, DPO, KTO, ORPO and SimPO"),
        (
            "use_eaft eaft_alpha eaft_k center_rewards_coefficient num_labels dpo_use_weighting "
            "precompute_ref_log_probs dpo_use_liger_kernel dpo_padding_free "
            "dpo_loss_type dpo_loss_weights cpo_alpha "
            "rpo_alpha dpo_norm_loss "
            "dpo_generate_during_eval dpo_use_logits_to_keep"
        ),
    ),
}
