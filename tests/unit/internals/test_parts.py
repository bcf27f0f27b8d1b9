"""When a run does without private names, and what it says then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardwise.internals import parts
from shardwise.internals.parts import PARTS, PUBLIC_ONLY, Changed, Part, is_open, public_note


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No answers of other tests, nor of the environment."""
    monkeypatch.delenv(PUBLIC_ONLY, raising=False)
    for known in (parts._why_unknown, parts._what_changed):
        known.cache_clear()
    yield
    for known in (parts._why_unknown, parts._what_changed):
        known.cache_clear()


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_part_is_as_we_know_it_on_this_release(part: Part) -> None:
    assert parts.why_public(part) is None


def test_a_module_of_ours_that_is_missing_is_no_change_of_torch() -> None:
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        is_open(Part("nothing", "torch", parts._check_in("nowhere", "check")))


def test_nothing_is_said_where_nothing_is_off() -> None:
    assert public_note(PARTS) is None


@pytest.mark.parametrize("value", ["1", "true"])
def test_one_variable_turns_all_of_them_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(PUBLIC_ONLY, value)
    assert not any(map(is_open, PARTS))
    note = public_note(PARTS) or ""
    assert "\n" not in note and f"({PUBLIC_ONLY} is set)" in note
    assert all(part.name in note for part in PARTS)


@pytest.mark.parametrize("value", ["", "0"])
def test_a_variable_that_says_no_turns_none_off(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(PUBLIC_ONLY, value)
    assert all(map(is_open, PARTS))


@pytest.mark.parametrize(
    ("installed", "told"),
    [
        ("2.16.0", "torch 2.16.0 is newer than 2.15, the newest that was tested"),
        ("3.0.0a0+git1", "torch 3.0.0a0+git1 is newer than 2.15"),
        ("2.9.1", "torch 2.9.1 is older than 2.11, the oldest that was tested"),
    ],
)
def test_a_release_that_was_not_tested_is_told(
    monkeypatch: pytest.MonkeyPatch, installed: str, told: str
) -> None:
    real = parts.version
    monkeypatch.setattr(
        parts, "version", lambda package: installed if package == "torch" else real(package)
    )
    off = {part.name for part in PARTS if not is_open(part)}
    assert off == {part.name for part in PARTS if part.package == "torch"}
    assert told in (public_note(PARTS) or "")


@pytest.mark.parametrize("installed", ["2.11.0", "2.15.3", "2.13.0+cpu"])
def test_releases_in_between_are_known(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(parts, "version", lambda package: installed)
    assert parts._why_unknown("torch") is None


def test_a_part_that_has_changed_is_told_with_what_has() -> None:
    def check() -> None:
        raise Changed("FSDP2's operator is another")

    note = public_note([Part("gathers in place", "torch", check)])
    assert note is not None
    assert note.startswith("public paths instead of gathers in place (torch 2.")
    assert "has changed: Changed: FSDP2's operator is another" in note
