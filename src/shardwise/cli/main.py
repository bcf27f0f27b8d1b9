"""`shardwise`: the verbs, and how an error leaves the process."""

from __future__ import annotations

import io
import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn

import typer

from shardwise.cli import (
    checkpoint,
    compare,
    config,
    data,
    doctor,
    export,
    fabric,
    generate,
    init,
    launch,
    logs,
    migrate,
    observe,
    plan,
    profile,
    ray_driver,
    report,
    sites,
    status,
    stop,
    torchrun,
    train,
    tunnel,
    ui,
    verify,
)
from shardwise.errors import ExitCode, UserError
from shardwise.internals.private_names import PYTREE_LOGGER
from shardwise.launch.last_words import leave_word
from shardwise.version import __version__

app = typer.Typer(
    name="shardwise",
    help="Train language models with PyTorch FSDP2, and know beforehand what will happen.",
    epilog="Start with: shardwise config cp demo run.yaml; shardwise train run.yaml; "
    "for a run of your own: shardwise init",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# Characters of an error that names a path of any length.
_MAX_SHOWN = 500
_NARROWEST_PANEL = 20
# Unknown options reach load_config, which answers `--optim.lr=1` with "write optim.lr=1".
_OVERRIDES = {"ignore_unknown_options": True}
app.command("init")(init.init)
app.command("plan", context_settings=_OVERRIDES)(plan.plan)
app.command("compare", context_settings=_OVERRIDES)(compare.compare)
app.command("train", context_settings=_OVERRIDES)(train.train)
app.command("launch", context_settings=_OVERRIDES)(launch.launch)
app.command("sites")(sites.sites)
app.command("status")(status.status)
app.command("logs")(logs.logs)
app.command("attach")(logs.attach)
app.command("stop")(stop.stop)
app.command("exclude")(stop.exclude)
app.command("torchrun", context_settings=_OVERRIDES)(torchrun.torchrun)
app.command("ray-driver", hidden=True)(ray_driver.ray_driver)
app.command("tunnel", context_settings=_OVERRIDES)(tunnel.tunnel)
app.command("verify")(verify.verify)
app.command("doctor", context_settings=_OVERRIDES)(doctor.doctor)
app.command("fabric", context_settings=_OVERRIDES)(fabric.fabric)
app.command("profile")(profile.profile)
app.command("report")(report.report)
app.command("ui")(ui.ui)
app.command("export")(export.export)
app.command("generate")(generate.generate)
app.command("migrate", context_settings=_OVERRIDES)(migrate.migrate)
app.add_typer(config.app)
app.add_typer(data.app)
app.add_typer(checkpoint.app)
app.add_typer(observe.app)


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and end."),
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; a UserError becomes one panel and its exit code."""
    _print_any_text()
    _hush_torchao()
    try:
        _run()
    except SystemExit as end:
        if sys.argv[1:2] == [torchrun.torchrun.__name__]:
            _leave(end)
        raise


def _run() -> None:
    try:
        app()
    except UserError as error:
        if leave_word(error, os.environ):
            _show(error)
        sys.exit(int(error.code))
    except OSError as error:
        failure = _failed_file(error)
        _show(failure)
        sys.exit(int(failure.code))
    except KeyboardInterrupt:
        sys.exit(130)


def _leave(end: SystemExit) -> NoReturn:
    """Exit at once, without Python's own shutdown.

    After a signal torchrun leaves its rendezvous open for other nodes. A daemon thread of it then
    still writes to torch's store several times a minute. If Python 3.11 shuts down while that
    thread is inside the store, it unwinds the thread through C++ frames that must not be unwound.
    The process then dies of SIGABRT ("terminate called without an active exception") and its exit
    code is lost. Nothing is left for Python's shutdown to do: the ranks have ended, and the agent's
    files are removed.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader is gone
            stream.flush()
    os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


def _failed_file(error: OSError) -> UserError:
    """The error for a file or disk that failed where nothing more specific is known."""
    name = error.filename or "a file"
    return UserError(
        f"{name}: {error.strerror or error}"[:_MAX_SHOWN],
        why="the system refused it",
        fix="check that path, its permissions, and the space on its disk",
        code=ExitCode.ENVIRONMENT,
    )


def _print_any_text() -> None:
    """Let no character end a command: what the terminal cannot encode is shown as its escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _hush_torchao() -> None:
    """Silence two warnings of torch about torchao's enums: the user of a command cannot fix
    them. transformers imports torchao where it is installed."""
    torch_log = logging.getLogger(PYTREE_LOGGER)
    torch_log.addFilter(lambda record: "is an Enum subclass" not in record.getMessage())


def _show(error: UserError) -> None:
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.panel import Panel
        from rich.text import Text

        console = Console(stderr=True)
        # In fewer columns, which COLUMNS=0 may say, a panel would show nothing.
        if console.width >= _NARROWEST_PANEL:
            # A stop that somebody asked for is no fault.
            is_stop = error.code == ExitCode.PREEMPTED
            title, color = ("stopped", "yellow") if is_stop else ("error", "red")
            panel = Panel(Text(str(error)), title=title, border_style=color, title_align="left")
            console.print(panel)
            return
    typer.echo(f"error: {error}", err=True)
