"""Events become series under Prometheus's names, with labels that cannot grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bad_clients import get
from prometheus_client.parser import text_string_to_metric_families

from shardwise.metrics.events import EventLog, read_events
from shardwise.metrics.goodput import goodput
from shardwise.metrics.monitoring.metric_names import METRICS
from shardwise.metrics.sinks.exposition import Told
from shardwise.metrics.sinks.prometheus import Page, PrometheusSink

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def told(rank: int = 0, checkpoint_every: int = 10) -> Told:
    return Told("run", rank, 5, checkpoint_every)


def step(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "event": "step",
        "time": 1000.0 + number,
        "step": number,
        "num_steps": 100,
        "loss": 2.5,
        "grad_norm": 0.75,
        "lr": 1e-3,
        "step_s": 0.5,
        "tokens": 512 * number,
        "tokens_per_s": 1024.0,
        "efficiency": {"mfu": 0.4, "hfu": 0.5},
        "mfu_planned": 0.45,
        "memory": {"allocated": 10, "reserved": 20},
        "memory_capacity": 80,
        "data_share": 0.01,
        **changes,
    }


COLLECTIVES = {
    "event": "collectives",
    "time": 1.0,
    "step": 10,
    "rows": [
        {"kind": "all_gather", "phase": "forward", "count": 4, "bus_bytes_per_s": 5e9},
        {"kind": "of my own", "phase": "of my own", "count": 4, "bus_bytes_per_s": 6e9},
    ],
    "straggler": {"rank": 3, "behind_s": 0.25},
    "seconds": {
        "all_gather": {"buckets": [[0.1, 3], [0.2, 5]], "sum": 1.5, "count": 6},
        "of my own": {"buckets": [], "sum": 0.0, "count": 0},
    },
}


def series(page: Page) -> Series:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.render().decode())
        for sample in family.samples
    }


def value(page: Page, name: str, **labels: str) -> float | None:
    return series(page).get((name, tuple(sorted({"job_name": "run", **labels}.items()))))


def page_after(*events: dict[str, Any], of: Told | None = None) -> Page:
    page = Page(of or told())
    for event in events:
        page.see(event)
    return page


def test_a_step_is_exported_with_its_own_numbers() -> None:
    page = page_after({"event": "start", "time": 1.0, "step": 0, "world_size": 2}, step(5))
    assert value(page, "fsdp_step_duration_seconds", rank="0") == 0.5
    assert value(page, "fsdp_grad_norm") == 0.75
    assert value(page, "training_mfu") == 0.4
    assert value(page, "training_loss") == 2.5
    assert value(page, "training_step") == 5
    assert value(page, "training_tokens_total") == 5 * 512
    assert value(page, "training_memory_peak_bytes", rank="0", state="reserved") == 20
    assert value(page, "training_last_step_timestamp_seconds", rank="0") == 1005.0
    assert value(page, "training_log_interval_seconds", rank="0") == 2.5


def test_the_load_of_experts_is_exported() -> None:
    load = {"most": 1.5, "least": 0.25, "entropy": 0.9, "dropped": 0}
    page = page_after(step(5, experts=load))
    assert value(page, "training_expert_load_ratio") == 1.5
    assert value(page, "training_expert_least_load_ratio") == 0.25
    assert value(page, "training_expert_entropy_ratio") == 0.9
    assert value(page, "training_expert_dropped_tokens") == 0
    assert value(page_after(step(5, experts=None)), "training_expert_load_ratio") is None


def test_the_ranks_of_a_pipeline_are_exported() -> None:
    stages = [
        {"rank": rank, "busy_s": 3.0 - rank, "allocated": 7 + rank, "reserved": 9}
        for rank in (0, 1)
    ]
    page = page_after(
        {"event": "pipeline", "step": 5, "bubble": 0.4, "planned": 0.3, "stages": stages}
    )
    assert value(page, "training_pipeline_bubble_ratio") == 0.4
    assert value(page, "training_pipeline_bubble_planned_ratio") == 0.3
    assert value(page, "training_pipeline_busy_seconds", stage="1") == 2.0
    assert value(page, "training_pipeline_memory_peak_bytes", stage="1", state="allocated") == 8


def test_what_is_not_known_has_no_series() -> None:
    page = page_after(step(5), step(10, efficiency=None, mfu_planned=None))
    assert value(page, "training_mfu") is None
    assert value(page, "training_mfu_planned") is None


def test_counters_begin_at_zero() -> None:
    page = page_after()
    for metric in METRICS:
        if metric.kind == "counter":
            assert value(page, f"{metric.name}_total") == 0, metric.name


def test_faults_are_counted() -> None:
    events = [{"event": name, "time": 1.0} for name in ("nonfinite", "restart", "restart")]
    events += [{"event": "checkpoint_failed", "time": 1.0}, {"event": "rollback", "step": 3}]
    page = page_after(*events)
    assert value(page, "training_nonfinite_batches_total") == 1
    assert value(page, "training_restarts_total") == 2
    assert value(page, "training_checkpoint_failures_total") == 1
    assert value(page, "training_rollbacks_total") == 1


def test_steps_that_are_made_again_are_not_productive() -> None:
    resume = {"event": "resume", "time": 1.0, "step": 5}
    start = {"event": "start", "time": 1.0, "step": 5}
    page = page_after(step(5), step(10), resume, start, step(10), step(15))
    assert value(page, "training_productive_seconds_total") == pytest.approx(15 * 0.5 * 0.99)
    assert value(page, "training_tokens_total") == 15 * 512


def test_productive_is_what_the_report_calls_so() -> None:
    """Compilation, waiting for data, steps that a restart or a rollback repeats: none of it is."""
    start = {"event": "start", "time": 1.0, "world_size": 2}
    slow = {"step_s": 9.0, "data_share": 0.2}
    usual = {"step_s": 1.0, "data_share": 0.2}
    events = [start | {"step": 0}, step(5, **slow), step(10, **usual), step(12, **usual)]
    events += [start | {"step": 8}, step(10, **slow), step(15, **usual)]
    events += [{"event": "rollback", "time": 1.0, "step": 11}, step(15, **usual), step(20, **usual)]
    page = page_after()
    counted = [0.0]
    for event in events:
        page.see(event)
        counted.append(value(page, "training_productive_seconds_total") or 0.0)
    assert counted == sorted(counted)
    assert counted[-1] == pytest.approx(20 * 0.8) == goodput(events)["productive"]


def test_counters_go_on_after_a_restart(tmp_path: Path) -> None:
    """What the record holds at the start is counted once, what comes later once too."""
    record = tmp_path / "events.jsonl"
    with EventLog(record, enabled=True) as log:
        log.write("nonfinite", step=3)
        log.write("restart", number=1)
    history = read_events(record, end=record.stat().st_size)
    sink = PrometheusSink(told(), "127.0.0.1", 0, history)
    sink.see({"event": "nonfinite", "time": 2.0, "step": 4})
    status, body = get(("127.0.0.1", sink.port))
    sink.close()
    assert status == 200
    assert 'training_restarts_total{job_name="run"} 1.0' in body.decode()
    assert 'training_nonfinite_batches_total{job_name="run"} 2.0' in body.decode()


def test_a_checkpoint_moves_the_saved_step() -> None:
    saved = {"event": "checkpoint", "step": 10, "stage_s": 0.1, "write_s": 2.0, "commit_s": 0.2}
    page = page_after(step(12), saved)
    assert value(page, "training_last_checkpoint_step") == 10
    assert value(page, "training_checkpoint_interval_steps") == 10
    assert value(page, "training_checkpoint_duration_seconds", phase="write") == 2.0
    assert value(page, "training_checkpoints_total") == 1


def test_without_periodic_checkpoints_none_can_be_late() -> None:
    page = page_after(step(12), of=told(checkpoint_every=0))
    assert value(page, "training_last_checkpoint_step") is None
    assert value(page, "training_checkpoint_interval_steps") is None


def test_collectives_are_a_histogram_and_rates() -> None:
    page = page_after(COLLECTIVES)
    assert value(page, "fsdp_allgather_seconds_bucket", le="0.1") == 3
    assert value(page, "fsdp_allgather_seconds_bucket", le="0.2") == 5
    assert value(page, "fsdp_allgather_seconds_bucket", le="+Inf") == 6
    assert value(page, "fsdp_allgather_seconds_count") == 6
    assert value(page, "fsdp_allgather_seconds_sum") == 1.5
    rate = "fsdp_collective_bus_bytes_per_second"
    assert value(page, rate, kind="all_gather", phase="forward") == 5e9
    assert value(page, "fsdp_straggler_behind_seconds", rank="3") == 0.25


def test_a_straggler_that_caught_up_is_gone() -> None:
    page = page_after(COLLECTIVES, COLLECTIVES | {"straggler": None})
    assert value(page, "fsdp_straggler_behind_seconds", rank="3") is None


def test_events_cannot_grow_the_page() -> None:
    page = page_after(COLLECTIVES)
    rows = [{"kind": f"k{n}", "phase": f"p{n}", "bus_bytes_per_s": 1.0} for n in range(1000)]
    before = len(series(page))
    page.see(COLLECTIVES | {"rows": rows})
    assert len(series(page)) <= before
    assert value(page, "fsdp_collective_bus_bytes_per_second", kind="other", phase="other") == 1.0


def test_other_nodes_tell_of_themselves_only() -> None:
    page = page_after(step(5), COLLECTIVES, of=told(rank=8))
    assert {labels[-1] for _, labels in series(page) if labels[-1][0] == "rank"} == {("rank", "8")}
    assert value(page, "fsdp_step_duration_seconds", rank="8") == 0.5
    assert value(page, "fsdp_grad_norm") is None
    assert value(page, "training_restarts_total") is None


def test_the_page_is_made_anew_only_when_something_changed() -> None:
    page = page_after(step(5))
    first = page.render()
    assert page.render() is first
    page.see({"event": "data", "time": 1.0})
    assert page.render() is first
    page.see(step(6))
    assert page.render() is not first


def test_names_follow_the_rules_of_prometheus(exported_names: set[str]) -> None:
    page = page_after(step(5), COLLECTIVES)
    names = {name for name, _ in series(page)}
    assert names <= exported_names
    for name in names:
        assert ":" not in name
        assert name.islower() and name.replace("_", "a").isalnum()
