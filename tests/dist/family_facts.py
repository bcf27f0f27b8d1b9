"""What shardwise can do with a family, found out by doing it, and the page that says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from family_runs import SETTINGS
from rank_pool import Ranks
from refused_families import NOT_BUILT, NOT_TRAINED
from tiny_families import VOCAB, save_model, tiny_config
from tiny_runs import tiny_plan, whole
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from shardwise.checkpoint.restore import find_good, restore_checkpoint
from shardwise.checkpoint.save import Progress, Saver
from shardwise.errors import UserError
from shardwise.model import attention_choice as attention_module
from shardwise.model.attention_choice import attention_of
from shardwise.model.blocks import find_units, iter_modules
from shardwise.model.build import build_on_meta
from shardwise.model.counted_sizes import count_on_meta
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.torchao_float8 import float8_layers
from shardwise.plan.decisions import Choice
from shardwise.training.comparison import compare
from shardwise.training.head_trial import why_not_chunked
from shardwise.training.session import attach_training_loss, build_session
from shardwise.training.trial import few_tokens

Pool = Callable[[int], Ranks]
PAGE = Path(__file__).parents[2] / "docs" / "families.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
HEADS = ("family", "trains", "float8", "fused head", "attention kernel", "other number of ranks")


@dataclass(frozen=True, slots=True)
class Facts:
    """A row of the table, in words."""

    family: str
    trains: str
    float8: str = "-"
    fused_head: str = "-"
    attention: str = "-"
    reshards: str = "-"

    def row(self) -> str:
        """A line of Markdown."""
        name, *cells = astuple(self)
        return f"| `{name}` | {' | '.join(cells)} |"


@dataclass(frozen=True, slots=True)
class TakenUp:
    """What one rank found in a checkpoint of two ranks."""

    is_equal: bool
    why_not_fused: str
    has_other_objective: bool


def facts_of(ranks: Pool, family: str, home: Path) -> Facts:
    """The row of a family; `home` is an empty folder."""
    if reason := NOT_BUILT.get(family) or NOT_TRAINED.get(family):
        return Facts(family, f"no: {reason}")
    config = tiny_config(family)
    save_model(config, home / "source")
    settings = {**SETTINGS, "model.name": str(home / "source")}
    ranks(2).run(save_on_two, settings, home / "checkpoints")
    (taken,) = ranks(1).run(take_up, settings, home / "checkpoints")
    (in_bf16,) = ranks(1).run(runs_in_bf16, settings)
    return Facts(
        family,
        _trains(taken, in_bf16),
        _float8(family),
        f"no: {taken.why_not_fused}" if taken.why_not_fused else "yes",
        _attention(family, config),
        "yes" if taken.is_equal else "no",
    )


def save_on_two(settings: Mapping[str, Any], root: Path) -> None:
    """On each of two ranks: the model of a directory, saved as a checkpoint."""
    plan = tiny_plan(2, settings)
    session = build_session(plan, build_mesh(plan), lambda text: None)
    saver = Saver(root, plan, session.model, session.optimizer, session.mesh.world)
    saver.start(Progress(step=1, position=1, tokens=0, loss=None, loss_scale=None))
    (outcome,) = saver.finish()
    saver.close()
    assert outcome.error is None


def take_up(settings: Mapping[str, Any], root: Path) -> TakenUp:
    """On one rank: the checkpoint beside the directory, and the loss beside the model's own."""
    plan, said = tiny_plan(1, settings), list[str]()
    session = build_session(plan, build_mesh(plan), lambda text: None, resuming=True)
    found = find_good(root, session.mesh.world, verify=True, tell=lambda path, reasons: None)
    assert found is not None
    restore_checkpoint(found, plan, session.model, session.optimizer, session.mesh.world)
    source = AutoModelForCausalLM.from_pretrained(settings["model.name"], dtype=torch.float32)
    expected = dict([*source.named_parameters(), *source.named_buffers()])
    held = dict([*session.model.named_parameters(), *session.model.named_buffers()])
    is_equal = all(torch.equal(whole(held[name]), expected[name]) for name in expected)
    attach_training_loss(session, said.append)
    # The run agrees with its plan, whether the loss is planned to be chunked or not.
    assert not any(text.startswith("loss: all logits at once") for text in said)
    if reason := plan.model.whole_logits:
        ids = few_tokens(plan).to(session.device)
        assert why_not_chunked(session.model, ids, plan.model.head) == reason
    compared = compare(session.model, plan, session.device)
    assert compared.is_equal or compared.has_other_objective
    return TakenUp(is_equal, reason, not compared.is_equal)


def runs_in_bf16(settings: Mapping[str, Any]) -> bool:
    """On one rank: whether a forward with bf16 parameters, and buffers as they are, gets through.

    In a few families the two meet in one matmul.
    """
    plan = tiny_plan(1, {**settings, "precision.param": "bf16"})
    session = build_session(plan, build_mesh(plan), lambda text: None)
    try:
        attach_training_loss(session, lambda text: None)
    except UserError as error:
        assert error.fix == "write precision.param=fp32"
        return False
    return True


def _trains(taken: TakenUp, in_bf16: bool) -> str:
    if taken.has_other_objective:
        return "on next tokens alone, with `train.check_loss=false`"
    return "yes" if in_bf16 else "yes, with `precision.param=fp32`"


def _float8(family: str) -> str:
    """The share of the weights of blocks that multiply in float8, at the size that the family's
    configuration has by itself, or at toy size where that is no model."""
    try:
        model, note = _on_meta(family, CONFIG_MAPPING[family]()), ""
    except UserError:
        model, note = _on_meta(family, tiny_config(family)), " at toy size"
    units = find_units(model)
    plan = tiny_plan(1, {"precision.float8_min_features": 16})
    plan = plan.with_choices(linear=Choice("float8", "given", "user"))
    changed = sum(x.num_weights for x in float8_layers(model, units, plan) if x.why_not is None)
    blocks = {id(m): m for unit in units.blocks for m in iter_modules(model, unit)}.values()
    params = {id(p): p for block in blocks for p in block.parameters() if p.dim() > 1}.values()
    return f"{changed / max(1, sum(p.numel() for p in params)):.0%}{note}"


def _on_meta(family: str, config: PreTrainedConfig) -> Any:
    return build_on_meta({**config.to_diff_dict(), "model_type": family}, attention=None)


def _attention(family: str, config: PreTrainedConfig) -> str:
    """What the family asks of an attention kernel, and whether ours does it."""
    described = {**config.to_diff_dict(), "model_type": family}
    kinds = count_on_meta(family, described).attentions
    if "flash_attention_4" not in kinds:
        return f"no: its class has {', '.join(kinds)}"
    with _asked() as asked:
        ours = attention_of("flash_attention_4", "cpu")
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ours)
        try:
            model(input_ids=_ids(), use_cache=False)
        except UserError as error:
            return f"no: {error.why}"
        except (AttributeError, TypeError):
            return "no: it reads masks itself"
    if not asked:
        return "not called"
    needs = sorted({name for names in asked for name in names})
    return f"yes: {', '.join(needs)}" if needs else "yes"


@contextmanager
def _asked() -> Iterator[list[tuple[str, ...]]]:
    """What each call of our operator asks for besides causal attention."""
    calls: list[tuple[str, ...]] = []
    attend = attention_module.causal_attention

    def noted(*args: Any) -> Any:
        needs = zip(("window", "soft cap", "sinks"), args[5:8], strict=True)
        calls.append(tuple(name for name, value in needs if value is not None))
        return attend(*args)

    with mock.patch.object(attention_module, "causal_attention", noted):
        yield calls


def _ids() -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, 16), generator=torch.Generator().manual_seed(0))


# ---- the page ------------------------------------------------------------------------------------


def table_of(rows: Sequence[Facts]) -> str:
    """The whole table."""
    assert len(HEADS) == len(fields(Facts))
    lines = [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
    return "\n".join([*lines, *(facts.row() for facts in rows)])


def written_table() -> str:
    """The table as the page has it."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


def write_table(rows: Sequence[Facts]) -> None:
    """Put the table between its marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table_of(rows)}\n\n{END}{after}", encoding="utf-8")
