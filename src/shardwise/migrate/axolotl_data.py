"""What axolotl's YAML says about data: datasets, templates, packing, held-out share."""

from __future__ import annotations

from typing import Any

from shardwise.migrate.datasets import first_of, formatted, placed
from shardwise.migrate.foreign_values import flag, number, positive, text
from shardwise.migrate.key_rules import KeyRule, drop, each, otherwise, to, unless
from shardwise.migrate.line import Outcome, always, changed, dropped, mapped
from shardwise.migrate.preferences import OBJECTIVES
from shardwise.migrate.source import Source

_KEYS = "records have `messages`, or ShareGPT's `conversations`; rename other keys"
_FORMATS = {
    "alpaca": "instruction",
    "chat_template": "chat",
    "sharegpt": "chat",
    "completion": "text",
    "pretrain": "text",
}


def _type(value: Any, source: Source) -> Outcome:
    if str(source.get("rl")).lower() in OBJECTIVES:
        return changed({}, "rows have the keys of data.format; `shardwise data show` shows them")
    return formatted(_format).translate(value, source)


def _format(value: Any) -> str | None:
    return _FORMATS.get(str(value).split(":")[0].split(".")[0].strip().lower())


def _template(value: Any, _: Source) -> Outcome:
    if str(value).strip().lower() == "tokenizer_default":
        return always("the tokenizer's own template")
    return dropped("the tokenizer's own template is used; data.chat_template names a Jinja file")


def _held_out(value: Any, _: Source) -> Outcome:
    share = number(value)
    if not 0 <= share <= 0.5:
        return dropped("data.eval_fraction is a share of the records, 0 to 0.5")
    return mapped({"data.eval_fraction": share}, "the share that is held out")


def _packing(value: Any, _: Source) -> Outcome:
    if flag(value):
        return always("sequences are packed, and conversations in them kept apart")
    return mapped({"data.packing": "one"}, "each conversation has a sequence of its own")


def _on_inputs(value: Any, _: Source) -> Outcome:
    if flag(value):
        return changed({}, "of conversations the assistant's turns are trained on; text is whole")
    return always("of conversations the assistant's turns alone are trained on")


def _field(value: Any, _: Source) -> Outcome:
    if str(value) in ("messages", "conversations"):
        return always("the keys of a conversation")
    return dropped(_KEYS)


_MEMBERS: dict[str, KeyRule] = {
    "path": placed("a hub id, a directory, or a file by its suffix"),
    "type": KeyRule(_type),
    "split": to("data.split", text, "the split"),
    "name": to("data.name", text, "the configuration of the dataset"),
    "field": to("data.field", text, "the column of the text"),
    "text_column": to("data.field", text, "the column of the text"),
    "field_messages": KeyRule(_field),
    "data_files": drop("data.path takes files, directories and globs"),
    "ds_type": otherwise("data.source tells it: jsonl, parquet, text or datasets"),
    "chat_template": KeyRule(_template),
    "train_on_eos": otherwise("the template says what ends a turn"),
    "train_on_eot": otherwise("the template says what ends a turn"),
    "roles_to_train": otherwise("the assistant's turns are trained on"),
}
_REST = drop(_KEYS)


def _members(section: str) -> dict[str, KeyRule]:
    rules = {f"{section}[].{key}": first_of(section, key, rule) for key, rule in _MEMBERS.items()}
    return {**rules, f"{section}[].*": _REST}


DATA: dict[str, KeyRule] = {
    **_members("datasets"),
    **_members("pretraining_dataset"),
    "datasets": drop("datasets is a list of mappings with a path"),
    "pretraining_dataset": placed("a hub id, a directory, or a file by its suffix"),
    **each(
        otherwise("data.eval_fraction holds records out of the training data"),
        ("test_datasets[].*", "test_datasets"),
    ),
    "sequence_len": to("data.seq_len", positive, "tokens of a sequence"),
    "sample_packing": KeyRule(_packing),
    "val_set_size": KeyRule(_held_out),
    "chat_template": KeyRule(_template),
    "chat_template_jinja": drop("put the template into a file: data.chat_template names it"),
    "chat_template_kwargs.*": drop("templates get no arguments of their own"),
    "train_on_inputs": KeyRule(_on_inputs),
    "streaming": otherwise("data is indexed once, and then read in any order"),
    "tokenizer_config": to("data.tokenizer", text, "a hub id or a directory"),
    "group_by_length": unless("conversations are packed to equal lengths"),
    **each(
        otherwise("data is tokenised once, packed by best fit, and kept in a cache"),
        "dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory "
        "dataset_shard_num dataset_shard_idx num_dataset_shards_to_save skip_prepare_dataset "
        "eval_sample_packing pad_to_sequence_len pad_to_multiple_of sample_packing_group_size "
        "sample_packing_bin_size sample_packing_sequentially sample_packing_eff_est "
        "sample_packing_seq_len_multiplier sample_packing_mp_start_method multipack_real_batches "
        "batch_flattening max_packed_sequence_len total_num_tokens total_supervised_tokens "
        "pretrain_multipack_buffer_size pretrain_multipack_attn streaming_multipack_buffer_size "
        "pretraining_sample_concatenation eval_sequence_len excess_length_strategy max_prompt_len",
    ),
    **each(
        otherwise("the order of data is a function of the seed"),
        "shuffle_merged_datasets shuffle_before_merging_datasets curriculum_sampling",
    ),
    **each(
        drop("data is read as it is"),
        "dataset_exact_deduplication min_sample_len push_dataset_to_hub default_system_message "
        "eot_tokens preprocess_iterable is_preprocess",
    ),
}
