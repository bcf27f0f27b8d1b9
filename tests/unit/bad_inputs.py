"""Inputs that must be refused with advice that works. Data only: no test lives here.

`words` are what stands after `shardwise`, `run.yaml` holds `text`. A row of another runner than the
command line names a function of test_advice_works.py, which takes the same words.
"""

from __future__ import annotations

from typing import NamedTuple

TINY = "model: tiny-llama\ncluster: 2xCPU\n"


class BadInput(NamedTuple):
    id: str
    words: tuple[str, ...]
    text: str = TINY
    runner: str = "cli"


def _plan(id: str, *overrides: str, text: str = TINY) -> BadInput:
    return BadInput(id, ("plan", "run.yaml", *overrides), text)


def _data(id: str, *overrides: str) -> BadInput:
    return BadInput(id, overrides, runner="data")


FLAGS = (
    _plan("flag of a field's own name", "--lr", "3e-4"),
    _plan("flag of a field with =", "--lr=3e-4"),
    _plan("flag with a dash", "--clip-norm", "1"),
    _plan("flag of a top-level field", "--name", "first"),
    _plan("flag of a section", "--optim.lr", "3e-4"),
    _plan("flag like nothing", "--zebra", "3"),
    _plan("flag of a misspelled field", "--optim.lrr=3e-4"),
    _plan("flag without a value", "--seed"),
    _plan("field of two sections", "--eval-every", "10"),
    _plan("word without a section", "lr=3e-4"),
    _plan("word without a value", "train.steps"),
    _plan("steps as a flag", "--steps", "20"),
    _plan("path as a flag", "--seq-len=512"),
)

VALUES = (
    _plan("text for a batch", "train.global_batch=large"),
    _plan("text for a list", "optim.betas=0.9"),
    _plan("one beta", "optim.betas=[0.9]"),
    _plan("yes for a bool", "checkpoint.asynchronous=yes"),
    _plan("off for a bool", "checkpoint.verify=off"),
    _plan("float for steps", "train.steps=1e2"),
    _plan("misspelled strategy", "shard.strategy=full_shared"),
    _plan("misspelled dtype", "precision.param=bfloat16"),
    _plan("misspelled attention", "model.attention=spda"),
    _plan("misspelled source", "data.source=jsnl"),
    _plan("misspelled wandb", "observe.wandb=ofline"),
    _plan("a dtype that is none", "precision.reduce=int8"),
    _plan("null for a number", "optim.lr=null"),
    _plan("list for text", "model.name=[a,b]"),
    _plan("mapping for a number", "train.steps={a: 1}"),
    _plan("number for a name", "name=2024"),
    _plan("number for a name in the file", text="name: 2024\n"),
    _plan("date-like revision", text="model: {name: tiny-llama, revision: 1e5}\n"),
    _plan("bool for a name", "model.name=true"),
    _plan("section as a list", text="optim: [1]\nmodel: tiny-llama\n"),
    _plan("section as a number", text="train: 5\nmodel: tiny-llama\n"),
    _plan("data as a word", text="data: wikipedia\nmodel: tiny-llama\n"),
    _plan("data as a word on the command line", "data=wikipedia"),
    _plan("section as a word on the command line", "optim=fast"),
    _plan("quoted number", text='optim: {lr: "3e-4"}\nmodel: tiny-llama\n'),
    _plan("quoted whole number", text='train: {steps: "12"}\nmodel: tiny-llama\n'),
)

KEYS = (
    _plan("typo of a key", text="optim: {lrr: 1e-3}\n"),
    _plan("key of another section", text="train: {lr: 1e-3}\n"),
    _plan("key at the top", text="lr: 1e-3\n"),
    _plan("key at the top, misspelled", text="warmup_step: 3\n"),
    _plan("typo of a section", text="optimizer:\n  lr: 1e-3\n"),
    _plan("typo of a section, near", text="optm:\n  lr: 1e-3\n"),
    _plan("dotted key", text="optim.lr: 1e-3\n"),
    _plan("section in a section", text="model:\n  name: tiny-llama\n  optim: {lr: 1}\n"),
    _plan("top-level key in a section", text="train: {runs_dir: here}\n"),
    _plan("override of a misspelled field", "trian.steps=3"),
    _plan("override of a field of another section", "train.lr=1e-3"),
    _plan("key like nothing", text="zebra: 1\n"),
    _plan("given twice", text="optim:\n  lr: 1e-4\n  lr: 2e-4\n"),
    _plan("tabs", text="optim:\n\tlr: 1\n"),
    _plan("list at the top", text="- model\n"),
)

RULES = (
    _plan("name with a slash", "name=a/b"),
    _plan("name with a dot", "name=.."),
    *(
        _plan(f"{path} is too small", f"{path}={value}")
        for path, value in (
            ("train.steps", 0), ("train.global_batch", 0), ("train.micro_batch", 0),
            ("train.accumulation", 0), ("train.gc_every", 0), ("observe.log_every", 0),
            ("observe.profile", 0), ("observe.profile_steps", 0), ("checkpoint.keep", 0),
            ("data.eval_sequences", 0), ("mesh.replicate", 0), ("mesh.shard", 0),
            ("cluster.nvlink_domain", 0), ("shard.all_gather_limit", 0),
            ("shard.unit_min_params", 0), ("memory.loss_chunk_tokens", 0), ("data.seq_len", 1),
            ("precision.float8_min_features", 8), ("shard.forward_prefetch", -1),
            ("shard.backward_prefetch", -1), ("data.max_corrupt", -1), ("checkpoint.every", -1),
            ("train.patience", -1), ("data.workers", -1), ("train.min_gain", -1),
            ("train.eval_every", -1), ("train.seed", -1), ("optim.warmup_steps", -1),
            ("optim.weight_decay", -1), ("train.max_nonfinite", -1), ("train.max_restarts", -1),
            ("cluster.peak_tflops", 0), ("train.hang_timeout_s", 0), ("optim.lr", 0),
            ("optim.eps", 0), ("optim.clip_norm", 0), ("precision.loss_scale", 0),
            ("data.eval_fraction", 0.7), ("memory.checkpoint_activations", 2),
            ("memory.offload_activations", 2), ("optim.min_lr_ratio", 2),
            ("gates.max_exposed", 2), ("observe.prometheus_port", 0),
        )
    ),
    _plan("patience without evaluations", "train.patience=2"),
    _plan("gain without patience", "train.min_gain=0.1"),
    _plan("best without evaluations", "checkpoint.keep_best=true"),
    _plan("decay of no steps", "optim.schedule=wsd", "optim.decay_steps=0"),
    _plan("betas of one", "optim.betas=[0.9,1.0]"),
    _plan("warm-up beyond the end", "train.steps=10", "optim.warmup_steps=20"),
    _plan("decay without wsd", "optim.decay_steps=5"),
    _plan("phases too long", "train.steps=100", "optim.schedule=wsd", "optim.warmup_steps=60",
          "optim.decay_steps=60"),
    _plan("stop beyond the end", "train.steps=10", "train.stop_after=20"),
    _plan("stop at zero", "train.stop_after=0"),
    _plan("batch of micro-batches", "train.global_batch=10", "train.micro_batch=4",
          "train.accumulation=1"),
    _plan("prefetch beyond the limit", "shard.forward_prefetch=2", "shard.all_gather_limit=2"),
    _plan("backward beyond the limit", "shard.backward_prefetch=1", "shard.all_gather_limit=1"),
    _plan("units found twice", "shard.unit_classes=[A]", "shard.unit_min_params=5"),
    _plan("reshard to one", "shard.reshard_after_forward=1"),
    _plan("grad op that reshards", "shard.strategy=shard_grad_op",
          "shard.reshard_after_forward=true"),
    _plan("no_shard that shards", "shard.strategy=no_shard", "mesh.shard=2"),
    _plan("float8 not compiled", "precision.linear=float8", "memory.compile=false"),
    _plan("float8 with fp16", "precision.linear=float8", "precision.param=fp16"),
    _plan("float8 with odd sequences", "precision.linear=float8", "data.seq_len=1000"),
    _plan("bf16 state without fused", "optim.state=bf16", "optim.fused=false"),
    _plan("bf16 state offloaded", "optim.state=bf16", "memory.offload=cpu"),
    _plan("bf16 state with torch's kernels", "optim.state=bf16", "train.kernels=torch"),
    _plan("weights that are not read", "model.weights_from=x", "model.weights=random"),
    _plan("code that is not pinned", "model.name=who/what", "model.trust_remote_code=true"),
    _plan("source without a path", "data.source=jsonl"),
    _plan("path without a source", "data.path=notes.txt"),
    _plan("profile beyond the end", "observe.profile=999"),
    _plan("profile beyond the stop", "observe.profile=20", "train.stop_after=21"),
    _plan("profile longer than the run", "observe.profile=1", "train.steps=2"),
    _plan("a host without a port", "observe.prometheus_host=0.0.0.0"),
)  # fmt: skip

CLUSTERS = (
    _plan("64 GPUs in a node", "cluster.name=64xH100"),
    _plan("9 GPUs in a node", "cluster.name=9xH200"),
    _plan("a node of nodes", "cluster.name=2x16xB200"),
    _plan("unknown GPU", "cluster.name=8xH101"),
    _plan("unknown GPU of two nodes", "cluster.name=2x8xB201"),
    _plan("GPU like none", "cluster.name=8xZebra"),
    _plan("unknown GPU as an option", "--cluster", "8xH101"),
    _plan("no number", "cluster.name=H100"),
    _plan("no devices", "cluster.name=0xH100"),
    _plan("a word", "cluster.name=many"),
    _plan("domain that does not divide", "cluster.name=8xH100", "cluster.nvlink_domain=3"),
    _plan("two sites", "cluster.name=2x8xH100", "cluster.datacenters=2", "mesh.site=1"),
    _plan("three sites", "cluster.name=2x8xH100", "cluster.datacenters=3"),
    _plan("sites that share matmuls", "cluster.name=2x8xH100", "mesh.site=2", "mesh.tensor=2"),
    _plan("unknown network", "cluster.name=2x8xH100", "cluster.interconnect=infiniband-ndx"),
    _plan("network like none", "cluster.name=2x8xH100", "cluster.interconnect=pigeons"),
    _plan("prices that are not there", "cluster.name=8xH100", "cluster.prices=nowhere.yaml"),
    _plan("prices that are none", "cluster.name=8xH100", "cluster.prices=run.yaml"),
    _plan("own kernels on a CPU", "train.kernels=own"),
)

BATCHES = (
    _plan("batch over ranks", "cluster.name=8xH100", "train.global_batch=12"),
    _plan("batch over two ranks", "train.global_batch=7"),
    _plan("batch over micro-batch", "cluster.name=8xH100", "train.global_batch=16",
          "train.micro_batch=3"),
    _plan("batch over accumulation", "cluster.name=8xH100", "train.global_batch=16",
          "train.accumulation=4"),
    _plan("all three", "cluster.name=8xH100", "train.global_batch=32", "train.micro_batch=2",
          "train.accumulation=4"),
    _plan("all three, too large", "train.global_batch=2", "train.micro_batch=2",
          "train.accumulation=1"),
    _plan("mesh product", "cluster.name=8xH100", "mesh.replicate=3", "mesh.shard=2"),
    _plan("half a mesh", "cluster.name=8xH100", "mesh.shard=3"),
    _plan("other half of a mesh", "cluster.name=8xH100", "mesh.replicate=5"),
    _plan("mesh of two that fit alone", "cluster.name=8xH100", "mesh.replicate=4", "mesh.shard=4"),
    _plan("strategy against mesh", "cluster.name=8xH100", "shard.strategy=full_shard",
          "mesh.replicate=2", "mesh.shard=4"),
    _plan("reshard group", "cluster.name=8xH100", "shard.strategy=full_shard",
          "shard.reshard_after_forward=3"),
    _plan("reshard group of all", "cluster.name=8xH100", "shard.strategy=full_shard",
          "shard.reshard_after_forward=8"),
    _plan("reshard group, mesh open", "cluster.name=6xH100", "shard.reshard_after_forward=4"),
    _plan("gather in place with a group", "cluster.name=8xH100", "shard.strategy=full_shard",
          "shard.reshard_after_forward=4", "shard.gather_in_place=true"),
)  # fmt: skip

MODELS = (
    _plan("unknown preset", "model.name=lama-3.1-8b"),
    _plan("model like none", "model.name=zebra"),
    _plan("weights of a preset", "model.weights=pretrained"),
    _plan("misspelled override", "model.overrides.num_hidden_layer=2"),
    _plan("override like none", "model.overrides.zebra=2"),
    _plan("directory without config", "model.name=empty"),
    _plan("directory with a broken config", "model.name=broken"),
    _plan("directory without a family", "model.name=nameless"),
    _plan("weights that are not there", "model.weights_from=nowhere"),
    _plan("float8 on a CPU", "precision.linear=float8"),
    _plan("float8 on an A100", "precision.linear=float8_rowwise", "cluster.name=8xA100"),
    _plan("float8 for narrow layers", "precision.linear=float8", "cluster.name=8xH100"),
    _plan("405B on one GPU", "model.name=llama-3.1-405b", "cluster.name=1xH100"),
    _plan("70B on a node", "model.name=llama-3.1-70b", "cluster.name=8xH100",
          "train.global_batch=64"),
    _plan("8B unsharded", "model.name=llama-3.1-8b", "cluster.name=8xH100",
          "shard.strategy=no_shard"),
    _plan("a large micro-batch", "model.name=llama-3.1-8b", "cluster.name=8xH100",
          "train.micro_batch=256", "mesh.context=1", "mesh.tensor=1"),
    _plan("a long sequence", "model.name=llama-3.2-1b", "cluster.name=8xA10G",
          "data.seq_len=131072", "mesh.context=1", "mesh.tensor=1"),
    _plan("far too large", "model.name=mixtral-8x7b", "model.overrides.num_local_experts=128",
          "cluster.name=8xH100"),
)  # fmt: skip

_SCRAPE = ("observe", "scrape", "--on", "slurm", "--nodes")
_TUNNEL = ("tunnel", "run.yaml", "--device")
_DEMO = ("train", "run.yaml", "name=demo")

COMMANDS = (
    BadInput("no such file", ("plan", "runn.yaml")),
    BadInput("no such directory", ("plan", "nowhere/run.yaml")),
    BadInput("a directory", ("plan", "configs")),
    BadInput("an empty directory", ("plan", "empty")),
    BadInput("another suffix", ("plan", "run.conf")),
    BadInput("no file at all", ("plan",)),
    BadInput("quick alone", ("plan", "run.yaml", "--quick")),
    BadInput("unknown goal", ("plan", "run.yaml", "--for", "free")),
    BadInput("calibrate a GPU", ("plan", "--calibrate", "--cluster", "8xH100")),
    BadInput("unknown example", ("config", "cp", "demmo", "new.yaml")),
    BadInput("example like none", ("config", "cp", "zzz", "new.yaml")),
    BadInput("example over a file", ("config", "cp", "demo", "run.yaml")),
    BadInput("example into nowhere", ("config", "cp", "demo", "nowhere/new.yaml")),
    BadInput("unknown setting", ("config", "schema", "optim.lrr")),
    BadInput("unknown section", ("config", "schema", "optimm")),
    BadInput("checkpoints of nothing", ("checkpoint", "ls", "nowhere")),
    BadInput("verify nothing", ("checkpoint", "verify", "nowhere")),
    BadInput("a step that is not there", ("checkpoint", "verify", "runs/demo", "--step", "41")),
    BadInput("a step where there are none", ("checkpoint", "verify", "empty", "--step", "41")),
    BadInput("damaged checkpoints", ("checkpoint", "verify", "runs/bad")),
    BadInput("another model's tensors", ("checkpoint", "verify", "runs/demo")),
    BadInput("a key that is not there", ("checkpoint", "verify", "runs/demo", "--key", "my.key")),
    BadInput("a key that is short", ("checkpoint", "sign", "runs/demo", "--key", "run.conf")),
    BadInput("no good checkpoint", ("train", "run.yaml", "name=lost")),
    BadInput("prune to damaged ones", ("checkpoint", "prune", "runs/bad", "--keep", "1")),
    BadInput("report of nothing", ("report", "runs/demmo")),
    BadInput("report of no run", ("report", "empty")),
    BadInput("report into nowhere", ("report", "runs/demo", "--to", "nowhere/page.html")),
    BadInput("report over a file", ("report", "runs/demo", "--to", "run.yaml")),
    BadInput("verify no run", ("verify", "empty")),
    BadInput("verify two runs", ("verify", "runs/demo", "runs/other")),
    BadInput("parity of one", ("verify", "--parity", "runs/demo")),
    BadInput("parity without a step", ("verify", "--parity", "runs/demo", "runs/other")),
    BadInput("profile of no trace", ("profile", "runs/demo")),
    BadInput("profile of no file", ("profile", "nowhere.json.gz")),
    BadInput("profile of another file", ("profile", "run.yaml")),
    BadInput("rules of no scale", ("observe", "rules", "--scale", "0")),
    BadInput("rules into nowhere", ("observe", "rules", "--to", "nowhere/rules.yaml")),
    BadInput("scrape of odd nodes", (*_SCRAPE, "gpu[1-")),
    BadInput("scrape of a range", (*_SCRAPE, "gpu[b-a]")),
    BadInput("scrape of too many", (*_SCRAPE, "gpu[1-999999]")),
    BadInput("nodes of pods", ("observe", "scrape", "--on", "kubernetes", "--nodes", "gpu1")),
    BadInput("fabric of one rank", ("fabric", "--cluster", "1xCPU", "--sizes", "64KiB")),
    BadInput("fabric of no share", ("fabric", "--cluster", "2xCPU", "--min-share", "80")),
    BadInput("fabric of odd sizes", ("fabric", "--cluster", "2xCPU", "--sizes", "large")),
    BadInput("fabric of small sizes", ("fabric", "--cluster", "2xCPU", "--sizes", "1")),
    BadInput("fabric of odd kinds", ("fabric", "--cluster", "2xCPU", "--collectives", "sum")),
    BadInput("fabric of no log", ("fabric", "--cluster", "2xCPU", "--nccl-log", "nowhere.log")),
    BadInput("fabric of another log", ("fabric", "--cluster", "2xCPU", "--nccl-log", "run.yaml")),
    BadInput("tunnel to nowhere", ("tunnel", "run.yaml", "--device", "tpu")),
    BadInput("tunnel without links", ("tunnel", "run.yaml", "--link-speed", "0")),
    BadInput("tunnel of no steps", ("tunnel", "run.yaml", "--steps", "0")),
    BadInput("trace of nothing", (*_TUNNEL, "fake", "--trace", "a.json.gz")),
    BadInput("trace of another name", (*_TUNNEL, "cpu", "--trace", "a.json")),
    BadInput("trace into nowhere", (*_TUNNEL, "cpu", "--trace", "no/a.json.gz")),
    BadInput("train on GPUs that are not here", ("train", "run.yaml", "cluster.name=8xH100")),
    BadInput("train on two nodes", ("train", "run.yaml", "cluster.name=2x2xCPU")),
    BadInput("train over checkpoints", (*_DEMO, "checkpoint.resume=false")),
    BadInput("train another model", (*_DEMO, "model.name=small-llama")),
    BadInput("wandb that is not here", ("train", "run.yaml", "observe.wandb=offline")),
    BadInput("export of nothing", ("runs/none",), runner="export"),
    BadInput("export of no step", ("runs/demo", "--step", "41"), runner="export"),
    BadInput("export of a step of one", ("runs/demo/checkpoints/step-00000020", "--step", "20"),
             runner="export"),
    BadInput("export over files", ("runs/demo", "--to", "configs"), runner="export"),
    BadInput("export of damage", ("runs/bad", "--to", "new"), runner="export"),
)  # fmt: skip

DATA = (
    _data("files that are not there", "data.source=text", "data.path=nowhere"),
    _data("a directory without text", "data.source=text", "data.path=empty"),
    _data("text of one document held out", "data.source=text", "data.path=one.txt",
          "data.eval_fraction=0.1", "data.seq_len=16"),
    _data("too little text", "data.source=text", "data.path=one.txt", "data.seq_len=4096"),
    _data("records without the key", "data.source=jsonl", "data.path=records.jsonl"),
    _data("records that are none", "data.source=jsonl", "data.path=broken.jsonl"),
    _data("an unknown tokenizer", "data.source=text", "data.path=one.txt", "data.seq_len=16",
          "data.tokenizer=nowhere/at/all"),
    _data("two datasets", "data.source=datasets", "data.path=[a,b]"),
)  # fmt: skip

BAD_INPUTS: tuple[BadInput, ...] = (
    *FLAGS, *VALUES, *KEYS, *RULES, *CLUSTERS, *BATCHES, *MODELS, *COMMANDS, *DATA,
)  # fmt: skip
