"""The loop: data, step, log, evaluate, save, stop. Each is a sentence here and a file elsewhere."""

from __future__ import annotations

import gc
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.checkpoint.restore import find_good, restore_checkpoint
from shardwise.checkpoint.resume import Resumption, validate_begin, validate_resume
from shardwise.checkpoint.save import Progress, SaveOutcome, Saver, software_versions
from shardwise.checkpoint.store import Checkpoint
from shardwise.data.loader import eval_batches
from shardwise.data.prefetch import Prefetcher, prefetching
from shardwise.errors import ExitCode, UserError
from shardwise.lease.lease import UNFENCED, Fence, LostLease
from shardwise.metrics.collectives import CollectiveTimer
from shardwise.metrics.events import EventLog
from shardwise.metrics.line import StepReport, format_line
from shardwise.metrics.sinks.open import open_sinks
from shardwise.parallel.comm import apply_carrier
from shardwise.parallel.float8 import float8_layers
from shardwise.plan.plan import Plan
from shardwise.training.documents import masks_by_position
from shardwise.training.heartbeat import Heartbeat, Phase
from shardwise.training.oom import explained_oom, start_history
from shardwise.training.optim import learning_rate
from shardwise.training.profile import StepProfiler
from shardwise.training.replicas import Replicas
from shardwise.training.resume import accept_resume, announce_resume, decide_together
from shardwise.training.room import rooms_until
from shardwise.training.run_directory import write_run_directory
from shardwise.training.session import (
    Say,
    Session,
    attach_training_loss,
    build_loader,
    build_session,
)
from shardwise.training.signals import StopRequest, stop_requests
from shardwise.training.step import Stepper, evaluate
from shardwise.training.surroundings import (
    device_name,
    fast_attention,
    prepare_matmuls,
    seed_step,
    steady_collector,
)
from shardwise.training.units import float8_table, notes_of, unit_table
from shardwise.training.window import Window


def run(plan: Plan, say: Say, fence: Fence = UNFENCED, heartbeat: Heartbeat | None = None) -> None:
    """Train on this rank until the plan's last step, from the newest good checkpoint if any."""
    heartbeat = heartbeat or Heartbeat(dist.get_rank(), Phase.READING)
    with stop_requests() as stop, _open_events(plan, say, fence) as events:
        torch.use_deterministic_algorithms(plan.config.train.deterministic)
        prepare_matmuls(plan)
        decide_together(lambda: validate_resume(plan))
        found = find_newest(plan, events, say)
        if found is None:
            decide_together(lambda: validate_begin(plan))
            decide_together(lambda: _write_as_holder(plan, fence))
        start_history(plan)
        session = build_session(plan, say, resuming=found is not None)
        accepted = None if found is None else accept_resume(plan, found, session.data.identity)
        loop = Loop(session, events, say, stop, heartbeat, fence)
        try:
            loop.run(accepted)
        finally:
            loop.profiler.close()
            loop.saver.close()


def _write_as_holder(plan: Plan, fence: Fence) -> None:
    fence.validate()
    write_run_directory(plan)


def _open_events(plan: Plan, say: Say, fence: Fence) -> EventLog:
    """The record, which rank 0 writes, and the sinks that this rank feeds."""
    rank = dist.get_rank()
    sinks = open_sinks(plan, rank=rank, local_rank=int(os.environ.get("LOCAL_RANK", rank)))
    path = plan.run_dir / "events.jsonl"
    return EventLog(path, enabled=rank == 0, observers=sinks, say=say, fence=fence)


def find_newest(plan: Plan, events: EventLog, say: Say) -> Checkpoint | None:
    """The newest good checkpoint of the run; what is damaged is set aside and said."""

    def tell(path: Path, reasons: list[str]) -> None:
        say(f"ALERT: {path.name} is damaged and was quarantined: {'; '.join(reasons)}")
        events.write("checkpoint_damaged", path=str(path), reasons=reasons)

    return find_good(plan.run_dir / "checkpoints", verify=plan.config.checkpoint.verify, tell=tell)


@dataclass(slots=True)
class Place:
    """How far the run is: updates made, and global batches read, which skipped ones add to."""

    step: int = 0
    position: int = 0
    tokens: int = 0
    """Those that the weights have learnt from."""

    bad_in_a_row: int = 0
    rollbacks: int = 0


class Loop:
    """One rank's run over the steps that are left."""

    def __init__(
        self,
        session: Session,
        events: EventLog,
        say: Say,
        stop: StopRequest,
        heartbeat: Heartbeat,
        fence: Fence = UNFENCED,
    ) -> None:
        self.session = session
        self.plan = session.plan
        self.events = events
        self.say = say
        self.stop = stop
        self.heartbeat = heartbeat
        self.fence = fence
        self.timer = CollectiveTimer(session.device)
        self.stepper = Stepper(session.model, session.optimizer, session.plan, self.timer.enter)
        self.replicas = Replicas(session.model, session.optimizer, session.mesh)
        self.profiler = StepProfiler(session.plan, session.model, session.units)
        self.saver = Saver(
            self.plan.run_dir / "checkpoints", self.plan, session.model, session.optimizer, fence
        )
        self.place = Place()
        self.stopping = False
        self.last_loss: float | None = None
        self.saved_step: int | None = None
        self.disk_ails = False
        self.has_begun = False

    def run(self, accepted: Resumption | None) -> None:
        """From the restored step to the last, then the final evaluation and checkpoint."""
        self._describe()
        if accepted is not None:
            self._resume(accepted)
        attach_training_loss(self.session, self.say)
        start, end = self.place.step, self._end_step()
        if start >= end:
            self.heartbeat.enter(Phase.DONE)
            self.say(f"nothing to do: step {start} of {self.plan.config.train.steps} is done")
            return
        self.events.write(
            "start",
            step=start,
            world_size=dist.get_world_size(),
            versions=software_versions(),
            environment={"device": device_name(self.plan)},
        )
        if self.plan.config.observe.collectives and self.plan.world_size > 1:
            here = self.session
            apply_carrier(here.model, here.units, self.plan, here.mesh, self.timer)
        oom = explained_oom(self.plan, start, lambda: self.place.step)
        masks = masks_by_position(self.plan)
        attention = fast_attention(self.session.device, reads_positions=masks)
        with steady_collector(), attention, oom:
            self._compare_replicas()
            if start == 0:
                self._evaluate()
            self.heartbeat.enter(Phase.COMPILING)
            while self.place.step < end:
                self._read_and_step(end)
            self._finish(end)

    def _read_and_step(self, end: int) -> None:
        """Steps until `end`, or until the run has gone back to a checkpoint and reads anew."""
        first = self.place.position
        pin = self.session.device.type == "cuda"
        loader = build_loader(self.session)
        # Skipped batches are read beyond the steps that are left, so the range is open.
        with prefetching(loader, first, first + 2**40, pin_memory=pin) as batches:
            window = self._window(batches)
            just_started = True
            while self.place.step < end:
                with self.profiler.step(self.place.step + 1):
                    has_stepped = self._step(batches, window)
                if not has_stepped:
                    return
                done = self.place.step
                is_due = done == end or done % self.plan.config.observe.log_every == 0
                if just_started or is_due or self.stopping:
                    self._log(window, batches)
                    window, just_started = self._window(batches), False
                if self.stopping:
                    self._stop_here()
                if self._edge_work(end):
                    window = self._window(batches)

    def _step(self, batches: Prefetcher, window: Window) -> bool:
        """One update, reading past batches that give none; false after a rollback."""
        train, place = self.plan.config.train, self.place
        while True:
            micro_batches = next(batches)
            seed_step(train.seed, place.position)
            rate = learning_rate(self.plan.config.optim, place.step, train.steps)
            result = self.stepper.run(micro_batches, rate, wants_stop=self._wants_stop())
            self.timer.end_step()
            self._begin_or_beat()
            place.position += 1
            if result.applied:
                place.step, place.bad_in_a_row = place.step + 1, 0
                place.tokens += self.plan.tokens_per_step
                window.add(result)
                self.stopping = result.stop_requested
                if result.overflows:
                    self._tell_scale(result.overflows)
                return True
            self._skip(result.grad_norm)
            if place.bad_in_a_row > train.max_nonfinite:
                self._roll_back()
                return False

    def _begin_or_beat(self) -> None:
        """After a step. From the first on there is something to save, and signals ask for it."""
        if self.has_begun:
            self.heartbeat.beat()
            return
        self.has_begun = True
        self.stop.listen()
        # Whoever sees one rank train may ask all of them to stop: by then all listen.
        everyone = torch.zeros(1, device=self.session.device)
        dist.all_reduce(everyone)
        everyone.item()
        self.heartbeat.begin()

    def _wants_stop(self) -> bool:
        """A signal came, or another job has taken the run directory."""
        return bool(self.stop) or self.fence.lost

    def _tell_scale(self, overflows: int) -> None:
        """Steps that were computed more than once took longer, which must not stay a riddle."""
        scale, step = self.stepper.scale.value, self.place.step
        self.say(
            f"loss scale {scale:g} from step {step} on: fp16 gradients overflowed with a larger one"
        )
        self.events.write("loss_scale", step=step, scale=scale, overflows=overflows)

    def _skip(self, grad_norm: float) -> None:
        """A batch without a finite loss and gradient changes nothing but the position."""
        place, size = self.place, self.plan.global_batch.value
        place.bad_in_a_row += 1
        batch = place.position - 1
        is_norm = not math.isfinite(grad_norm)
        what = f"gradient norm {grad_norm}" if is_norm else "a loss that is not finite"
        self.say(
            f"ALERT: {what} in batch {batch} at step {place.step + 1}; skipped "
            f"({place.bad_in_a_row} in a row)"
        )
        self.events.write(
            "nonfinite",
            step=place.step + 1,
            batch=batch,
            sequences=[batch * size, (batch + 1) * size],
            in_a_row=place.bad_in_a_row,
        )

    def _roll_back(self) -> None:
        """Back to the newest checkpoint, and on with the batches after the offending ones."""
        self._finish_save()
        with self.heartbeat.during(Phase.READING):
            found = find_newest(self.plan, self.events, self.say)
        config = self.plan.config
        if found is None or self.place.rollbacks >= config.train.max_nonfinite:
            warmup = max(100, 2 * config.optim.warmup_steps)
            slower = (
                f"lower the rate: optim.lr={config.optim.lr / 3:.1e}, or warm up longer: "
                f"optim.warmup_steps={min(config.train.steps, warmup)}"
            )
            is_widest = self.plan.param_dtype.value == "fp32"
            raise UserError(
                f"{self.place.bad_in_a_row} batches in a row gave no finite gradient at step "
                f"{self.place.step + 1}",
                why="no checkpoint is left to go back to"
                if found is None
                else f"going back {self.place.rollbacks} times did not help",
                fix=slower if is_widest else f"{slower}, or write precision.param=fp32",
                code=ExitCode.DIVERGED,
            )
        position, rollbacks = self.place.position, self.place.rollbacks + 1
        with self.heartbeat.during(Phase.READING):
            self._restore(found)
        self.place.position, self.place.rollbacks = position, rollbacks
        self.say(f"ALERT: rolled back to step {found.step}; going on with batch {position}")
        self.events.write("rollback", step=found.step, position=position)

    def _edge_work(self, end: int) -> bool:
        """What happens between steps on all ranks together; true if it took time worth noting."""
        config, done = self.plan.config, self.place.step
        self._report(self.saver.poll())
        # Of an earlier edge: the device has passed it, so that nobody waits.
        self.replicas.settle()
        profiled = self.profiler.finish(done, self.events, self.say)
        if done % config.train.gc_every == 0:
            gc.collect()
        if done == end:
            return False
        if config.train.compare_replicas_every and done % config.train.compare_replicas_every == 0:
            self.replicas.compare(done)
        evaluates = config.train.eval_every > 0 and done % config.train.eval_every == 0
        saves = config.checkpoint.every > 0 and done % config.checkpoint.every == 0
        if evaluates:
            self._evaluate()
        if saves:
            # Ranks see a save in the background end at different steps; here all know its end.
            self._finish_save()
            if self.disk_ails:
                self._save_for_good(waits=True)
            else:
                self._save(wait=not config.checkpoint.asynchronous)
        return profiled or evaluates or saves

    def _finish(self, end: int) -> None:
        steps = self.plan.config.train.steps
        self._evaluate()
        if self.plan.config.checkpoint.at_end or end < steps:
            self._save_for_good(waits=True)
        self._finish_save()
        self.heartbeat.enter(Phase.DONE)
        self.events.write("end", step=end, finished=end == steps, loss=self.last_loss)
        if end < steps:
            self.say(f"stopped after step {end} of {steps}, as train.stop_after says")
        else:
            self.say(f"finished {steps} steps")

    def _stop_here(self) -> None:
        """Some rank was asked to stop: save, and leave with the code that says so."""
        reason = self.stop.name or "a signal to another rank"
        # Who asked will not wait long.
        self._save_for_good(waits=False)
        self.events.write("stopped", step=self.place.step, reason=reason)
        raise UserError(
            f"stopped by {reason}; step {self.place.step} is saved",
            fix="the same command goes on from there",
            code=ExitCode.PREEMPTED,
        )

    def _validate_held(self) -> None:
        """All ranks end together where the run directory is another job's by now."""
        refusal: list[UserError | None] = [None]
        try:
            self.fence.validate()
        except LostLease as error:
            refusal = [error]
        dist.broadcast_object_list(refusal, src=0)
        if refusal[0] is not None:
            raise refusal[0]

    def _window(self, batches: Prefetcher) -> Window:
        return Window(self.plan, self.session.device, batches.wait_s)

    def _describe(self) -> None:
        data, units, plan = self.session.data, self.session.units, self.plan
        layers = float8_layers(self.session.model, units, plan)
        tables = [*unit_table(units, plan, layers), *float8_table(layers, plan)]
        for line in [*tables, *notes_of(units, plan)]:
            self.say(line)
        for record in data.skipped:
            self.say(f"skipped corrupt record {record}")
        self.events.write(
            "data", tokens=data.num_train_tokens, tokenizer=data.tokenizer_identity,
            skipped=list(data.skipped),
        )  # fmt: skip

    def _resume(self, accepted: Resumption) -> None:
        self._restore(accepted.checkpoint)
        self.place.position = accepted.position
        announce_resume(accepted, self.events, self.say)

    def _restore(self, found: Checkpoint) -> None:
        session, manifest = self.session, found.manifest
        restore_checkpoint(found, self.plan, session.model, session.optimizer)
        self.stepper.scale.restore(manifest.loss_scale)
        self.place = Place(found.step, manifest.position, manifest.tokens)
        self.last_loss, self.saved_step = manifest.loss, found.step

    def _end_step(self) -> int:
        train = self.plan.config.train
        return train.steps if train.stop_after is None else train.stop_after

    def _log(self, window: Window, batches: Prefetcher) -> None:
        step = self.place.step
        rate = learning_rate(self.plan.config.optim, step - 1, self.plan.config.train.steps)
        report: StepReport = window.report(step, self.place.tokens, rate, batches.wait_s)
        self.last_loss = report.loss
        self.say(format_line(report))
        self.events.write("step", **asdict(report))
        if self.plan.config.observe.collectives:
            self._log_collectives(step, report.step_s)

    def _log_collectives(self, step: int, step_s: float) -> None:
        before = self.timer.late_rank
        found = self.timer.report(step_s)
        if found is None:
            return
        self.events.write("collectives", step=step, **found)
        late, rank = found["straggler"], self.timer.late_rank
        # Said once: the record repeats it for as long as it lasts.
        if late is not None and rank != before:
            self.say(
                f"ALERT: the other ranks wait {1e3 * late['behind_s']:.0f} ms a step for rank "
                f"{rank}"
            )
        elif late is None and before is not None:
            self.say(f"rank {before} is in step with the others again")

    def _evaluate(self) -> None:
        data = self.session.data.eval
        if data is None:
            return
        batches = eval_batches(
            data,
            num_sequences=self.plan.config.data.eval_sequences,
            micro_batch=self.plan.micro_batch.value,
            rank=dist.get_rank(),
            num_ranks=dist.get_world_size(),
        )
        self.timer.enter("eval")
        with self.heartbeat.during(Phase.EVALUATING):
            loss = evaluate(self.session.model, list(batches), self.session.device)
        self.say(f"eval at step {self.place.step}: loss {loss:.4f} on held-out text")
        self.events.write("eval", step=self.place.step, loss=loss)

    def _save(self, *, wait: bool, hurried: bool = False) -> list[SaveOutcome]:
        """Start a save of this step; returns outcomes that are known."""
        if self.place.step == self.saved_step:
            return []
        self._compare_replicas()
        progress = Progress(
            step=self.place.step,
            position=self.place.position,
            tokens=self.place.tokens,
            loss=self.last_loss,
            loss_scale=self.stepper.scale.to_dict(),
            data=self.session.data.identity,
        )
        with self.heartbeat.during(Phase.SAVING):
            outcomes = self.saver.start(progress, hurried=hurried)
            self.saved_step = self.place.step
            if wait:
                outcomes += self.saver.finish()
        self._report(outcomes)
        return outcomes

    def _compare_replicas(self) -> None:
        """A mixture of replicas that differ is no model: it is neither trained on nor saved."""
        self.replicas.compare(self.place.step)
        self.replicas.settle()

    def _finish_save(self) -> None:
        """Wait for the save in flight, and tell how it went."""
        with self.heartbeat.during(Phase.SAVING):
            outcomes = self.saver.finish()
        self._report(outcomes)

    def _save_for_good(self, *, waits: bool) -> None:
        """A save that must succeed: nothing comes after it, or the disk failed the one before."""
        self._validate_held()
        failed = self._failure_of_save(hurried=not waits)
        if failed is not None and failed.ails_disk and waits:
            if failed.no_room:
                self._wait_for_room()
            failed = self._failure_of_save()
        if failed is not None:
            raise UserError(
                f"step {failed.step} could not be saved: {failed.error}",
                fix="make room or mend the disk; the same command goes on from the newest "
                "checkpoint",
                # No restart: it would train all steps since then again, for a disk as full.
                code=ExitCode.ENVIRONMENT,
            )

    def _failure_of_save(self, *, hurried: bool = False) -> SaveOutcome | None:
        """Save this step now; None where it is saved."""
        outcomes = self._save(wait=True, hurried=hurried)
        own = [outcome for outcome in outcomes if outcome.step == self.place.step]
        return next((outcome for outcome in own if outcome.error is not None), None)

    def _wait_for_room(self) -> None:
        """Wait, for some time, until a save fits; raise where none does.

        What was trained since the last checkpoint is lost when the run ends here, but training on
        would only add to it.
        """
        patience_s = self.plan.config.checkpoint.wait_for_room_s
        has_told = False
        for room in rooms_until(self.saver.room, patience_s, self._wants_stop):
            self.heartbeat.beat()
            if not room.fits and not has_told:
                has_told = True
                self.say(f"ALERT: {room}; training waits up to {patience_s:.0f} s for room")
        if not room.fits:
            raise UserError(
                f"step {self.place.step} cannot be saved: {room}",
                why=f"the disk was full, and stayed so for {patience_s:.0f} s",
                fix=f"make room there; `shardwise checkpoint ls {self.plan.run_dir}` lists the "
                "checkpoints; the same command goes on from the newest one",
                code=ExitCode.ENVIRONMENT,
            )

    def _report(self, outcomes: list[SaveOutcome]) -> None:
        """A save that failed is said at once; training goes on and tries again at the next."""
        for outcome in outcomes:
            times = (
                f"stage {outcome.stage_s:.2f} s, write {outcome.write_s:.2f} s, "
                f"commit {outcome.commit_s:.2f} s, read back {outcome.check_s:.2f} s"
            )
            self.disk_ails = outcome.ails_disk
            if outcome.error is None:
                self.say(f"saved step {outcome.step} ({times})")
                self.events.write("checkpoint", **outcome.to_dict())
            else:
                self.saved_step = None
                self.say(f"ALERT: step {outcome.step} was not saved: {outcome.error}")
                self.events.write("checkpoint_failed", **outcome.to_dict())
