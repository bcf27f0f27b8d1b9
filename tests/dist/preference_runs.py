"""Tiny runs over preferences: by shardwise on ranks, and by plain PyTorch in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from tiny_runs import Settings, Trained, on_first, plain_adamw, plain_twin, start, whole_params
from torch import Tensor

from shardwise.data.mismatched import exchange_answers
from shardwise.kernels.cross_entropy import IGNORE_INDEX
from shardwise.training.document_attention import masks_by_position
from shardwise.training.optim import learning_rate
from shardwise.training.preference_losses import has_kl_term
from shardwise.training.reference_pass import fill_table
from shardwise.training.session import Session, build_loader, objective_of
from shardwise.training.step import Stepper
from shardwise.training.surroundings import fast_attention
from shardwise.training.window import Window

QUIET: Any = SimpleNamespace(say=lambda text: None, heartbeat=SimpleNamespace(beat=lambda: None))


def start_compared(world: int, settings: Settings) -> Session:
    """A session whose reference differs from its first weights, so that no margin is 0."""
    session = start(world, settings)
    if session.reference is not None:
        with fast_attention(session.device, reads_positions=masks_by_position(session.plan)):
            fill_table(session, session.reference.table, QUIET)
        session.reference.table[::2] += 0.7
        # Behind the documents are exchanged answers, whose mean log-ratio must be above 0 to count.
        session.reference.table[session.reference.num_documents :] -= 1.0
    return session


def train_compared(world: int, settings: Settings) -> Any:
    """On every rank: all steps, and the scores of the last one; the result comes from rank 0."""
    session = start_compared(world, settings)
    plan = session.plan
    objective = objective_of(session)
    stepper = Stepper(session.model, session.optimizer, plan, session.mesh, objective=objective)
    loader, losses, norms = build_loader(session), [], []
    with fast_attention(session.device, reads_positions=masks_by_position(plan)):
        for step in range(plan.config.train.steps):
            rate = learning_rate(plan.config.optim, step, plan.config.train.steps)
            result = stepper.run(loader.step_batches(step), rate)
            losses.append((result.loss_sum.double() / result.num_terms).item())
            norms.append(result.grad_norm)
    window = Window(plan, session.device, session.mesh)
    window.add(result, plan.tokens_per_step)
    scores = window.report(1, 1, 1.0, 0.0).preference
    return on_first((Trained(losses, norms, whole_params(session.model)), scores))


# ---- the reference: whole logits of one document at a time ------------------------------------


def train_compared_plainly(settings: Settings) -> tuple[Trained, Any]:
    """In a world of one: the same pairs, one after the other, without packing or FSDP."""
    session = start_compared(1, settings)
    plan, loader = session.plan, build_loader(session)
    table = None if session.reference is None else session.reference.table.clone()
    model = plain_twin(session)
    if table is not None:
        _assert_reference(model, session, table)
    optim, losses, norms = plan.config.optim, [], []
    params = list(model.parameters())
    optimizer = plain_adamw(model, optim)
    for step in range(plan.config.train.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(optim, step, plan.config.train.steps)
        batches = loader.step_batches(step)
        answers = [answer for batch in batches for answer in _answers(model, batch, table)]
        kl = plain_kl(model, batches, table) if has_kl_term(plan.settings.preference) else 0.0
        loss, scores = plain_loss(answers, plan.settings.preference, kl)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(params, optim.clip_norm or 1e9).item())
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, norms, whole_params(model)), scores


def _answers(
    model: Any, batch: Any, table: Tensor | None, named: Any = None
) -> list[SimpleNamespace]:
    """Log-probability, length, reference and label of each document, each in a batch of its own.
    `named` has their numbers and labels, where the batch has not those of all."""
    compared = (named or batch).compared
    inputs, labels = batch.inputs.flatten(), batch.labels.flatten()
    firsts = [int(first) for first in batch.documents.starts if first < len(inputs)]
    ends, numbers = [*firsts[1:], len(inputs)], iter(compared.numbers.tolist())
    found = []
    for first, end in zip(firsts, ends, strict=True):
        wanted = labels[first:end]
        if not (wanted != IGNORE_INDEX).any():
            continue  # padding
        logits = model(input_ids=inputs[None, first:end], use_cache=False).logits[0]
        logps = torch.log_softmax(logits.float(), -1)
        kept = (wanted != IGNORE_INDEX).nonzero().flatten()
        number = next(numbers)
        logp = logps[kept, wanted[kept]].sum()
        reference = None if table is None else table[number]
        found.append(SimpleNamespace(logp=logp, length=len(kept), reference=reference))
    flags = compared.preferred.tolist()
    assert len(found) == len(flags)
    for answer, flag in zip(found, flags, strict=True):
        answer.preferred = flag
    return found


def _assert_reference(model: Any, session: Session, table: Tensor) -> None:
    """The table holds the model's own log-probabilities, shifted by `start_compared`."""
    with torch.no_grad():
        for batch in build_loader(session).step_batches(0):
            numbers = batch.compared.numbers.tolist()
            for number, answer in zip(numbers, _answers(model, batch, None), strict=True):
                wanted = float(answer.logp) + (0.7 if number % 2 == 0 else 0.0)
                assert abs(float(table[number]) - wanted) < 1e-4


@torch.no_grad()
def plain_kl(model: Any, batches: list[Any], table: Tensor) -> float:
    """The mean log-ratio of answers to other prompts, one conversation at a time."""
    ratios: list[float] = []
    for batch in batches:
        others = exchange_answers(batch)
        wanted = others.compared.numbers.tolist()
        reference = dict(zip(wanted, table[others.compared.numbers + len(table) // 2], strict=True))
        numbers = batch.compared.numbers.tolist()
        for number, answer in zip(numbers, _answers(model, others, None, batch), strict=True):
            if number in reference:
                ratios.append(float(answer.logp) - float(reference[number]))
    mean = sum(ratios) / len(ratios)
    assert mean > 0.1
    return mean


def plain_loss(
    answers: list[SimpleNamespace], config: Any, kl: float = 0.0
) -> tuple[Tensor, dict[str, float]]:
    """The published formulas, one pair after the other."""
    beta, terms, rewards = config.beta, [], []
    if config.objective == "kto":
        for each in answers:
            reward = beta * (each.logp - each.reference)
            gain = reward - beta * kl
            value = torch.sigmoid(gain if each.preferred else -gain)
            weight = config.desirable_weight if each.preferred else config.undesirable_weight
            terms.append(weight * (1 - value))
            rewards.append((each.preferred, float(reward)))
        right = [(reward > beta * kl) == flag for flag, reward in rewards]
    else:
        right = []
        for chosen, rejected in zip(answers[0::2], answers[1::2], strict=True):
            assert chosen.preferred and not rejected.preferred
            term, good, bad = _pair(chosen, rejected, config)
            terms.append(term)
            right.append(bool(good > bad))
            rewards += [(True, float(good)), (False, float(bad))]
    means = [
        sum(reward for flag, reward in rewards if flag is side)
        / sum(flag is side for flag, _ in rewards)
        for side in (True, False)
    ]
    scores = {"accuracy": sum(right) / len(right), "margin": means[0] - means[1]}
    return torch.stack(terms).mean(), scores


def _pair(chosen: Any, rejected: Any, config: Any) -> tuple[Tensor, Tensor, Tensor]:
    beta, log = config.beta, torch.log
    if config.objective == "dpo":
        good, bad = (beta * (each.logp - each.reference) for each in (chosen, rejected))
        smooth, sure = config.label_smoothing, torch.sigmoid(good - bad)
        return -(1 - smooth) * log(sure) - smooth * log(1 - sure), good, bad
    good, bad = (each.logp / each.length for each in (chosen, rejected))
    if config.objective == "simpo":
        margin = beta * good - beta * bad - config.gamma
        return -log(torch.sigmoid(margin)), beta * good, beta * bad
    odds = [torch.exp(mean) / (1 - torch.exp(mean)) for mean in (good, bad)]
    ratio = -log(torch.sigmoid(log(odds[0] / odds[1])))
    return -good + beta * ratio, beta * good, beta * bad
