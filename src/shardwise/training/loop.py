"""The loop: data, step, log, evaluate, save, stop. Each is a sentence here and a file elsewhere."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist

from shardwise.checkpoint.may_resume import Resumption
from shardwise.checkpoint.save import software_versions
from shardwise.checkpoint.store import Checkpoint
from shardwise.data.prefetch import Prefetcher, prefetching
from shardwise.errors import ExitCode, UserError
from shardwise.metrics.collectives import CollectiveTimer
from shardwise.metrics.progress_line import StepReport
from shardwise.parallel.axis_groups import AxisGroups
from shardwise.training.channels import Channels
from shardwise.training.comparison import compare_losses
from shardwise.training.document_attention import masks_by_position
from shardwise.training.evaluating import Evaluating
from shardwise.training.heartbeat import Phase
from shardwise.training.joining import OuterStep, no_outer_step
from shardwise.training.oom import explained_oom
from shardwise.training.optim import learning_rate
from shardwise.training.outer import Standing
from shardwise.training.pipeline import StagePasses
from shardwise.training.profiled_steps import StepProfiler
from shardwise.training.reached import Reached
from shardwise.training.reference_pass import prepare_reference
from shardwise.training.replicas import Replicas
from shardwise.training.resume import (
    announce_resume,
    find_newest,
    refuse_rollback,
    restore,
    why_no_way_back,
)
from shardwise.training.saving import Saving
from shardwise.training.session import (
    Session,
    attach_training_loss,
    build_loader,
    objective_of,
)
from shardwise.training.step import Stepper
from shardwise.training.surroundings import (
    device_name,
    fast_attention,
    seed_step,
    steady_collector,
)
from shardwise.training.telling import (
    tell_collectives,
    tell_scale,
    tell_session,
    tell_skip,
    tell_stages,
    tell_step,
)
from shardwise.training.window import Window


class Loop:
    """One rank's run over the steps that are left."""

    def __init__(
        self,
        session: Session,
        channels: Channels,
        timer: CollectiveTimer,
        outer_step: OuterStep = no_outer_step,
    ) -> None:
        self.session = session
        self.plan = session.plan
        self.mesh = session.mesh
        self.channels = channels
        self.say = channels.say
        self.events = channels.events
        self.heartbeat = channels.heartbeat
        self.timer = timer
        trained, objective = (session.model, session.optimizer), objective_of(session)
        self.stepper = Stepper(*trained, self.plan, self.mesh, timer.enter, objective=objective)
        self.replicas = Replicas(session.model, session.optimizer, session.mesh)
        what = (session.plan, session.model, session.units, self.mesh.world)
        self.profiler = StepProfiler(*what, groups=AxisGroups.of(self.mesh))
        self.saving = Saving(session, self.replicas, self.stepper.scale, channels)
        self.evaluating = Evaluating(session, channels, timer, objective)
        self.outer_step = outer_step
        self.reached = Reached()
        self.stopping = False
        self.has_begun = False

    def run(self, accepted: Resumption | None) -> None:
        """Train from the restored step to the last, then evaluate and save."""
        tell_session(self.session, self.channels)
        start, end = 0 if accepted is None else accepted.checkpoint.step, self._end_step()
        is_compared = start < end and prepare_reference(self.session, self.channels, start)
        if accepted is not None:
            self._resume(accepted)
        if not is_compared:
            attach_training_loss(self.session, self.say)
        if self._is_over(end):
            self.heartbeat.enter(Phase.DONE)
            steps, early = self.plan.settings.train.steps, self.evaluating.ends_early(self.reached)
            why = f"; {self.evaluating.why_early(self.reached)}" if early else ""
            self.say(f"nothing to do: step {start} of {steps} is done{why}")
            return
        self._enter_sites(end)
        start = self.reached.step
        self.events.write(
            "start",
            step=start,
            world_size=self.mesh.world.size,
            versions=software_versions(),
            environment={"device": device_name(self.plan)},
        )
        if not is_compared:
            compare_losses(self.session, self.channels, start)
        self.timer.forget()
        oom = explained_oom(self.plan, self.mesh.world.rank, start, lambda: self.reached.step)
        device, masks = self.session.device, masks_by_position(self.plan)
        with steady_collector(), fast_attention(device, reads_positions=masks), oom:
            self.saving.compare_replicas(self.reached.step)
            if start == 0 or self.evaluating.is_due(self.reached):
                self.evaluating.evaluate(self.reached)
            self.heartbeat.enter(Phase.COMPILING)
            while not self._is_over(end):
                self._read_and_step(end)
            self._finish()

    def _read_and_step(self, end: int) -> None:
        """Take steps until `end`, or until the run has gone back to a checkpoint and must read
        again."""
        first = self.reached.position
        pin = self.session.device.type == "cuda"
        loader = build_loader(self.session, self.reached.shift)
        # Skipped batches are read beyond the steps that are left, so the range is open.
        with prefetching(loader, first, first + 2**40, pin_memory=pin) as batches:
            window = self._window(batches)
            just_started = True
            while not self._is_over(end):
                with self.profiler.step(self.reached.step + 1):
                    has_stepped = self._step(batches, window)
                if not has_stepped:
                    return
                moved = self._meet_other_sites()
                done = self.reached.step
                is_due = done == end or done % self.plan.settings.observe.log_every == 0
                if just_started or is_due or self.stopping:
                    self._log(window, batches)
                    window, just_started = self._window(batches), False
                if self.stopping:
                    self._stop_here()
                if self._edge_work(end):
                    window = self._window(batches)
                if moved:
                    return

    def _step(self, batches: Prefetcher, window: Window) -> bool:
        """One update. Batches that give none are skipped. Returns False after a rollback."""
        train, reached = self.plan.settings.train, self.reached
        while True:
            micro_batches = next(batches)
            seed_step(train.seed, reached.position, self.mesh.token_rank)
            rate = learning_rate(self.plan.settings.optim, reached.step, train.steps)
            result = self.stepper.run(micro_batches, rate, wants_stop=self.channels.wants_stop)
            self.timer.end_step()
            self._begin_or_beat()
            reached.position += 1
            if result.applied:
                reached.step, reached.bad_in_a_row = reached.step + 1, 0
                # Micro-batches of a step are equally long on all ranks.
                tokens = self.plan.decided.global_batch * micro_batches[0].inputs.shape[1]
                reached.tokens += tokens
                self.outer_step(Standing(reached.step, reached.position))
                window.add(result, tokens)
                # Several sites stop together, after an outer step.
                self.stopping = result.stop_requested and self.session.outer is None
                if result.overflows:
                    scale = self.stepper.scale.value
                    tell_scale(scale, result.overflows, reached.step, self.channels)
                return True
            reached.bad_in_a_row += 1
            tell_skip(self.plan, reached, result.grad_norm, self.channels)
            if reached.bad_in_a_row > train.max_nonfinite:
                self._roll_back()
                return False

    def _meet_other_sites(self) -> bool:
        """After an outer step agree on the next batch, and on whether to stop. Returns whether this
        site reads on elsewhere, because another one has skipped batches."""
        outer, reached = self.session.outer, self.reached
        if outer is None or not outer.timetable.is_whole_after(reached.step):
            return False
        before = reached.position
        has_moved = self._go_to(outer.where(Standing(reached.step, before)))
        wants_stop = self.channels.wants_stop
        reached.position, self.stopping = outer.agree(reached.position, wants_stop=wants_stop)
        return has_moved or reached.position != before

    def _go_to(self, there: Standing) -> bool:
        """Go on where the other sites are. Returns whether that is another step."""
        reached = self.reached
        moved, reached.position = there.step - reached.step, there.position
        if moved:
            train = self.plan.decided
            reached.tokens += moved * train.global_batch * train.seq_len
            reached.step = there.step
            self.say(f"went on to step {there.step}, with the state of the other sites")
            self.events.write("joined", step=there.step, position=there.position)
        return moved != 0

    def _enter_sites(self, end: int) -> None:
        """Meet the other sites, and go on where they are."""
        if self.session.outer is not None:
            here = Standing(self.reached.step, self.reached.position)
            with self.heartbeat.during(Phase.JOINING):
                there = self.session.outer.enter(here, end)
            self._go_to(there)

    def _begin_or_beat(self) -> None:
        """Report a step. From the first one on there is something to save, and signals ask for a
        save."""
        if self.has_begun:
            self.heartbeat.beat()
            return
        self.has_begun = True
        self.channels.stop.listen()
        # Whoever sees one rank train may ask all of them to stop, so all must listen by then.
        everyone = torch.zeros(1, device=self.session.device)
        dist.all_reduce(everyone, group=self.mesh.world.group)
        everyone.item()
        self.heartbeat.begin()

    def _roll_back(self) -> None:
        """Go back to the newest checkpoint, and continue with the batches after the offending
        ones."""
        if self.session.outer is not None:
            raise refuse_rollback(self.plan, self.reached, "a site cannot go back alone")
        self.saving.finish()
        before = self.reached
        with self.heartbeat.during(Phase.READING):
            found = find_newest(self.plan, self.mesh.world, self.channels)
            if found is None or before.rollbacks >= self.plan.settings.train.max_nonfinite:
                raise refuse_rollback(self.plan, before, why_no_way_back(before, found))
            self._restore(found)
        position, self.reached.shift = before.position, before.shift
        self.reached.position, self.reached.rollbacks = position, before.rollbacks + 1
        self.say(f"ALERT: rolled back to step {found.step}; going on with batch {position}")
        self.events.write("rollback", step=found.step, position=position)

    def _edge_work(self, end: int) -> bool:
        """What all ranks do together between steps. Returns True if it took time worth noting."""
        settings, done = self.plan.settings, self.reached.step
        self.saving.poll()
        # This comparison is of an earlier step, which the device has passed, so nobody waits.
        self.replicas.settle()
        profiled = self.profiler.finish(done, self.events, self.say)
        if done % settings.train.gc_every == 0:
            gc.collect()
        if done == end:
            return False
        every = settings.train.compare_replicas_every
        if every and done % every == 0:
            self.replicas.compare(done)
        evaluates = self.evaluating.is_due(self.reached)
        if evaluates:
            self.evaluating.evaluate(self.reached)
        saves = settings.checkpoint.every > 0 and done % settings.checkpoint.every == 0
        if saves or self.evaluating.is_worth_saving(self.reached):
            self.saving.save_at_edge(self.reached)
        return profiled or evaluates or saves

    def _finish(self) -> None:
        """Evaluate and save the last step, and say why it is the last."""
        reached, steps = self.reached, self.plan.settings.train.steps
        end = reached.step
        self.evaluating.evaluate(reached)
        early = end < steps and self.evaluating.ends_early(reached)
        is_best = self.evaluating.is_worth_saving(reached)
        if self.plan.settings.checkpoint.at_end or end < steps or is_best:
            self.saving.save_for_good(reached, waits=True)
        self.saving.finish()
        if self.session.outer is not None:
            self.session.outer.leave(end, finished=True)
        self.heartbeat.enter(Phase.DONE)
        said = {"finished": end == steps, "early": early, "loss": reached.last_loss}
        self.events.write("end", step=end, **said)
        if early:
            self.say(
                f"stopped early after step {end} of {steps}: {self.evaluating.why_early(reached)}"
            )
        elif end < steps:
            self.say(f"stopped after step {end} of {steps}, as train.stop_after says")
        else:
            self.say(f"finished {steps} steps")

    def _is_over(self, end: int) -> bool:
        return self.reached.step >= end or self.evaluating.ends_early(self.reached)

    def _stop_here(self) -> None:
        """Save and end with the exit code for a stop, because some rank was asked to stop."""
        reason = self.channels.stop.name or "a signal to another rank"
        # Whoever asked will not wait long.
        self.saving.save_for_good(self.reached, waits=False)
        if self.session.outer is not None:
            self.session.outer.leave(self.reached.step, finished=False)
        self.events.write("stopped", step=self.reached.step, reason=reason)
        raise UserError(
            f"stopped by {reason}; step {self.reached.step} is saved",
            fix="the same command goes on from there",
            code=ExitCode.PREEMPTED,
        )

    def _window(self, batches: Prefetcher) -> Window:
        return Window(self.plan, self.session.device, self.mesh, batches.wait_s)

    def _resume(self, accepted: Resumption) -> None:
        self._restore(accepted.checkpoint)
        self.reached.position, self.reached.held_out = accepted.position, accepted.held_out
        self.reached.shift = accepted.shift
        announce_resume(accepted, self.channels)

    def _restore(self, found: Checkpoint) -> None:
        self.reached = restore(found, self.session, self.stepper.scale)
        self.saving.saved_step = found.step

    def _end_step(self) -> int:
        train = self.plan.settings.train
        return train.steps if train.stop_after is None else train.stop_after

    def _log(self, window: Window, batches: Prefetcher) -> None:
        step = self.reached.step
        rate = learning_rate(self.plan.settings.optim, step - 1, self.plan.settings.train.steps)
        report: StepReport = window.report(step, self.reached.tokens, rate, batches.wait_s)
        self.reached.last_loss = report.loss
        tell_step(report, self.channels, self.plan)
        if isinstance(self.stepper.passes, StagePasses):
            tell_stages(self.stepper.passes.figures(), step, self.plan, self.channels)
        # Sites would wait for each other between outer steps.
        if self.plan.settings.observe.collectives and self.session.outer is None:
            tell_collectives(self.timer, step, report.step_s, self.channels)
