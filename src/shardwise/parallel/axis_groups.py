"""Which axis of the mesh a collective moves tensors along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.distributed import ProcessGroup

from shardwise.parallel.mesh import Mesh

SEVERAL = ""
"""Ranks of several axes agree on a few numbers."""


@dataclass(frozen=True, slots=True)
class AxisGroups:
    """The axes of process groups, by the names of the groups."""

    axes: Mapping[str, str] = field(default_factory=dict)
    experts: str | None = None
    """The group that tokens travel in. It can be that of `shard` too."""

    @classmethod
    def of(cls, mesh: Mesh) -> AxisGroups:
        """What FSDP2 moves is along `shard`, of which `context` is a part."""
        axes = {_name(group): axis for axis, group in mesh.axis_groups.items()}
        for devices in (mesh.fsdp_over_experts, mesh.fsdp):
            names = devices.mesh_dim_names or ()
            axes |= {_name(devices.get_group(axis)): axis for axis in names}
        experts = mesh.group("expert")
        return cls(axes, None if experts is None else _name(experts))

    def axis_of(self, kind: str, group: ProcessGroup) -> str:
        """The axis of a collective of this kind; `SEVERAL` where it is none's."""
        if kind == "all_to_all" and _name(group) == self.experts:
            return "expert"
        return self.axes.get(_name(group), SEVERAL)


def _name(group: ProcessGroup) -> str:
    return str(group.group_name)
