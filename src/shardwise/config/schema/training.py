"""How a run trains: its optimizer and its loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.config.schema.words import Auto


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "muon", "adafactor", "lion"] = "adamw"
    """`muon`: torch's Muon for the matrices of blocks, half of AdamW's state there, and AdamW for
    embeddings, the head, vectors and stacked experts; its updates are scaled so that `lr` and
    `weight_decay` are AdamW's. `adafactor`: torch's, with hardly any state. Both gather each matrix
    for its update, and every rank computes all updates. `lion`: half of AdamW's state, and nothing
    is gathered; every number moves by `lr`, so rates are a third to a tenth of AdamW's, and
    `weight_decay` is as much larger."""

    lr: float = 3e-4
    """Peak learning rate."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's two decay rates, or Lion's, whose paper has `[0.9, 0.99]`."""

    eps: float = 1e-8
    """Adam's epsilon."""

    weight_decay: float = 0.1
    """Decoupled weight decay; norms and biases are left out."""

    decay_embeddings: bool = True
    """Whether embeddings decay like other matrices. `false` leaves out the tables that tokens and
    positions are looked up in, and the head where it is tied to one. Rows of rare tokens then keep
    their size."""

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

    state: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format of Adam's two moments. bf16 halves their memory, and int8 quarters it: 256 numbers of
    a row share a scale. Both are rounded stochastically, so that changes smaller than their
    precision add up. bf16 is part of our fused kernel; int8 is plain torch, and slower."""

    @property
    def gathers_matrices(self) -> bool:
        """Whether an update needs whole matrices, and not only a rank's own part of them."""
        return self.name in ("muon", "adafactor")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The loop."""

    steps: int = 1000
    """Optimizer steps of the whole run; the learning-rate schedule spans them."""

    epochs: float | None = None
    """Passes over the training data, instead of `train.steps`. The steps are counted from the
    sequences once the data was read, and the last one is filled up from the next pass. Not for
    `synthetic` data, which has no end."""

    global_batch: int | Auto = "auto"
    """Sequences in one optimizer step over all ranks = micro_batch x accumulation x ranks."""

    batch_may_change: bool = False
    """Whether a resume may have another global batch. It then reads on behind the sequences that
    were read, and the log says so. Otherwise it is refused: it is another run."""

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

    patience: int = 0
    """How many evaluations in a row may pass without a fall of the held-out loss. After that many
    the run saves and ends. 0: it goes on to its last step. It needs `train.eval_every` and
    held-out data (`data.eval_fraction` or `data.eval_path`)."""

    min_gain: float = 0.0
    """With `patience`: the least fall of the held-out loss that counts, in nats. Smaller ones add
    up until they do."""

    max_nonfinite: int = 3
    """How many batches in a row may give a loss or gradient that is not finite. Each is skipped and
    named. After one more, the run goes back to the newest checkpoint and skips these batches."""

    max_restarts: int = 3
    """How often `shardwise train` and `shardwise torchrun` start the ranks again after one died or
    hung."""

    hang_timeout_s: float = 900.0
    """Seconds without a finished step, or with a stopped rank, after which the ranks count as hung.
    Their stacks are written to their logs, and they are ended and started again. Importing,
    compiling, evaluating and saving have at least 1800 s; reading data and weights has 6 hours."""

    gc_every: int = 50
    """Steps between Python's garbage collections, which all ranks run after the same step."""

    compare_replicas_every: int = 100
    """Steps between comparisons of replicas, bit by bit, where there are several (`hybrid_shard`,
    `no_shard`). A difference stops the run and names tensor, ranks and hosts. Replicas are compared
    at the start and before each save too; 0: only then. A comparison takes as long as reading the
    shard and its moments: 7 ms for a billion parameters on an H200, about a second where they are
    in host memory."""

    check_loss: bool = True
    """Compare losses before the first step of every start: 256 tokens go through the loss that is
    trained on, with the run's kernels, and through the model's own `forward(labels=...)`, without
    them. A difference beyond rounding is an error. It takes two forward passes, and so two passes
    of all-gathers: 0.1 s for small models, as long as an evaluation of one micro-batch for large
    ones."""

    router_aux_loss: Literal["auto", "off"] | float = "auto"
    """The coefficient of the load-balancing loss of a mixture of experts, which is added to the
    loss that is trained on. `auto`: what the model's config asks for (`output_router_logits` and
    `router_aux_loss_coef`); a number turns it on for any model whose routers transformers finds."""

    router_z_loss: float = 0.0
    """The coefficient of the routers' z-loss, which keeps their logits small: the mean over tokens
    of the squared logarithm of the sum of exponentials. 0: none. It needs a model whose routers
    transformers finds."""

    kernels: Literal["auto", "own", "torch"] = "auto"
    """Which kernels compute AdamW, the loss, SwiGLU, copies around collectives and float8's casts.
    `own`: Triton kernels that move and keep fewer bytes (SwiGLU on Hopper in the epilogue of its
    matmuls, with `shardwise[quack]`). `torch`: torch, its compiler and torchao. The numbers
    agree to rounding. `auto`: our own on GPUs; without Triton torch's, and the run says so."""
