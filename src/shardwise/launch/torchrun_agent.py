"""torchrun, with the exit code of the rank that failed and one error instead of a traceback.

The agent, its options and its rendezvous are PyTorch's. torchrun itself always exits with 1 when a
rank fails, and it dies of SIGUSR1 and SIGUSR2, which schedulers send before they kill.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import get_args_parser, run

from shardwise.config.load import load_config
from shardwise.config.schema import TrainConfig
from shardwise.errors import ExitCode, UserError, brief
from shardwise.launch.agent import error_of_start, has_adviser, restarting_where_it_helps
from shardwise.launch.failure import details_of, known_exit_code
from shardwise.launch.hang import describe_hang
from shardwise.launch.lookout import Lookout
from shardwise.launch.parent import AGENT_VARIABLE
from shardwise.launch.ranks import RankFailure
from shardwise.launch.relay import stopped_before_training
from shardwise.launch.say import say_on_console
from shardwise.launch.watchdog import Watchdog
from shardwise.training.heartbeat import HEARTBEAT_VARIABLE, Phase, Sign
from shardwise.training.signals import STOP_SIGNALS

# How long ranks may save after a signal before they are killed, unless the user says. torchrun's 30
# s are less than a large checkpoint takes.
_SHUTDOWN_TIMEOUT_S = 600
_ONE_NODE = ("1", "1:1")
# torchrun keeps the store of its first ranks. A node that comes later would wait for its address,
# and ranks would look for it on a node that has gone.
_OWN_STORE = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def run_agent(words: list[str]) -> None:
    """Start the ranks of this node as torchrun would, and wait for them."""
    arguments = parse_agent(words)
    # Until the agent has ranks, the default action ends it at once. Python's own handler would wait
    # for the rendezvous, which waits for the other nodes.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with tempfile.TemporaryDirectory(prefix="shardwise-", ignore_cleanup_errors=True) as folder:
        heartbeats = Path(folder, "heartbeats")
        heartbeats.mkdir()
        os.environ |= {HEARTBEAT_VARIABLE: str(heartbeats), AGENT_VARIABLE: str(os.getpid())}
        if arguments.nnodes not in _ONE_NODE:
            os.environ.setdefault(*_OWN_STORE)
        arguments.log_dir = arguments.log_dir or folder
        _hush_agent()
        lookout = Lookout(heartbeats, launcher=os.getpid())
        settings = _settings(arguments)
        timeout_s = settings.hang_timeout_s if settings else None
        with Watchdog(lookout, say_on_console, timeout_s=timeout_s) as watchdog:
            _run(arguments, lookout, watchdog)


def parse_agent(words: list[str]) -> argparse.Namespace:
    """torchrun's options, then `run.yaml [a.b=v ...]`, or `-m shardwise VERB ...` as torchrun."""
    parser = get_args_parser()
    parser.prog = "shardwise torchrun"
    # torch 2.11 has no such option; our agent keeps to it there.
    with suppress(argparse.ArgumentError):
        parser.add_argument("--shutdown-timeout", "--shutdown_timeout", type=int)
    if "PET_MAX_RESTARTS" not in os.environ:
        parser.set_defaults(max_restarts=None)
    if "PET_NODE_RANK" not in os.environ:
        parser.set_defaults(node_rank=None)
    arguments = parser.parse_args(words)
    _name_host(arguments)
    if not arguments.module:
        program = ["train", arguments.training_script, *arguments.training_script_args]
        arguments.module, arguments.training_script = True, "shardwise"
        arguments.training_script_args = program
    named = [name.strip() for name in arguments.signals_to_handle.split(",")]
    passed_on = dict.fromkeys([*named, *(number.name for number in STOP_SIGNALS)])
    arguments.signals_to_handle = ",".join(filter(None, passed_on))
    if arguments.shutdown_timeout is None:
        arguments.shutdown_timeout = _shutdown_timeout_s(os.environ)
    if arguments.max_restarts is None:
        arguments.max_restarts = _max_restarts(arguments)
    return arguments


def _name_host(arguments: argparse.Namespace) -> None:
    """Let the first node host the meeting of c10d, where the node's number is known.

    Otherwise torchrun asks DNS whether the endpoint is this machine. In a new pod DNS does not know
    that yet, and all agents would wait for a host that none of them is.
    """
    rank, arguments.node_rank = arguments.node_rank, arguments.node_rank or 0
    if rank is None or arguments.rdzv_backend != "c10d":
        return
    # torchrun would warn that it takes no number of the node here.
    arguments.node_rank = 0
    if "is_host" not in arguments.rdzv_conf:
        said = [arguments.rdzv_conf] if arguments.rdzv_conf else []
        arguments.rdzv_conf = ",".join([*said, f"is_host={str(rank == 0).lower()}"])


def _shutdown_timeout_s(environ: Mapping[str, str]) -> int:
    """The user's value from torchrun's variable, else our own."""
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    said = environ.get(name, str(_SHUTDOWN_TIMEOUT_S))
    # Python reads no number of thousands of digits.
    if not said.isdecimal() or len(said) > 9:
        raise UserError(
            f"{name}={said[:40]!r}",
            why="it has to be a whole number of seconds",
            fix=f"write `unset {name}`, which gives ranks {_SHUTDOWN_TIMEOUT_S} s to save",
        )
    return int(said)


def _max_restarts(arguments: argparse.Namespace) -> int:
    """As many restarts as `shardwise train` makes, where nodes can meet again.

    A static rendezvous does not tell a node that another one starts its ranks again. And without
    an adviser each agent counts its own failures, and ranks that are told different counts do not
    meet. There the user has to say.
    """
    settings = _settings(arguments)
    can_meet = arguments.nnodes in _ONE_NODE or (arguments.rdzv_backend == "c10d" and has_adviser())
    return settings.max_restarts if settings is not None and can_meet else 0


def _settings(arguments: argparse.Namespace) -> TrainConfig | None:
    """The training settings of the configuration; None where it is wrong, which the ranks will
    report."""
    program: list[str] = arguments.training_script_args
    is_training = arguments.training_script == "shardwise" and program[:1] == ["train"]
    if not is_training or len(program) < 2:
        return None
    try:
        return load_config(program[1], program[2:]).train
    except UserError:
        return None


def _run(arguments: argparse.Namespace, lookout: Lookout, watchdog: Watchdog) -> None:
    began = time.time()
    try:
        least_nodes = int(arguments.nnodes.partition(":")[0])
        with (
            restarting_where_it_helps(watchdog, lookout, arguments.shutdown_timeout, least_nodes),
            _deaf_afterwards(arguments.signals_to_handle.split(",")),
        ):
            run(arguments)
    except ChildFailedError as failed:
        raise error_of_start(failed.failures, watchdog) from None
    except SignalException as stopped:
        words = list(_words_since(began, Path(arguments.log_dir)))
        error = _stopped(stopped.sigval, words, lookout.newest_signs(), watchdog)
        if error is not None:
            raise error from None
    except (RendezvousError, dist.DistError) as error:
        raise UserError(
            "the agents of the nodes did not meet",
            why=brief(error),
            fix="check that --rdzv-endpoint (or --master-addr and --master-port) names one node "
            "that all can reach, and that --nnodes agents were started",
            code=ExitCode.ENVIRONMENT,
        ) from error
    except ValueError as error:
        raise UserError(f"torchrun: {error}", fix="torchrun --help lists its options") from error


@contextmanager
def _deaf_afterwards(names: Sequence[str]) -> Iterator[None]:
    """Ignore these signals when the block has ended: no rank is left that they could reach.
    PyTorch's handlers would stay, and raise inside of what cleans up and reports."""
    try:
        yield
    finally:
        for number in (getattr(signal, name, None) for name in names):
            if number is not None and callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_IGN)


def _words_since(began: float, log_dir: Path) -> Iterator[RankFailure]:
    """The error files of the ranks. After a signal the agent does not read them.

    `log_dir` may be the user's and have files of earlier starts.
    """
    for file in log_dir.glob("*/attempt_*/*/error.json"):
        # Nothing is known of a rank that could not write it whole.
        with suppress(OSError, ValueError, KeyError, TypeError):
            when = file.stat().st_mtime
            if when >= began:
                code = json.loads(file.read_text(encoding="utf-8"))["message"]["errorCode"]
                yield RankFailure(int(file.parent.name), int(code), file, when)


def _stopped(
    number: signal.Signals,
    words: list[RankFailure],
    signs: Mapping[int, Sign],
    watchdog: Watchdog,
) -> UserError | None:
    """The error after a signal, which the agent has passed to its ranks before it waited for them.

    None where they were about to end anyway.
    """
    if watchdog.hang is not None and not any(one.exitcode == ExitCode.PREEMPTED for one in words):
        return describe_hang(watchdog.hang)
    if words and _may_have_saved(words, signs):
        first = min(words, key=lambda one: one.time)
        details = details_of(first)
        code = known_exit_code(first.exitcode)
        return UserError(
            details["what"], why=details.get("why", ""), fix=details.get("fix", ""), code=code
        )
    if signs and all(sign.phase == Phase.DONE for sign in signs.values()):
        return None
    if signs and all(sign.has_begun for sign in signs.values()):
        return UserError(
            f"stopped by {number.name}, and no rank has saved",
            why="SIGHUP and SIGQUIT end ranks at once; after other signals ranks must save within "
            "--shutdown-timeout",
            fix="the same command goes on from the newest checkpoint",
            code=ExitCode.WORKER_DIED,
        )
    return stopped_before_training(number.name)


def _may_have_saved(words: list[RankFailure], signs: Mapping[int, Sign]) -> bool:
    """Whether ranks may have saved. A rank that has not made its first step dies of the signal, and
    the other ranks then fail too."""
    return all(sign.has_begun for sign in signs.values()) or any(
        one.exitcode == ExitCode.PREEMPTED for one in words
    )


def _hush_agent() -> None:
    """Silence the agent's log of failed ranks: our one error says more."""
    said = ("failed (exitcode:", "Sending process", "death signal, shutting down workers")

    def is_news(record: logging.LogRecord) -> bool:
        return not any(words in record.getMessage() for words in said)

    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(is_news)
