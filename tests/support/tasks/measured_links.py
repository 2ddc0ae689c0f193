"""Task of the ranks of a pool: measure collectives into a hardware file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headrace.planner.measure.clock import Clock
from headrace.planner.measure.collectives import GroupShape, World, open_group, sweep
from headrace.planner.measure.profile import SIZES, measure_links, open_profile


def profile_links(file: str, per_node: int) -> int | None:
    """Measure with so many ranks on a node; return the number of rows that rank 0 added."""
    world = _world(per_node)
    profile, before = None, 0
    if world.rank == 0:
        profile = open_profile(Path(file), None, world.device, per_node, "quick-links")
        before = len(profile.file.collectives)
    sizes = SIZES["cpu", True]
    measure_links(profile, world, sizes, Clock(world.device, sizes.budget))
    return None if profile is None else len(profile.file.collectives) - before


def times_of_all(collectives: list[str], sizes: list[int]) -> list[dict[str, Any]]:
    """Return the rows of a sweep over one group of all ranks."""
    world = _world(dist.get_world_size())
    with open_group(world, GroupShape(world.size, 1)) as group:
        clock = Clock(world.device, 0)
        return [t.row for name in collectives for t in sweep(world, group, name, sizes, clock)]


def _world(per_node: int) -> World:
    return World(dist.get_rank(), dist.get_world_size(), per_node, torch.device("cpu"))
