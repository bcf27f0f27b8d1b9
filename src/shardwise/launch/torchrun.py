"""torchrun, with the exit code of the rank that failed and one error in place of a traceback.

The agent, its options and its rendezvous are PyTorch's. torchrun itself ends with 1 whatever its
ranks end with, and it dies of SIGUSR1 and SIGUSR2, which schedulers send before they kill.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import get_args_parser, run

from shardwise.errors import ExitCode, UserError
from shardwise.launch.failure import details_of, known_exit_code
from shardwise.launch.last_words import AGENT_VARIABLE
from shardwise.launch.ranks import RankFailure
from shardwise.training.heartbeat import HEARTBEAT_VARIABLE
from shardwise.training.signals import STOP_SIGNALS

# Failures so soon after the first may still be its cause: the agent looks ten times a second, and
# notes whole seconds. Ranks that it had to kill come 30 s later.
_TOGETHER_S = 5
# How long ranks may save after a signal before they are killed, unless the user says. torchrun's
# 30 s are less than a large checkpoint takes.
_SHUTDOWN_TIMEOUT_S = 600


def run_agent(words: list[str]) -> None:
    """Start the ranks of this node as torchrun would, and wait for them."""
    arguments = parse_agent(words)
    # Until the agent has ranks, the default action ends it at once. Python's own handler would
    # wait for the rendezvous to return, which waits for the other nodes.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        heartbeats = Path(folder, "heartbeats")
        heartbeats.mkdir()
        os.environ |= {HEARTBEAT_VARIABLE: str(heartbeats), AGENT_VARIABLE: str(os.getpid())}
        arguments.log_dir = arguments.log_dir or folder
        _hush_agent()
        _run(arguments, heartbeats)


def parse_agent(words: list[str]) -> argparse.Namespace:
    """torchrun's options, then `run.yaml [a.b=v ...]`, or `-m shardwise VERB ...` as torchrun."""
    parser = get_args_parser()
    parser.prog = "shardwise torchrun"
    arguments = parser.parse_args(words)
    if not arguments.module:
        program = ["train", arguments.training_script, *arguments.training_script_args]
        arguments.module, arguments.training_script = True, "shardwise"
        arguments.training_script_args = program
    named = [name.strip() for name in arguments.signals_to_handle.split(",")]
    passed_on = dict.fromkeys([*named, *(number.name for number in STOP_SIGNALS)])
    arguments.signals_to_handle = ",".join(filter(None, passed_on))
    if arguments.shutdown_timeout is None and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in os.environ:
        arguments.shutdown_timeout = _SHUTDOWN_TIMEOUT_S
    return arguments


def _run(arguments: argparse.Namespace, heartbeats: Path) -> None:
    began = time.time()
    try:
        run(arguments)
    except ChildFailedError as failed:
        raise error_of_ranks(failed.failures) from None
    except SignalException as stopped:
        words = list(_words_since(began, Path(arguments.log_dir)))
        had_begun = any(heartbeats.iterdir())
        raise _stopped(stopped.sigval, words, had_begun=had_begun) from None
    except (RendezvousError, dist.DistError) as error:
        raise UserError(
            "the agents of the nodes did not meet",
            why=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
            fix="check that --rdzv-endpoint (or --master-addr and --master-port) names one node "
            "that all can reach, and that --nnodes agents were started",
            code=ExitCode.ENVIRONMENT,
        ) from error
    except ValueError as error:
        raise UserError(f"torchrun: {error}", fix="torchrun --help lists its options") from error


def error_of_ranks(failures: Mapping[int, ProcessFailure]) -> UserError:
    """The first cause among the ranks of this node, in the words of the rank where it left any."""
    first = _first_failure(failures)
    details = details_of(first)
    code = known_exit_code(first.exitcode)
    what = details.get("what") or f"it ended with exit code {first.exitcode} and no message"
    if first.exitcode < 0 or not details:
        what = f"rank {first.rank} on {os.uname().nodename} failed: {what}"
    fix = details.get("fix") or "run the same command again to resume"
    return UserError(what, why=details.get("why", ""), fix=fix, code=code)


def _first_failure(failures: Mapping[int, ProcessFailure]) -> RankFailure:
    """SIGTERM is how the agent ends the others; a rank that was killed otherwise is a cause."""
    ended = [
        RankFailure(rank, failure.exitcode, Path(failure.error_file), float(failure.timestamp))
        for rank, failure in failures.items()
    ]
    causes = [one for one in ended if one.exitcode != -signal.SIGTERM] or ended
    begin = min(one.time for one in causes)
    together = [one for one in causes if one.time <= begin + _TOGETHER_S]
    killed = [one for one in together if one.exitcode < 0]
    return min(killed or together, key=lambda one: one.time)


def _words_since(began: float, log_dir: Path) -> Iterator[RankFailure]:
    """What the ranks have left in their error files; after a signal the agent does not read them.

    `log_dir` may be the user's and have those of earlier starts.
    """
    for file in log_dir.glob("*/attempt_*/*/error.json"):
        if file.stat().st_mtime >= began:
            code = json.loads(file.read_text(encoding="utf-8"))["message"]["errorCode"]
            yield RankFailure(int(file.parent.name), code, file, file.stat().st_mtime)


def _stopped(number: signal.Signals, words: list[RankFailure], *, had_begun: bool) -> UserError:
    """After a signal, which the agent has passed on to its ranks and waited for them."""
    if words:
        first = min(words, key=lambda one: one.time)
        details = details_of(first)
        code = known_exit_code(first.exitcode)
        return UserError(
            details["what"], why=details.get("why", ""), fix=details.get("fix", ""), code=code
        )
    if had_begun:
        return UserError(
            f"stopped by {number.name}, and no rank has saved",
            why="SIGHUP and SIGQUIT end ranks at once; others have --shutdown-timeout to save in",
            fix="the same command goes on from the newest checkpoint",
            code=ExitCode.WORKER_DIED,
        )
    return UserError(
        f"stopped by {number.name} before the first step; nothing was trained",
        fix="run the same command again",
        code=ExitCode.PREEMPTED,
    )


def _hush_agent() -> None:
    """The agent logs that a rank failed and that it ends the others: our one error says more."""
    said = ("failed (exitcode:", "Sending process", "death signal, shutting down workers")

    def is_news(record: logging.LogRecord) -> bool:
        return not any(words in record.getMessage() for words in said)

    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(is_news)
