"""The line printed while training, the same on a terminal and in a file."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.facts.flops import Efficiency
from shardwise.metrics.meters import PeakMemory
from shardwise.units import GIB, format_count, format_duration, speed_unit

_COLUMNS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """How evenly tokens went to experts, over all ranks."""

    most: float
    """Tokens of the busiest expert of any block, over the mean of its block."""

    least: float
    """Tokens of the idlest expert of any block, over the mean of its block."""

    entropy: float
    """The entropy of a token's expert as a share of its maximum, as a mean over blocks."""

    dropped: int
    """Choices of experts that no expert computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceScores:
    """How well answers are told apart, over all ranks."""

    accuracy: float
    """The share of pairs whose chosen answer has the higher reward. For KTO the share of answers
    whose reward is on the side of their label: of 0, or of what the KL term compares with."""

    margin: float | None
    """The mean reward of chosen answers less that of rejected ones; None where one kind is
    missing."""

    chosen: float | None
    """The mean reward of chosen answers."""

    rejected: float | None
    """The mean reward of rejected answers."""

    kl: float | None = None
    """KTO's KL term: how much likelier answers to other prompts have become; None without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The figures of a logged step."""

    step: int
    num_steps: int
    loss: float
    grad_norm: float
    lr: float
    step_s: float
    tokens: int
    tokens_per_s: float
    tokens_per_s_planned: float | None
    efficiency: Efficiency | None
    mfu_planned: float | None
    memory: PeakMemory
    memory_capacity: int
    memory_planned: int
    data_share: float
    eta_s: float
    aux_loss: float | None = None
    """The routers' load-balancing loss, without its coefficient; None where there is none."""

    z_loss: float | None = None
    """The routers' z-loss, without its coefficient; None where there is none."""

    experts: ExpertLoad | None = None
    """None for a dense model."""

    trained_tokens: int | None = None
    """The tokens since the last line that the loss was computed on; None where it is all of
    them."""

    trained_share: float | None = None
    """The same as a share of all tokens since the last line, padding included."""

    preference: PreferenceScores | None = None
    """None where no answers are compared."""


def format_line(report: StepReport, device: str = "cuda") -> str:
    """`step 40/2000  loss 2.4310  gnorm 0.83 ...`; what has no room in 80 columns is on a second
    line, behind two blanks."""
    width = len(str(report.num_steps))
    held = report.memory.reserved / GIB
    return _in_columns(
        [
            f"step {report.step:>{width}}/{report.num_steps}",
            f"loss {report.loss:.4f}",
            *([] if report.preference is None else format_scores(report.preference)),
            *([] if report.aux_loss is None else [f"aux {report.aux_loss:.4f}"]),
            *([] if report.z_loss is None else [f"z {report.z_loss:.4f}"]),
            *([] if report.experts is None else [f"experts {report.experts.most:.2f}x"]),
            *([] if report.trained_share is None else [f"trained {report.trained_share:.0%}"]),
            f"gnorm {report.grad_norm:.2f}",
            f"lr {report.lr:.1e}",
            f"eta {format_duration(report.eta_s)}",
            _format_speed(report, device),
            *_format_efficiency(report),
            f"mem {held:.1f}/{report.memory_capacity / GIB:.0f} GiB "
            f"(plan {report.memory_planned / GIB:.1f})",
            f"data {report.data_share:.0%}",
        ]
    )


def _in_columns(items: list[str]) -> str:
    lines = [items[0]]
    for item in items[1:]:
        longer = f"{lines[-1]}  {item}"
        if len(longer) <= _COLUMNS:
            lines[-1] = longer
        else:
            lines.append(f"  {item}")
    return "\n".join(lines)


def format_scores(scores: PreferenceScores) -> list[str]:
    """`accuracy 87.5%`, `margin 0.312`."""
    margin = [] if scores.margin is None else [f"margin {scores.margin:.3f}"]
    return [f"accuracy {scores.accuracy:.1%}", *margin]


def _format_speed(report: StepReport, device: str) -> str:
    speed = f"{format_count(report.tokens_per_s)} {speed_unit(device)}"
    planned = report.tokens_per_s_planned
    # Where there is an MFU the plan stands beside that.
    if planned is None or report.efficiency is not None:
        return speed
    return f"{speed} (plan {format_count(planned)})"


def _format_efficiency(report: StepReport) -> list[str]:
    found = report.efficiency
    if found is None:
        return []
    planned = "" if report.mfu_planned is None else f" (plan {100 * report.mfu_planned:.1f})"
    mfu, hfu = f"mfu {found.mfu:.1%}{planned}", f"hfu {found.hfu:.1%}"
    return [mfu] if found.hfu == found.mfu else [f"{mfu} {hfu}"]
