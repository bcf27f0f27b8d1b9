"""What sites must have in common, and why one of them is not admitted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwise.errors import ExitCode, UserError
from shardwise.plan.planned import Plan

# What all sites do in their inner steps.
_ALIKE = ("lr", "betas", "eps", "weight_decay", "clip_norm", "schedule", "warmup_steps")


def about_site(plan: Plan, model: nn.Module, data: str) -> dict[str, Any]:
    """What must be the same in all sites."""
    config = plan.settings
    shapes = [(name, list(param.shape)) for name, param in model.named_parameters()]
    return {
        "model": hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16],
        "diloco.steps": config.diloco.steps,
        "diloco.lr": config.diloco.lr,
        "diloco.momentum": config.diloco.momentum,
        "mesh.site": plan.decided.jobs,
        "train.global_batch": plan.decided.global_batch,
        "train.steps": config.train.steps,
        "train.seed": config.train.seed,
        "data.seq_len": config.data.seq_len,
        "training data": data[-16:],
        **{f"optim.{name}": getattr(config.optim, name) for name in _ALIKE},
    }


def not_admitted(answer: Mapping[str, Any], site: int, step: int) -> UserError:
    """Why the council does not admit this site."""
    match answer["say"]:
        case "finished":
            return UserError(
                f"the other sites have finished step {answer['step']} without site {site}, which "
                f"is at step {step}",
                why="`shardwise sites` goes on from its record",
                fix="for a new run give it another file, with --record; to go on with the old one "
                "use a checkpoint of another site, or train further in all of them: write "
                f"train.steps={2 * answer['step']}",
                code=ExitCode.ENVIRONMENT,
            )
        case "other":
            what = answer["what"]
            return UserError(
                f"site {site} has {what}={answer['mine']}, and another site has {answer['theirs']}",
                why="sites that exchange what they have learnt train one model in one way",
                fix="give all sites one YAML, and change cluster.name=8xH100 and diloco.site=1 "
                "alone for each",
            )
        case "replaced":
            return UserError(
                f"another job has come to the council as site {site}, and is in this one's place",
                why="each site is one job, and the one that came last counts",
                fix="give each job a number of its own, from diloco.site=0 on",
                code=ExitCode.ENVIRONMENT,
            )
        case "stranger":
            return UserError(
                f"diloco.site={site}, but the council has {answer['num_sites']} sites",
                fix=f"start it with `shardwise sites --sites {site + 1}`, or write diloco.site=0",
            )
    raise RuntimeError(f"the council answers {answer}")
