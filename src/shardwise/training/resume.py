"""How all ranks agree to resume from a checkpoint or to go back to one, and what they report."""

from __future__ import annotations

from pathlib import Path

from shardwise.checkpoint.eval_history import HeldOut
from shardwise.checkpoint.may_resume import Resumption, judge_resume
from shardwise.checkpoint.restore import find_good, restore_checkpoint
from shardwise.checkpoint.store import Checkpoint
from shardwise.errors import ExitCode, UserError
from shardwise.parallel.mesh import World
from shardwise.plan.planned import Plan
from shardwise.plan.run_directory import write_run_directory
from shardwise.training.channels import Channels
from shardwise.training.overlapped import settle
from shardwise.training.reached import Reached
from shardwise.training.scale import LossScale
from shardwise.training.session import Session


def find_newest(plan: Plan, world: World, channels: Channels) -> Checkpoint | None:
    """The newest good checkpoint of the run. Damaged ones are quarantined and reported."""

    def tell(path: Path, reasons: list[str]) -> None:
        channels.say(f"ALERT: {path.name} is damaged and was quarantined: {'; '.join(reasons)}")
        channels.events.write("checkpoint_damaged", path=str(path), reasons=reasons)

    root, verify = plan.run_dir / "checkpoints", plan.settings.checkpoint.verify
    return find_good(root, world, verify=verify, tell=tell)


def restore(found: Checkpoint, session: Session, scale: LossScale) -> Reached:
    """Fill model, optimizer and loss scale. Returns the progress of the run at that checkpoint."""
    world, manifest = session.mesh.world, found.manifest
    settle(session.optimizer)
    sites = None if session.outer is None else session.outer.state
    restore_checkpoint(found, session.plan, session.model, session.optimizer, world, sites)
    scale.restore(manifest.loss_scale)
    return Reached(
        step=found.step,
        position=manifest.position,
        shift=manifest.shift or 0,
        tokens=manifest.tokens,
        last_loss=manifest.loss,
        held_out=manifest.held_out or HeldOut(),
    )


def why_no_way_back(reached: Reached, found: Checkpoint | None) -> str:
    """Why a run does not go back to a checkpoint once more."""
    if found is None:
        return "no checkpoint is left to go back to"
    return f"going back {reached.rollbacks} times did not help"


def refuse_rollback(plan: Plan, reached: Reached, why: str) -> UserError:
    """The error for a run whose gradients stay not finite."""
    config = plan.settings
    warmup = max(100, 2 * config.optim.warmup_steps)
    slower = (
        f"lower the rate: optim.lr={config.optim.lr / 3:.1e}, or warm up longer: "
        f"optim.warmup_steps={min(config.train.steps, warmup)}"
    )
    is_widest = plan.decided.param_dtype == "fp32"
    return UserError(
        f"{reached.bad_in_a_row} batches in a row gave no finite gradient at step "
        f"{reached.step + 1}",
        why=why,
        fix=slower if is_widest else f"{slower}, or write precision.param=fp32",
        code=ExitCode.DIVERGED,
    )


def accept_resume(plan: Plan, world: World, found: Checkpoint, data: str) -> Resumption:
    """How the run resumes with this data. The run directory records it from now on."""

    def accept() -> Resumption:
        resumption = judge_resume(found, plan, data)
        write_run_directory(plan)
        return resumption

    return world.decide(accept)


def announce_resume(accepted: Resumption, channels: Channels) -> None:
    """Report what changed, and where the run resumes."""
    found, say = accepted.checkpoint, channels.say
    data = "continued"
    if accepted.changes:
        say(f"changed since step {found.step}:")
    for change in accepted.changes:
        say(f"  {change}")
    if not accepted.remembers_data:
        data = "taken to be the same"
        say("the checkpoint is too old to tell what data it used; the data is taken to be the same")
    if accepted.restarts_data:
        data = "restarted"
        say("the data is read from its start, as data.on_change=restart says")
    if accepted.changes_batch:
        say(
            f"a batch has {accepted.global_batch} sequences from here on, and had "
            f"{found.manifest.global_batch}; reading goes on behind the "
            f"{found.manifest.next_sequence:,} sequences that were read"
        )
    if accepted.forgets_held_out:
        say("the held-out text is another one: the best step is looked for anew")
    say(f"resumed at step {found.step} from {found.path}")
    channels.events.write(
        "resume",
        step=found.step,
        written_by=found.manifest.world_size,
        position=accepted.position,
        sequence=accepted.next_sequence,
        data=data,
        changes=[str(change) for change in accepted.changes],
    )
