"""W&B without a login or a network: said once, and nobody waits for it."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest

from shardwise.metrics.events import EventLog, read_events
from shardwise.metrics.sinks import wandb as wandb_sink
from shardwise.metrics.sinks.feed import Feed
from shardwise.metrics.sinks.wandb import WandbSink, run_id

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.skipif(
        importlib.util.find_spec("wandb") is None,
        reason="wandb is not installed (pip install shardwise[wandb])",
    ),
]


def failures_online(tmp_path: Path, *, close_s: float) -> list[str]:
    feed = Feed(
        "wandb",
        lambda: WandbSink(tmp_path, mode="online", project="tests", config={}),
        close_s=close_s,
    )
    file = tmp_path / "events.jsonl"
    with EventLog(file, enabled=True, observers=[feed]) as log:
        log.write("step", step=1, loss=2.0)
    return [event["reason"] for event in read_events(file) if event["event"] == "sink_failed"]


def test_without_a_login_its_own_reason_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    # wandb takes seconds to import, and more on a machine with much else to do.
    monkeypatch.setattr(wandb_sink, "FINISH_S", 120.0)
    (reason,) = failures_online(tmp_path, close_s=150)
    assert "No API key configured" in reason


def test_without_a_network_the_end_of_a_run_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    # An address of documentation: nobody answers.
    monkeypatch.setenv("WANDB_BASE_URL", "http://192.0.2.77:9")
    started = time.monotonic()
    assert failures_online(tmp_path, close_s=1) == ["it did not close within 1 s"]
    # W&B itself tries for longer; the rest of this minute is for a machine with much else to do.
    assert time.monotonic() - started < 60


def test_a_run_keeps_its_identity(tmp_path: Path) -> None:
    assert run_id(tmp_path / "a") == run_id(tmp_path / "a") != run_id(tmp_path / "b")
