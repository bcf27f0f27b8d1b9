"""One server forks the processes of all tests that a pytest process runs.

Python has one fork server a process, and it imports modules only when it starts. So the list here
has what any test needs; otherwise the first test decides and the others import torch in each fork.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

_PRELOAD = [
    "forked",
    "small_trainer",
    "pydantic.fields",
    "pydantic.type_adapter",
    "shardwise.checkpoint.export_model",
    "shardwise.cli.next_steps",
    "shardwise.cli.summary",
    "shardwise.doctor.examine",
    "shardwise.launch.worker",
    "shardwise.plan.elastic",
    "shardwise.report.collect",
    "transformers.models.auto.modeling_auto",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "shardwise.verify.judge",
    "settled",
]


def forkserver() -> ForkServerContext:
    """The context whose processes are forked off the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context
