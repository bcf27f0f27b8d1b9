from __future__ import annotations

from typing import Any

import pytest

from shardwise.errors import ExitCode, UserError
from shardwise.training.agree import Account, Topic, find_disagreement

SETTINGS = Topic("settings", ExitCode.CONFIG, "give the same")
VERSIONS = Topic("versions", ExitCode.ENVIRONMENT, "install the same")
TOPICS = (SETTINGS, VERSIONS)


def account(rank: int, *, host: str = "", **topics: dict[str, Any]) -> Account:
    # Through JSON, as they travel.
    made = Account(rank=rank, host=host or f"host-{rank}", topics=topics)
    return Account.from_json(made.to_json())


def test_ranks_that_say_the_same_agree() -> None:
    values = {"optim.lr": 3e-4, "betas": (0.9, 0.95), "limit": float("inf"), "none": None}
    assert find_disagreement([account(rank, settings=values) for rank in range(4)], TOPICS) is None


def test_host_field_and_both_values_are_named() -> None:
    accounts = [account(0, settings={"optim.lr": 3e-4}), account(2, settings={"optim.lr": 1e-4})]
    error = find_disagreement(accounts, TOPICS)
    assert error is not None
    line = "host-2 (rank 2): optim.lr is 0.0001 there, 0.0003 on host-0 (rank 0)"
    assert line in error.what
    assert (error.fix, error.code) == ("give the same", ExitCode.CONFIG)


def test_ranks_of_one_host_are_told_once() -> None:
    odd = [account(rank, host="b", settings={"x": 2}) for rank in (2, 3)]
    error = find_disagreement([account(0, settings={"x": 1}), *odd], TOPICS)
    assert error is not None and error.what.count("x is 2") == 1


def test_a_value_that_only_one_has_differs() -> None:
    accounts = [account(0, versions={}), account(1, versions={"torchao": "0.17"})]
    error = find_disagreement(accounts, TOPICS)
    assert error is not None and "torchao is 0.17 there, not set on" in error.what
    assert error.code == ExitCode.ENVIRONMENT


def test_a_rank_is_not_asked_what_it_leaves_out() -> None:
    accounts = [account(0, settings={"x": 1}), account(1), account(2, settings={"x": 1})]
    assert find_disagreement(accounts, TOPICS) is None


def test_a_long_list_is_cut() -> None:
    many = {f"field-{n:02}": n for n in range(20)}
    error = find_disagreement([account(0, settings={}), account(1, settings=many)], TOPICS)
    assert error is not None and error.what.count("there,") == 8 and "and 12 more" in error.what


@pytest.mark.parametrize("all_fail", [False, True])
def test_an_error_of_a_rank_comes_before_all_else(all_fail: bool) -> None:
    failure = UserError("no such file", why="w", fix="f", code=ExitCode.ENVIRONMENT).to_dict()
    first = Account(rank=0, host="a", error=failure if all_fail else None)
    error = find_disagreement([first, Account(rank=1, host="b", error=failure)], TOPICS)
    assert error is not None
    assert error.what == ("no such file" if all_fail else "b (rank 1): no such file")
    assert (error.why, error.fix, error.code) == ("w", "f", ExitCode.ENVIRONMENT)
