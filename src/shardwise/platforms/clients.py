"""Commands of a platform, run as a user would type them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from shlex import join

from shardwise.errors import ExitCode, UserError

_TIMEOUT_S = 120.0


def run_client(
    words: Sequence[str],
    *,
    platform: str,
    get: str = "type the same command on a machine that has them, such as a login node",
    timeout_s: float = _TIMEOUT_S,
) -> str:
    """What the command prints. A UserError carries its own words where it fails; `get` says how to
    come by the command."""
    try:
        done = subprocess.run(
            list(words), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError as error:
        raise UserError(
            f"{words[0]} is not installed on this machine",
            why=f"{platform} is asked through its own commands",
            fix=f"{get}; without --submit the files are written anywhere, and `{join(words)}` is "
            "all that is left to do",
            code=ExitCode.ENVIRONMENT,
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"`{join(words)}` has not answered within {timeout_s:.0f} s",
            why=f"the controller of {platform} is busy or cannot be reached",
            fix="type the same command again later",
            code=ExitCode.ENVIRONMENT,
        ) from error
    if done.returncode != 0:
        raise UserError(
            f"{platform} refuses `{join(words)}`",
            why=" ".join((done.stderr.strip() or done.stdout.strip()).split()),
            fix="change what it names, and type the same command again",
            code=ExitCode.ENVIRONMENT,
        )
    return done.stdout
