"""What the sbatch script says, and what Slurm's own commands are asked. No Slurm is needed here;
tests/chaos/test_slurm.py has a real one."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.launch.prepare import choose_plan
from shardwise.platforms.job import Job, build_job
from shardwise.platforms.left_out import EXCLUDE_VARIABLE
from shardwise.platforms.slurm import SlurmLauncher, expand_nodes
from shardwise.platforms.submission import Submission


def job_of(*overrides: str, least: int = 0) -> Job:
    config = load_config(None, ["model=tiny-llama", "data=synthetic", *overrides])
    plan = choose_plan(config, {})
    return build_job(plan, command="/my env/shardwise", least_nodes=least or plan.cluster.num_nodes)


def options(text: str) -> dict[str, str]:
    """What sbatch reads. A reason stands above each."""
    lines = text.splitlines()
    found = {}
    for number, line in enumerate(lines):
        if line.startswith("#SBATCH "):
            assert lines[number - 1].startswith("# "), line
            (word,) = shlex.split(line.removeprefix("#SBATCH "))
            name, _, value = word.partition("=")
            assert name not in found
            found[name] = value
    return found


def render(*overrides: str, least: int = 0) -> str:
    text = SlurmLauncher().render(job_of(*overrides, least=least)).main.text
    # Bash can read it.
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=60)
    return text


def test_nodes_gpus_time_and_signal_come_from_the_plan() -> None:
    text = render("cluster=4x8xH100", "train.steps=100000", "model=llama-3.1-8b")
    said = options(text)
    assert said["--nodes"] == "4" and said["--ntasks-per-node"] == "1"
    assert said["--gpus-per-node"] == "8" and said["--switches"] == "1@10"
    job = job_of("cluster=4x8xH100", "train.steps=100000", "model=llama-3.1-8b")
    assert job.walltime_s.value is not None
    assert int(said["--time"]) * 60 >= job.walltime_s.value > int(said["--time"]) * 60 - 60
    # To the batch shell alone, and not the signal that NCCL may catch.
    assert said["--signal"] == f"B:USR2@{job.grace_s.value}"
    assert said["--requeue"] == "" and said["--open-mode"] == "append"
    assert "export NCCL_IB_TIMEOUT=22" in text and "export PYTORCH_ALLOC_CONF=" in text
    assert "--rdzv-backend c10d" in text and '--rdzv-id "$attempt"' in text
    assert '"$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"' in text
    assert "'/my env/shardwise' torchrun" in text


def test_a_cpu_cluster_without_a_speed_asks_for_no_gpus_and_no_time() -> None:
    said = options(render("cluster=2x2xCPU"))
    assert not said.keys() & {"--gpus-per-node", "--time", "--switches", "--exclude"}


def test_what_the_user_says_replaces_ours() -> None:
    text = render(
        "cluster=2x2xCPU",
        "launch.options=[--partition=gpu,--nodes=2-2,--requeue=no]",
        "launch.exclude=[n1,n2]",
        "launch.walltime_s=90",
        "launch.grace_s=100000",
        "launch.setup=[module load cuda]",
        "launch.environment={PYTHONUNBUFFERED: a b, NCCL_IB_TIMEOUT: 23}",
        "launch.command=apptainer exec a.sif shardwise",
    )
    said = options(text)
    assert said["--partition"] == "gpu" and said["--nodes"] == "2-2" and said["--requeue"] == "no"
    assert said["--exclude"] == "n1,n2" and said["--time"] == "2"
    assert said["--signal"] == "B:USR2@65535", "Slurm keeps it in 16 bits"
    assert text.index("module load cuda") < text.index("srun ")
    assert "export PYTHONUNBUFFERED='a b'" in text and "export NCCL_IB_TIMEOUT=23" in text
    assert "\n  apptainer exec a.sif shardwise torchrun" in text


def test_an_elastic_run_asks_for_a_range_of_nodes() -> None:
    job = ("cluster=4x2xCPU", "launch.elastic=true", "train.global_batch=16")
    text = render(*job, least=1)
    assert options(text)["--nodes"] == "1-4"
    # A late node is left out only where the run may go on without it.
    assert "'/my env/shardwise' exclude \"$run\" --late" in text
    assert "--late" not in render(*job)
    # Nor does a broken one leave itself out elsewhere.
    assert f"export {EXCLUDE_VARIABLE}=" in text and EXCLUDE_VARIABLE not in render(*job)


def test_names_and_places_with_odd_characters_survive(tmp_path: Path) -> None:
    text = render("cluster=2x1xCPU", "name=it's one", f"runs_dir={tmp_path}/a 5% b")
    said = options(text)
    assert said["--job-name"] == "it's one"
    assert said["--output"] == f"{tmp_path}/a 5%% b/it's one/launch/slurm-%j.out"
    # Tasks of an array have run directories of their own.
    line = next(line for line in text.splitlines() if line.startswith("name="))
    for environ, name in (({}, "it's one"), ({"SLURM_ARRAY_TASK_ID": "7"}, "it's one-7")):
        shell = ["bash", "-c", f'{line}; printf %s "$name"']
        done = subprocess.run(shell, env=environ, capture_output=True, text=True, timeout=60)
        assert done.stdout == name


def test_the_machine_of_the_command_is_no_cluster_of_slurm() -> None:
    with pytest.raises(UserError, match=r"cluster\.name=local is the machine") as caught:
        SlurmLauncher().render(job_of("cluster=local"))
    assert "cluster.name=4x8xH100" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("nodea", ("nodea",)),
        ("nodea,gpu9", ("nodea", "gpu9")),
        ("n[1-3,7],gpu9", ("n1", "n2", "n3", "n7", "gpu9")),
        ("n[008-011]", ("n008", "n009", "n010", "n011")),
    ],
)
def test_lists_of_nodes_are_expanded(text: str, names: tuple[str, ...]) -> None:
    assert expand_nodes(text) == names


class Recorded:
    """Commands that answer as Slurm's own did, and note how they were asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder / "bin"
        self._folder.mkdir()
        # Slurm may be installed here: nothing but these is found.
        monkeypatch.setenv("PATH", str(self._folder))
        files = folder / "files"
        files.mkdir()
        self.submission = Submission(
            platform="slurm", id="7", run_dir=str(folder), files_dir=str(files), time=0.0
        )

    def answer(self, command: str, text: str, code: int = 0) -> None:
        file = self._folder / command
        said = f"printf '%s\\n' \"$*\" >> {shlex.quote(str(file))}.asked\n"
        file.write_text(f"#!/bin/sh\n{said}printf %s {shlex.quote(text)}\nexit {code}\n")
        file.chmod(0o755)

    def asked(self, command: str) -> list[str]:
        file = self._folder / f"{command}.asked"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("line", "state", "words", "nodes"),
    [
        ("PENDING\x1fResources\x1f", "waiting", "PENDING (Resources)", ()),
        ("RUNNING\x1fNone\x1fn[1-2]", "running", "RUNNING", ("n1", "n2")),
        ("COMPLETED\x1fNone\x1fn1", "ended", "COMPLETED", ("n1",)),
        ("CANCELLED\x1fNone\x1fn1", "stopped", "CANCELLED", ("n1",)),
        ("TIMEOUT\x1fTimeLimit\x1fn1", "failed", "TIMEOUT (TimeLimit)", ("n1",)),
        ("", "unknown", "Slurm has forgotten job 7", ()),
    ],
)
def test_states_of_slurm_in_our_words(
    line: str, state: str, words: str, nodes: tuple[str, ...], recorded: Recorded
) -> None:
    recorded.answer("squeue", line)
    found = SlurmLauncher().status(recorded.submission)
    assert (found.state, found.words, found.nodes) == (state, words, nodes)


def test_a_job_that_waits_is_cancelled_and_one_that_runs_is_told_to_save(
    recorded: Recorded,
) -> None:
    recorded.answer("scancel", "")
    recorded.answer("squeue", "PENDING\x1fPriority\x1f")
    SlurmLauncher().stop(recorded.submission)
    recorded.answer("squeue", "RUNNING\x1fNone\x1fn1")
    SlurmLauncher().stop(recorded.submission)
    assert recorded.asked("scancel") == ["7", "--batch --signal=USR2 7"]
    assert Path(recorded.submission.files_dir, "stop-7").exists()
    recorded.answer("squeue", "COMPLETED\x1fNone\x1fn1")
    SlurmLauncher().stop(recorded.submission)
    assert len(recorded.asked("scancel")) == 2


def test_nodes_are_left_out_at_once_or_at_the_next_start(recorded: Recorded) -> None:
    recorded.answer("scontrol", "")
    recorded.answer("squeue", "RUNNING\x1fNone\x1fn1")
    SlurmLauncher().exclude(recorded.submission, ["n1"])
    assert recorded.asked("scontrol") == []
    recorded.answer("squeue", "PENDING\x1fNone\x1f")
    SlurmLauncher().exclude(recorded.submission, ["n2", "n1"])
    assert recorded.asked("scontrol") == ["update JobId=7 ExcNodeList=n1,n2"]
    assert Path(recorded.submission.files_dir, "exclude").read_text() == "n1\nn2\n"


def test_slurms_own_words_and_a_missing_command_are_told(recorded: Recorded) -> None:
    launcher, job = SlurmLauncher(), job_of("cluster=2x1xCPU")
    with pytest.raises(UserError, match="sbatch is not installed on this machine") as missing:
        launcher.submit(job, launcher.render(job))
    assert "login node" in missing.value.fix
    recorded.answer("sbatch", "sbatch: error: invalid partition specified: gpu", code=1)
    with pytest.raises(UserError, match="Slurm refuses `sbatch --parsable ") as refused:
        launcher.submit(job, launcher.render(job))
    assert refused.value.why == "sbatch: error: invalid partition specified: gpu"
    recorded.answer("sbatch", "12;cluster\n")
    assert launcher.submit(job, launcher.render(job)) == "12"
