"""The text of an sbatch script: options with reasons, then the job itself."""

from __future__ import annotations

import math
from shlex import quote

from shardwise.errors import ExitCode
from shardwise.platforms.job import Job, Setting
from shardwise.platforms.left_out import EXCLUDE_VARIABLE
from shardwise.platforms.rendered import environment_lines

# Slurm keeps the seconds of --signal in 16 bits.
_MAX_SIGNAL_S = 65535
# Errors that come again from the same files and settings.
_FINAL = (
    ExitCode.CONFIG,
    ExitCode.DOES_NOT_FIT,
    ExitCode.VERIFY_FAILED,
    ExitCode.DIVERGED,
)


def options_of(job: Job) -> tuple[Setting, ...]:
    """The options of sbatch; the user's replace ours of the same name."""
    own = [
        Setting("--job-name", job.name, "the name of the run directory"),
        Setting("--chdir", str(job.work_dir), "relative paths of the run begin here"),
        Setting("--output", _output(job), "%j also tells array tasks apart"),
        Setting("--open-mode", "append", "a job that starts again keeps what it printed before"),
        _nodes(job),
        Setting("--ntasks-per-node", "1", "one torchrun on each node, which starts its ranks"),
        Setting("--exclusive", "", "all ranks wait for the slowest, so no node has other jobs"),
        Setting("--mem", "0", "all of a node's memory: the usual share is too little for weights"),
        *_gpus(job),
        *_time(job),
        Setting(
            "--signal",
            f"B:USR2@{min(job.grace_s.value, _MAX_SIGNAL_S)}",
            f"seconds before the time limit at which this script is told: {job.grace_s.why}; "
            "NCCL may catch USR1",
        ),
        Setting("--requeue", "", "after preemption or the loss of a node the job starts again"),
    ]
    if job.launch.exclude:
        own.append(Setting("--exclude", ",".join(job.launch.exclude), "given: launch.exclude"))
    given = [_given(option) for option in job.launch.options]
    said = {one.name for one in given}
    return (*(one for one in own if one.name not in said), *given)


def _output(job: Job) -> str:
    # Slurm would replace what stands after a percent sign.
    return f"{str(job.files_dir).replace('%', '%%')}/slurm-%j.out"


def _nodes(job: Job) -> Setting:
    if not job.is_elastic:
        return Setting("--nodes", str(job.nodes), f"the plan is for {job.cluster.name}")
    why = (
        f"the plan is for {job.cluster.name}; with launch.elastic the run goes on with down to "
        f"{job.least_nodes}, and trains the same global batches"
    )
    return Setting("--nodes", f"{job.least_nodes}-{job.nodes}", why)


def _gpus(job: Job) -> list[Setting]:
    if job.cluster.device != "cuda":
        return []
    found = [
        Setting("--gpus-per-node", str(job.ranks_per_node), f"one rank a GPU: {job.cluster.name}")
    ]
    if job.nodes > 1:
        why = "nodes below one switch, if they are free within ten minutes: fewer hops"
        found.append(Setting("--switches", "1@10", why))
    return found


def _time(job: Job) -> list[Setting]:
    limit = job.walltime_s
    if limit.value is None:
        return []
    return [Setting("--time", str(math.ceil(limit.value / 60)), f"minutes: {limit.why}")]


def _given(option: str) -> Setting:
    name, _, value = option.partition("=")
    return Setting(name, value, "given: launch.options")


def script_of(job: Job, options: tuple[Setting, ...]) -> str:
    """The whole file. No command may stand before the last #SBATCH line."""
    lines = [
        "#!/bin/bash",
        f"# The run {job.name} on Slurm. `shardwise launch` wrote this file, with a reason above "
        "each setting.",
        *(line for one in options for line in (f"# {one.why}", f"#SBATCH {_option(one)}")),
        "",
        *environment_lines(job),
        *job.launch.setup,
        "",
        *_start(job),
        "",
        *_end(job),
    ]
    return "\n".join(lines) + "\n"


def _option(one: Setting) -> str:
    # sbatch reads quotes as a shell does.
    return f"{one.name}={quote(one.value)}" if one.value else one.name


def _start(job: Job) -> list[str]:
    """Start one agent on each node, and pass on what the scheduler sends."""
    agent = (
        '--nnodes "$SLURM_JOB_NUM_NODES" '
        f"--nproc-per-node {job.ranks_per_node} "
        '--rdzv-backend c10d --rdzv-id "$attempt" --rdzv-endpoint "$host:$port" '
        f"--shutdown-timeout {job.grace_s.value}"
    )
    training = f'{quote(str(job.config_path))} "name=$name"'
    left_out = quote(str(job.files_dir / "exclude"))
    health = [
        "# A node whose GPUs are broken writes its name there; the next start leaves it out.",
        f"export {EXCLUDE_VARIABLE}={left_out}",
    ]
    return [
        *(health if job.is_elastic else []),
        "# Tasks of an array are runs of their own.",
        f'name={quote(job.name)}"${{SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}}"',
        "# Ranks of an earlier attempt may still be about: this id is of this attempt alone.",
        'attempt="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        "# This script runs on the first node, so the ranks meet here, at the address that Slurm "
        "knows.",
        'host=$(scontrol --oneliner show node "$SLURMD_NODENAME" | grep -o " NodeAddr=[^ ]*")',
        'host="${host#*=}"',
        "# A port below those that the kernel gives to connections, and that nobody listens on.",
        "port=$((20000 + RANDOM % 10000))",
        'while (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null; do '
        "port=$((20000 + RANDOM % 10000)); done",
        "# The ranks save and end: before the time limit (USR2), before preemption and when the",
        "# job is cancelled (TERM).",
        'told="" step=""',
        'trap \'told=1; [ -z "$step" ] || kill -USR2 "$step" 2> /dev/null\' USR2 TERM',
        "# The agent takes the place of bash, so that signals reach it. Its ranks may use all "
        "cores.",
        "# A node that has ended does not end the others while they save.",
        "srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 \\",
        "  bash -c 'PET_NODE_RANK=$SLURM_NODEID exec \"$@\"' agent \\",
        f"  {job.command} torchrun {agent} \\",
        f"  {training} &",
        "step=$!",
        '[ -z "$told" ] || kill -USR2 "$step"',
        "# A signal ends `wait`, not the step.",
        'wait "$step"; code=$?',
        'while kill -0 "$step" 2> /dev/null; do wait "$step"; code=$?; done',
    ]


def _end(job: Job) -> list[str]:
    """Start again where that helps; the same command resumes from the newest checkpoint."""
    final = "|".join(str(int(code)) for code in _FINAL)
    late = [
        "# A node that the others have waited for again and again is left out.",
        f'{job.command} exclude "$run" --late',
    ]
    files = quote(str(job.files_dir))
    return [
        f'files={files} run={quote(str(job.run_dir.parent))}/"$name"',
        'failures="$files/failures-$SLURM_JOB_ID" stopped="$files/stop-$SLURM_JOB_ID"',
        "# `shardwise stop` is no failure, and not to be followed by another start.",
        f'if [ -e "$stopped" ] && [ "$code" = {int(ExitCode.PREEMPTED)} ]; then exit 0; fi',
        "# Done; or cancelled; or Slurm itself starts it again.",
        'state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)',
        'if [ "$code" = 0 ] || [ -e "$stopped" ] || [ "$state" != RUNNING ]; then exit "$code"; fi',
        f'if [ -n "$told" ] || [ "$code" = {int(ExitCode.PREEMPTED)} ]; then',
        '  why="the run was told to stop before its end" && rm -f "$failures"',
        "else",
        "  # These come again from the same files and settings.",
        f'  case "$code" in {final}) exit "$code" ;; esac',
        '  echo "$(date +%FT%T) $SLURM_JOB_NODELIST exit code $code" >> "$failures"',
        '  count=$(wc -l < "$failures") why="exit code $code, failure $count"',
        f"  # launch.max_requeues={job.launch.max_requeues}",
        f'  if [ "$count" -gt {job.launch.max_requeues} ]; then exit "$code"; fi',
        "fi",
        'echo "shardwise: $why; the job starts again and resumes"',
        'scontrol requeue "$SLURM_JOB_ID" || {',
        '  echo "shardwise: scontrol cannot requeue here; submit $files/job.sbatch again" >&2',
        '  exit "$code"',
        "}",
        *(late if job.is_elastic else []),
        "# Nodes that `shardwise exclude` has named.",
        '[ ! -s "$files/exclude" ] ||',
        '  scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$(paste -sd, "$files/exclude")"',
    ]
