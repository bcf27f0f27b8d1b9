"""Losses that compare answers: DPO, KTO, ORPO and SimPO, over log-probabilities of documents.

Every loss is a mean over terms: pairs, or for KTO answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.config.schema import PreferenceConfig
from shardwise.data.compared import Compared
from shardwise.data.loader import MicroBatch
from shardwise.data.mismatched import exchange_answers
from shardwise.metrics.progress_line import PreferenceScores
from shardwise.parallel.shard import reshard_all
from shardwise.training.objective import BatchLoss, model_inputs

# The mean log-probability of an answer stays below this, where the odds are still finite.
_NEARLY_SURE = -1e-7


class PreferenceObjective:
    """The objective of `preference.objective`."""

    def __init__(
        self,
        config: PreferenceConfig,
        reference: Tensor | None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.config = config
        self.reference = reference
        """The reference's log-probability of each document by its number, on the device. With
        KTO's KL term, as many more follow: of the prompt of each with another answer."""

        self.group = group
        """The ranks that hold tokens, over which the KL term is a mean."""

        self.kl: Tensor | None = None
        """The KL term of this step; None where there is none."""

    @torch.no_grad()
    def prepare(self, model: Any, batches: Sequence[MicroBatch], device: torch.device) -> None:
        """Find KTO's KL term: how much likelier answers to other prompts have become, as a mean
        over all that the step holds."""
        if not has_kl_term(self.config) or self.reference is None:
            return
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for batch in batches:
            found, logps = exchanged_logps(model, batch, device)
            ratios = logps - self.reference[found.numbers + len(self.reference) // 2]
            sums += torch.stack([ratios.double().sum(), sums.new_full((), len(ratios))])
        reshard_all(model)
        dist.all_reduce(sums, group=self.group)
        self.kl = (sums[0] / sums[1].clamp(min=1)).clamp(min=0).float()

    def num_terms(self, batch: MicroBatch) -> int:
        """Pairs, or answers where each counts by itself."""
        return len(_compared(batch)) // (1 if self.config.objective == "kto" else 2)

    def loss(self, model: Any, batch: MicroBatch, device: torch.device) -> BatchLoss:
        """The loss, summed over pairs or answers."""
        found = _compared(batch).to(device)
        logps = document_logps(model, batch, found, device)
        if self.reference is not None:
            ratios = logps - self.reference[found.numbers]
            if self.config.objective == "kto":
                return kto(ratios, found.preferred, self.config, self.kl)
            return dpo(ratios, self.config)
        means = logps / found.num_tokens
        return {"orpo": orpo, "simpo": simpo}[self.config.objective](means, self.config)


def document_logps(model: Any, batch: MicroBatch, found: Compared, device: torch.device) -> Tensor:
    """The log-probability of each document's answer: a sum over the tokens that are trained on."""
    inputs, labels, apart = model_inputs(batch, device)
    losses = model.token_losses(inputs, labels, **apart)
    # `unsafe` leaves out a check that would wait for the device.
    sums = torch.segment_reduce(losses, "sum", lengths=found.lengths, unsafe=True)
    return -sums[found.places]


def has_kl_term(config: PreferenceConfig) -> bool:
    """Whether answers to other prompts are compared with."""
    return config.objective == "kto" and config.kl_term


def exchanged_logps(model: Any, batch: MicroBatch, device: torch.device) -> tuple[Compared, Tensor]:
    """The log-probabilities of answers to other prompts of the same sequence."""
    others = exchange_answers(batch)
    found = _compared(others).to(device)
    others = others.pinned() if device.type == "cuda" else others
    return found, document_logps(model, others, found, device)


def dpo(ratios: Tensor, config: PreferenceConfig) -> BatchLoss:
    """DPO with the sigmoid loss; label smoothing as in conservative DPO."""
    chosen, rejected = _sides(_beta(config) * ratios)
    margin, confused = chosen - rejected, config.label_smoothing
    losses = -(1 - confused) * F.logsigmoid(margin) - confused * F.logsigmoid(-margin)
    return BatchLoss(losses.sum(), _pair_scores(chosen, rejected))


def kto(
    ratios: Tensor, preferred: Tensor, config: PreferenceConfig, kl: Tensor | None = None
) -> BatchLoss:
    """KTO. Without its KL term rewards are compared with 0 (`apo_zero_unpaired` in TRL)."""
    rewards = _beta(config) * ratios
    gains = rewards if kl is None else rewards - _beta(config) * kl
    good, bad = config.desirable_weight, config.undesirable_weight
    losses = torch.where(preferred, good * torch.sigmoid(-gains), bad * torch.sigmoid(gains))
    values, is_good = rewards.detach().double(), preferred.double()
    is_right = ((gains.detach() > 0) == preferred).double()
    every = torch.ones_like(values)
    parts = [every, is_right, is_good, is_good * values, 1 - is_good, (1 - is_good) * values]
    parts += [] if kl is None else [every * kl]
    return BatchLoss(losses.sum(), torch.stack([part.sum() for part in parts]))


def orpo(means: Tensor, config: PreferenceConfig) -> BatchLoss:
    """The mean loss of a token of the chosen answer, and beta times that of the odds ratio."""
    sure = means.clamp(max=_NEARLY_SURE)
    chosen, rejected = _sides(sure - torch.log(-torch.expm1(sure)))
    losses = -_sides(means)[0] - _beta(config) * F.logsigmoid(chosen - rejected)
    return BatchLoss(losses.sum(), _pair_scores(*_sides(_beta(config) * means)))


def simpo(means: Tensor, config: PreferenceConfig) -> BatchLoss:
    """SimPO: the mean log-probability of a token is the reward, and gamma the margin."""
    chosen, rejected = _sides(_beta(config) * means)
    losses = -F.logsigmoid(chosen - rejected - config.gamma)
    return BatchLoss(losses.sum(), _pair_scores(chosen, rejected))


def scores_of(sums: Sequence[Tensor], group: ProcessGroup) -> PreferenceScores | None:
    """The scores of several losses of all ranks; None where there were none. All ranks of the group
    call this together."""
    if not sums:
        return None
    total = torch.stack(list(sums)).sum(0)
    dist.all_reduce(total, group=group)
    terms, right, num_chosen, chosen, num_rejected, rejected, *kl = total.tolist()
    good = chosen / num_chosen if num_chosen else None
    bad = rejected / num_rejected if num_rejected else None
    return PreferenceScores(
        accuracy=right / max(1.0, terms),
        margin=None if good is None or bad is None else good - bad,
        chosen=good,
        rejected=bad,
        kl=kl[0] / max(1.0, terms) if kl else None,
    )


def _pair_scores(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Terms, terms that are right, then the number and the sum of rewards of each side."""
    chosen, rejected = chosen.detach().double(), rejected.detach().double()
    number = chosen.new_full((), len(chosen))
    right = (chosen > rejected).double().sum()
    return torch.stack([number, right, number, chosen.sum(), number, rejected.sum()])


def _sides(values: Tensor) -> tuple[Tensor, Tensor]:
    """Those of chosen and of rejected documents."""
    return values[0::2], values[1::2]


def _beta(config: PreferenceConfig) -> float:
    return float(config.beta)


def _compared(batch: MicroBatch) -> Compared:
    if batch.compared is None:
        raise ValueError("this micro-batch has no documents to compare")
    return batch.compared
