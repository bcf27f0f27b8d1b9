"""The checkpoints of a run: when one is started, how it ended, and what happens on a full disk."""

from __future__ import annotations

from shardwise.checkpoint.outcome import SaveOutcome
from shardwise.checkpoint.save import Progress, Saver
from shardwise.checkpoint.store import final_path
from shardwise.errors import ExitCode, UserError
from shardwise.lease.lease import LostLease
from shardwise.metrics.callbacks import CheckpointSaved
from shardwise.training.channels import Channels
from shardwise.training.full_disk import rooms_until
from shardwise.training.heartbeat import Phase
from shardwise.training.overlapped import settle
from shardwise.training.reached import Reached
from shardwise.training.replicas import Replicas
from shardwise.training.scale import LossScale
from shardwise.training.session import Session


class Saving:
    """Saves one run. All ranks call each of these methods together."""

    def __init__(
        self,
        session: Session,
        replicas: Replicas,
        scale: LossScale,
        channels: Channels,
    ) -> None:
        self.plan = session.plan
        self.world = session.mesh.world
        self.data = session.data.identity
        self.replicas = replicas
        self.scale = scale
        self.channels = channels
        self.saver = Saver(
            self.plan.run_dir / "checkpoints",
            self.plan,
            session.model,
            session.optimizer,
            self.world,
            channels.fence,
            None if session.outer is None else session.outer.state,
        )
        self.saved_step: int | None = None
        self.disk_ails = False

    def close(self) -> None:
        """End saving, however the run ends."""
        self.saver.close()

    def save_at_edge(self, reached: Reached) -> None:
        """The save that is due after a step. Most of it runs beside the next steps."""
        # Ranks see the end of a background save at different steps; here all know it.
        self.finish()
        if self.disk_ails:
            self.save_for_good(reached, waits=True)
        else:
            self._save(reached, wait=not self.plan.settings.checkpoint.asynchronous)

    def save_for_good(self, reached: Reached, *, waits: bool) -> None:
        """A save that must succeed: nothing comes after it, or the disk failed the one before."""
        self._validate_held()
        failed = self._failure_of_save(reached, hurried=not waits)
        if failed is not None and failed.ails_disk and waits:
            if failed.no_room:
                self._wait_for_room(reached.step)
            failed = self._failure_of_save(reached)
        if failed is not None:
            raise UserError(
                f"step {failed.step} could not be saved: {failed.error}",
                fix="make room or mend the disk; the same command goes on from the newest "
                "checkpoint",
                # There is no restart: it would train all steps since then again, for a disk that is
                # as full.
                code=ExitCode.ENVIRONMENT,
            )

    def finish(self) -> None:
        """Wait for the save in flight, and report it."""
        with self.channels.heartbeat.during(Phase.SAVING):
            outcomes = self.saver.finish()
        self._report(outcomes)

    def poll(self) -> None:
        """Report a save that has ended since the last call."""
        self._report(self.saver.poll())

    def compare_replicas(self, step: int) -> None:
        """Raise where replicas differ: their mixture is no model, and is neither trained nor
        saved."""
        self.replicas.compare(step)
        self.replicas.settle()

    def _save(self, reached: Reached, *, wait: bool, hurried: bool = False) -> list[SaveOutcome]:
        """Start a save of this step. Returns the outcomes that are known."""
        if reached.step == self.saved_step:
            return []
        settle(self.saver.optimizer)
        self.compare_replicas(reached.step)
        progress = Progress(
            step=reached.step,
            position=reached.position,
            shift=reached.shift or None,
            tokens=reached.tokens,
            loss=reached.last_loss,
            loss_scale=self.scale.to_dict(),
            data=self.data,
            held_out=None if reached.held_out.step is None else reached.held_out,
        )
        with self.channels.heartbeat.during(Phase.SAVING):
            outcomes = self.saver.start(progress, hurried=hurried)
            self.saved_step = reached.step
            if wait:
                outcomes += self.saver.finish()
        self._report(outcomes)
        return outcomes

    def _failure_of_save(self, reached: Reached, *, hurried: bool = False) -> SaveOutcome | None:
        """Save this step now. Returns None where it is saved."""
        outcomes = self._save(reached, wait=True, hurried=hurried)
        own = [outcome for outcome in outcomes if outcome.step == reached.step]
        return next((outcome for outcome in own if outcome.error is not None), None)

    def _validate_held(self) -> None:
        """End all ranks together where another job has taken the run directory."""
        refusal: UserError | None = None
        try:
            self.channels.fence.validate()
        except LostLease as error:
            refusal = error
        refusal = self.world.share(refusal)
        if refusal is not None:
            raise refusal

    def _wait_for_room(self, step: int) -> None:
        """Wait for a limited time until a save fits, and raise where none does.

        The steps since the last checkpoint are lost when the run ends here, but training on would
        only add to them.
        """
        patience_s = self.plan.settings.checkpoint.wait_for_room_s
        has_told = False
        for room in rooms_until(self.world, self.saver.room, patience_s, self._wants_stop):
            self.channels.heartbeat.beat()
            if not room.fits and not has_told:
                has_told = True
                self.channels.say(
                    f"ALERT: {room}; training waits up to {patience_s:.0f} s for room"
                )
        if not room.fits:
            raise UserError(
                f"step {step} cannot be saved: {room}",
                why=f"the disk was full, and stayed so for {patience_s:.0f} s",
                fix=f"make room there; `shardwise checkpoint ls {self.plan.run_dir}` lists the "
                "checkpoints; the same command goes on from the newest one",
                code=ExitCode.ENVIRONMENT,
            )

    def _wants_stop(self) -> bool:
        return self.channels.wants_stop

    def _report(self, outcomes: list[SaveOutcome]) -> None:
        """Report a save. After a failure training continues, and the next save tries again."""
        for outcome in outcomes:
            times = (
                f"stage {outcome.stage_s:.2f} s, write {outcome.write_s:.2f} s, "
                f"commit {outcome.commit_s:.2f} s, read back {outcome.check_s:.2f} s"
            )
            self.disk_ails = outcome.ails_disk
            if outcome.error is None:
                self.channels.say(f"saved step {outcome.step} ({times})")
                self.channels.events.write("checkpoint", **outcome.to_dict())
                path = final_path(self.plan.run_dir / "checkpoints", outcome.step)
                self.channels.callbacks.tell(
                    CheckpointSaved(run_dir=self.plan.run_dir, step=outcome.step, path=path)
                )
            else:
                self.saved_step = None
                self.channels.say(f"ALERT: step {outcome.step} was not saved: {outcome.error}")
                self.channels.events.write("checkpoint_failed", **outcome.to_dict())
