from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import ExitCode, UserError
from shardwise.launch.rank_environment import adopt_launcher

TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "MASTER_ADDR": "node-1",
}
LAUNCHERS = {*TORCHRUN, *SRUN}


@pytest.mark.parametrize("environ", [{}, TORCHRUN, {"WORLD_SIZE": "4"}, {"SLURM_PROCID": "0"}])
def test_what_torchrun_sets_is_left_alone(environ: dict[str, str]) -> None:
    adopted = dict(environ)
    adopt_launcher(adopted)
    assert adopted == environ


def test_a_task_of_srun_is_a_rank() -> None:
    environ = dict(SRUN)
    adopt_launcher(environ)
    assert (environ["RANK"], environ["LOCAL_RANK"]) == ("5", "1")
    assert (environ["WORLD_SIZE"], environ["LOCAL_WORLD_SIZE"]) == ("8", "4")
    assert environ["MASTER_PORT"] == "29500"


@pytest.mark.parametrize(
    "environ",
    [
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
        # A batch script: it has the tasks of its job, and is none of them.
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "MASTER_ADDR": "node-1"},
    ],
    ids=["one task", "batch script"],
)
def test_slurm_alone_makes_no_rank(environ: dict[str, str]) -> None:
    adopted = dict(environ)
    adopt_launcher(adopted)
    assert "RANK" not in adopted


def test_tasks_that_cannot_meet_are_refused() -> None:
    """Each would take itself for the only one."""
    without = {name: value for name, value in SRUN.items() if name != "MASTER_ADDR"}
    with pytest.raises(UserError, match="8 tasks, which do not know where to meet") as raised:
        adopt_launcher(without)
    assert raised.value.code == ExitCode.ENVIRONMENT
    assert "export MASTER_ADDR=" in raised.value.fix


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"WORLD_SIZE": ""}, "RANK=1 is set, WORLD_SIZE not"),
        ({"LOCAL_RANK": "", "MASTER_PORT": ""}, "LOCAL_RANK and MASTER_PORT not"),
        ({"RANK": ""}, "RANK='' is not a whole number"),
        ({"RANK": "one"}, "RANK='one' is not a whole number"),
        ({"RANK": "-1"}, "RANK='-1' is not a whole number"),
        ({"RANK": "٣"}, "is not a whole number"),
        ({"RANK": "9" * 5000}, "is not a whole number"),
        ({"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not a whole number from 1 on"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not below the node's 2 ranks"),
        ({"LOCAL_WORLD_SIZE": "many"}, "LOCAL_WORLD_SIZE='many'"),
        ({"MASTER_PORT": "ssh"}, "MASTER_PORT='ssh'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
    ],
)
def test_half_a_launcher_is_refused(change: dict[str, str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        adopt_launcher(TORCHRUN | change)
    assert said in raised.value.what
    assert "unset RANK" in raised.value.fix
    assert raised.value.code == ExitCode.ENVIRONMENT


def test_nodes_of_different_size_are_refused() -> None:
    with pytest.raises(UserError, match="different numbers of tasks"):
        adopt_launcher(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4,3"})


@pytest.mark.parametrize("verb", ["train", "fabric"])
def test_the_command_says_so_without_a_traceback(verb: str, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("model: tiny-llama\ndata: synthetic\ncluster: 2xCPU\n")
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("shardwise")), verb, str(config)],
        cwd=tmp_path,
        env=kept | {"RANK": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == ExitCode.ENVIRONMENT, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: RANK=0 is set, WORLD_SIZE and LOCAL_RANK and MASTER_ADDR")
    assert not (tmp_path / "runs").exists()
