"""What the record of a run says about its health: gradients, losses, saves, restarts."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise

from shardwise.doctor.check import Check
from shardwise.doctor.run.case import Case
from shardwise.metrics.verdict import MEMORY_BAND
from shardwise.plan.stage_rows import first_rank_memory
from shardwise.units import format_bytes, format_duration
from shardwise.verify.gates import check_gates

_LEAST_STEPS = 3
_LEAST_SCALE = 1.0
_LONGEST_SAVE_S = 600
# A save or an evaluation may take some of the usual intervals.
_LEAST_SILENCE_S = 30
_MANY_INTERVALS = 8
_OUT_OF_MEMORY = re.compile(r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED")


def _gate(name: str) -> Callable[[Case], Iterator[str]]:
    """The figure of a gate that failed, as `shardwise verify` judges it."""

    def look(case: Case) -> Iterator[str]:
        if case.run.plan is None or not case.steps:
            return
        for gate in check_gates(case.run.plan, case.whole, ()):
            if gate.name == name and gate.verdict == "fail":
                yield f"{gate.figure}, where the gate is {gate.bound}"

    return look


def _damaged(case: Case) -> Iterator[str]:
    for entry in case.run.checkpoints:
        if entry.is_bad:
            yield f"{entry.path.name} is {entry.state}" + (f": {entry.reason}" * bool(entry.reason))


def _unreadable(case: Case) -> Iterator[str]:
    yield from case.run.notes


def _restarted(case: Case) -> Iterator[str]:
    restarts = case.of_kind("restart")
    if restarts:
        reasons = dict.fromkeys(str(event.get("reason", "no reason")) for event in restarts)
        yield f"{len(restarts)} restarts: {'; '.join(list(reasons)[:3])}"


def _out_of_memory_at_load(case: Case) -> Iterator[str]:
    if not case.steps and any(_OUT_OF_MEMORY.search(log.text) for log in case.logs):
        yield "memory ran out before the first step"


def _no_gradient(case: Case) -> Iterator[str]:
    norms = [event["grad_norm"] for event in case.steps]
    if len(norms) >= _LEAST_STEPS and not any(norms):
        yield f"the gradient norm is 0 in all {len(norms)} logged steps"


def _some_without_gradient(case: Case) -> Iterator[str]:
    zero = [event["step"] for event in case.steps if event["grad_norm"] == 0]
    if zero and len(zero) < len(case.steps):
        yield f"the gradient norm is 0 in step {', '.join(map(str, zero[:5]))}"


def _scale_collapsed(case: Case) -> Iterator[str]:
    scales = [event for event in case.of_kind("loss_scale") if _is_small(event.get("scale"))]
    if scales:
        yield f"the loss scale fell to {scales[-1]['scale']:g} at step {scales[-1].get('step')}"


def _is_small(scale: object) -> bool:
    return isinstance(scale, int | float) and scale < _LEAST_SCALE


def _slow_save(case: Case) -> Iterator[str]:
    saves = [e for e in case.of_kind("checkpoint") if isinstance(e.get("write_s"), int | float)]
    slow = [event for event in saves if event["write_s"] > _LONGEST_SAVE_S]
    if slow:
        longest = max(event["write_s"] for event in slow)
        yield f"{len(slow)} of {len(saves)} saves took up to {format_duration(longest)}"


def _failed_save(case: Case) -> Iterator[str]:
    failed = case.of_kind("checkpoint_failed")
    if failed:
        yield f"{len(failed)} saves failed; the last at step {failed[-1]['step']}: " + str(
            failed[-1].get("error", "no reason given")
        )


def _not_finite(case: Case) -> Iterator[str]:
    skipped = [event for event in case.whole if event["event"] == "nonfinite"]
    bad = [event["step"] for event in case.steps if not math.isfinite(event["loss"])]
    if skipped or bad:
        steps = [str(event.get("step")) for event in skipped] or list(map(str, bad))
        yield f"batches at step {', '.join(steps[:5])} gave a loss or gradient that is not finite"


def _went_back(case: Case) -> Iterator[str]:
    back = case.of_kind("rollback")
    if back:
        yield f"{len(back)} times, the last time to step {back[-1]['step']}"


def _skipped_records(case: Case) -> Iterator[str]:
    for event in case.of_kind("data")[-1:]:
        skipped = event.get("skipped")
        if isinstance(skipped, list) and skipped:
            yield f"{len(skipped)} records, such as {skipped[0]}"


def _lost_sink(case: Case) -> Iterator[str]:
    for event in case.of_kind("sink_failed")[-1:]:
        yield f"{event.get('sink')}: {event.get('reason')}"


def _more_memory(case: Case) -> Iterator[str]:
    plan = case.run.plan
    if plan is None or plan.cluster.device != "cuda" or not case.steps:
        return
    held, planned = case.steps[-1]["memory"]["allocated"], first_rank_memory(plan).allocated
    if held > (1 + MEMORY_BAND) * planned:
        yield f"{format_bytes(held)} allocated, where the plan has {format_bytes(planned)}"


def _silent(case: Case) -> Iterator[str]:
    """A run that has neither ended nor said anything for much longer than usual."""
    life = case.of_kind("start", "restart", "end", "stopped")
    times = [event["time"] for event in case.of_kind("step")]
    if not life or life[-1]["event"] in ("end", "stopped") or len(times) < _LEAST_STEPS:
        return
    usual = statistics.median(after - before for before, after in pairwise(times))
    silence = case.now - case.whole[-1]["time"]
    if silence > max(_LEAST_SILENCE_S, _MANY_INTERVALS * usual):
        yield (
            f"its last event was {format_duration(silence)} ago, at step "
            f"{case.of_kind('step')[-1]['step']}; a line usually comes every {usual:.1f} s"
        )


def _said(pattern: str) -> Callable[[Case], Iterator[str]]:
    """The first line with a pattern, in the logs or in the reason of a restart."""
    compiled = re.compile(pattern)

    def look(case: Case) -> Iterator[str]:
        for log in case.logs:
            if match := compiled.search(log.text):
                yield f"{log.name}: {match[0].strip()}"
                return

    return look


RECORD: tuple[Check[Case], ...] = (
    Check(
        "SW301", "error", "A checkpoint is damaged",
        "It cannot be resumed from or exported.",
        "shardwise checkpoint verify RUN says what is wrong; the run goes on from the one before",
        _damaged,
    ),
    Check(
        "SW302", "note", "Some files of the run cannot be read",
        "What they hold is left out of the other checks.",
        "see whether the run has ended, and whether the disk was full",
        _unreadable,
    ),
    Check(
        "SW303", "warning", "Ranks were started again",
        "Each restart costs the steps since the last checkpoint.",
        "read the logs of the attempt before; a rank that dies each time is usually one GPU",
        _restarted,
    ),
    Check(
        "SW304", "error", "Memory ran out while the model was loaded",
        "Some other tools build the whole model on every rank before they shard it.",
        "shard on the meta device, as shardwise does; with Accelerate "
        "fsdp_cpu_ram_efficient_loading: true",
        _out_of_memory_at_load,
    ),
    Check(
        "SW305", "error", "Nothing is learnt: all gradients are zero",
        "The parameters that are trained are not those that the loss depends on.",
        "check adapter.targets; in FSDP1 scripts use_orig_params=True",
        _no_gradient,
    ),
    Check(
        "SW306", "error", "The loss scale of fp16 collapsed",
        "Gradients overflow even with a scale below 1, so that NaN or zeros are learnt.",
        "write precision.param=bf16, or lower optim.lr",
        _scale_collapsed,
    ),
    Check(
        "SW307", "warning", "The gradient norm has spikes",
        "They come from the learning rate, or from data that differs or is damaged.",
        "lower optim.lr, or lengthen optim.warmup_steps; look at the batches of these steps",
        _gate("gradient norm"),
    ),
    Check(
        "SW308", "warning", "Saves take more than ten minutes",
        "A disk that is too slow, or a full state dict that one rank gathers.",
        "choose a faster place with runs_dir=DIRECTORY; save shards, not a full state dict",
        _slow_save,
    ),
    Check(
        "SW309", "warning", "Some gradients are zero",
        "In fp16 gradients underflow; with recompute a block may compute in another format.",
        "write precision.param=bf16, and use no autocast inside of blocks",
        _some_without_gradient,
    ),
    Check(
        "SW310", "error", "The loss does not fall, or is not finite",
        "The run learns nothing.",
        "lower optim.lr; see the data as it is trained on with `shardwise data show FILE`",
        _gate("loss"),
    ),
    Check(
        "SW311", "warning", "The device's memory is nearly full",
        "The allocator then retries, which takes time, and the next long batch may not fit.",
        "a smaller train.micro_batch, or memory.checkpoint_activations=full",
        _gate("memory"),
    ),
    Check(
        "SW312", "warning", "More memory is held than planned",
        "Parameters, gradients and Adam are exact, so activations or the loss are larger.",
        "compare `shardwise plan` with what `shardwise profile RUN` shows",
        _more_memory,
    ),
    Check(
        "SW313", "warning", "Batches were skipped because they are not finite",
        "One bad batch is usual in fp16; several come from the data or the learning rate.",
        "look at the sequences that the record names; lower optim.lr",
        _not_finite,
    ),
    Check(
        "SW314", "warning", "The run went back to a checkpoint",
        "Too many batches in a row were not finite.",
        "lower optim.lr; look at the data at these steps",
        _went_back,
    ),
    Check(
        "SW315", "error", "A checkpoint could not be saved",
        "Training goes on, and a failure would lose all steps since the last one.",
        "make room on the disk, or choose another place with runs_dir=DIRECTORY",
        _failed_save,
    ),
    Check(
        "SW316", "note", "Records of the data were skipped",
        "They cannot be read or trained on.",
        "mend the records, or leave them out",
        _skipped_records,
    ),
    Check(
        "SW317", "warning", "A sink gets no more events",
        "The curves there end; events.jsonl goes on.",
        "look at the sink's own log; start the run again to open it anew",
        _lost_sink,
    ),
    Check(
        "SW318", "error", "Replicas hold different bits",
        "They make the same updates, so one host has computed, kept or received wrong data.",
        "leave the host that is named out, and resume from the last checkpoint",
        _said(r"replicas differ after step [^\n]*"),
    ),
    Check(
        "SW319", "error", "Ranks were not started alike",
        "They have different settings, data, weights, packages or hardware.",
        "give every node the same file, data and packages",
        _said(r"the ranks were not started alike:[^\n]*\n[^\n]*"),
    ),
    Check(
        "SW320", "error", "Ranks hung",
        "One rank waits for what another does not do. Their stacks are in their logs.",
        "read the stacks: the rank that is not in a collective is the cause",
        _said(r"[^\n]*\bhung\b[^\n]*"),
    ),
    Check(
        "SW321", "error", "A node does not see the run directory",
        "Checkpoints need one directory that all nodes see.",
        "name one on a shared file system: runs_dir=DIRECTORY",
        _said(r"[^\n]*does not see the runs directory of [^\n]*"),
    ),
    Check(
        "SW322", "error", "The run has gone silent",
        "It is dead, or ranks wait in a collective for a link or a node that is down.",
        "see whether its processes and all nodes are there, and whether nodes reach each other: "
        "shardwise fabric; ranks that hang are ended after train.hang_timeout_s",
        _silent,
    ),
)  # fmt: skip
