"""Where a run takes place, and how its ranks are laid out."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config.schema.words import Auto, PipelineSchedule, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Where the run takes place."""

    name: str = "local"
    """`local` (the GPUs of this machine, or one CPU rank), or NODESxGPUSxKIND such as `8xH100`,
    `4x8xH100`, `2x8xA100-40GB`; `2xCPU` is two ranks on this machine's CPU."""

    nvlink_domain: int | Auto = "auto"
    """GPUs that reach each other over NVLink; `auto` is all the GPUs of a node. With `auto`, a name
    with more GPUs per node than such servers have is refused (`64xH100`: write `8x8xH100`)."""

    interconnect: str | float = "auto"
    """The network between nodes: a name such as `infiniband-ndr`, `efa-3200` or `ethernet-100`,
    or the GB/s of all network cards of a node, in one direction; `auto` is what such servers
    usually have."""

    peak_tflops: float | Auto = "auto"
    """Dense peak of one device in the format that the run computes in; MFU is a share of it. `auto`
    is the vendor's figure; devices that the catalogue does not know then have no MFU."""

    gpu_gib: float | Auto = "auto"
    """Memory of one GPU in GiB, as `nvidia-smi` shows it. It describes a GPU that the catalogue
    does not know, together with `cluster.peak_tflops` and `cluster.gpu_gbps`."""

    gpu_gbps: float | Auto = "auto"
    """GB/s of the memory of such a GPU. Links between two of them are planned as PCIe."""

    usd_per_gpu_hour: float | Auto = "auto"
    """Price of one GPU for an hour; `auto` looks it up in `prices`."""

    prices: str | None = None
    """A YAML of prices to use instead of the sample that comes with the package."""

    datacenters: int = 1
    """Places that the ranks are in, each with as many nodes. FSDP stays inside each of them, and
    DiLoCo joins them (`mesh.site`)."""

    site_link: float | None = None
    """Gbit/s between a site and the others, in one direction, for all its ranks together. With it
    the plan tells how long sites wait for each other."""

    site_delay_ms: float = 0.0
    """Milliseconds that a message takes from one site to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """How many ranks each axis of the device mesh has. The product of all but `expert` must be the
    world size."""

    site: int | Auto = "auto"
    """Groups of ranks that train apart, and exchange what they have learnt in an outer step
    (DiLoCo). `auto`: one for each of `cluster.datacenters`."""

    replicate: int | Auto = "auto"
    """Copies of the sharded model (HSDP's outer axis, whose all-reduce crosses nodes)."""

    shard: int | Auto = "auto"
    """Ranks that one copy is sharded over (the axis of all-gather and reduce-scatter)."""

    pipeline: int | Auto = "auto"
    """Ranks along which the blocks are divided into stages (pipeline parallel). `auto`: one."""

    pipeline_schedule: PipelineSchedule = "1f1b"
    """The order in which micro-batches pass the stages. `1f1b`: one forward, one backward in turn.
    `interleaved_1f1b`: each rank has several stages, so that ranks wait less. `zero_bubble`: the
    gradients of weights are computed later, while ranks would wait."""

    pipeline_chunks: int | Auto = "auto"
    """Stages on each rank. `auto`: two with `interleaved_1f1b`, otherwise one."""

    pipeline_blocks: str | Auto = "auto"
    """Blocks of each stage in order, such as 5+3. `auto`: the stages take about as long, the head
    and the loss included."""

    pipeline_recompute: str | Auto = "auto"
    """What each rank of a pipeline recomputes, in order and in the words of
    `memory.checkpoint_activations`, such as full+0.5+none+none. `auto`: each the least that fits;
    where `memory.checkpoint_activations` is given, all ranks do as it says."""

    tensor: int | Auto = "auto"
    """Ranks that compute each matmul together (tensor parallel): neighbours, over NVLink."""

    sequence_parallel: bool = True
    """With `mesh.tensor`: the same ranks divide the tokens of norms and of the residual. It takes
    less memory and no more communication."""

    context: int | Auto = "auto"
    """Ranks that each sequence is split over (context parallel)."""

    expert: int | Auto = "auto"
    """Parts that the experts of a block are dealt out in (expert parallel). It takes no ranks of
    its own: it divides shard x context x tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardConfig:
    """How parameters, gradients and optimizer state are spread over the mesh."""

    strategy: Strategy = "auto"
    """`full_shard` (ZeRO-3), `shard_grad_op` (ZeRO-2), `hybrid_shard` (HSDP), `no_shard` (DDP)."""

    reshard_after_forward: bool | int | Auto = "auto"
    """Free gathered parameters after forward (true), keep them for backward (false), or reshard
    them to groups of this many ranks (an integer, such as the GPUs of a node)."""

    keep_experts: bool | Auto = "auto"
    """With `mesh.expert`: keep the experts of a rank gathered from forward to backward (true) where
    the rest of their block is freed. `auto`: where it fits and is faster."""

    forward_prefetch: int | Auto = "auto"
    """Units that are all-gathered ahead in forward, explicitly. 0 leaves FSDP2's own overlap."""

    gather_in_place: bool | Auto = "auto"
    """All-gather each parameter into its own memory, instead of a whole unit into one buffer
    from which parameters are copied. `auto`: on GPUs with our own kernels, where units are
    gathered one ahead."""

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
