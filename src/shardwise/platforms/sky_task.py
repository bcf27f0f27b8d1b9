"""The task of a SkyPilot managed job, each setting with its reason. Written for SkyPilot 0.14,
which has lifecycle hooks."""

from __future__ import annotations

from shlex import quote, split
from typing import Any

from shardwise.errors import ExitCode
from shardwise.platforms.explained import Because
from shardwise.platforms.job import Job
from shardwise.platforms.kubernetes.kube_names import kube_name
from shardwise.platforms.volume import runs_dir_on_volume

# Errors that come again from the same files and settings.
_FINAL = (
    ExitCode.CONFIG,
    ExitCode.DOES_NOT_FIT,
    ExitCode.VERIFY_FAILED,
    ExitCode.DIVERGED,
)
# Nodes of one start may be minutes apart: one has the image, another pulls it.
_MEETING_S = 1800
# The end of the agent after its ranks have ended.
_AGENT_S = 30
# Until the first node has said how the run ended.
_LAST_WORDS_S = 10
# Where SkyPilot's catalogue spells a GPU in another way.
_ACCELERATORS = {
    "V100-16GB": "V100",
    "A100-40GB": "A100",
    "RTX-3090": "RTX3090",
    "RTX-4090": "RTX4090",
    "RTX-5090": "RTX5090",
    "RTX-A6000": "RTXA6000",
    "RTX-6000-Ada": "RTX6000-Ada",
}


def build_task(job: Job) -> dict[str, Any]:
    """What `sky jobs launch` reads."""
    settings = job.config.skypilot
    task: dict[str, Any] = {
        "name": kube_name(job.name),
        "num_nodes": Because(job.nodes, f"The plan is for {job.cluster.name}; SkyPilot starts all"),
        "resources": _resources(job),
        "envs": {one.name: Because(one.value, one.why) for one in job.environment},
    }
    if settings.secrets:
        why = "`sky jobs launch --secret NAME` takes the value from the shell; no file has it"
        task["secrets"] = Because(dict.fromkeys(settings.secrets), why)
    if settings.volume is not None:
        why = "All nodes write one run directory, and a recovery on other nodes finds it"
        task["volumes"] = {settings.mount: Because(settings.volume, why)}
    task["file_mounts"] = {
        config_in_home(job): Because(str(job.config_path), "What the ranks read, on every node"),
        **settings.file_mounts,
    }
    task["setup"] = Because(_lines(_setup(job)), "Once on each new node")
    task["run"] = Because(_lines(_run(job)), "One agent on each node, which starts its ranks")
    task["config"] = {"hooks": [_hook(job)]}
    return task


def config_in_home(job: Job) -> str:
    """Where each node has the configuration."""
    return f"~/.shardwise/{kube_name(job.name)}.yaml"


def _resources(job: Job) -> dict[str, Any]:
    settings = job.config.skypilot
    found: dict[str, Any] = {}
    if settings.infra is not None:
        found["infra"] = Because(settings.infra, "given: skypilot.infra")
    if job.cluster.device == "cuda":
        kind = settings.accelerator or _ACCELERATORS.get(job.device_kind, job.device_kind)
        why = "One rank for each GPU of a node"
        found["accelerators"] = Because({kind: job.ranks_per_node}, why)
        if job.nodes > 1:
            why = "The fastest links that the nodes have, such as InfiniBand or EFA"
            found["network_tier"] = Because("best", why)
    else:
        found["cpus"] = Because(f"{job.ranks_per_node}+", "One core at least for each rank")
    if settings.spot:
        found["use_spot"] = Because(True, "given: skypilot.spot")
    if settings.image is not None:
        found["image_id"] = Because(settings.image, "given: skypilot.image")
    found["job_recovery"] = {
        "max_restarts_on_errors": Because(
            0,
            "SkyPilot would count every exit code, also of errors that come again. `run` counts "
            f"itself, up to launch.max_requeues={job.launch.max_requeues}",
        ),
        "recover_on_exit_codes": Because(
            [int(ExitCode.PREEMPTED)],
            "`run` ends with it where another start helps; it resumes from the newest checkpoint. "
            "SkyPilot recovers from preemption and lost nodes by itself",
        ),
    }
    return found


def _setup(job: Job) -> list[str]:
    settings = job.config.skypilot
    mount = quote(settings.mount)
    return [
        *settings.setup,
        "# What is written beside the volume is lost with the node.",
        f"mountpoint -q {mount} || {{",
        f'  echo "shardwise: no volume is mounted at "{mount} >&2',
        f"  exit {int(ExitCode.ENVIRONMENT)}",
        "}",
    ]


def _run(job: Job) -> list[str]:
    return [
        f"cd {quote(job.config.skypilot.mount)} || exit {int(ExitCode.ENVIRONMENT)}",
        *job.launch.setup,
        *_start(job),
        *_end(job),
    ]


def _start(job: Job) -> list[str]:
    """Start the agent of this node, and pass on what it is sent."""
    # The path of this installation means nothing on the nodes.
    command = "shardwise" if job.launch.command == "auto" else job.launch.command
    program = quote(split(command)[0])
    on_gpus = job.cluster.device == "cuda"
    ranks = '"$SKYPILOT_NUM_GPUS_PER_NODE"' if on_gpus else str(job.ranks_per_node)
    config = config_in_home(job).replace("~", "$HOME", 1)
    return [
        f"command -v {program} > /dev/null || {{",
        f'  echo "shardwise: the nodes have no "{program}"; install it in skypilot.setup" >&2',
        f"  exit {int(ExitCode.ENVIRONMENT)}",
        "}",
        "# The first address is the first node's, where the ranks meet.",
        'host=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
        'here=$(echo "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")',
        "# All recoveries of a job have one SKYPILOT_TASK_ID. Ranks of an earlier start cannot",
        "# join this one: its nodes, or its number on them, are others.",
        'nodes=$(echo "$SKYPILOT_NODE_IPS" | cksum | cut -d " " -f 1)',
        'attempt="$SKYPILOT_TASK_ID-$SKYPILOT_INTERNAL_JOB_ID-$nodes"',
        "# A port below those that the kernel gives to connections, and the same on all nodes.",
        'port=$((20000 + $(echo "$attempt" | cksum | cut -d " " -f 1) % 10000))',
        "# The ranks save and end.",
        'agent=""',
        'trap \'[ -z "$agent" ] || kill -USR2 "$agent" 2> /dev/null\' USR2 TERM',
        f"PET_NODE_RANK=$SKYPILOT_NODE_RANK {command} torchrun \\",
        f'  --nnodes "$SKYPILOT_NUM_NODES" --nproc-per-node {ranks} \\',
        '  --rdzv-backend c10d --rdzv-id "$attempt" --rdzv-endpoint "$host:$port" \\',
        f"  --rdzv-conf join_timeout={_MEETING_S},read_timeout={_MEETING_S} "
        '--local-addr "$here" \\',
        f"  --shutdown-timeout {job.grace_s.value} \\",
        f'  "{config}" &',
        "agent=$!",
        "# The hook below reads it.",
        f'echo "$agent" > {_pid_file(job)}',
        "# A signal ends `wait`, not the agent.",
        'wait "$agent"; code=$?',
        'while kill -0 "$agent" 2> /dev/null; do wait "$agent"; code=$?; done',
        f"rm -f {_pid_file(job)}",
    ]


def _end(job: Job) -> list[str]:
    """Ask for another start where it helps."""
    runs_dir = runs_dir_on_volume(job, job.config.skypilot.mount)
    failures = quote(str(runs_dir / job.name / "launch" / "failures"))
    final = "|".join(str(int(code)) for code in _FINAL)
    again = int(ExitCode.PREEMPTED)
    return [
        f'failures={failures}-"$SKYPILOT_TASK_ID"',
        'case "$code" in',
        "  0) exit 0 ;;",
        "  # It has saved, and goes on as often as it takes.",
        f'  {again}) rm -rf "$failures" ;;',
        "  # These come again from the same files and settings.",
        f"  {final}) ;;",
        "  *)",
        "    # One file for each start, whichever of its nodes failed.",
        '    mkdir -p "$failures" && : > "$failures/$attempt"',
        '    count=$(ls "$failures" | wc -l)',
        '    echo "shardwise: exit code $code, failure $count" >&2',
        f"    # launch.max_requeues={job.launch.max_requeues}",
        f'    [ "$count" -gt {job.launch.max_requeues} ] || code={again} ;;',
        "esac",
        "# SkyPilot kills all nodes as soon as one has failed, and the first has last words to "
        "write.",
        f'[ "$SKYPILOT_NODE_RANK" = 0 ] || sleep {_LAST_WORDS_S}',
        'exit "$code"',
    ]


def _hook(job: Job) -> dict[str, Any]:
    lines = [
        f"agent=$(cat {_pid_file(job)} 2> /dev/null) || exit 0",
        'kill -USR2 "$agent" 2> /dev/null || exit 0',
        'while kill -0 "$agent" 2> /dev/null; do sleep 1; done',
    ]
    return {
        "events": Because(
            ["preemption", "down"],
            "Before a node is taken away, and before `sky jobs cancel` ends the job, the ranks of "
            "all nodes save: the agent of one passes the request on",
        ),
        "timeout": Because(
            job.grace_s.value + _AGENT_S,
            f"Ranks get {job.grace_s.value} s to save ({job.grace_s.why}), the agent {_AGENT_S} s "
            "more. On Kubernetes SkyPilot makes it the grace period of the pod",
        ),
        "run": _lines(lines),
    }


def _pid_file(job: Job) -> str:
    # Nodes may share a home.
    return f'"$HOME/.shardwise/{kube_name(job.name)}-$(hostname).agent"'


def _lines(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
