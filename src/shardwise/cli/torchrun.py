"""`shardwise torchrun`: PyTorch's agent, with our exit codes and one error."""

from __future__ import annotations

from typing import Annotated

import typer


def torchrun(
    words: Annotated[
        list[str],
        typer.Argument(
            help="torchrun's own options, then the configuration and changes such as optim.lr=3e-4."
        ),
    ],
) -> None:
    """Train on several nodes: run it on each, with torchrun's options.

    It is torchrun, but ends with the exit code of the rank that failed, shows one error, and passes
    SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 on to the ranks, which save and end with 75.

    \b
    Examples:
      shardwise torchrun --nproc-per-node 8 run.yaml
      shardwise torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d \\
        --rdzv-endpoint HOST:29500 run.yaml optim.lr=1e-5
      shardwise torchrun --nproc-per-node 8 -m shardwise fabric run.yaml
    Next: look into the run directory that it names.
    """
    from shardwise.launch.torchrun_agent import run_agent

    run_agent(words)
