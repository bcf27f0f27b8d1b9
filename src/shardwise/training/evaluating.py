"""Evaluations on the held-out split, and what follows from them: the best step, and an early
end."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict

from shardwise.data.loader import eval_batches
from shardwise.metrics.callbacks import Evaluated
from shardwise.metrics.collectives import CollectiveTimer
from shardwise.metrics.progress_line import format_scores
from shardwise.training.channels import Channels
from shardwise.training.evaluation import evaluate
from shardwise.training.heartbeat import Phase
from shardwise.training.objective import NextToken, Objective
from shardwise.training.overlapped import settle
from shardwise.training.reached import Reached
from shardwise.training.session import Session


class Evaluating:
    """Evaluates one run. All ranks call each of these methods together."""

    def __init__(
        self,
        session: Session,
        channels: Channels,
        timer: CollectiveTimer,
        objective: Objective | None = None,
    ) -> None:
        self.session = session
        self.objective = objective or NextToken(session.mesh.split)
        self.settings = session.plan.settings
        self.channels = channels
        self.timer = timer

    def is_due(self, reached: Reached) -> bool:
        """Whether this step is to be evaluated and was not yet. A run that was stopped saves first,
        and evaluates when it goes on."""
        every = self.settings.train.eval_every
        return every > 0 and reached.step % every == 0 and reached.held_out.step != reached.step

    def evaluate(self, reached: Reached) -> None:
        """Compute the held-out loss of this step, and note what it says."""
        data, mesh = self.session.data.eval, self.session.mesh
        if data is None or reached.held_out.step == reached.step:
            return
        settle(self.session.optimizer)
        batches = list(
            eval_batches(
                data,
                num_sequences=self.settings.data.eval_sequences,
                micro_batch=self.session.plan.decided.micro_batch,
                rank=mesh.eval_rank,
                num_ranks=mesh.eval_degree,
            )
        )
        self.timer.enter("eval")
        with self.channels.heartbeat.during(Phase.EVALUATING):
            agreed = nullcontext() if self.session.outer is None else self.session.outer.agreed()
            with agreed:
                loss, scores = evaluate(
                    self.session.model, batches, self.objective, self.session.device, mesh
                )
        # All ranks must decide alike, and no backend promises sums of equal bits.
        loss = mesh.world.share(loss)
        reached.held_out = reached.held_out.after(reached.step, loss, self.settings.train.min_gain)
        is_best = reached.held_out.is_best_at(reached.step)
        what, found = "text", {}
        if scores is not None:
            told = ", ".join(format_scores(scores))
            what, found = f"{self.settings.data.unit}s: {told}", {"preference": asdict(scores)}
        self.channels.say(f"eval at step {reached.step}: loss {loss:.4f} on held-out {what}")
        self.channels.events.write("eval", step=reached.step, loss=loss, best=is_best, **found)
        run_dir = self.session.plan.run_dir
        self.channels.callbacks.tell(
            Evaluated(run_dir=run_dir, step=reached.step, loss=loss, is_best=is_best)
        )

    def is_worth_saving(self, reached: Reached) -> bool:
        """Whether this step is the best so far, and the best is to be kept."""
        return self.settings.checkpoint.keep_best is True and reached.held_out.is_best_at(
            reached.step
        )

    def ends_early(self, reached: Reached) -> bool:
        """Whether the held-out loss has not fallen for too long."""
        patience = self.settings.train.patience
        return 0 < patience <= reached.held_out.without_gain

    def why_early(self, reached: Reached) -> str:
        """The reason for the end, in words."""
        train, found = self.settings.train, reached.held_out
        gain = f" by {train.min_gain:g}" if train.min_gain else ""
        best = (
            "none was better than the model that training began with"
            if found.best_step is None
            else f"the best is {found.best_loss:.4f} at step {found.best_step}"
        )
        return f"the held-out loss has not fallen{gain} in {found.without_gain} evaluations; {best}"
