"""Keys of torchtune's recipes for other tasks than training, and for other losses."""

from __future__ import annotations

from shardwise.migrate.key_rules import KeyRule, drop, each, task

OTHER_TASK = "there is no teacher, no reward and no rollout"
_RECIPE = "evaluation, generation and quantisation are no training"

DROPS: dict[str, KeyRule] = {
    **each(task(_RECIPE), "quantizer._component_ tasks prompt prompt.system prompt.user inference"),
    **each(
        drop(_RECIPE),
        "quantizer quantizer.* prompt.* limit enable_kv_cache max_seq_length max_new_tokens "
        "temperature top_k include_tune_recipes apply_chat_template inference.* instruct_template "
        "chat_format",
    ),
    **each(
        task(OTHER_TASK),
        "teacher_model._component_ policy_model._component_ kd_ratio ppo_epochs qat_quantizer",
    ),
    **each(
        drop(OTHER_TASK),
        "teacher_model.* teacher_checkpointer.* kd_loss.* policy_model.* ref_checkpointer.* "
        "ref_policy_checkpointer.* reward_and_value_model.* reward_checkpointer.* "
        "value_checkpointer.* reward_functions reward_functions[].* "
        "forward_batch_size ppo_batch_size "
        "grpo_samples gamma lmbda kl_coeff whiten_rewards penalise_no_eos min_response_length "
        "reward_penalty stop_token_ids max_generated_tokens num_steps training.* orchestration.* "
        "postprocessing.* debug_logging_enabled debug_num_samples_per_step early_exit_loss.* "
        "layer_dropout.* fake_quant_after_n_steps num_train_steps ref_checkpointer",
    ),
    **each(
        drop("there is no counterpart"),
        "use_distributed_state_dict use_flex save_safetensors fsdp.*",
    ),
}
