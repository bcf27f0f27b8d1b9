"""A user's own functions, called by the first rank with frozen values at moments of a run.

Ranks are processes of their own, so a function is named as `module:function`, and imported there.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path

from shardwise.errors import ExitCode, UserError, brief


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogged:
    """The step that was logged last, every `observe.log_every` steps."""

    run_dir: Path
    step: int
    num_steps: int
    loss: float
    """The mean over the steps since the one before."""

    grad_norm: float
    lr: float
    tokens: int
    """Those that the weights have learnt from so far."""

    step_s: float
    tokens_per_s: float
    """Of one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluation on what is held out."""

    run_dir: Path
    step: int
    loss: float
    is_best: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint that is complete."""

    run_dir: Path
    step: int
    path: Path


Moment = StepLogged | Evaluated | CheckpointSaved
Callback = Callable[[Moment], object]


class Callbacks:
    """The functions of a run, by their names."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._functions = {name: load_callback(name) for name in names}

    def tell(self, moment: Moment) -> None:
        """Call all of them. One that raises ends the run: nobody would notice otherwise."""
        for name, function in self._functions.items():
            try:
                function(moment)
            except Exception as error:
                logging.getLogger(__name__).exception("%s", name)
                raise UserError(
                    f"the callback {name} failed at step {moment.step}",
                    why=brief(error),
                    fix="mend it, or leave it out: observe.callbacks=[]; the same command goes on "
                    "from the newest checkpoint",
                ) from error


def load_callback(name: str) -> Callback:
    """The function that `module:function` names. Modules are looked for where the command was
    started, too."""
    module, _, path = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = attrgetter(path)(import_module(module))
    except Exception as error:
        raise UserError(
            f"the callback {name} cannot be imported",
            why=brief(error),
            fix="name a function of a module that lies where the command is started, or is "
            "installed: observe.callbacks=[MODULE:FUNCTION]",
            code=ExitCode.ENVIRONMENT,
        ) from error
    if not callable(found):
        raise UserError(
            f"the callback {name} is no function, but {type(found).__name__}",
            fix="name a function: observe.callbacks=[MODULE:FUNCTION]",
        )
    return found


def name_of_callback(function: Callback | str) -> str:
    """The name by which ranks import a function."""
    if isinstance(function, str):
        return function
    module, path = function.__module__, function.__qualname__
    if module == "__main__" or "<" in path:
        raise UserError(
            f"the callback {path} of {module} cannot be imported by ranks",
            why="they are processes of their own, and import functions by module and name",
            fix="import the function from a file of its own, and name it so: "
            "observe.callbacks=[MODULE:FUNCTION]",
        )
    return f"{module}:{path}"
