"""Our loss beside the model's own, before the first step.

The same tokens go through the loss that the run trains on, with our head, kernels and attention,
and through the model's own `forward(labels=...)`, with the code of its family. A factor after the
head that we do not know, a kernel that is wrong for these sizes, or a term that the family adds to
its loss would otherwise show as a worse model, weeks later.

With random weights every loss is near the logarithm of the vocabulary, whatever a head does. So
groups of tokens are compared as well, and the scale of a difference is how much groups differ from
each other.
"""

from __future__ import annotations

import inspect
import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.internals.hugging_face import eager_code
from shardwise.kernels.cross_entropy import IGNORE_INDEX
from shardwise.model.override import own_forwards
from shardwise.model.sequence_split import SequenceSplit
from shardwise.model.split_attention import part_arguments
from shardwise.parallel.mesh import Mesh
from shardwise.plan.context import tokens_of_a_cut
from shardwise.plan.decisions import multiplies_base, multiplies_experts
from shardwise.plan.float8_rules import is_float8
from shardwise.plan.planned import Plan
from shardwise.training.channels import Channels
from shardwise.training.document_attention import masks_by_position
from shardwise.training.session import Session
from shardwise.training.surroundings import fast_attention
from shardwise.training.trial import NEEDS_MORE, trying

# Twice the shortest window of attention that is usual (gpt-oss), so that its edge is seen.
_TOKENS = 256
_GROUPS = 8
# What rounding may do to losses, as a share of how much groups differ. In formats of few bits a
# token near a tie goes to another expert, which is more than rounding.
_SHARES = {"fp32": 1e-3, "bf16": 0.25, "fp16": 0.25}
_FLOAT8_SHARE = 0.5
# Where all groups are alike, fp32 sums still round.
_ROUNDING = 1e-5


@dataclass(frozen=True, slots=True)
class LossComparison:
    """The losses of the same tokens by both ways, as means over tokens."""

    ours: float
    own: float
    """What the model's own forward returns as its loss."""

    own_cross_entropy: float
    """The cross-entropy of the logits that it returns."""

    apart: float
    """The difference of a group of tokens, as the root of the mean square over groups."""

    allowed: float
    """How much rounding may make of it."""

    @property
    def is_equal(self) -> bool:
        """Whether both are the same to rounding. Two losses that are not finite cannot be compared,
        and the first step will say so."""
        if not math.isfinite(self.ours) and not math.isfinite(self.own_cross_entropy):
            return True
        # A difference that is not a number is not below the bound.
        return self.apart <= self.allowed and abs(self.ours - self.own) <= self.allowed

    @property
    def has_other_objective(self) -> bool:
        """Whether only the family's loss differs, which is then more than a cross-entropy."""
        return self.apart <= self.allowed and (
            abs(self.ours - self.own_cross_entropy) <= self.allowed
        )


def compare_losses(session: Session, channels: Channels, step: int) -> None:
    """Raise on all ranks where a rank's loss is not the model's own.

    Every rank has the same tokens. Kernels may differ between devices, so all ranks are asked.
    """
    plan = session.plan
    if not plan.settings.train.check_loss:
        return
    if plan.decided.pipeline > 1:
        channels.say("loss check: not made, because no rank has the whole model")
        return
    with fast_attention(session.device, reads_positions=masks_by_position(plan)):
        mine = compare(session.model, plan, session.device, session.mesh)
    everyone = session.mesh.world.gather(mine)
    found = next((each for each in everyone if not each.is_equal), mine)
    channels.events.write("loss_check", step=step, **asdict(found))
    if not found.is_equal:
        raise _refusal(session.model, found)
    channels.say(
        f"loss check: {found.ours:.4f} here, {found.own:.4f} by the model's own forward over the "
        "same tokens"
    )


def compare(
    model: Any, plan: Plan, device: torch.device, mesh: Mesh | None = None
) -> LossComparison:
    """Both losses of the same tokens on this rank. The model is as it was afterwards.

    Where ranks divide sequences, each compares its own part with that of the model's own forward,
    which has whole sequences.
    """
    split = None if mesh is None else mesh.split
    ids = _tokens(plan).to(device)
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = IGNORE_INDEX
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), trying(model):
        compares = plan.settings.preference.objective != "none"
        total, groups = _our_losses(model, ids, labels, split, by_token=compares)
        own, logits = _own_losses(model, ids)
    each = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    if split is not None:
        each, labels = split.own(each.view(ids.shape)).flatten(), split.own(labels)
    sizes = torch.stack([part.ne(IGNORE_INDEX).sum() for part in _split(labels.flatten())])
    own_groups = torch.stack([part.sum() for part in _split(each)]) / sizes
    sums = torch.stack([total, each.sum(), sizes.sum()]).double()
    if mesh is not None and split is not None:
        dist.all_reduce(sums, group=mesh.group("context"))
    ours, cross_entropy = (sums[:2] / sums[2]).float()
    if own is None or _takes_labels_as_they_are(own, logits, ids):
        own = cross_entropy
    apart = (ours - cross_entropy).abs()
    if groups:
        apart = (torch.stack(groups) / sizes - own_groups).square().mean().sqrt()
    rounding = max(_ROUNDING, torch.finfo(own.dtype).eps)
    allowed = _share(plan) * own_groups.std() + rounding * cross_entropy
    figures = torch.stack([x.double() for x in (ours, own, cross_entropy, apart, allowed)])
    return LossComparison(*figures.tolist())


def _tokens(plan: Plan) -> Tensor:
    """Random tokens in sequences that the model has positions for; the same on every rank."""
    decided = plan.decided
    divided = decided.sequence_parallel
    cut = tokens_of_a_cut(decided.context, decided.tensor, divided=divided)
    length = max(2, min(-(-_TOKENS // cut) * cut, plan.settings.data.seq_len))
    shape = (max(1, decided.context * _TOKENS // length), length)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(plan.model.vocab_size, shape, generator=generator)


def _our_losses(
    model: Any, ids: Tensor, labels: Tensor, split: SequenceSplit | None, *, by_token: bool
) -> tuple[Tensor, list[Tensor]]:
    """The summed loss as a step computes it, and that of each group where our head computes it."""
    groups: list[Tensor] = []
    more: dict[str, Any] = {}
    if split is not None:
        more = part_arguments(split, ids)
        ids, labels = split.own(ids), split.own(labels)

    def on_head(head: nn.Module, inputs: tuple[Any, ...]) -> None:
        # Without labels the head is asked for logits, and the loss is computed from them.
        if len(inputs) == 2:
            parts = zip(*map(_split, inputs), strict=True)
            groups.extend(head.forward(*part) for part in parts)

    head = model.get_output_embeddings()
    hook = None if head is None else head.register_forward_pre_hook(on_head)
    total: Tensor = (
        model.token_losses(ids, labels).sum() if by_token else model.sum_loss(ids, labels, **more)
    )
    if hook is not None:
        hook.remove()
    return total, groups


def _own_losses(model: Any, ids: Tensor) -> tuple[Tensor | None, Tensor]:
    """The loss that the model's own forward returns, and its logits."""
    output: Any = None
    with own_forwards(model), eager_code(model):
        if "labels" in inspect.signature(model.forward).parameters:
            # GIT wants labels for the tokens of an image as well.
            with suppress(*NEEDS_MORE):
                output = model(input_ids=ids, labels=ids, use_cache=False)
        if output is None:
            output = model(input_ids=ids, use_cache=False)
    return getattr(output, "loss", None), output.logits.flatten(0, 1).float()


def _takes_labels_as_they_are(own: Tensor, logits: Tensor, ids: Tensor) -> bool:
    """Whether a family leaves it to its caller to shift labels, as BART's decoder does."""
    unshifted = F.cross_entropy(logits, ids.flatten())
    rounding = max(_ROUNDING, torch.finfo(own.dtype).eps)
    return bool((own.float() - unshifted).abs() <= rounding * unshifted)


def _split(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.chunk(_GROUPS)


def _share(plan: Plan) -> float:
    decided = plan.decided
    if is_float8(decided.linear) or multiplies_base(decided) or multiplies_experts(decided):
        return _FLOAT8_SHARE
    return _SHARES[decided.param_dtype]


def _refusal(model: Any, found: LossComparison) -> UserError:
    name = type(model).__name__.removeprefix("FSDP")
    if found.has_other_objective:
        why = (
            f"it is not the cross-entropy of its logits, which is {found.own_cross_entropy:.4f} "
            "there and here: the model is trained on more than its next tokens"
        )
        fix = "write train.check_loss=false to train it on its next tokens alone"
    else:
        why = (
            f"groups of tokens differ by {found.apart:.3g}, and rounding may make "
            f"{found.allowed:.3g} of it: the head, a kernel or the attention of this run is not "
            "what the model has"
        )
        fix = (
            "find the part with memory.loss=full, train.kernels=torch, model.attention=eager or "
            "precision.param=fp32; train.check_loss=false trains on the loss here"
        )
    return UserError(
        f"the loss here is {found.ours:.4f}, and that of {name}.forward for the same tokens is "
        f"{found.own:.4f}",
        why=why,
        fix=fix,
    )
