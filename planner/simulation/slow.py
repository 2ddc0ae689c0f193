"""Slow ranks and links: `--slow rank=17:1.3`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from ...console.errors import MisuseError
from ..prices.machine import Machine

Part = Literal["rank", "node", "network"]
PARTS: dict[Part, str] = {
    "rank": "computation of one rank",
    "node": "its link within the node",
    "network": "its link to other nodes",
}
"""Parts of a cluster that may be slow, and their meaning."""


@dataclass(frozen=True)
class Slow:
    """One part of a cluster that takes `factor` times as long."""

    part: Part
    rank: int
    factor: float

    def __str__(self) -> str:
        return f"{self.part}={self.rank}:{self.factor:g}"


def parse_slow(text: str, gpus: int) -> Slow:
    match = re.fullmatch(r"(\w+)=(\d+):([\d.]+)", text)
    if not match or match[1] not in get_args(Part) or not _above_one(match[3]):
        raise MisuseError(
            f"--slow {text} is not PART=RANK:FACTOR",
            hint=f"PART is {', '.join(get_args(Part))}; FACTOR is at least 1: rank=17:1.3",
        )
    if int(match[2]) >= gpus:
        raise MisuseError(f"--slow {text}: the ranks of {gpus} devices are 0 to {gpus - 1}")
    part: Part = match[1]  # type: ignore[assignment]
    return Slow(part, int(match[2]), float(match[3]))


def _above_one(number: str) -> bool:
    try:
        return 1 <= float(number) < math.inf
    except ValueError:
        return False


class SlowMachine(Machine):
    """The cluster as a group of ranks sees it that has a slow rank or link.

    A collective takes as long as its slowest link, because its rings divide a message evenly.
    """

    def __init__(self, machine: Machine, part: Part, factor: float) -> None:
        super().__init__(
            machine.hardware, machine.precision, fp8=machine.fp8, roofline=machine.roofline
        )
        self.part, self.factor = part, factor

    def _rate(self, kind: str, **at: object) -> float:
        return super()._rate(kind, **at) / (self.factor if self.part == "rank" else 1.0)

    def collective(self, name: str, size: float, ranks: int, stride: int) -> float:
        near = math.gcd(ranks, max(1, self.per_node // stride))
        slow = near > 1 if self.part == "node" else self.part == "network" and near < ranks
        return super().collective(name, size, ranks, stride) * (self.factor if slow else 1.0)

    def hop(self, size: float, stride: int) -> float:
        link = "node" if stride < self.per_node else "network"
        return super().hop(size, stride) * (self.factor if link == self.part else 1.0)
