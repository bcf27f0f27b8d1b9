"""A few steps under torch's profiler: one Kineto trace for each rank, with the units labelled.

All ranks are profiled. A rank that is profiled alone would be late everywhere, and its waits for
the others would vanish from its own trace. Outside of these steps there is no label and no hook.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.hooks import RemovableHandle

from shardwise.config.schema import ObserveConfig
from shardwise.errors import UserError
from shardwise.internals.collective_calls import told_to
from shardwise.internals.parts import CALLS, is_open
from shardwise.metrics.events import EventLog
from shardwise.metrics.labels import along_label, step_label, unit_label
from shardwise.metrics.overlap import profile_of
from shardwise.metrics.trace import METADATA
from shardwise.metrics.trace_file import read_trace, trace_path
from shardwise.model.blocks import UnitMap, iter_modules
from shardwise.parallel.axis_groups import SEVERAL, AxisGroups
from shardwise.parallel.mesh import World
from shardwise.plan.axis_traffic import planned_traffic
from shardwise.plan.planned import Plan


class StepProfiler:
    """Profiles the steps that the plan names, after one warm-up step."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        units: UnitMap,
        world: World,
        observe: ObserveConfig | None = None,
        groups: AxisGroups | None = None,
    ) -> None:
        """Without `groups` nothing is told by axis."""
        observe = observe or plan.settings.observe
        self.plan = plan
        self.model = model
        self.units = units
        self.world = world
        self.first = observe.profile
        self.last = None if self.first is None else self.first + observe.profile_steps - 1
        self.num_steps = observe.profile_steps
        self._profile: profile | None = None
        self.groups = groups
        self._hooks: list[RemovableHandle] = []
        self._listening = ExitStack()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A context around step `number`."""
        if self.first is not None and self.first - 1 <= number <= self.first:
            self._begin(warm_up=self.first - number)
        if self._profile is None:
            yield
            return
        with record_function(step_label(number)):
            yield
        # Work that the step before left on the device would look like a gap.
        if number + 1 == self.first and self.plan.cluster.device == "cuda":
            torch.cuda.synchronize()
        self._profile.step()

    def finish(self, step: int, events: EventLog, say: Callable[[str], None]) -> bool:
        """Write the trace after the last profiled step, and report what rank 0's holds.

        A trace that cannot be written is no reason to end a run.
        """
        if self._profile is None or self.first is None or step != self.last:
            return False
        path = trace_path(self.plan.run_dir, self.first, self.world.rank)
        try:
            path.parent.mkdir(exist_ok=True)
            self.export(path)
            if self.world.is_first:
                _tell(path, self.plan, events, say)
        except (OSError, UserError) as error:
            say(f"ALERT: there is no profile of steps {self.first} to {step}: {error}")
        finally:
            self.close()
        return True

    def export(self, path: Path) -> None:
        """Stop, and write the trace."""
        done = self._profile
        self.close()
        if done is not None:
            done.export_chrome_trace(str(path))

    def close(self) -> None:
        """Stop wherever it is: a process that exits while it is profiled crashes."""
        if self._profile is None:
            return
        self._profile.stop()
        self._listening.close()
        for hook in self._hooks:
            hook.remove()
        self._profile, self._hooks = None, []

    def _begin(self, warm_up: int) -> None:
        """Start. A run that resumes right at the first profiled step has no warm-up step."""
        if self._profile is not None:
            return
        activities = [ProfilerActivity.CPU]
        if self.plan.cluster.device == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        self._hooks = list(label_units(self.model, self.units))
        if self.groups is not None and is_open(CALLS):
            self._listening.enter_context(told_to(self._label_call))
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=warm_up, active=self.num_steps, repeat=1),
        )
        self._profile.start()
        self._profile.add_metadata_json(METADATA, json.dumps(self._about()))

    def _label_call(
        self, kind: str, num_bytes: int, group: ProcessGroup
    ) -> AbstractContextManager[object]:
        """A label around the call of a collective, where it goes along one axis."""
        axis = SEVERAL if self.groups is None else self.groups.axis_of(kind, group)
        return nullcontext() if axis == SEVERAL else record_function(along_label(axis, num_bytes))

    def _about(self) -> dict[str, Any]:
        """What a reader needs and the trace does not say."""
        return {
            "rank": self.world.rank,
            "world_size": self.world.size,
            "device": self.plan.cluster.device,
            "planned": {axis: asdict(sums) for axis, sums in planned_traffic(self.plan).items()},
            "units": {unit.name: list(unit.modules) for unit in self.units.units},
        }


def label_units(model: nn.Module, units: UnitMap) -> Iterator[RemovableHandle]:
    """Put a label around the forward of every unit, including FSDP2's own hooks."""
    for unit in units.units:
        for module in iter_modules(model, unit):
            label = _Label(unit_label(unit.name))
            yield module.register_forward_pre_hook(label.open, prepend=True)
            yield module.register_forward_hook(label.close, always_call=True)


class _Label:
    """A label that one hook opens and another closes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.open_ones: list[record_function] = []

    def open(self, *_: object) -> None:
        """Before a forward."""
        label = record_function(self.name)
        label.__enter__()
        self.open_ones.append(label)

    def close(self, *_: object) -> None:
        """After it, even where it failed."""
        self.open_ones.pop().__exit__(None, None, None)


def _tell(path: Path, plan: Plan, events: EventLog, say: Callable[[str], None]) -> None:
    found = profile_of(read_trace(path))
    say(
        f"profiled {len(found.steps)} steps: {found.share('compute_s'):.0%} compute, "
        f"{found.share('exposed_s'):.0%} exposed communication, {found.share('idle_s'):.0%} idle; "
        f"see shardwise profile {plan.run_dir}"
    )
    events.write("profile", **found.summary(), trace=str(path.relative_to(plan.run_dir)))
