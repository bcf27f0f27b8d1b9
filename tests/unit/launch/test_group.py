from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from shardwise.errors import ExitCode, UserError
from shardwise.launch import group


@pytest.fixture
def orphan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of torchrun, at whose agent's address nobody listens any more."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("orphan")
def test_a_rank_does_not_wait_long_for_the_store_of_a_dead_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert group._AGENT_ANSWERS_WITHIN.total_seconds() <= 120
    monkeypatch.setattr(group, "_AGENT_ANSWERS_WITHIN", timedelta(seconds=1))
    with pytest.raises(UserError, match="could not meet the others") as raised:
        group.open_store(group.TIMEOUT)
    assert raised.value.code == ExitCode.ENVIRONMENT


@pytest.mark.usefixtures("orphan")
def test_a_store_of_rank_0_itself_may_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under srun, where rank 0 is still importing while others look for it."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    monkeypatch.setattr(group, "_AGENT_ANSWERS_WITHIN", timedelta(0))
    monkeypatch.setenv("WORLD_SIZE", "1")
    group.open_store(timedelta(seconds=60)).set("key", "value")
