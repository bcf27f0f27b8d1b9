"""The driver of a run on Ray: a TorchTrainer with one worker for each node.

Each worker runs an agent of torchrun, which starts a rank for each device of its node. So signals,
heartbeats, errors and exit codes are those of every other platform. Ray places the workers, and
starts all of them again when one dies.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import yaml

from shardwise.errors import ExitCode, UserError, brief
from shardwise.launch.ray_node import run_node
from shardwise.launch.say import say_on_console

NAMESPACE = "shardwise"
# After these another start would end the same way.
_FINAL = (ExitCode.CONFIG, ExitCode.DOES_NOT_FIT, ExitCode.VERIFY_FAILED, ExitCode.DIVERGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJob:
    """What `shardwise launch --on ray` has written for the driver."""

    name: str
    nodes: int
    least_nodes: int
    ranks_per_node: int
    resources_per_node: dict[str, float]
    placement_strategy: str
    max_failures: int
    storage_path: str
    work_dir: str
    command: list[str]
    environment: dict[str, str]
    setup: list[str]

    @property
    def num_workers(self) -> int | tuple[int, int]:
        """As Ray reads it: a number, or a range within which it may choose."""
        return self.nodes if self.least_nodes == self.nodes else (self.least_nodes, self.nodes)

    @classmethod
    def load(cls, path: Path) -> RayJob:
        """Read the file."""
        try:
            found = cls(**yaml.safe_load(path.read_text(encoding="utf-8")))
            for name, kind in get_type_hints(cls).items():
                if not isinstance(getattr(found, name), get_origin(kind) or kind):
                    raise TypeError(f"{name} is {getattr(found, name)!r}")
            return found
        except (OSError, TypeError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise UserError(
                f"{path} is no file of `shardwise launch --on ray`",
                why=brief(error),
                fix="write it anew: shardwise launch FILE --on ray",
            ) from error


class Desk:
    """An actor where nodes leave how their agents ended, and where a stop is asked for."""

    def __init__(self) -> None:
        self._codes: dict[int, int] = {}
        self._is_stopping = False

    def begin(self) -> None:
        """Forget the codes of an earlier start."""
        self._codes.clear()

    def note(self, node: int, code: int) -> None:
        """Keep how the agent of a node ended."""
        self._codes[node] = code

    def verdict(self) -> int | None:
        """The exit code that ends this start for all nodes; None where a restart may help."""
        final = [code for code in self._codes.values() if code in _FINAL]
        saved = [code for code in self._codes.values() if code == ExitCode.PREEMPTED]
        return next(iter(final or saved), None)

    def ask_to_stop(self) -> None:
        """Let all nodes save and end."""
        self._is_stopping = True

    def is_stopping(self) -> bool:
        """Whether somebody has asked."""
        return self._is_stopping


def run_driver(path: Path) -> None:
    """Train to the end, on the Ray cluster that this process belongs to."""
    job = RayJob.load(path)
    ray = _connect()
    desk = _open_desk(job.name)
    while True:
        ray.get(desk.begin.remote())
        _fit(job, desk)
        code = ray.get(desk.verdict.remote())
        if code is None:
            return
        if code != ExitCode.PREEMPTED or ray.get(desk.is_stopping.remote()):
            raise UserError(
                f"the ranks of {job.name} ended with exit code {code}",
                why="their error stands above",
                fix=f"shardwise logs {job.name}",
                code=ExitCode(code),
            )
        say_on_console("the run was preempted and has saved; its ranks start again")


def _open_desk(name: str) -> Any:
    """The desk, on the node of the driver: another node may go while the run goes on."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0)(Desk).options(name=name, scheduling_strategy=here).remote()


def stop_driver(path: Path) -> None:
    """Ask the driver of the same file to let its ranks save and end."""
    job, ray = RayJob.load(path), _connect()
    try:
        ray.get(ray.get_actor(job.name).ask_to_stop.remote())
    except (ValueError, ray.exceptions.RayActorError):
        # It has ended in the meantime.
        say_on_console(f"{job.name} is not running")


def _fit(job: RayJob, desk: Any) -> None:
    """One life of the trainer, which starts workers again up to `max_failures` times."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        run_node,
        train_loop_config={
            "command": job.command,
            "environment": job.environment,
            "setup": job.setup,
            "ranks": job.ranks_per_node,
            "work_dir": job.work_dir,
            "desk": desk,
        },
        scaling_config=ScalingConfig(
            num_workers=job.num_workers,
            use_gpu="GPU" in job.resources_per_node,
            resources_per_worker=job.resources_per_node,
            placement_strategy=job.placement_strategy,
        ),
        # Workers only tell each other where the agents meet.
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            name=job.name,
            storage_path=job.storage_path,
            failure_config=FailureConfig(max_failures=job.max_failures),
        ),
    )
    try:
        trainer.fit()
    except Exception as error:
        raise UserError(
            f"Ray has given up on {job.name}",
            why=brief(error),
            fix="look for the first error above; the same command goes on from the newest "
            "checkpoint",
            code=ExitCode.WORKER_DIED,
        ) from error


def _connect() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "Ray is not installed",
            fix="pip install 'shardwise[ray]'",
            code=ExitCode.ENVIRONMENT,
        ) from error
    ray.init(address="auto", namespace=NAMESPACE, log_to_driver=True)
    return ray
