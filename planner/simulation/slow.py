"""Slow ranks and links: `--slow rank=17:1.3`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from ...console.errors import MisuseError
from ..prices.machine import Machine

SlowPart = Literal["rank", "node", "network"]
SLOW_PARTS: dict[SlowPart, str] = {
    "rank": "computation of one rank",
    "node": "its link within the node",
    "network": "its link to other nodes",
}
"""Parts of a cluster that may be slow, with their meaning."""


@dataclass(frozen=True)
class Slowdown:
    """A part of a cluster that takes `factor` times as long."""

    part: SlowPart
    rank: int
    factor: float

    def __str__(self) -> str:
        return f"{self.part}={self.rank}:{self.factor:g}"


def parse_slowdown(text: str, gpus: int) -> Slowdown:
    """Parse PART=RANK:FACTOR for a cluster of `gpus` devices."""
    match = re.fullmatch(r"(\w+)=(\d+):(\d+\.?\d*)", text)
    if not match or match[1] not in SLOW_PARTS or not 1 <= float(match[3]) < math.inf:
        raise MisuseError(
            f"--slow {text} is not PART=RANK:FACTOR",
            hint=f"PART is {', '.join(SLOW_PARTS)}; FACTOR is at least 1: rank=17:1.3",
        )
    if int(match[2]) >= gpus:
        raise MisuseError(f"--slow {text}: the ranks of {gpus} devices are 0 to {gpus - 1}")
    part: SlowPart = match[1]
    return Slowdown(part, int(match[2]), float(match[3]))


class SlowMachine(Machine):
    """A cluster in which every rank, or every link of a kind, is slow.

    To a group with a slow rank or link the cluster looks like this: a collective takes as long as
    its slowest link, because its rings divide a message evenly.
    """

    def __init__(self, machine: Machine, part: SlowPart, factor: float) -> None:
        super().__init__(
            machine.hardware,
            machine.precision,
            fp8=machine.fp8,
            roofline=machine.roofline,
            program=machine.program,
        )
        self.part, self.factor = part, factor

    def _rate(self, kind: str, **at: object) -> float:
        return super()._rate(kind, **at) / (self.factor if self.part == "rank" else 1.0)

    def launches(self, count: float) -> float:
        return super().launches(count) * (self.factor if self.part == "rank" else 1.0)

    def collective(self, name: str, size: float, ranks: int, stride: int) -> float:
        near = math.gcd(ranks, max(1, self.per_node // stride))
        is_slow = near > 1 if self.part == "node" else self.part == "network" and near < ranks
        return super().collective(name, size, ranks, stride) * (self.factor if is_slow else 1.0)

    def hop(self, size: float, stride: int) -> float:
        link = "node" if stride < self.per_node else "network"
        return super().hop(size, stride) * (self.factor if link == self.part else 1.0)
