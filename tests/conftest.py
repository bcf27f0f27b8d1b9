"""What holds for all tests: a calibration of this machine must not change what a plan says."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

import one_parser  # noqa: F401  (before anything imports typer.testing)
from commands import run_forked, run_installed

Run = Callable[..., subprocess.CompletedProcess[str]]
# What imports and test functions make stays; to look for garbage among it takes a tenth of the time
# of a collection of tests.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files of tests/chaos wait much, so one worker has them while others compute.

    Tests that `make chaos` runs are left out here, because to skip one takes a few milliseconds of
    two processes. Where torchao is missing its tests are skipped, but not where it was meant to be
    there.
    """
    if "SHARDWISE_CHAOS" not in os.environ:
        long = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
    items[:] = _waiting_between_computing(items)
    if find_spec("torchao") is not None:
        return
    if "SHARDWISE_FLOAT8" in os.environ:
        raise pytest.UsageError("torchao is not on the path: `make clean`, then `make setup`")
    for item in items:
        if item.get_closest_marker("torchao"):
            item.add_marker(pytest.mark.skip(reason="torchao is not on the path: make test-float8"))


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end, so no collection of garbage needs to look at them."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _waiting_between_computing(items: list[pytest.Item]) -> list[pytest.Item]:
    """The files in their order, but two others after each one that waits."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = [tests for path, tests in files.items() if path.parent.name == "chaos"]
    computing = [tests for path, tests in files.items() if path.parent.name != "chaos"]
    for number, tests in enumerate(waiting):
        computing.insert(3 * number, tests)
    return [item for tests in computing for item in tests]


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An empty cache directory for this process and all that it starts."""
    before = os.environ.get("SHARDWISE_CACHE")
    os.environ["SHARDWISE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["SHARDWISE_CACHE"]
    else:
        os.environ["SHARDWISE_CACHE"] = before


@pytest.fixture(scope="session")
def installed() -> Run:
    """`installed(*words, expect=0)`: the installed command, for what is about its start."""
    return run_installed


@pytest.fixture(scope="session")
def shardwise(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`shardwise(*words, expect=0)`: the command in a process that is forked off, as are its ranks:
    none has to import torch."""
    return partial(run_forked, tmp_path_factory.mktemp("output"))
