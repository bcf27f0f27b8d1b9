"""Ranks that differ inside of a process group: each of them raises the same error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from rank_pool import Ranks
from tiny_runs import tiny_plan

from shardwise.errors import ExitCode, UserError
from shardwise.parallel.mesh import World
from shardwise.training import session
from shardwise.training.agree import Topic, settle_in_group

pytestmark = pytest.mark.dist
TOPIC = Topic("settings", ExitCode.CONFIG, "give the same")


def verdict(values: list[int | None], failing: int | None) -> dict[str, object] | None:
    """What this rank raises where rank n says `values[n]`; None where it raises nothing."""
    rank = dist.get_rank()
    error = UserError("the data is gone", fix="fetch it") if rank == failing else None
    value = values[rank]
    try:
        values = {} if value is None else {"settings": {"x": value}}
        settle_in_group(World.joined(), [TOPIC], values, error)
    except UserError as raised:
        return raised.to_dict()
    return None


@pytest.mark.parametrize(
    ("values", "failing", "said"),
    [
        ([1, 1], None, None),
        ([1, None], None, None),
        ([1, 2], None, "(rank 1): x is 2 there, 1 on"),
        ([1, 1], 1, "(rank 1): the data is gone"),
    ],
)
def test_all_ranks_hear_of_it(
    values: list[int | None], failing: int | None, said: str | None,
    ranks: Callable[[int], Ranks],
) -> None:  # fmt: skip
    first, second = ranks(2).run(verdict, values, failing)
    assert first == second
    assert (first is None) == (said is None)
    if said is not None:
        assert said in first["what"]


def build_from_own_file(folder: str, texts: list[str]) -> str:
    """Rank n is a node of its own, whose file holds `texts[n]`."""
    path = Path(folder, f"text-{dist.get_rank()}.txt")
    path.write_text(texts[dist.get_rank()])
    plan = tiny_plan(
        2,
        {
            "cluster.name": "2x1xCPU",
            "data.source": "text",
            "data.path": str(path),
            "runs_dir": folder,
        },
    )
    try:
        session._build_data(plan, replace(World.joined(), local_rank=0), lambda text: None)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("same words " * 99, ""),
        ("other word " * 99, "sha256 of the train tokens is"),
        ("", "has no text"),
    ],
)
def test_nodes_with_other_tokens_do_not_train(
    second: str, said: str, tmp_path: Path, ranks: Callable[[int], Ranks]
) -> None:
    texts = ["same words " * 99, second]
    found = ranks(2).run(build_from_own_file, str(tmp_path), texts)
    assert found[0] == found[1]
    assert said in found[0] and bool(said) == bool(found[0])
