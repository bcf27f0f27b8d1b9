"""Everything that one rank needs to train, built from a plan: model, optimizer, data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from shardwise.data.grouping import LengthOrder
from shardwise.data.loader import BatchLoader
from shardwise.data.splits import DataSplits, build_sequences
from shardwise.data.windows import ConversationWindows
from shardwise.errors import ExitCode, UserError
from shardwise.facts.adapter_sizes import BASE_NAMES
from shardwise.files import user_path
from shardwise.kernels.own import uses_own
from shardwise.model.attention_choice import attention_of
from shardwise.model.blocks import UnitMap
from shardwise.model.build import build_on_meta, drop_idle_window
from shardwise.model.lora import initialise_adapters
from shardwise.model.split_attention import split_attention_of
from shardwise.model.stage_part import keep_stages
from shardwise.model.weights import (
    allocate_shards,
    initialise_buffers,
    initialise_weights,
    tied_names,
    validate_ties,
)
from shardwise.parallel.adapters import has_adapters
from shardwise.parallel.apply import parallelize
from shardwise.parallel.comm import Carrier
from shardwise.parallel.mesh import Mesh, World
from shardwise.parallel.precision import DTYPES
from shardwise.parallel.reduce_buffer import reduce_buffer_for
from shardwise.parallel.stages import Stages, stages_of
from shardwise.parallel.torchao_float8 import refresh_scales
from shardwise.plan.planned import Plan
from shardwise.training.adapter_calls import validate_called
from shardwise.training.agree import Topic, settle_in_group
from shardwise.training.apart import Apart
from shardwise.training.balance import watch_routers
from shardwise.training.document_attention import check_documents, masks_by_position
from shardwise.training.expert_load import watch_experts
from shardwise.training.head_trial import refuse_chunked, why_not_chunked
from shardwise.training.loss import attach_loss, prepare_head
from shardwise.training.objective import NextToken, Objective
from shardwise.training.outer import Outer, Together
from shardwise.training.overlapped import build_for
from shardwise.training.pipeline import StagedNextToken, attach_stages
from shardwise.training.preference_losses import PreferenceObjective
from shardwise.training.reference import Reference, open_reference
from shardwise.training.surroundings import fast_attention
from shardwise.training.trial import few_tokens, validate_trainable
from shardwise.units import format_bytes

Say = Callable[[str], None]
TOKENS = Topic("tokens", ExitCode.CONFIG, "let every node read the same data and tokenizer")


@dataclass(frozen=True, slots=True)
class Session:
    """The parts of a run on this rank."""

    plan: Plan
    model: Any
    units: UnitMap
    optimizer: torch.optim.Optimizer
    data: DataSplits
    device: torch.device
    mesh: Mesh
    reference: Reference | None = None
    """What the objective compares with; None where it compares with nothing."""

    outer: Outer | None = None
    """What joins this site with the others; None where there is one."""


def build_session(
    plan: Plan, mesh: Mesh, say: Say, *, resuming: bool = False, carrier: Carrier | None = None
) -> Session:
    """Build in order: the data, the sharded model, its weights, the optimizer.

    A run that resumes leaves the parameters to the checkpoint, all but those that adapters freeze,
    which no checkpoint holds, and those that a reference is still to be computed with. Collectives
    go through `carrier`, where there is one.
    """
    device = torch.device(plan.cluster.device)
    data = _build_data(plan, mesh.world, say)
    reference = open_reference(plan, data, mesh.world, say)
    knows = reference is None or reference.is_known
    reads = not resuming or has_adapters(plan) or not knows
    model, units = build_model(plan, mesh, say, with_weights=reads, carrier=carrier)
    optimizer = build_for(model, units, plan)
    outer = _build_outer(plan, model, units, optimizer, mesh, data.identity, say)
    return Session(plan, model, units, optimizer, data, device, mesh, reference, outer)


def _build_outer(
    plan: Plan,
    model: Any,
    units: UnitMap,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    data: str,
    say: Say,
) -> Outer | None:
    """What joins this site with others, whether they are in this job or in others."""
    if mesh.axes.site > 1:
        return Together(model, units, mesh, plan.settings.diloco)
    return Apart(plan, model, optimizer, mesh, data, say) if mesh.jobs > 1 else None


def objective_of(session: Session) -> Objective:
    """What the plan asks to be minimised."""
    config, reference = session.plan.settings.preference, session.reference
    if (stages := stages_of(session.plan, session.mesh)) is not None:
        return StagedNextToken(stages)
    if config.objective == "none":
        return NextToken(session.mesh.split)
    table = None if reference is None else reference.table
    return PreferenceObjective(config, table, session.mesh.token_group)


def build_model(
    plan: Plan,
    mesh: Mesh,
    say: Say,
    *,
    with_weights: bool = True,
    carrier: Carrier | None = None,
) -> tuple[Any, UnitMap]:
    """The sharded model with its first weights; no rank ever holds the whole of it."""
    model, units = shard_model(plan, mesh, carrier)
    fill_model(model, units, plan, say, with_weights=with_weights)
    return model, units


def shard_model(plan: Plan, mesh: Mesh, carrier: Carrier | None = None) -> tuple[Any, UnitMap]:
    """The model with the plan's changes, still on meta."""
    model, buffer = _build_on_meta(plan), reduce_buffer_for(plan, mesh)
    if (stages := stages_of(plan, mesh)) is not None:
        keep_stages(model, stages.blocks, stages.own)
    prepare_head(
        model,
        plan.decided.loss_chunk_tokens,
        compiled=plan.decided.compile,
        own_kernels=uses_own(plan),
        form=plan.model.head,
        buffer=buffer,
        group=mesh.group("tensor"),
    )
    watch_experts(model)
    if plan.decided.router_aux_loss or plan.decided.router_z_loss:
        watch_routers(model)
    ties = tied_names(model)
    units = parallelize(model, plan, mesh, carrier, buffer)
    validate_ties(model, ties)
    return model, units


def fill_model(
    model: Any, units: UnitMap, plan: Plan, say: Say, *, with_weights: bool = True
) -> None:
    """Allocate this rank's shards, and fill them with first weights."""
    device = torch.device(plan.cluster.device)
    home = torch.device("cpu") if plan.decided.offload else device
    allocate_shards(model, home, buffers_on=device)
    twin = _build_on_meta(plan)
    if with_weights and plan.weights_dir is None:
        initialise_weights(model, twin, units, seed=plan.settings.train.seed, device=device)
    else:
        initialise_buffers(model, twin, device)
    if with_weights and plan.weights_dir is not None:
        _read_weights(model, Path(plan.weights_dir), plan, say)
    if with_weights:
        _fill_adapters(model, plan, say)
        refresh_scales(model, plan)


def build_loader(session: Session, shift: int = 0) -> BatchLoader:
    """This rank's part of every global batch, whose place is shifted by so many sequences."""
    plan = session.plan
    return BatchLoader(
        session.data.train,
        shift=shift,
        order=length_order(plan, session.data),
        seed=plan.settings.train.seed,
        # A mixture is shuffled in itself.
        shuffle=plan.settings.data.shuffle and not session.data.mixed,
        global_batch=plan.decided.global_batch,
        micro_batch=plan.decided.micro_batch,
        accumulation=plan.decided.accumulation,
        rank=session.mesh.data_rank,
        num_ranks=session.mesh.data_degree,
    )


def length_order(plan: Plan, data: DataSplits) -> LengthOrder | None:
    """The order of batches of similar lengths, where the run asks for it."""
    if not plan.settings.data.group_lengths or not isinstance(data.train, ConversationWindows):
        return None
    return LengthOrder(
        data.train.lengths,
        plan.settings.data.seq_len,
        seed=plan.settings.train.seed,
        shuffle=plan.settings.data.shuffle,
        global_batch=plan.decided.global_batch,
    )


def attach_training_loss(session: Session, say: Say) -> None:
    """Give the model its losses. Their form is checked on real weights, so these come first."""
    plan, model = session.plan, session.model
    if (stages := stages_of(plan, session.mesh)) is not None:
        _attach_loss_to_stages(session, stages)
        return
    if plan.model.source == "counted":
        # It is known for the other families. The launcher has tried models that fit into its
        # memory.
        validate_trainable(model, plan, session.device)
    if has_adapters(plan):
        validate_called(model, few_tokens(plan).to(session.device))
    chunked = plan.decided.loss == "chunked"
    if chunked:
        reason = why_not_chunked(model, few_tokens(plan).to(session.device), plan.model.head)
        if reason is not None and plan.choices["loss"].source == "user":
            raise refuse_chunked(reason)
        if reason is not None:
            say(f"loss: all logits at once, because {reason}")
            chunked = False
    if plan.settings.data.keeps_documents_apart:
        with fast_attention(session.device, reads_positions=masks_by_position(plan)):
            check_documents(model, session.device, DTYPES[plan.decided.param_dtype])
    attach_loss(model, chunked=chunked)
    register_fsdp_forward_method(model, "sum_loss")
    register_fsdp_forward_method(model, "token_losses")


def _attach_loss_to_stages(session: Session, stages: Stages) -> None:
    """No rank can run the whole model. The form of its head was found without weights when the run
    was planned, and a family that has another would be known by then."""
    plan, model = session.plan, session.model
    attach_loss(model, chunked=plan.decided.loss == "chunked")
    attach_stages(model, stages)
    register_fsdp_forward_method(model, "run_stage")


def _fill_adapters(model: Any, plan: Plan, say: Say) -> None:
    place = plan.settings.adapter.weights_from
    if place is None:
        initialise_adapters(model, plan.settings.train.seed)
        return
    from shardwise.model.peft_format import load_peft

    load_peft(model, user_path(place))
    say(f"adapters begin with those of {place}")


def _read_weights(model: Any, place: Path, plan: Plan, say: Say) -> None:
    # This is imported on need: it relies on parts of transformers that change between releases.
    from shardwise.model.dequantised import stored_quantization
    from shardwise.model.pretrained import load_pretrained, new_rows
    from shardwise.model.stored import find_weights, unread_state

    for name, count in new_rows(model, place).items():
        if not model.get_parameter(name).requires_grad:
            raise _refuse_frozen_rows(name, count)
        say(f"{name} has {count} new rows, which begin with the mean of the others")
    num_bytes = load_pretrained(model, place, plan.settings.model.ignore_weights)
    quantization, base = stored_quantization(place), plan.settings.adapter.base
    how = f", dequantised from {quantization.method}" if quantization else ""
    if quantization is not None and quantization.method == base:
        how = f", whose {BASE_NAMES[base]} stays as it is"
    say(f"rank 0 read {format_bytes(num_bytes)} of weights from {find_weights(place)}{how}")
    if unread := unread_state(place):
        say(f"not read: {', '.join(unread)}; the optimizer and the schedule start anew")


def _refuse_frozen_rows(name: str, count: int) -> UserError:
    return UserError(
        f"{name} has {count} more rows than its file, and adapters leave it frozen",
        why="model.overrides has another vocab_size, and rows of new tokens must be trained",
        fix="name all tables: adapter.modules_to_save=[embed_tokens,lm_head], or leave "
        "model.overrides out",
    )


def _build_on_meta(plan: Plan) -> PreTrainedModel:
    code_dir = plan.model_dir if plan.settings.model.trust_remote_code else None
    config = drop_idle_window(plan.hf_config, plan.settings.data.seq_len)
    named = attention_of if plan.decided.context == 1 else split_attention_of
    attention = named(plan.decided.attention, plan.cluster.device)
    model = build_on_meta(config, attention=attention, code_dir=code_dir)
    # We compute the load-balancing loss: the model's own is of one rank, and is not used.
    for settings in (model.config, model.config.get_text_config()):
        if getattr(settings, "output_router_logits", False):
            settings.output_router_logits = False
    return model


def _build_data(plan: Plan, world: World, say: Say) -> DataSplits:
    """The first rank of each node tokenises. The others wait and find the result in the cache.

    Data of one node that cannot be read, or that gives other tokens, is an error on all ranks.
    """
    settings = plan.settings

    def build() -> DataSplits:
        return build_sequences(
            settings.data,
            vocab_size=plan.model.vocab_size,
            model_name=settings.model.name,
            model_revision=settings.model.revision,
            seed=settings.train.seed,
            cache_root=Path(settings.runs_dir) / ".cache",
            verify=world.is_first_of_node,
            say=say,
        )

    data, failure = None, None
    if world.is_first_of_node:
        try:
            data = build()
        except UserError as error:
            failure = error
    values = {TOKENS.name: _token_values(data)} if data else {}
    settle_in_group(world, [TOKENS], values, failure)
    return data or build()


def _token_values(data: DataSplits) -> dict[str, Any]:
    """The values that are equal where nodes have the same tokens, whatever the paths are."""
    digests = {
        f"sha256 of the {name} tokens": hashed for name, hashed in data.token_digests.items()
    }
    # A tokenizer's identity begins with the name of its directory, which may differ.
    tokenizer = data.tokenizer_identity.rpartition("@")[2]
    return {"tokenizer": tokenizer, "training tokens": data.num_train_tokens, **digests}
