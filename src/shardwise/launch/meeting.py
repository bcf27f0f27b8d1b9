"""What ranks settle before they form a process group: whether they are alike and share a disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from shardwise.errors import ExitCode, UserError
from shardwise.launch.identity import TOPICS, identity_of
from shardwise.launch.last_words import as_user_error
from shardwise.launch.peers import IDENTITY, Peers
from shardwise.parallel.mesh import validate_world_size
from shardwise.plan.planned import Plan
from shardwise.training.agree import Account, find_disagreement

# A network file system may show a new file to other nodes only after its caches have expired.
_SEEN_WITHIN_S = 15.0
_LOOK_EVERY_S = 0.25
_TOKEN = "token"
_SEES, _RUNS_DIR = "sees", "runs_dir"


def meet(peers: Peers, look: Callable[[], Plan]) -> Plan:
    """The plan that `look` makes of what this rank was given. Raises the same error on every rank
    where they cannot train together, or where `look` fails on one of them."""
    own = _settle_identity(peers, look)
    if peers.world_size > int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        _settle_directory(peers, Path(own.config.runs_dir))
    return own


def _settle_identity(peers: Peers, look: Callable[[], Plan]) -> Plan:
    def settle(mine: Account) -> None:
        peers.settle(IDENTITY, mine, lambda accounts: find_disagreement(accounts, TOPICS))

    try:
        own = look()
        validate_world_size(own, peers.world_size)
        topics = identity_of(own, os.environ)
    except Exception as error:
        # Any error is told to the others, which would wait for this rank.
        settle(Account(rank=peers.rank, error=as_user_error(error, log="").to_dict()))
        raise
    settle(Account(rank=peers.rank, topics=topics))
    return own


def _settle_directory(peers: Peers, runs_dir: Path) -> None:
    """Rank 0 creates a file, and the first rank of every other node looks for it."""
    here = {_SEES: True, _RUNS_DIR: str(runs_dir.absolute())}
    made: list[Path] = []
    error = None
    if peers.rank == 0:
        token = f".meeting-{uuid4().hex}"
        try:
            made = _make(runs_dir, token)
        except OSError as failure:
            error = _unwritable(runs_dir, failure).to_dict()
        peers.store.set(_TOKEN, token)
    elif os.environ["LOCAL_RANK"] == "0":
        here[_SEES] = _appears(runs_dir / peers.store.get(_TOKEN).decode())
    mine = Account(rank=peers.rank, topics={"directory": here}, error=error)
    try:
        peers.settle("directory", mine, _find_stranger)
    finally:
        for path in made:
            # The runs directory is removed too, where it was created for this and is empty again.
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()


def _make(runs_dir: Path, token: str) -> list[Path]:
    """Create the file, and return it with the directories that were created for it, the
    innermost first."""
    missing = [path for path in (runs_dir, *runs_dir.parents) if not path.exists()]
    runs_dir.mkdir(parents=True, exist_ok=True)
    (runs_dir / token).touch()
    return [runs_dir / token, *missing]


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        with suppress(OSError):
            os.listdir(path.parent)  # makes NFS ask the server
        time.sleep(_LOOK_EVERY_S)
    return True


def _find_stranger(accounts: Sequence[Account]) -> UserError | None:
    if any(account.error for account in accounts):
        return find_disagreement(accounts, [])
    said = [(account, account.topics["directory"]) for account in accounts]
    strangers = [(account, values) for account, values in said if not values[_SEES]]
    if not strangers:
        return None
    account, values = strangers[0]
    first, firsts = said[0]
    return UserError(
        f"{account.name} does not see the runs directory of {first.name}",
        why=f"it looks into {values[_RUNS_DIR]}, rank 0 writes to {firsts[_RUNS_DIR]}; checkpoints "
        "need one directory that all nodes see",
        fix="name a directory on a file system that all nodes share: runs_dir=DIR",
        code=ExitCode.ENVIRONMENT,
    )


def _unwritable(runs_dir: Path, error: OSError) -> UserError:
    return UserError(
        f"runs_dir {runs_dir} cannot be written: {error.strerror}",
        fix="name a directory that you may write to: runs_dir=DIR",
        code=ExitCode.ENVIRONMENT,
    )
