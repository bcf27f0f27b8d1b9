"""Whether a run may resume from a checkpoint: what changed since, and what must not change.

Needs no torch: the launcher asks before any rank starts, and the ranks ask again once they have
their tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.checkpoint.base import validate_base
from shardwise.checkpoint.eval_history import HeldOut
from shardwise.checkpoint.manifest import Damaged
from shardwise.checkpoint.own_plan import read_own_plan
from shardwise.checkpoint.store import Checkpoint, Entry, list_entries, validate_readable
from shardwise.config.plain import config_to_dict
from shardwise.config.schema import AdapterConfig, RunConfig
from shardwise.config.schema_text import show_value
from shardwise.errors import ExitCode, UserError, printable
from shardwise.files import free_name
from shardwise.plan.planned import Plan

Values = dict[str, Any]

# Each of these alone decides which tokens come at which position.
ORDER = (
    *("data.seq_len", "data.shuffle", "data.group_lengths"),
    *("train.seed", "train.global_batch"),
)
_BATCH = "train.global_batch"
# These name the tokens. The same tokens may have other names, so their hash decides.
NAMES = (
    "data.source",
    "data.path",
    "data.field",
    "data.name",
    "data.split",
    "data.tokenizer",
    "data.eval_fraction",
)
# These decide which text is evaluated.
HELD_OUT = ("data.eval_fraction", "data.eval_path", "data.eval_split", "data.eval_sequences")
# What the numbers of adapters mean depends on these.
ADAPTER = ("method", "targets", "base", "rank", "alpha", "rslora", "dora", "modules_to_save")
# The place of a run is no part of what it trains.
PLACE = ("name", "runs_dir")
# Fields of config.json that do not describe the model.
NOT_THE_MODEL = ("transformers_version", "_name_or_path")
_MOST_NAMED = 5
_RESTARTS = "it keeps weights, optimizer and step, and reads the data from its start"


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that is not what it was."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return printable(f"{self.name}: {_shown(self.old)} -> {_shown(self.new)}")


@dataclass(frozen=True, slots=True)
class Resumption:
    """A resume that was accepted."""

    checkpoint: Checkpoint
    changes: tuple[Change, ...]
    restarts_data: bool
    """The data is read from its start: it is other data, or in another order."""

    global_batch: int
    """Sequences of a batch from here on."""

    remembers_data: bool
    """False where the checkpoint is too old to say which tokens it was trained on."""

    @property
    def position(self) -> int:
        """The global batch that is read next."""
        return 0 if self.restarts_data else self.checkpoint.manifest.position

    @property
    def shift(self) -> int:
        """What the place of every batch is shifted by, so that the next one begins behind the
        sequences that were read."""
        return self.next_sequence - self.position * self.global_batch

    @property
    def next_sequence(self) -> int:
        """The first sequence that is read."""
        return 0 if self.restarts_data else self.checkpoint.manifest.next_sequence

    @property
    def changes_batch(self) -> bool:
        """Whether batches go on with another size."""
        return not self.restarts_data and self.global_batch != self.checkpoint.manifest.global_batch

    @property
    def forgets_held_out(self) -> bool:
        """Whether losses are of other text than before, so that they cannot be compared."""
        has_other = any(change.name in HELD_OUT for change in self.changes)
        return self.checkpoint.manifest.held_out is not None and (self.restarts_data or has_other)

    @property
    def held_out(self) -> HeldOut:
        """What earlier evaluations say of the text that is evaluated now."""
        found = None if self.forgets_held_out else self.checkpoint.manifest.held_out
        return found or HeldOut()


def validate_resume(plan: Plan) -> None:
    """Raise where the run directory holds checkpoints that this plan cannot resume from.

    Only settings are compared here. Ranks compare the tokens once they have them.
    """
    entries = list_entries(plan.run_dir / "checkpoints")
    found = [entry.checkpoint for entry in entries if entry.checkpoint is not None]
    newest = found[-1].step if found else 0
    for entry in entries:
        if entry.step >= newest:
            # It may be the newest, and good.
            validate_readable(entry)
    if not found:
        _validate_begin(plan, entries)
        return
    if not plan.settings.checkpoint.resume:
        raise UserError(
            f"{plan.run_dir} holds checkpoints up to step {found[-1].step}",
            why="checkpoint.resume=false asks for a run from the start, and nothing is overwritten",
            fix=f"give the run another name: name={free_name(plan.run_dir).name}, or leave "
            "checkpoint.resume out to go on",
        )
    judge_resume(found[-1], plan)


def validate_begin(plan: Plan) -> None:
    """Raise where a run would begin at step 1 over checkpoints, none of which is good."""
    _validate_begin(plan, list_entries(plan.run_dir / "checkpoints"))


def judge_resume(found: Checkpoint, plan: Plan, data: str | None = None) -> Resumption:
    """How the plan resumes from `found`, or an error. `data` is the tokens' identity, if known."""
    try:
        old = read_own_plan(found.path)
    except Damaged as damage:
        if data is not None:
            raise _unverified(found, damage) from damage
        # The ranks will find it too, and quarantine this checkpoint.
        old = {"config": {}, "hf_config": plan.hf_config, "choices": {}}
    new = json.loads(json.dumps(plan.to_dict()))
    _validate_model(plan, old["hf_config"])
    _validate_adapter(plan, old)
    _validate_optimizer(plan, old["config"])
    _validate_moments(plan, old["config"])
    validate_base(found, plan)
    changes = tuple(_changes(found, old, new))
    fixed = [name for name in ORDER if name != _BATCH or not plan.settings.train.batch_may_change]
    broken = [str(change) for change in changes if change.name in fixed]
    broken += _other_tokens(found.manifest.data, data, changes)
    if broken and plan.settings.data.on_change == "refuse":
        raise _refusal(found, plan, broken)
    batch, remembers = plan.decided.global_batch, found.manifest.data is not None
    return Resumption(found, changes, bool(broken), batch, remembers)


def _unverified(found: Checkpoint, damage: Damaged) -> UserError:
    return UserError(
        f"{found.path} is damaged",
        why=f"{damage}; with checkpoint.verify=false it was not verified before it was chosen",
        fix="leave checkpoint.verify out: a damaged checkpoint is then set aside, and the run "
        "resumes from the one before it",
        code=ExitCode.VERIFY_FAILED,
    )


def _validate_begin(plan: Plan, entries: Sequence[Entry]) -> None:
    lost = [entry for entry in entries if entry.state != "partial"]
    if not lost or plan.settings.checkpoint.begin_anew:
        return
    shown = "".join(
        f"\n    {entry.path.name}: {entry.reason.splitlines()[0] if entry.reason else entry.state}"
        for entry in lost[-_MOST_NAMED:]
    )
    raise UserError(
        f"{plan.run_dir} has checkpoints, and none of them is good:{shown}",
        why="the run would begin at step 1 again, and its training so far would be lost",
        fix="restore it from a backup, or give the run another name: "
        f"name={free_name(plan.run_dir).name}, or begin at step 1 and leave them where they are: "
        "checkpoint.begin_anew=true",
        code=ExitCode.VERIFY_FAILED,
    )


def _changes(found: Checkpoint, old: Values, new: Values) -> Iterator[Change]:
    """Changed settings in the order of the configuration, then changed decisions of the
    planner."""
    now = dict(_flat(new["config"]))
    before = now
    if old["config"]:
        # A field that is newer than the checkpoint had the effect of its default.
        defaults = dict(_flat(config_to_dict(RunConfig())))
        before = defaults | dict(_flat(old["config"]))
    manifest, batch = found.manifest, new["choices"]["global_batch"]["value"]
    before = before | {"train.seed": manifest.seed, "train.global_batch": manifest.global_batch}
    now = now | {"train.global_batch": batch}
    for name, value in now.items():
        if name not in PLACE and before.get(name) != value:
            yield Change(name, before.get(name), value)
    decided = old["choices"]
    for name, choice in new["choices"].items():
        if name == "global_batch" or choice["source"] == "user" or name not in decided:
            continue
        if decided[name].get("value") != choice["value"]:
            yield Change(f"{name} (planned)", decided[name].get("value"), choice["value"])


def _other_tokens(
    saved: str | None, data: str | None, changes: tuple[Change, ...]
) -> Iterator[str]:
    """Why the tokens are not those of the checkpoint, as far as is known."""
    renamed = [
        str(change)
        for change in changes
        if change.name in NAMES or change.name.startswith("data.mixture")
    ]
    if saved is None:
        yield from renamed
    elif data is not None and data != saved:
        yield from renamed or ["the training tokens: no setting changed, but the text did"]


def _refusal(found: Checkpoint, plan: Plan, broken: list[str]) -> UserError:
    why = "the data would not go on where it stopped"
    if found.manifest.data is None:
        why += "; this checkpoint is too old to tell whether other names stand for the same text"
    on = f"write data.on_change=restart: {_RESTARTS}"
    if all(line.startswith(f"{_BATCH}: ") for line in broken):
        on = "write train.batch_may_change=true: it reads on behind what was read, in batches of "
        on += f"{plan.decided.global_batch}"
    return UserError(
        f"{plan.run_dir} cannot go on at step {found.step} with other data:"
        + "".join(f"\n    {change}" for change in broken),
        why=why,
        fix=f"set this back, or give the run another name: name={free_name(plan.run_dir).name}, or "
        f"{on}",
    )


def _validate_model(plan: Plan, old: Values) -> None:
    before, now = dict(_flat(old)), dict(_flat(plan.hf_config))
    changes = [
        str(Change(name, before.get(name), now.get(name)))
        for name in {**before, **now}
        if name not in NOT_THE_MODEL and before.get(name) != now.get(name)
    ]
    if not changes:
        return
    more = len(changes) - _MOST_NAMED
    raise UserError(
        f"{plan.run_dir} holds checkpoints of another model:"
        + "".join(f"\n    {change}" for change in changes[:_MOST_NAMED])
        + (f"\n    and {more} more" if more > 0 else ""),
        why="model.name, model.overrides or the model's config.json changed since they were "
        "written",
        fix=f"set this back, or give the run another name: name={free_name(plan.run_dir).name}",
    )


def _validate_adapter(plan: Plan, old: Values) -> None:
    """Raise where adapters have other shapes or another scale than those of the checkpoint."""
    now = asdict(plan.settings.adapter)
    before = asdict(AdapterConfig()) | dict(old["config"].get("adapter", now))
    if before["base"] == "auto":
        before["base"] = old["choices"]["base"]["value"]
    changes = [
        str(Change(f"adapter.{name}", before[name], now[name]))
        for name in ADAPTER
        if before[name] != now[name]
    ]
    if changes and "none" not in (before["method"], now["method"]):
        raise UserError(
            f"{plan.run_dir} holds checkpoints of other adapters:"
            + "".join(f"\n    {change}" for change in changes),
            why="their numbers mean something else with other settings",
            fix=f"set this back, or give the run another name: name={free_name(plan.run_dir).name}",
        )


def _validate_optimizer(plan: Plan, old: Values) -> None:
    """Raise where the state in the checkpoint is another optimizer's."""
    now = plan.settings.optim.name
    before = dict(old.get("optim", {})).get("name", "adamw" if old else now)
    if before != now:
        raise UserError(
            f"{plan.run_dir} holds checkpoints with optim.name={before}, and this run has {now}",
            why="an optimizer cannot go on from the state of another one",
            fix=f"write optim.name={before}, or give the run another name: "
            f"name={free_name(plan.run_dir).name}",
        )


def _validate_moments(plan: Plan, old: Values) -> None:
    """Raise where Adam's moments are codes in one of the two runs alone."""
    now = plan.settings.optim.state
    before = dict(old.get("optim", {})).get("state", now)
    if before != now and "int8" in (before, now):
        raise UserError(
            f"{plan.run_dir} holds checkpoints with optim.state={before}, and this run has {now}",
            why="codes of eight bits are not read as moments, nor moments as codes",
            fix=f"write optim.state={before}, or give the run another name: "
            f"name={free_name(plan.run_dir).name}",
        )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every leaf; an empty mapping is a leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    return value if isinstance(value, str) else show_value(value)
