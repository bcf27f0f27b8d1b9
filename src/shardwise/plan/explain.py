"""A plan as text: what was decided, why, and the memory of a rank."""

from __future__ import annotations

from typing import Any

from shardwise.plan.axis_sizes import mesh_in_words
from shardwise.plan.axis_traffic import planned_traffic
from shardwise.plan.planned import MEMORY_PARTS, Forecast, Plan
from shardwise.plan.stage_rows import stage_rows
from shardwise.units import format_bytes, format_count, format_duration, speed_unit

# Of a step that the GPU waits for the host: below it nothing is said.
_LATE_SHARE = 0.02


def headline(plan: Plan) -> str:
    """One line: model, cluster, mesh, batch."""
    return (
        f"{plan.model.name} ({format_count(plan.model.total_params)} parameters) on "
        f"{plan.cluster.name}: {plan.decided.strategy}, mesh {mesh_in_words(plan.decided)}, "
        f"{format_count(plan.tokens_per_step)} tokens a step"
    )


def input_lines(plan: Plan) -> list[str]:
    """The first weights and the tokenizer of a run, each with the reason."""
    named = (("first weights", "weights"), ("tokenizer", "tokenizer"))
    choices = [(words, plan.choices[name]) for words, name in named]
    return [f"{words}: {choice.value} ({choice.why})" for words, choice in choices]


def choice_rows(plan: Plan) -> list[tuple[str, str, str, str]]:
    """(decision, value, source, why) for every decision."""
    return [
        (name, _show(choice.value), choice.source, choice.why)
        for name, choice in plan.choices.items()
    ]


def memory_rows(plan: Plan) -> list[tuple[str, str]]:
    """(what, bytes) of one rank's expected peak, the total last."""
    rows = [(name, held) for name, held in _memory_figures(plan) if held != "0 B"]
    return [(name, f"{held}{_classes(plan) if name == 'params' else ''}") for name, held in rows]


def _classes(plan: Plan) -> str:
    """What of the parameters is frozen and what is trained, where both are there."""
    frozen = plan.memory.frozen
    if not frozen:
        return ""
    trained = format_bytes(plan.memory.params - frozen)
    adapter, stored = plan.model.adapter, plan.decided.param_dtype
    if adapter is not None and adapter.packed_params:
        stored = f"{adapter.packing} and {stored}"
    return f": {format_bytes(frozen)} frozen in {stored}, {trained} trained, fp32"


def forecast_rows(plan: Plan, budget_tokens: float | None = None) -> list[tuple[str, str]]:
    """(what, figure) of the expected speed and cost."""
    forecast = plan.forecast
    if forecast is None:
        unknown = f"no rates are known for {plan.cluster.device_in_words}"
        measures = f"{unknown}; `shardwise plan --calibrate` measures them"
        return [("speed", measures), *_traffic_rows(plan), *stage_rows(plan)]
    unit = speed_unit(plan.cluster.device)
    source = {"catalogue": "from the catalogue's rates", "measured": "from measured rates"}
    rows = [
        ("speed", f"{format_count(forecast.tokens_per_s)} {unit}, {source[forecast.source]}"),
        ("step", f"{_step_time(forecast.step_s)}: {_terms(forecast)}"),
        ("mfu", _shares(forecast)),
    ]
    if forecast.reference_s is not None:
        seconds = 1000 * forecast.reference_s / plan.decided.global_batch
        took = _step_time(seconds)
        rows.append(("reference", f"{took} for 1,000 sequences, once before the first step"))
    rows += [*_traffic_rows(plan), *_outer_rows(plan), *stage_rows(plan)]
    if plan.cluster.device == "cuda":  # a CPU computes or communicates, in turn
        enough = format_count(forecast.tokens_to_hide)
        rows.append(("overlap", f"full from {enough} tokens in a rank's micro-batch on"))
        rows += _host_rows(forecast)
    tokens = budget_tokens or 1e9
    cost = "no price known; set cluster.usd_per_gpu_hour"
    if forecast.usd_per_billion_tokens is not None:
        cost = f"USD {forecast.usd_per_billion_tokens * tokens / 1e9:,.0f}"
    rows.append((f"{format_count(tokens)} tokens", f"{_time_of(forecast, tokens)}, {cost}"))
    if forecast.usd_per_billion_tokens is not None:
        hours = forecast.hours_per_billion_tokens * plan.world_size
        usd = forecast.usd_per_billion_tokens / hours
        rows.append(("price", f"USD {usd:.2f} a GPU-hour ({forecast.price_source})"))
    return rows


def _traffic_rows(plan: Plan) -> list[tuple[str, str]]:
    """What a rank's step moves along each axis."""
    along = [f"{axis} {format_bytes(t.num_bytes)}" for axis, t in planned_traffic(plan).items()]
    return [("traffic", f"of a rank and step along {', '.join(along)}")] if along else []


def _host_rows(forecast: Forecast) -> list[tuple[str, str]]:
    """What to do where the GPU waits for the host."""
    share = forecast.terms["launch"] / forecast.step_s
    if share < _LATE_SHARE:
        return []
    return [
        (
            "host",
            f"the GPU waits {share:.0%} of a step for the host to launch its kernels; a larger "
            "train.micro_batch or data.seq_len gives each of them more to do",
        )
    ]


def _outer_rows(plan: Plan) -> list[tuple[str, str]]:
    """What sites exchange, and how long they wait for it."""
    outlook, diloco = plan.outlook, plan.settings.diloco
    if outlook is None:
        return []
    sent = f"{format_bytes(outlook.bytes_per_rank)} of each rank every {diloco.steps} steps"
    if outlook.seconds is None:
        return [("outer step", sent)]
    row = f"{sent}, in {_step_time(outlook.seconds)}"
    if outlook.share is not None:
        row += f", {outlook.share:.1%} of the time"
    if outlook.least_steps is not None:
        row += f"; {diloco.max_share:.0%} from diloco.steps={outlook.least_steps} on"
    return [("outer step", row)]


def alternative_rows(plan: Plan, top: int) -> list[tuple[str, str, str, str]]:
    """(plan, speed, memory, why not) of the best plans that were not chosen."""
    return [
        (
            each.label,
            "-" if each.tokens_per_s is None else format_count(each.tokens_per_s),
            format_bytes(each.memory_bytes),
            each.why_not,
        )
        for each in plan.alternatives[:top]
    ]


def difference_rows(
    before: Plan, after: Plan, budget_tokens: float | None = None
) -> list[tuple[str, str, str]]:
    """(what, before, after) of everything that a change of the configuration changes."""
    tokens = budget_tokens or 1e9
    pairs = [*zip(_figures(before, tokens), _figures(after, tokens), strict=True)]
    return [(name, old, new) for (name, old), (_, new) in pairs if old != new]


def _figures(plan: Plan, tokens: float) -> list[tuple[str, str]]:
    """The same names for every plan, in the same order."""
    choices = [(name, _show(choice.value)) for name, choice in plan.choices.items()]
    forecast = plan.forecast
    unit = speed_unit(plan.cluster.device)
    speed = "-" if forecast is None else f"{forecast.tokens_per_s:,.0f} {unit}"
    usd = None if forecast is None else forecast.usd_per_billion_tokens
    budget = "-" if forecast is None else _time_of(forecast, tokens)
    if usd is not None:
        budget += f", USD {usd * tokens / 1e9:,.0f}"
    named = f"{format_count(tokens)} tokens"
    return [*choices, *_memory_figures(plan), ("speed", speed), (named, budget)]


def _memory_figures(plan: Plan) -> list[tuple[str, str]]:
    memory = plan.memory
    likely = f"{format_bytes(memory.low)} to {format_bytes(memory.high)} likely"
    if plan.model.num_experts > 1:
        likely += ", however uneven the experts are"
    total = (
        f"{format_bytes(memory.total)} of {format_bytes(plan.cluster.memory_bytes)}; {likely}; "
        f"the peak is in the {memory.peak}"
    )
    return [
        *((name, format_bytes(getattr(memory, name))) for name in MEMORY_PARTS),
        ("total", total),
    ]


def _time_of(forecast: Forecast, tokens: float) -> str:
    return format_duration(3600 * forecast.hours_per_billion_tokens * tokens / 1e9)


def _step_time(seconds: float) -> str:
    return f"{seconds:.2f}s" if seconds < 10 else format_duration(seconds)


def _terms(forecast: Forecast) -> str:
    """The largest parts of a step."""
    parts = sorted(forecast.terms.items(), key=lambda item: -item[1])
    shares = [(name, seconds / forecast.step_s) for name, seconds in parts]
    return ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in shares[:6] if share)


def _shares(forecast: Forecast) -> str:
    if forecast.mfu is None or forecast.hfu is None:
        return "- (the device's peak is not known)"
    return f"{forecast.mfu:.1%} (hfu {forecast.hfu:.1%})"


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)
