from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from shardwise.errors import ExitCode, UserError
from shardwise.internals.elastic_agent import AskingAgent
from shardwise.launch import torchrun_agent
from shardwise.launch.agent import Adviser, error_of_ranks
from shardwise.launch.failure import Passing
from shardwise.launch.hang import Hang
from shardwise.launch.heard import HeardSignals
from shardwise.launch.last_words import (
    AGENT_VARIABLE,
    ERROR_FILE_VARIABLE,
    RankTerminal,
    errors_naming,
    leave_word,
)
from shardwise.launch.lookout import Lookout
from shardwise.launch.torchrun_agent import _stopped, parse_agent
from shardwise.launch.watchdog import Watchdog
from shardwise.training.heartbeat import Phase, Sign
from shardwise.training.signals import stop_requests

AT = 1_000


def ended(folder: Path, local_rank: int, code: int, text: str = "", at: int = AT) -> ProcessFailure:
    """A rank as the agent sees it: an exit code, and a file where the rank could write one."""
    file = folder / f"{local_rank}.json"
    if text:
        extra = {"timestamp": str(at)}
        file.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
    failure = ProcessFailure(local_rank=local_rank, pid=1, exitcode=code, error_file=str(file))
    failure.timestamp = at
    return failure


def test_words_after_the_options_are_a_run() -> None:
    words = ["--nnodes", "2", "--nproc-per-node", "4", "--node-rank=1", "run.yaml", "optim.lr=1"]
    parsed = parse_agent(words)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.node_rank) == ("2", "4", 1)
    assert (parsed.module, parsed.training_script) == (True, "shardwise")
    assert parsed.training_script_args == ["train", "run.yaml", "optim.lr=1"]


def test_a_module_is_started_as_torchrun_does() -> None:
    parsed = parse_agent(["-m", "shardwise", "fabric", "run.yaml"])
    assert parsed.training_script == "shardwise"
    assert parsed.training_script_args == ["fabric", "run.yaml"]


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        ([], "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"),
        (["--signals-to-handle", "SIGUSR1"], "SIGUSR1,SIGTERM,SIGINT,SIGUSR2"),
    ],
)
def test_the_agent_passes_on_what_asks_ranks_to_stop(given: list[str], passed_on: str) -> None:
    arguments = parse_agent([*given, "run.yaml"])
    assert arguments.signals_to_handle == passed_on
    assert arguments.shutdown_timeout == 600


def test_a_signal_after_the_end_of_the_ranks_is_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm may send several while the agent of a lost node's peer reports and cleans up."""

    def raises(number: int, _: object) -> None:
        raise AssertionError(f"{signal.Signals(number).name} reached what cleans up")

    def leave_handlers(_: object) -> None:
        signal.signal(signal.SIGUSR2, raises)
        raise ValueError("ended")

    monkeypatch.setattr(torchrun_agent, "run", leave_handlers)
    lookout = Lookout(tmp_path, launcher=os.getpid())
    watchdog = Watchdog(lookout, print, timeout_s=None)
    with stop_requests():
        with pytest.raises(UserError, match="ended"):
            torchrun_agent._run(parse_agent(["run.yaml"]), lookout, watchdog)
        os.kill(os.getpid(), signal.SIGUSR2)


@pytest.mark.parametrize(
    ("said", "why"),
    [("", "RendezvousTimeoutError"), ("too late\nby far", "RendezvousTimeoutError: too late")],
)
def test_agents_that_do_not_meet_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, why: str
) -> None:
    """PyTorch's own error of a time limit says nothing but its name."""

    def come_alone(_: object) -> None:
        raise RendezvousTimeoutError(said)

    monkeypatch.setattr(torchrun_agent, "run", come_alone)
    lookout = Lookout(tmp_path, launcher=os.getpid())
    watchdog = Watchdog(lookout, print, timeout_s=None)
    with stop_requests(), pytest.raises(UserError, match="did not meet") as caught:
        torchrun_agent._run(parse_agent(["run.yaml"]), lookout, watchdog)
    assert (caught.value.code, caught.value.why) == (ExitCode.ENVIRONMENT, why)


def test_the_time_to_save_is_the_users_where_given() -> None:
    assert parse_agent(["--shutdown-timeout", "90", "run.yaml"]).shutdown_timeout == 90


def test_torchruns_variable_says_the_time_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "45")
    assert parse_agent(["run.yaml"]).shutdown_timeout == 45
    for wrong in ("soon", "-1", "9" * 5000):
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", wrong)
        with pytest.raises(UserError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
            parse_agent(["run.yaml"])


@pytest.mark.parametrize(
    ("given", "limit_s"),
    [
        # torch 2.11 passes a signal on without a limit, and ends ranks without a signal.
        ((signal.SIGTERM,), 600),
        ((), 30),
        # A newer torch names the limit.
        ((signal.SIGTERM, 90), 90),
    ],
)
def test_ranks_get_time_to_save_whatever_torch_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[int, ...], limit_s: int
) -> None:
    asked: list[tuple[int, int]] = []
    lookout = Lookout(tmp_path)
    agent = object.__new__(AskingAgent)
    agent._advice = Adviser(
        Watchdog(lookout, print), lookout, shutdown_timeout_s=600, heard=HeardSignals()
    )
    agent._pcontext = SimpleNamespace(close=lambda *words: asked.append(words))
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", lambda _agent, _signal: None)
    agent._shutdown(*given)  # type: ignore[arg-type]
    assert asked == [(signal.SIGTERM, limit_s)]


def test_the_words_and_the_code_of_a_rank_are_kept(tmp_path: Path) -> None:
    text = "UserError: rank 3 on b failed: full\n  why: no room\n  fix: free some\n  log: x.log"
    failures = {3: ended(tmp_path, 1, 2, text), 2: ended(tmp_path, 0, -15)}
    error = error_of_ranks(failures)
    assert (error.what, error.why) == ("rank 3 on b failed: full", "no room")
    assert error.fix == "free some\n  log: x.log"
    assert error.code == ExitCode.CONFIG


def test_a_rank_that_was_killed_is_the_cause_of_its_peers_errors(tmp_path: Path) -> None:
    broken = "UserError: rank 0 on a failed: connection closed"
    failures = {0: ended(tmp_path, 0, 6, broken), 1: ended(tmp_path, 1, -9, at=AT + 1)}
    error = error_of_ranks(failures)
    assert "rank 1 on" in error.what and "SIGKILL" in error.what
    assert error.code == ExitCode.WORKER_DIED


def test_a_rank_that_the_agent_had_to_kill_is_not(tmp_path: Path) -> None:
    full = "UserError: rank 0 on a failed: the disk is full"
    failures = {0: ended(tmp_path, 0, 2, full), 1: ended(tmp_path, 1, -9, at=AT + 30)}
    assert error_of_ranks(failures).what == "rank 0 on a failed: the disk is full"


def test_ranks_that_saved_are_preempted(tmp_path: Path) -> None:
    saved = "UserError: stopped by SIGTERM; step 7 is saved\n  fix: again"
    failures = {0: ended(tmp_path, 0, -15), 1: ended(tmp_path, 1, 75, saved)}
    error = error_of_ranks(failures)
    assert error.code == ExitCode.PREEMPTED
    assert error.what == "stopped by SIGTERM; step 7 is saved"


def test_one_rank_of_a_node_speaks(tmp_path: Path) -> None:
    error = UserError("full", fix="free some")
    said = []
    for local_rank in range(3):
        file = tmp_path / "attempt_0" / str(local_rank) / "error.json"
        file.parent.mkdir(parents=True)
        environ = {
            "RANK": str(local_rank),
            "TORCHELASTIC_RUN_ID": "x",
            ERROR_FILE_VARIABLE: str(file),
        }
        said.append(leave_word(error, environ))
        assert "shown above" in file.read_text()
    assert said == [True, False, False]


def test_under_our_agent_it_speaks_for_the_ranks(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    environ = {"RANK": "0", AGENT_VARIABLE: "1", ERROR_FILE_VARIABLE: str(file)}
    assert not leave_word(UserError("full", fix="free some"), environ)
    assert json.loads(file.read_text())["message"]["message"] == "UserError: full\n  fix: free some"


def test_a_process_without_a_launcher_speaks() -> None:
    assert leave_word(UserError("x"), {})


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "3")
    # RankTerminal puts its own stream there, which the test takes away again.
    monkeypatch.setattr("sys.stderr", sys.__stderr__)


def fail_as_rank(log: Path, error: Exception) -> UserError:
    with pytest.raises(UserError) as raised, RankTerminal(), errors_naming(log):
        raise error
    return raised.value


@pytest.mark.usefixtures("as_rank")
def test_an_error_nobody_expected_names_rank_place_and_log(tmp_path: Path) -> None:
    error = fail_as_rank(tmp_path / "rank-3.log", ValueError("shapes differ\nand more"))
    assert error.what == f"rank 3 on {socket.gethostname()} failed: ValueError: shapes differ"
    assert __file__ in error.why and "in fail_as_rank" in error.why
    assert error.fix == f"read {tmp_path / 'rank-3.log'}; then run the same command again to resume"
    assert error.code == ExitCode.WORKER_DIED


@pytest.mark.usefixtures("as_rank")
def test_a_users_error_keeps_its_parts_and_gets_the_log(tmp_path: Path) -> None:
    error = fail_as_rank(tmp_path / "r.log", UserError("full", why="w", fix="free some"))
    assert error.what == f"rank 3 on {socket.gethostname()} failed: full"
    assert (error.why, error.fix) == ("w", f"free some\n  log: {tmp_path / 'r.log'}")
    saved = UserError("stopped by SIGTERM; step 7 is saved", code=ExitCode.PREEMPTED)
    assert fail_as_rank(tmp_path / "r.log", saved).what == saved.what


@pytest.mark.usefixtures("as_rank")
def test_without_a_log_the_traceback_is_shown() -> None:
    with pytest.raises(UserError) as raised, RankTerminal():
        raise ValueError("too early")
    assert raised.value.why.startswith("Traceback") and "too early" in raised.value.why


# ---- restarts --------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "run.yaml"
    file.write_text("model: tiny-llama\ndata: synthetic\ncluster: 2xCPU\n")
    return str(file)


@pytest.mark.parametrize(
    ("words", "restarts"),
    [
        (["CONFIG"], 3),
        (["-m", "shardwise", "train", "CONFIG", "train.max_restarts=5"], 5),
        (["--max-restarts", "0", "CONFIG"], 0),
        (["--max-restarts=7", "CONFIG"], 7),
        # Nodes count for themselves.
        (["--nnodes", "2", "CONFIG"], 0),
        (["-m", "shardwise", "fabric", "CONFIG"], 0),
        # What is wrong with it is for the ranks to say.
        (["nowhere.yaml"], 0),
        (["CONFIG", "train.max_restarts=many"], 0),
    ],
)
def test_one_node_starts_its_ranks_again_as_the_configuration_says(
    words: list[str], restarts: int, config: str
) -> None:
    given = [config if word == "CONFIG" else word for word in words]
    assert parse_agent(["--standalone", *given]).max_restarts == restarts


def test_torchruns_own_variable_counts(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")
    assert int(parse_agent([config]).max_restarts) == 1


def told_by_a_rank(
    error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[int, ProcessFailure]:
    """A rank that ends with this error, and the file that it leaves."""
    file = folder / "error.json"
    environ = {"RANK": "0", AGENT_VARIABLE: "1", ERROR_FILE_VARIABLE: str(file)}
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError) as raised, RankTerminal(), errors_naming(folder / "rank-0.log"):
        raise error
    leave_word(raised.value, environ)
    code = int(raised.value.code)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file=str(file))
    failure.timestamp = AT
    return {0: failure}


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionResetError("Connection reset by peer"), True),
        (RuntimeError("[gloo] Connection closed by peer"), True),
        (IndexError("index 1024 is out of bounds"), False),
        (UserError("lr is wrong", fix="write another"), False),
        (UserError("stopped by SIGTERM; step 3 is saved", code=ExitCode.PREEMPTED), False),
    ],
)
def test_only_what_may_pass_is_answered_by_a_restart(
    error: Exception, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = error_of_ranks(told_by_a_rank(error, tmp_path, monkeypatch))
    assert isinstance(told, Passing) == passes


# ---- after a signal --------------------------------------------------------------------------


def sign(phase: Phase, *, begun: bool) -> dict[int, Sign]:
    return {0: Sign(rank=0, pid=1, born=1, phase=phase, beat=1, has_begun=begun)}


def stopped(signs: dict[int, Sign], hang: Hang | None = None) -> UserError | None:
    watchdog = Watchdog(Lookout(Path("/nowhere")), lambda text: None)
    watchdog.hang = hang
    return _stopped(signal.SIGTERM, [], signs, watchdog)


def test_a_signal_after_the_last_step_changes_nothing() -> None:
    assert stopped(sign(Phase.DONE, begun=True)) is None


def test_a_signal_before_the_first_step_loses_nothing() -> None:
    for signs in ({}, sign(Phase.READING, begun=False)):
        error = stopped(signs)
        assert error is not None and error.code == ExitCode.PREEMPTED
        assert "before the first step" in error.what


def test_a_signal_that_no_rank_has_answered_is_a_loss() -> None:
    error = stopped(sign(Phase.TRAINING, begun=True))
    assert error is not None and error.code == ExitCode.WORKER_DIED


def test_ranks_that_hang_while_they_should_save_are_named() -> None:
    error = stopped(sign(Phase.TRAINING, begun=True), Hang("no step for 6 s", 6.0, 1, False, ()))
    assert error is not None and error.what == "rank 1 hung: no step for 6 s"


@pytest.mark.parametrize(
    ("words", "conf"),
    [
        (["--node-rank=0"], "is_host=true"),
        (["--node-rank=2"], "is_host=false"),
        (["--node-rank=2", "--rdzv-conf=join_timeout=9"], "join_timeout=9,is_host=false"),
        (["--node-rank=2", "--rdzv-conf=is_host=1"], "is_host=1"),
        ([], ""),
    ],
)
def test_the_first_node_hosts_the_meeting_where_its_number_is_known(
    words: list[str], conf: str
) -> None:
    parsed = parse_agent(["--rdzv-backend", "c10d", *words, "run.yaml"])
    # torchrun warns of a number that it does not use.
    assert (parsed.rdzv_conf, parsed.node_rank) == (conf, 0)


def test_a_variable_gives_the_number_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NODE_RANK", "1")
    assert parse_agent(["--rdzv-backend=c10d", "run.yaml"]).rdzv_conf == "is_host=false"
    assert parse_agent(["--nnodes=2", "run.yaml"]).node_rank == 1
