"""The loop: data, step, log, evaluate, save, stop. Each is a sentence here and a file elsewhere."""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.checkpoint.restore import restore_checkpoint
from shardwise.checkpoint.save import save_checkpoint
from shardwise.checkpoint.store import latest_checkpoint, list_checkpoints
from shardwise.data.loader import BatchLoader, eval_batches
from shardwise.data.prefetch import prefetching
from shardwise.errors import ExitCode, UserError
from shardwise.metrics.events import EventLog
from shardwise.metrics.line import StepReport, format_line
from shardwise.plan.plan import Plan
from shardwise.train.optim import learning_rate
from shardwise.train.session import Say, Session, attach_training_loss, build_session
from shardwise.train.step import Stepper, evaluate
from shardwise.train.units import unit_table
from shardwise.train.window import Window


def run(plan: Plan, say: Say) -> None:
    """Train on this rank until the plan's last step, from the newest checkpoint if there is one."""
    is_first = dist.get_rank() == 0
    with EventLog(plan.run_dir / "events.jsonl", enabled=is_first) as events:
        _validate_resume(plan)
        torch.use_deterministic_algorithms(plan.config.train.deterministic)
        resuming = latest_checkpoint(plan.run_dir / "checkpoints") is not None
        session = build_session(plan, say, resuming=resuming)
        Loop(session, events, say).run()


class Loop:
    """One rank's run over the steps that are left."""

    def __init__(self, session: Session, events: EventLog, say: Say) -> None:
        self.session = session
        self.plan = session.plan
        self.events = events
        self.say = say
        self.stepper = Stepper(session.model, session.optimizer, session.plan)
        self.checkpoints = self.plan.run_dir / "checkpoints"
        self.last_loss: float | None = None
        self.saved_step: int | None = None

    def run(self) -> None:
        """From the restored step to the last, then the final evaluation and checkpoint."""
        self._describe()
        start, stop = self._restore(), self._stop_step()
        attach_training_loss(self.session, self.say)
        if start >= stop:
            self.say(f"nothing to do: step {start} of {self.plan.config.train.steps} is done")
            return
        self.events.write("start", step=start, world_size=dist.get_world_size())
        with _steady_collector(), _fast_attention(self.session.device):
            if start == 0:
                self._evaluate(0)
            self._steps(start, stop)
            self._finish(stop)

    def _steps(self, start: int, stop: int) -> None:
        train, observe = self.plan.config.train, self.plan.config.observe
        window = Window(self.plan, self.session.device)
        with prefetching(
            self._loader(), start, stop, pin_memory=self.session.device.type == "cuda"
        ) as batches:
            for step, micro_batches in enumerate(batches, start=start):
                _seed_step(train.seed, step)
                rate = learning_rate(self.plan.config.optim, step, train.steps)
                window.add(self.stepper.run(micro_batches, rate))
                done = step + 1
                if done == start + 1 or done == stop or done % observe.log_every == 0:
                    tokens = done * self.plan.tokens_per_step
                    self._log(window.report(done, tokens, rate, batches.wait_s))
                    window = Window(self.plan, self.session.device, batches.wait_s)
                if self._edge_work(done, stop):
                    window = Window(self.plan, self.session.device, batches.wait_s)

    def _edge_work(self, done: int, stop: int) -> bool:
        """What happens between steps on all ranks together; true if it took time worth noting."""
        config = self.plan.config
        if done % config.train.gc_every == 0:
            gc.collect()
        if done == stop:
            return False
        evaluates = config.train.eval_every > 0 and done % config.train.eval_every == 0
        saves = config.checkpoint.every > 0 and done % config.checkpoint.every == 0
        if evaluates:
            self._evaluate(done)
        if saves:
            self._save(done)
        return evaluates or saves

    def _finish(self, stop: int) -> None:
        steps = self.plan.config.train.steps
        self._evaluate(stop)
        if self.plan.config.checkpoint.at_end or stop < steps:
            self._save(stop)
        self.events.write("end", step=stop, finished=stop == steps, loss=self.last_loss)
        if stop < steps:
            self.say(f"stopped after step {stop} of {steps}, as train.stop_after says")
        else:
            self.say(f"finished {steps} steps")

    def _loader(self) -> BatchLoader:
        plan = self.plan
        return BatchLoader(
            self.session.data.train,
            seed=plan.config.train.seed,
            shuffle=plan.config.data.shuffle,
            global_batch=plan.global_batch.value,
            micro_batch=plan.micro_batch.value,
            accumulation=plan.accumulation.value,
            rank=dist.get_rank(),
            num_ranks=dist.get_world_size(),
        )

    def _describe(self) -> None:
        data = self.session.data
        for line in unit_table(self.session.units, self.plan):
            self.say(line)
        for record in data.skipped:
            self.say(f"skipped corrupt record {record}")
        self.events.write(
            "data", tokens=data.num_train_tokens, tokenizer=data.tokenizer_identity,
            skipped=list(data.skipped),
        )  # fmt: skip

    def _restore(self) -> int:
        found = latest_checkpoint(self.checkpoints)
        if found is None:
            return 0
        session = self.session
        restore_checkpoint(found, self.plan, session.model, session.optimizer)
        step = found.manifest.step
        self.say(f"resumed at step {step} from {found.path}")
        self.events.write("resume", step=step, written_by=found.manifest.world_size)
        self.last_loss, self.saved_step = found.manifest.loss, step
        return step

    def _stop_step(self) -> int:
        train = self.plan.config.train
        return train.steps if train.stop_after is None else train.stop_after

    def _log(self, report: StepReport) -> None:
        if not math.isfinite(report.loss):
            raise UserError(
                f"the loss is {report.loss} at step {report.step}",
                why="nothing that follows can be trusted",
                fix="lower optim.lr, lengthen optim.warmup_steps, or use precision.param=bf16; "
                "the newest checkpoint is from before this step",
                code=ExitCode.WORKER_DIED,
            )
        self.last_loss = report.loss
        self.say(format_line(report))
        self.events.write("step", **asdict(report))

    def _evaluate(self, step: int) -> None:
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
        loss = evaluate(self.session.model, list(batches), self.session.device)
        self.say(f"eval at step {step}: loss {loss:.4f} on held-out text")
        self.events.write("eval", step=step, loss=loss)

    def _save(self, step: int) -> None:
        if step == self.saved_step:
            return
        save_checkpoint(
            self.checkpoints,
            self.plan,
            self.session.model,
            self.session.optimizer,
            step=step,
            tokens=step * self.plan.tokens_per_step,
            loss=self.last_loss,
        )
        self.saved_step = step
        self.say(f"saved step {step} to {self.checkpoints}")
        self.events.write("checkpoint", step=step)


def _validate_resume(plan: Plan) -> None:
    found = list_checkpoints(plan.run_dir / "checkpoints")
    if found and not plan.config.checkpoint.resume:
        raise UserError(
            f"{plan.run_dir} holds checkpoints up to step {found[-1].manifest.step}",
            why="checkpoint.resume=false asks for a run from the start, and nothing is overwritten",
            fix="give the run another name, or move the directory away",
        )


def _seed_step(seed: int, step: int) -> None:
    """Dropout is a function of (seed, step, rank), so a resumed run needs no saved generator."""
    key = f"{seed}/{step}/{dist.get_rank()}".encode()
    torch.manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:7], "big"))


@contextmanager
def _steady_collector() -> Iterator[None]:
    """No garbage collection inside steps: one rank that pauses makes all the others wait."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _fast_attention(device: torch.device) -> Iterator[None]:
    """On Hopper cuDNN's attention is about twice as fast as the flash kernel that torch prefers."""
    if device.type != "cuda":
        yield
        return
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(order, set_priority=True):
        yield
