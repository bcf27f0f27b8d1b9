"""What a launcher tells a rank through the environment: torchrun's variables, or Slurm's."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

from shardwise.errors import ExitCode, UserError

# The file where ranks of one machine meet, instead of MASTER_ADDR and MASTER_PORT. Only our
# launcher sets it.
RENDEZVOUS_VARIABLE = "SHARDWISE_RENDEZVOUS"
# Only srun sets the variables of a step. A batch script has SLURM_NTASKS and SLURM_PROCID too,
# though it is no task.
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")
_TASKS_PER_NODE = re.compile(r"(\d+)(\(x\d+\))?")
# What torchrun takes where nobody names a port.
_DEFAULT_PORT = "29500"


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as one rank of several."""
    return "RANK" in environ


def adopt_launcher(environ: MutableMapping[str, str]) -> None:
    """Translate Slurm's variables to torchrun's where only those are set, and refuse nonsense."""
    if not is_rank(environ) and all(name in environ for name in _SLURM):
        environ.update(_from_slurm(environ))
    if is_rank(environ):
        _validate(environ)


def _from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """One rank for each task of `srun`; nothing where there is one task, which starts its own
    ranks."""
    num_tasks, per_node = environ["SLURM_STEP_NUM_TASKS"], environ["SLURM_STEP_TASKS_PER_NODE"]
    if num_tasks == "1":
        return {}
    if "MASTER_ADDR" not in environ:
        raise UserError(
            f"srun has started {num_tasks} tasks, which do not know where to meet",
            why="MASTER_ADDR is not set; each of them would train a model of its own",
            fix="before srun: export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | "
            "head -n 1); or `unset SLURM_PROCID` to train on this node alone",
            code=ExitCode.ENVIRONMENT,
        )
    same = _TASKS_PER_NODE.fullmatch(per_node)
    if same is None:
        raise UserError(
            f"SLURM_STEP_TASKS_PER_NODE={per_node}: the nodes have different numbers of tasks",
            why="every node must run the same number of ranks",
            fix="start them with srun --ntasks-per-node and the number of GPUs of a node",
            code=ExitCode.ENVIRONMENT,
        )
    return {
        "RANK": environ["SLURM_PROCID"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "WORLD_SIZE": num_tasks,
        "LOCAL_WORLD_SIZE": same[1],
        "MASTER_PORT": environ.get("MASTER_PORT", _DEFAULT_PORT),
    }


def _validate(environ: Mapping[str, str]) -> None:
    needed = ["WORLD_SIZE", "LOCAL_RANK"]
    if RENDEZVOUS_VARIABLE not in environ:
        needed += ["MASTER_ADDR", "MASTER_PORT"]
    if missing := [name for name in needed if not environ.get(name)]:
        raise _unusable(f"RANK={environ['RANK']} is set, {' and '.join(missing)} not")
    world = _number("WORLD_SIZE", environ, least=1)
    rank = _number("RANK", environ)
    local = _number("LOCAL_RANK", environ)
    size = (
        _number("LOCAL_WORLD_SIZE", environ, least=1) if environ.get("LOCAL_WORLD_SIZE") else world
    )
    if rank >= world:
        raise _unusable(f"RANK={rank} is not below WORLD_SIZE={world}")
    if local >= size:
        raise _unusable(f"LOCAL_RANK={local} is not below the node's {size} ranks")
    if RENDEZVOUS_VARIABLE not in environ and _number("MASTER_PORT", environ, least=1) >= 2**16:
        raise _unusable(f"MASTER_PORT={environ['MASTER_PORT']} is not a port")


def _number(name: str, environ: Mapping[str, str], least: int = 0) -> int:
    text = environ[name].strip()
    # Twenty digits are no count of ranks, and longer ones are more than `int` reads.
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) >= least):
        raise _unusable(f"{name}={environ[name]!r} is not a whole number from {least} on")
    return int(text)


def _unusable(what: str) -> UserError:
    return UserError(
        what,
        why="where RANK is set, a launcher has started this process as one rank of several",
        fix="start it through torchrun or srun; or `unset RANK` to let shardwise start its own "
        "ranks",
        code=ExitCode.ENVIRONMENT,
    )
