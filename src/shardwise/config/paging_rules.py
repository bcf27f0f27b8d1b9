"""Rules about Adam's moments in host memory, as rows."""

from __future__ import annotations

from shardwise.config.rule import Rule

PAGING_RULES: tuple[Rule, ...] = (
    Rule(
        "moments-go-once",
        "memory.offload_optimizer",
        lambda c: not c.memory.offload_optimizer or c.memory.offload == "none",
        "memory.offload=cpu keeps the whole optimizer in host memory",
        "leave memory.offload_optimizer out, or leave memory.offload out",
    ),
    Rule(
        "pages-are-fp32",
        "optim.state",
        lambda c: not c.memory.offload_optimizer or c.optim.state == "fp32",
        "memory.offload_optimizer keeps moments in fp32",
        "leave optim.state out, or leave memory.offload_optimizer out",
    ),
)
