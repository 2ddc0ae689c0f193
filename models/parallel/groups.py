"""Process groups for axes."""

from __future__ import annotations

from torch.distributed import distributed_c10d as c10d
from torch.distributed import get_process_group_ranks

from .axes import ALONE, Axis


def find_axis(name: str) -> Axis:
    """Return the axis with this name (`Axis.name`)."""
    if not name:
        return ALONE
    group = c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]
    return Axis(group, group.rank(), group.size())


def list_ranks(axis: Axis) -> tuple[int, ...]:
    """List the run's ranks on an axis, in order; none without a process group."""
    return tuple(get_process_group_ranks(axis.group)) if axis.group is not None else ()
