"""One rank of `shardwise fabric`, whoever started it. torch is imported when it measures."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

from shardwise.errors import ExitCode, UserError
from shardwise.verify.fabric.found import Found, Request
from shardwise.verify.fabric.nccl_log import captured_log

MODULE = "shardwise.cli.fabric_rank"
# A link without an answer for this long counts as dead.
_TIMEOUT = timedelta(minutes=5)


def measure_as_rank(request: Request) -> Found:
    """Join the others, measure, leave; the variables are those of torchrun."""
    import torch.distributed as dist

    from shardwise.launch.group import join_process_group
    from shardwise.verify.fabric.measure import measure_fabric

    # 2.13 warns of names that 2.11 needs.
    warnings.simplefilter("ignore")
    started, is_first = time.perf_counter(), os.environ["RANK"] == "0"

    def say(text: str) -> None:
        if is_first:
            sys.stderr.write(f"  {time.perf_counter() - started:5.1f} s  {text}\n")
            sys.stderr.flush()

    try:
        with captured_log(request.cluster.device) as log:
            join_process_group(request.cluster.device, _TIMEOUT)
            found = measure_fabric(request, log, say)
            dist.destroy_process_group()
    except RuntimeError as error:  # gloo's and NCCL's own, of links that do not answer
        raise UserError(
            f"rank {os.environ['RANK']} on {socket.gethostname()} lost the others",
            why=str(error).strip().splitlines()[0],
            fix="can the nodes reach each other? GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name "
            "the device to use; NCCL_DEBUG=INFO shows what NCCL does",
            code=ExitCode.ENVIRONMENT,
        ) from error
    return found


def main(question_path: str, answer_path: str) -> None:
    """A rank that `shardwise fabric` has started itself."""
    from shardwise.launch.parent import leave_with_launcher

    leave_with_launcher()
    question = json.loads(Path(question_path).read_text(encoding="utf-8"))
    found = measure_as_rank(Request.from_dict(question))
    if os.environ["RANK"] == "0":
        Path(answer_path).write_text(json.dumps(found.to_dict()), encoding="utf-8")


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        record(main)(*sys.argv[1:])
    except UserError as error:
        # `record` has written the error down; the exit code tells the launcher its kind.
        sys.exit(error.code)
