"""Process groups for axes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed import distributed_c10d as c10d
from torch.distributed import get_process_group_ranks

from .axes import ALONE, Axis

_fake_axes: dict[str, Axis] = {}


@dataclass(frozen=True)
class FakeGroup:
    """Name of a process group without processes, for messages of fake tensors."""

    group_name: str


def fake_axis(name: str, rank: int, size: int) -> Axis:
    group: Any = FakeGroup(name)
    return Axis(group, rank, size)


@contextmanager
def finding(*axes: Axis) -> Iterator[None]:
    """Inside, `find_axis` returns these fake axes."""
    _fake_axes.update((axis.name, axis) for axis in axes if axis.size > 1)
    try:
        yield
    finally:
        _fake_axes.clear()


def find_axis(name: str) -> Axis:
    """Return the axis with this name (`Axis.name`)."""
    if not name:
        return ALONE
    if name in _fake_axes:
        return _fake_axes[name]
    group = c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]
    return Axis(group, group.rank(), group.size())


def list_ranks(axis: Axis) -> tuple[int, ...]:
    """List the run's ranks on an axis, in order; none without a process group."""
    return tuple(get_process_group_ranks(axis.group)) if axis.group is not None else ()
