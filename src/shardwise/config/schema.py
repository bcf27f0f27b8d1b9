"""What a user may say: one frozen dataclass a section, a docstring under every field.

The docstrings are the reference: `shardwise config schema` and docs/configuration.md print them.
`auto` means that the planner decides and gives its reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Auto = Literal["auto"]
Strategy = Literal["auto", "full_shard", "shard_grad_op", "hybrid_shard", "no_shard"]
DtypeName = Literal["bf16", "fp16", "fp32"]
FLOAT8_FORMATS = ("float8", "float8_rowwise")  # of `precision.linear`

# `from_string` names the field that a section takes when the YAML gives it a bare string
# (`model: llama-3.1-8b`), so that the smallest useful file is three lines.
FROM_STRING = {"model": "name", "data": "source", "cluster": "name"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model is trained and where its first weights come from."""

    name: str = "tiny-llama"
    """A preset (`shardwise config ls` lists them), a directory with config.json, or a hub id."""

    weights: Literal["auto", "random", "pretrained"] = "auto"
    """`pretrained` reads weights, `random` initialises; `auto` reads them where they exist."""

    weights_from: str | None = None
    """The directory or file of the weights, where they are not beside config.json: safetensors,
    torch.save, or a checkpoint of Accelerate, the HF Trainer or DCP."""

    ignore_weights: list[str] = field(default_factory=list)
    """Regular expressions of tensors in the files that may stay unread, such as `^mtp`. Without
    one, a tensor that the model has no place for is an error."""

    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config.json to change, such as `num_hidden_layers: 16`."""

    attention: Literal[
        "auto", "sdpa", "eager", "flash_attention_2", "flash_attention_4", "flex_attention"
    ] = "auto"
    """The attention implementation that transformers is asked for; `auto` is `sdpa`, cuDNN's where
    it is faster, or `eager` for a family whose class has no `sdpa`. `flash_attention_4` (Hopper and
    later, with `shardwise[flash4]`) is ours: plainly causal, faster still, and compiled with its
    block."""

    revision: str | None = None
    """The hub revision (a commit hash) to read; required with `trust_remote_code`."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Needs a pinned `revision` for hub ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which tokens are trained on, and in which order."""

    source: Literal["stdlib", "text", "jsonl", "parquet", "datasets", "synthetic"] = "stdlib"
    """`stdlib` is the running Python's own source text; `text`, `jsonl` and `parquet` read files,
    the first two also as `.gz` and `.zst`; `datasets` reads a saved directory or a hub id;
    `synthetic` makes random tokens."""

    path: str | list[str] | None = None
    """Files, directories or globs for `text`, `jsonl` and `parquet`; the directory or id for
    `datasets`."""

    field: str = "text"
    """The key (jsonl) or column (parquet, datasets) that holds the text."""

    name: str | None = None
    """The configuration name of a hub dataset, such as `wikitext-103-raw-v1`."""

    split: str = "train"
    """The split of a `datasets` source to train on."""

    tokenizer: str = "auto"
    """`byte` (embedded, 257 tokens), a local directory or a hub id. `auto` takes the model's own
    tokenizer; without one it takes bytes for a vocabulary of about that size, and is an error for
    any other."""

    seq_len: int = 2048
    """Tokens in one training sequence. Documents are packed back to back to this length."""

    document_mask: bool = False
    """Tokens attend only to their own document, and its positions start at 0. No mask is built for
    `model.attention: flash_attention_4`; for others it is, and bars their fast kernels."""

    shuffle: bool = True
    """Visit sequences in a seeded random order, another one each epoch."""

    eval_fraction: float = 0.0
    """Share of the documents that is held out for the evaluation loss, 0 to 0.5."""

    eval_sequences: int = 64
    """How many held-out sequences one evaluation reads at most."""

    max_corrupt: int = 10
    """How many unreadable records may be skipped (each is named) before the run is refused."""

    on_change: Literal["refuse", "restart"] = "refuse"
    """What a resume does where the training tokens or their order changed. `refuse` ends it with
    the changes; `restart` keeps weights, optimizer and step, and reads the data from its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Where the run takes place."""

    name: str = "local"
    """`local` (the GPUs of this machine, or one CPU rank), or NODESxGPUSxKIND such as `8xH100`,
    `4x8xH100`, `2x8xA100-40GB`; `2xCPU` is two ranks on this machine's processor."""

    nvlink_domain: int | Auto = "auto"
    """GPUs that reach each other over NVLink; `auto` is all the GPUs of a node, and then a name
    with more GPUs in a node than its kind comes in is refused (`64xH100`: write `8x8xH100`)."""

    interconnect: str | float = "auto"
    """The network between nodes: a name such as `infiniband-ndr`, `efa-3200` or `ethernet-100`,
    or the GB/s of all the cards of one node, one way; `auto` is what such servers usually have."""

    peak_tflops: float | Auto = "auto"
    """Dense peak of one device in the format that the run computes in, which MFU is a share of;
    `auto` is the vendor's figure, and no MFU for devices that the catalogue does not know."""

    usd_per_gpu_hour: float | Auto = "auto"
    """Price of one GPU for an hour; `auto` looks it up in `prices`."""

    prices: str | None = None
    """A YAML of prices to use instead of the sample that comes with the package."""

    datacenters: int = 1
    """Sites that the workers sit in. FSDP needs one: more is refused, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """How many ranks each axis of the device mesh has. The product must be the world size."""

    replicate: int | Auto = "auto"
    """Copies of the sharded model (HSDP's outer axis, whose all-reduce crosses nodes)."""

    shard: int | Auto = "auto"
    """Ranks that one copy is sharded over (the axis of all-gather and reduce-scatter)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardConfig:
    """How parameters, gradients and optimizer state are spread over the mesh."""

    strategy: Strategy = "auto"
    """`full_shard` (ZeRO-3), `shard_grad_op` (ZeRO-2), `hybrid_shard` (HSDP), `no_shard` (DDP)."""

    reshard_after_forward: bool | int | Auto = "auto"
    """Free gathered parameters after forward (true), keep them for backward (false), or reshard
    them to groups of this many ranks (an integer, such as the GPUs of a node)."""

    forward_prefetch: int | Auto = "auto"
    """Units that are all-gathered ahead in forward, explicitly. 0 leaves FSDP2's own overlap."""

    gather_in_place: bool | Auto = "auto"
    """Gather each parameter where it is used, instead of all of a unit into one memory from which
    they are copied. `auto`: on GPUs with our own kernels, where units are gathered one ahead."""

    backward_prefetch: int | Auto = "auto"
    """Units that are all-gathered ahead in backward. 1 is FSDP2's own order."""

    all_gather_limit: int | Auto = "auto"
    """The most units that may be gathered at once, the one in use included; it caps both
    prefetch depths at one less. 1 turns prefetching off."""

    unit_classes: list[str] | None = None
    """Module classes that form a unit each, such as [LlamaDecoderLayer]; unset: found from the
    model's own metadata."""

    unit_min_params: int | None = None
    """Instead of classes: every module that holds at least this many parameters, not counting
    units inside it, becomes a unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """Which number formats are used. Master weights and Adam state are always fp32."""

    param: DtypeName | Auto = "auto"
    """Format of gathered parameters and compute. `auto`: bf16 where the hardware computes it,
    fp16 with loss scaling where it has only that, else fp32."""

    linear: Literal["auto", "param", "float8", "float8_rowwise"] = "auto"
    """What the linear layers of blocks multiply in. `float8`: one scale a tensor, weights gathered
    in eight bits; `float8_rowwise`: one scale a row, weights gathered in `param`. Both need a GPU
    that computes float8, torch.compile and `pip install shardwise[float8]`. `auto` is `param`, the
    format above: float8 changes the numbers, so it is never chosen for you."""

    float8_min_features: int = 1024
    """The least width, in and out, of a layer that float8 is used for: casts grow with the width,
    what they gain with its square. Unused otherwise."""

    reduce: DtypeName | Auto = "auto"
    """Format of the gradient reduction. `auto` is fp32; bf16 can diverge on long runs."""

    output: DtypeName | None = None
    """Format that the model's output is cast to; unset: whatever the last layer gives."""

    cast_forward_inputs: bool = True
    """Cast floating-point inputs of every unit to `param` before its forward."""

    loss_scale: float = 65536.0
    """The first loss scale when `param` is fp16. It falls by half when gradients overflow, and the
    batch is computed again; it doubles after 2000 steps without an overflow. Unused otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """What is traded to save memory."""

    checkpoint_activations: Literal["auto", "none", "full", "selective"] | float = "auto"
    """`full` recomputes every block in backward, `selective` keeps matmul and attention results
    and recomputes the rest, a fraction (0 to 1) recomputes that share of the blocks, evenly."""

    compile: bool | Auto = "auto"
    """Compile each block with torch.compile. `auto`: on GPUs, not on CPUs."""

    offload_activations: float = 0.0
    """Share of the blocks, 0 to 1, whose activations wait for backward in host memory. The copies
    run beside compute and cost little as long as PCIe is fast enough for them. `shardwise plan`
    says how much host memory that is, and what is waited for."""

    offload: Literal["none", "cpu"] = "none"
    """`cpu` keeps parameters, gradients and optimizer state in host memory."""

    pin_memory: bool = True
    """With offload to a host that feeds a GPU: page-locked memory, so copies overlap."""

    loss: Literal["auto", "chunked", "full"] = "auto"
    """`chunked` computes head and cross-entropy together, a slice of tokens at a time, and never
    holds all logits; `full` calls the model's own forward. `auto`: chunked where the model's head
    is a plain projection of its last hidden state (checked on the real model at start)."""

    loss_chunk_tokens: int | Auto = "auto"
    """Tokens per slice of the chunked loss."""

    accumulate: Literal["auto", "unsharded", "sharded"] = "auto"
    """With gradient accumulation: `unsharded` keeps whole gradients and reduces once, on the last
    micro-batch; `sharded` reduce-scatters every micro-batch (less memory, more traffic). HSDP
    all-reduces across replicas on the last micro-batch only, either way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = 3e-4
    """Peak learning rate."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's two decay rates."""

    eps: float = 1e-8
    """Adam's epsilon."""

    weight_decay: float = 0.1
    """Decoupled weight decay; norms and biases are left out."""

    clip_norm: float | None = 1.0
    """Largest global gradient norm; unset: no clipping."""

    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """How the rate falls after warm-up; `wsd` is warm-up, stable, then a linear decay."""

    warmup_steps: int = 0
    """Steps over which the rate rises linearly from 0 to `lr`."""

    decay_steps: int | Auto = "auto"
    """Length of `wsd`'s last phase; `auto` is a tenth of all steps."""

    min_lr_ratio: float = 0.1
    """The rate at the last step, as a share of `lr`."""

    fused: bool | Auto = "auto"
    """Fused AdamW; `auto`: where the device of the parameters has it."""

    state: Literal["fp32", "bf16"] = "fp32"
    """How Adam keeps its two moments. bf16 halves them; it is rounded at random, the nearer the
    likelier, so that changes smaller than its steps add up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The loop."""

    steps: int = 1000
    """Optimizer steps of the whole run; the schedule is laid over them."""

    global_batch: int | Auto = "auto"
    """Sequences in one optimizer step over all ranks = micro_batch x accumulation x ranks."""

    micro_batch: int | Auto = "auto"
    """Sequences in one forward pass of one rank."""

    accumulation: int | Auto = "auto"
    """Forward and backward passes in one optimizer step."""

    stop_after: int | None = None
    """Save and end cleanly after this step; the same command without it goes on."""

    seed: int = 0
    """Decides initial weights, data order and dropout."""

    deterministic: bool = False
    """Ask torch for deterministic algorithms (slower on GPUs)."""

    eval_every: int = 0
    """Steps between evaluations on the held-out split; 0: only at the end, where there is one."""

    max_nonfinite: int = 3
    """Batches in a row that may give a loss or gradient which is not finite; each is skipped and
    named. One more goes back to the newest checkpoint and on past these batches."""

    max_restarts: int = 3
    """How often `shardwise train`, and on one node `shardwise torchrun`, starts its ranks again
    after one died or hung."""

    hang_timeout_s: float = 900.0
    """Seconds without a finished step, or with a rank that is stopped, after which ranks are taken
    to hang. They are ended with their stacks in their logs, and started again. All else that a rank
    does (importing, compiling, evaluating, saving) has at least 1800 s, reading 6 hours."""

    gc_every: int = 50
    """Steps between garbage collections, at the same step edge on all ranks."""

    compare_replicas_every: int = 100
    """Steps between comparisons of what replicas hold, bit by bit, where there are several
    (`hybrid_shard`, `no_shard`). A difference stops the run and names tensor, ranks and hosts. They
    are compared at the start and before each save too; 0: only then. It takes as long as reading
    the shard and its moments: 7 ms for a billion parameters on an H200, about a second on a host
    that keeps them."""

    router_aux_loss: Literal["auto", "off"] | float = "auto"
    """The coefficient of the load-balancing loss of a mixture of experts, which is added to the
    loss that is trained on. `auto`: what the model's config asks for (`output_router_logits` and
    `router_aux_loss_coef`); a number turns it on for any model whose routers transformers finds."""

    kernels: Literal["auto", "own", "torch"] = "auto"
    """Who computes AdamW, the loss, SwiGLU, copies around collectives and the casts of float8:
    `own` are Triton kernels that move and keep fewer bytes (SwiGLU on Hopper inside of its matmuls,
    with `shardwise[quack]`), `torch` is torch, its compiler and torchao. The numbers agree to
    rounding. `auto`: our own on GPUs, unless Triton is missing there, which is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When state is kept, and whether a run goes on from it."""

    every: int = 500
    """Steps between checkpoints; 0: only at the end."""

    keep: int = 3
    """How many are kept; the oldest go first."""

    at_end: bool = True
    """Save after the last step."""

    asynchronous: bool = True
    """Write in the background while training goes on; the loop only waits for the copy to host
    memory, which takes as many bytes as the shards of a rank."""

    verify: bool = True
    """Hash every file before it is loaded. A damaged checkpoint is quarantined, and the run goes on
    from the one before it."""

    wait_for_room_s: float = 600.0
    """A save that finds the disk full fails, and training goes on. The next save, or the last one
    of the run, waits this long for room; then the run stops with an error. 0: it does not wait."""

    resume: bool = True
    """Go on from the newest checkpoint in the run directory. `false` refuses to start over one."""

    begin_anew: bool = False
    """Begin at step 1 where the run directory has checkpoints and none of them is good. Otherwise
    such a run stops and names them. They are set aside, and none is removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatesConfig:
    """What a run must meet, as its end and `shardwise verify` judge it."""

    enforce: bool = False
    """`shardwise train` exits with 5 where a gate failed at the end of a run, as `verify` does."""

    min_mfu: float = 0.40
    """The least MFU, on devices whose peak is known."""

    max_memory: float = 0.95
    """The most of a device's memory that may be reserved."""

    step_spread: float = 0.05
    """How far step times may be from their median, either way."""

    grad_spike: float = 10.0
    """How many times its median the gradient norm may reach."""

    max_exposed: float = 0.15
    """The most of a step that communication may take while nothing computes, in profiled steps.
    Above it the links set the pace: a larger micro-batch or another mesh gains more than tuning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig:
    """What is printed and recorded."""

    log_every: int = 10
    """Steps between lines on the console and step events in events.jsonl."""

    collectives: bool = True
    """Take the time of every collective and name the rank that the others wait for."""

    profile: int | None = None
    """The first step to profile, on every rank: RUN/profile holds the traces, and `shardwise
    profile RUN` reads them. Unset: none. The step before it warms the profiler up."""

    profile_steps: int = 3
    """How many steps are profiled, one after the other."""

    memory_history: bool = False
    """Note where every block of GPU memory was taken, so that running out of it leaves a snapshot
    for pytorch.org/memory_viz. Costs a stack for each allocation, so it is for looking, not for
    long runs."""

    tensorboard: bool = False
    """Write the curves of events.jsonl to RUN/tensorboard too."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Send the curves to Weights & Biases, or keep them in RUN/wandb for `wandb sync`. Needs
    `pip install shardwise[wandb]`."""

    wandb_project: str = "shardwise"
    """The W&B project that the run belongs to."""

    prometheus_port: int | None = None
    """Serve GET /metrics on this port, from the first rank of every node; unset: not at all."""

    prometheus_host: str = "127.0.0.1"
    """The address that the endpoint listens on. Loopback is seen by this machine only; 0.0.0.0
    is every network of it, and the endpoint asks nobody for a password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run: everything that a user said, nothing that was derived."""

    name: str = "run"
    """Name of the run directory. Unset: the file's name."""

    runs_dir: str = "runs"
    """Directory that holds the run directories."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    gates: GatesConfig = field(default_factory=GatesConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
