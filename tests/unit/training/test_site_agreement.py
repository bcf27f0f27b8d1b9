"""What sites must have in common, and what one hears that is not admitted."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shardwise.config.load import load_config
from shardwise.launch.prepare import choose_plan
from shardwise.plan.planned import Plan
from shardwise.training.site_agreement import about_site, not_admitted

SITE = (
    *("model.name=tiny-llama", "cluster.name=1xCPU", "mesh.site=2", "diloco.meet=node1:29700"),
    *("diloco.steps=10", "train.steps=10", "checkpoint.every=10"),
)


def plan_of(*settings: str) -> Plan:
    return choose_plan(load_config(None, [*SITE, *settings]), environ={})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"say": "finished", "step": 8}, "give it another file, with --record"),
        ({"say": "other", "what": "optim.lr", "mine": 1, "theirs": 2}, "optim.lr=1, and another"),
        ({"say": "replaced"}, "another job has come to the council as site 1"),
        ({"say": "stranger", "num_sites": 1}, "shardwise sites --sites 2"),
    ],
)
def test_a_site_hears_why_it_takes_no_part(answer: dict[str, Any], words: str) -> None:
    error = not_admitted(answer, 1, 4)
    assert words in f"{error.what} {error.why} {error.fix}" and error.fix


def test_sites_have_one_model_one_data_and_one_optimizer() -> None:
    plan, model = plan_of(), nn.Linear(4, 4)
    about = about_site(plan, model, "sha256:a")
    assert about == about_site(plan_of("diloco.site=1"), model, "sha256:a")
    others = {
        "training data": about_site(plan, model, "sha256:b"),
        "model": about_site(plan, nn.Linear(4, 5), "sha256:a"),
        "optim.lr": about_site(plan_of("optim.lr=1e-2"), model, "sha256:a"),
    }
    for name, other in others.items():
        assert [key for key, value in about.items() if other[key] != value] == [name]
