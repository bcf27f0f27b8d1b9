"""`shardwise ray-driver`: what a submitted Ray job runs. Users meet it in `shardwise launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def ray_driver(
    file: Annotated[Path, typer.Argument(help="The file that `shardwise launch` has written.")],
    stop: Annotated[bool, typer.Option("--stop", help="Ask the running driver to stop.")] = False,
) -> None:
    """Train on the Ray cluster that this process belongs to.

    \b
    Example:
      shardwise ray-driver runs/demo/launch/ray.yaml
    Next: shardwise status RUN
    """
    from shardwise.launch.ray_trainer import run_driver, stop_driver

    if stop:
        stop_driver(file)
    else:
        run_driver(file)
