"""What Slurm says."""

from __future__ import annotations

from shardwise.doctor.check import Check
from shardwise.doctor.signatures.log import Logs, sign

SLURM: tuple[Check[Logs], ...] = (
    sign(
        "SW600", "error", "The job reached its time limit",
        r"DUE TO TIME LIMIT",
        "Slurm ended it. Without a signal before that nothing was saved.",
        "ask for more time, and for a signal before the end: --signal=B:USR2@300 with --requeue",
    ),
    sign(
        "SW601", "warning", "The job was preempted",
        r"DUE TO PREEMPTION",
        "A job of higher priority took the nodes.",
        "submit with --requeue; the same command resumes from the newest checkpoint",
    ),
    sign(
        "SW602", "error", "Slurm's memory limit killed a process",
        r"(?:oom[-_]kill event|Some of the step tasks have been OOM Killed)",
        "The job used more host memory than it asked for.",
        "ask for more: --mem=0 takes all of the node; or use fewer data.workers",
    ),
    sign(
        "SW603", "error", "A node failed",
        r"DUE TO NODE FAILURE",
        "Slurm lost the node.",
        "submit with --requeue, and leave the node out with --exclude",
    ),
    sign(
        "SW604", "error", "Slurm lost a node of the job",
        r"error: Node failure on",
        "slurmd on that node does not answer.",
        "leave the node out with --exclude; look at it with scontrol show node",
    ),
    sign(
        "SW605", "error", "The step asks for more than the job has",
        r"More processors requested than permitted",
        "Tasks times cores of srun are more than sbatch was given.",
        "give srun the same --ntasks-per-node and --cpus-per-task as sbatch",
    ),
    sign(
        "SW606", "error", "No node can give what the job asks for",
        r"Requested node configuration is not available",
        "GPUs, memory or cores of one node are fewer than asked for.",
        "compare --gpus-per-node and --mem with sinfo -o '%n %G %m %c'",
    ),
    sign(
        "SW607", "error", "The account may not use this partition",
        r"Invalid account or account/partition combination",
        "Slurm refuses the job.",
        "sacctmgr show assoc user=$USER lists what is allowed; set --account and --partition",
    ),
    sign(
        "SW608", "error", "A task of the job ended",
        r"srun: error: \S+: tasks? [\d,\-\[\]]+: (?:Exited|Killed|Segmentation|Terminated|Bus)",
        "srun repeats how a process ended.",
        "read the log of that node",
        follows=True,
    ),
    sign(
        "SW609", "error", "The program is not on the node",
        r"execve\(\): [^\n]*: No such file or directory",
        "The environment was not activated in the job, or is on a disk of the login node.",
        "activate it in the script, from a directory that all nodes share",
    ),
    sign(
        "SW610", "warning", "The job waits for a limit of its account",
        r"\((?:QOSMax|QOSGrp|AssocGrp|AssocMax)\w+\)",
        "The account or the QOS may use no more GPUs, nodes or minutes now.",
        "wait, ask for fewer nodes, or use another QOS",
    ),
    sign(
        "SW611", "warning", "The step waits for resources of its own job",
        r"step creation temporarily disabled, retrying",
        "Another srun of the job holds them.",
        "start one srun at a time, or give it --overlap",
    ),
    sign(
        "SW612", "warning", "The working directory is not on the node",
        r"couldn't chdir to",
        "The directory of the submission is not shared. The job runs in /tmp.",
        "submit from a shared directory, or set --chdir",
    ),
    sign(
        "SW613", "error", "The job was cancelled",
        r"CANCELLED AT \S+ \*\*\*",
        "Somebody, or a failed dependency, cancelled it.",
        "see who: sacct -j JOB --format=State,Comment; submit again to resume",
    ),
)  # fmt: skip
