"""Configs that must be refused, and what the one error must say. Data only: no test lives here.

Every row is written to `run.yaml` and loaded with its overrides.
"""

from __future__ import annotations

from typing import NamedTuple


class BadConfig(NamedTuple):
    id: str
    text: str
    overrides: tuple[str, ...]
    says: tuple[str, ...]


BAD_CONFIGS: tuple[BadConfig, ...] = (
    # keys
    BadConfig(
        "typo in a section",
        "optim:\n  lrr: 3e-4\n",
        (),
        ("run.yaml:2", "unknown key `lrr` in section `optim`", "did you mean `lr`?"),
    ),
    BadConfig(
        "key of another section",
        "train:\n  steps: 10\n  lr: 3e-4\n",
        (),
        ("run.yaml:3", "`lr` belongs to section `optim`: write optim.lr"),
    ),
    BadConfig(
        "key of a section at the top",
        "lr: 3e-4\n",
        (),
        ("run.yaml:1", "unknown section or key `lr`", "write optim.lr"),
    ),
    BadConfig("typo in a section's name", "optimm:\n  lr: 1\n", (), ("run.yaml:1", "`optim`?")),
    BadConfig(
        "section inside a section",
        "model:\n  name: tiny-llama\n  optim:\n    lr: 1\n",
        (),
        ("run.yaml:3", "`optim` belongs to the top level"),
    ),
    BadConfig(
        "dotted key in a file",
        "optim.lr: 1\n",
        (),
        ("run.yaml:1", "write `lr:` indented below `optim:`"),
    ),
    BadConfig("key like nothing", "zebra: 1\n", (), ("`zebra`", "a file takes name, runs_dir")),
    BadConfig("near a field afar", "warmup_step: 1\n", (), ("did you mean optim.warmup_steps?",)),
    BadConfig(
        "key given twice",
        "optim:\n  lr: 1e-4\n  lr: 2e-4\n",
        (),
        ("run.yaml:3", "`optim.lr` is given twice", "line 2", "line 3"),
    ),
    # types
    BadConfig(
        "text for a number",
        'optim:\n  lr: "fast"\n',
        (),
        ("run.yaml:2", 'optim.lr is "fast"', "expected a number"),
    ),
    BadConfig("quoted number", 'optim:\n  lr: "3e-4"\n', (), ("optim.lr", "remove the quotes")),
    BadConfig(
        "true for a whole number",
        "train:\n  steps: true\n",
        (),
        ("run.yaml:2", "train.steps is true, expected a whole number"),
    ),
    BadConfig("float for a whole number", "train: {steps: 1e3}\n", (), ("train.steps", "1000")),
    BadConfig(
        "word for a number or auto",
        "train:\n  micro_batch: many\n",
        (),
        ('train.micro_batch is "many", expected a whole number or auto',),
    ),
    BadConfig("number for text", "name: 123\n", (), ("name is 123", "put it in quotes")),
    BadConfig("number-like hash", "model: {revision: 12e5}\n", (), ("model.revision", "in quotes")),
    BadConfig(
        "on for a bool",
        "memory:\n  compile: on\n",
        (),
        ("memory.compile", "write memory.compile=true"),
    ),
    BadConfig(
        "no for a bool", "data: {shuffle: no}\n", (), ("data.shuffle", "write data.shuffle=false")
    ),
    BadConfig(
        "misspelled choice",
        "optim:\n  schedule: cosin\n",
        (),
        ("expected cosine, linear, wsd or constant", "did you mean optim.schedule=cosine?"),
    ),
    BadConfig("three betas", "optim: {betas: [1, 2, 3]}\n", (), ("a list of 2 numbers",)),
    BadConfig("infinite rate", "optim: {lr: .inf}\n", (), ("optim.lr", "expected a number")),
    BadConfig("list for a section", "optim: [1]\n", (), ("run.yaml:1", "section `optim` is [1]")),
    BadConfig("string for a section", "optim: fast\n", (), ("section `optim`", "lr, betas")),
    BadConfig("number for a cluster", "cluster: 8\n", (), ("section `cluster` is 8",)),
    BadConfig("unknown data", "data: foo\n", (), ('data is "foo"', "stdlib, text, jsonl")),
    BadConfig(
        "all faults at once",
        "lr: 1\noptim:\n  lrr: 1\n  eps: x\ntrain:\n  steps: true\n",
        ("mesh.shrad=2",),
        ("5 settings", "run.yaml:1", "run.yaml:3", "run.yaml:4", "run.yaml:6", "'mesh.shrad=2'"),
    ),
    # syntax
    BadConfig("tab", "optim:\n\tlr: 1\n", (), ("run.yaml:2", "not valid YAML", "no tabs")),
    BadConfig("open bracket", "optim:\n  betas: [0.9\n", (), ("run.yaml:", "not valid YAML")),
    BadConfig("two documents", "name: a\n---\nname: b\n", (), ("run.yaml:2", "not valid YAML")),
    BadConfig("list at the top", "- model\n", (), ("the top level is", "a mapping of sections")),
    BadConfig("python tag", "name: !!python/name:os.system x\n", (), ("run.yaml:1", "tag")),
    BadConfig("alias into itself", "model: &m\n  overrides: *m\n", (), ("into itself",)),
    # overrides
    BadConfig("flag with =", "", ("--optim.lr=3e-4",), ("not flags", "write optim.lr=3e-4")),
    BadConfig("flag with a space", "", ("--optim.lr", "3e-4"), ("write optim.lr=3e-4",)),
    BadConfig("no =", "", ("optim.lr",), ("override 'optim.lr'", "write optim.lr=VALUE")),
    BadConfig("no key", "", ("=3",), ("override '=3'", "section.field=value")),
    BadConfig("override typo", "", ("optim.lrr=1",), ("override 'optim.lrr=1'", "`lr`?")),
    BadConfig("override section typo", "", ("optm.lr=1",), ("override 'optm.lr=1'", "`optim`?")),
    BadConfig("override type", "", ("train.steps=x",), ("override 'train.steps=x'", "train.steps")),
    BadConfig("override below a value", "", ("optim.lr.x=1",), ("optim.lr", "expected a number")),
    BadConfig("override syntax", "", ("optim.betas=[1",), ("override 'optim.betas=[1'", "YAML")),
    BadConfig("override number for text", "", ("name=7",), ("in quotes", """'name="7"'""")),
    # rules
    BadConfig("no steps", "train:\n  steps: 0\n", (), ("run.yaml:2", "train.steps is 0")),
    BadConfig(
        "warm-up longer than the run",
        "train: {steps: 10}\noptim:\n  warmup_steps: 20\n",
        (),
        ("run.yaml:3", "optim.warmup_steps is 20", "train.steps=10"),
    ),
    BadConfig("rule on an override", "", ("optim.lr=-1",), ("override 'optim.lr=-1'", "above 0")),
    BadConfig(
        "float8 that is not compiled",
        "precision: {linear: float8}\nmemory: {compile: false}\n",
        (),
        ('run.yaml:1: precision.linear is "float8"', "memory.compile is false"),
    ),
    BadConfig(
        "float8 with a loss scale",
        "precision: {linear: float8_rowwise, param: fp16}\n",
        (),
        ("precision.param is fp16", "write precision.param=bf16"),
    ),
    BadConfig(
        "float8 with odd sequences",
        "precision: {linear: float8}\ndata: {seq_len: 1000}\n",
        (),
        ("run.yaml:2: data.seq_len is 1000", "a multiple of 16"),
    ),
    BadConfig("path with stdlib", "data: {path: a.txt}\n", (), ("data.path", "data.source=stdlib")),
    BadConfig(
        "conversations in text",
        "data: {format: chat}\n",
        (),
        ("data.format", "data.source=stdlib has no records", "data.source=jsonl"),
    ),
    BadConfig(
        "field of conversations",
        "data: {source: jsonl, path: a.jsonl, format: auto, field: body}\n",
        (),
        ("data.field", "data.format=auto reads the keys of conversations"),
    ),
    BadConfig(
        "template of text",
        "data: {chat_template: a.jinja}\n",
        (),
        ("data.chat_template", "write data.format=auto"),
    ),
    BadConfig("text without path", "data: text\n", (), ("data.path is null", "data.source=text")),
    BadConfig(
        "experts kept that are not dealt out",
        "shard:\n  keep_experts: true\n",
        (),
        ("run.yaml:2", "without mesh.expert", "write mesh.expert=2 or more"),
    ),
    BadConfig(
        "experts kept in the stages of a pipeline",
        "mesh:\n  pipeline: 2\n  expert: 2\n",
        ("shard.keep_experts=true",),
        ("shard.keep_experts", "keeps all its parameters alike", "leave shard.keep_experts out"),
    ),
)
