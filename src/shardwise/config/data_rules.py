"""Rules about the data section, as rows."""

from __future__ import annotations

from shardwise.config.rule import Rule, at_least

_SOURCES_WITH_PATH = ("text", "jsonl", "parquet", "datasets")
_SOURCES_OF_RECORDS = ("jsonl", "parquet", "datasets")

DATA_RULES: tuple[Rule, ...] = (
    *at_least(0, "data.workers"),
    Rule(
        "source-needs-path",
        "data.path",
        lambda c: c.data.source not in _SOURCES_WITH_PATH or bool(c.data.path),
        "data.source={c.data.source} reads from a path",
        "write data.path=FILES (for datasets: a saved directory or a hub id)",
    ),
    Rule(
        "source-takes-no-path",
        "data.path",
        lambda c: c.data.source in _SOURCES_WITH_PATH or c.data.path is None,
        "data.source={c.data.source} reads no path, so it would be ignored",
        "leave data.path out, or write data.source=text (or jsonl, parquet, datasets)",
    ),
    Rule(
        "conversations-are-records",
        "data.format",
        lambda c: (
            c.data.format == "text" or bool(c.data.mixture) or c.data.source in _SOURCES_OF_RECORDS
        ),
        "data.source={c.data.source} has no records with keys",
        "write data.source=jsonl data.path=FILES (or parquet, datasets), or leave data.format out",
    ),
    Rule(
        "conversations-have-no-field",
        "data.field",
        lambda c: c.data.format == "text" or c.data.field == "text",
        "data.format={c.data.format} reads the keys of conversations, so it would be ignored",
        "leave data.field out, or leave data.format out",
    ),
    Rule(
        "template-needs-conversations",
        "data.chat_template",
        lambda c: c.data.format != "text" or c.data.chat_template is None,
        "data.format=text renders no conversations, so it would be ignored",
        "leave data.chat_template out, or write data.format=auto",
    ),
    Rule(
        "packing-needs-conversations",
        "data.packing",
        lambda c: c.data.format != "text" or c.data.packing == "auto",
        "data.format=text lays documents back to back, so it would be ignored",
        "leave data.packing out, or write data.format=auto",
    ),
    Rule(
        "lengths-need-single-conversations",
        "data.group_lengths",
        lambda c: (
            not c.data.group_lengths or (c.data.packing == "one" and not c.data.has_preferences)
        ),
        "data.packing={c.data.packing} with data.format={c.data.format} leaves hardly any padding",
        "write data.packing=one data.format=auto, or leave data.group_lengths out",
    ),
    Rule(
        "lengths-are-not-compiled",
        "data.group_lengths",
        lambda c: not c.data.group_lengths or c.memory.compile is False,
        "compiled blocks are of one length",
        "write memory.compile=false, or leave data.group_lengths out",
    ),
    Rule(
        "batches-of-lengths-stay",
        "train.batch_may_change",
        lambda c: not c.train.batch_may_change or not c.data.group_lengths,
        "data.group_lengths makes whole batches of sequences of similar lengths",
        "leave train.batch_may_change out, or leave data.group_lengths out",
    ),
    Rule(
        "one-conversation-needs-no-mask",
        "data.document_mask",
        lambda c: c.data.packing != "one" or not c.data.document_mask or c.data.format == "pairs",
        "data.packing=one gives each conversation a sequence of its own",
        "leave data.document_mask out, or leave data.packing out",
    ),
)
