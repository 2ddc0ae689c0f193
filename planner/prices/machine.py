"""Price operations and messages on a cluster, by the rates in a hardware file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

from ...console.errors import PlanError
from ...models.config.options.precision import PRECISIONS, Fp8Config
from ..grid.split import Direction, Split
from ..hardware import Hardware
from ..hardware.file import Overhead
from ..traces.work import EXPERTS, Work

MEMORY_BOUND = (
    *("rms_norm", "add_rms_norm", "gated_rms_norm", "glu", "rope"),
    *("spread_rows", "collect_rows"),
)
"""Kernels without a rate that are priced by memory traffic alone."""
RING = "ring_attention"
"""Kernel rate for ring attention without fused kernels: query-key pairs times channels."""
IMBALANCE = 1.15
"""Tokens of the busiest rank on an expert axis relative to their mean, where the file has none."""
BACKWARD_ATTENTION = 2.5
"""FLOP in attention's backward pass, relative to its forward pass."""


class Machine:
    """A cluster's prices in seconds, with a cache."""

    def __init__(
        self,
        hardware: Hardware,
        precision: str,
        *,
        fp8: Fp8Config | None = None,
        roofline: bool = False,
    ) -> None:
        self.hardware = hardware
        self.precision = "bf16" if fp8 else precision
        """Precision for all operations but FP8 products."""
        self.number_bytes = PRECISIONS[self.precision].weight_bytes
        self.fp8 = fp8
        self.roofline = roofline
        """True if kernels without a rate are priced by bytes and FLOP."""
        self.estimated: set[str] = set()
        """Kernels priced by the roofline."""
        self._rates: dict[tuple[object, ...], float | PlanError] = {}
        """Rates, or the error that names what the file lacks."""
        self._messages: dict[tuple[str, float, int, int], float] = {}
        self._works: dict[tuple[Work, Direction, Split], float] = {}
        """Seconds by operation: layer kinds share many, such as an MLP's."""

    @cached_property
    def overhead(self) -> Overhead:
        """Seconds per operation and per step; zero where the file has none."""
        return self.hardware.file.overhead or Overhead(operation=0.0, step=0.0, source="")

    @cached_property
    def imbalance(self) -> float:
        """Tokens of the busiest rank on an expert axis, relative to their mean."""
        experts = self.hardware.file.experts
        return IMBALANCE if experts is None else experts.imbalance

    def launches(self, count: float) -> float:
        """Return the seconds in which the host launches `count` operations."""
        return count * self.overhead.operation

    @property
    def per_node(self) -> int:
        return self.hardware.file.devices_per_node

    def collective(self, name: str, size: float, ranks: int, stride: int) -> float:
        """Return the seconds for a collective (`size` bytes) among ranks `stride` apart."""
        if ranks == 1 or not size:
            return 0.0
        key = name, size, ranks, stride
        if key not in self._messages:
            group_per_node = math.gcd(ranks, max(1, self.per_node // stride))
            self._messages[key] = self.hardware.seconds(name, size, ranks, group_per_node)
        return self._messages[key]

    def hop(self, size: float, stride: int) -> float:
        """Return the seconds for a message to a rank `stride` away."""
        key = "p2p", size, 2, stride
        if key not in self._messages:
            group_per_node = 2 if stride < self.per_node else 1
            self._messages[key] = self.hardware.seconds("p2p", size, 2, group_per_node)
        return self._messages[key]

    def ring_hop(self, size: float, ranks: int, stride: int) -> float:
        """Return the seconds in which all ranks in a ring send to the next rank, `stride` away. The
        slowest link counts."""
        return self.hop(size, stride if stride * ranks <= self.per_node else self.per_node)

    def chain(self, size: float, ranks: int, stride: int) -> float:
        """Return the seconds in which a message passes through all `ranks`, one after another."""
        between_nodes = ranks - 1
        if stride < self.per_node:
            between_nodes = -(-stride * ranks // self.per_node) - 1
        within_nodes = ranks - 1 - between_nodes
        links = (within_nodes, stride), (between_nodes, max(stride, self.per_node))
        return sum(count * self.hop(size, distance) for count, distance in links if count)

    def traffic(self, size: float) -> float:
        """Return the seconds in which a device reads and writes `size` bytes."""
        if not size:
            return 0.0
        # Rates depend on the size. Powers of two are near enough, and can be cached.
        rounded_size = 1 << max(0, int(size).bit_length() - 1)
        return size / self._rate("memory", bytes=rounded_size)

    def overlapped(self, compute: float, message: float, span: int) -> float:
        """Return the seconds until a computation and a message that starts with it both end.

        The message is among `span` neighbours.
        """
        if not message:
            return compute
        link = "node" if span <= self.per_node else "network"
        compute_slowdown, message_slowdown = self._overlap[link]
        if message * message_slowdown <= compute * compute_slowdown:  # the message is hidden
            return compute + message * message_slowdown * (1 - 1 / compute_slowdown)
        return compute * compute_slowdown + message - compute * compute_slowdown / message_slowdown

    @cached_property
    def _overlap(self) -> dict[str, tuple[float, float]]:
        """Slow-downs (computation, message) by link; 1 where the file has none."""
        measured = self.hardware.file.overlap
        return {
            link: self.hardware.overlap(link) if link in measured else (1.0, 1.0)
            for link in ("node", "network")
        }

    def seconds(self, work: Iterable[Work], direction: Direction, split: Split) -> float:
        """Return the seconds that a rank takes for its share in these operations."""
        total = 0.0
        for operation in work:
            key = operation, direction, split
            if key not in self._works:
                self._works[key] = self._price(*key)
            total += self._works[key]
        return total

    def _price(self, work: Work, direction: Direction, split: Split) -> float:
        if work.kind == "launch":
            return self.launches(work.count)
        count, ranks = work.count * split.rows, split.ranks
        if work.kind == "matmul":
            groups, m, k, n = work.shape
            flops = 2.0 * groups * m * k * n * count / ranks
            # Rates depend on the local size: tensor ranks split the longer side of a matrix.
            k, n = (max(1, k // split.tp), n) if k > n else (k, max(1, n // split.tp))
            m = max(1, m * split.rows // split.cp)
            dims = {"groups": groups, "m": m, "k": k, "n": n}
            seconds = flops / self._rate("matmul", **dims, precision=self.precision)
            if work.name == EXPERTS:  # few tokens for each: the weights' bytes count
                size = groups * (m * k + k * n + m * n) * self.number_bytes
                return max(seconds, self.traffic(size) * work.count)
            if not self._in_fp8(work, direction):
                return seconds
            fp8_seconds = flops / self._rate("matmul", **dims, precision="fp8")
            # Weight gradients, half the products in a backward pass, are in bf16.
            return fp8_seconds if direction == "forward" else (fp8_seconds + seconds) / 2
        if work.kind == "attention":
            width, heads, length, _ = work.shape
            flops = 2.0 * length**2 * heads * width * count / ranks
            dims = {"head_width": width, "heads": max(1, heads // ranks), "length": length}
            flops *= BACKWARD_ATTENTION if direction == "backward" else 1.0
            return flops / self._kernel_rate("attention", direction, dims)
        if work.kind == "kernel":
            return self._price_kernel(work, direction, split) * count / ranks
        if work.kind == "pairs":
            size, heads, length = work.shape
            dims = {"size": size, "width": heads * size, "length": length}
            return count * heads * size / self._kernel_rate(RING, direction, dims)
        return self.traffic(work.bytes * count / ranks)

    def _in_fp8(self, work: Work, direction: Direction) -> bool:
        """Return True if large matrices are multiplied. In a backward pass tokens may be any side,
        so all three must be large."""
        groups, *sides = work.shape
        if self.fp8 is None or groups > 1 or work.name:  # experts and the head stay in bf16
            return False
        return min(sides[1:] if direction == "forward" else sides) >= self.fp8.smallest

    def _price_kernel(self, work: Work, direction: Direction, split: Split) -> float:
        """Return a kernel's seconds per row, at the rate for a rank's share."""
        size, width, length = work.shape
        dims = {"size": size, "width": max(1, width // split.tp), "length": length // split.cp}
        try:
            rate = self._kernel_rate(work.name, direction, dims)
        except PlanError:
            if work.name in MEMORY_BOUND:
                return self.traffic(work.bytes)
            if not self.roofline:
                raise
            self.estimated.add(work.name)
            return max(self.traffic(work.bytes), self._min_kernel_seconds(work, direction))
        return length * width / rate

    def _kernel_rate(self, name: str, direction: Direction, dims: dict[str, int]) -> float:
        return self._rate(name, **dims, precision=self.precision, direction=direction)

    def has_kernel(self, name: str) -> bool:
        """Return True if the file has rates for the kernel in this precision."""
        return any(
            row.kernel == name and row.precision == self.precision
            for row in self.hardware.file.kernels
        )

    def _min_kernel_seconds(self, work: Work, direction: Direction) -> float:
        """Return the seconds for a kernel's FLOP at the rate for large matrix products."""
        size, width, length = work.shape
        flops = 4.0 * length * width * max(1, size)  # taps, or states: in and out
        if work.name == "fft_convolution":
            flops = 15.0 * length * width * math.log2(2 * length)
        flops *= 2 if direction == "backward" else 1
        return flops / self._rate(
            "matmul", groups=1, m=8192, k=8192, n=8192, precision=self.precision
        )

    def _rate(self, kind: str, **point: object) -> float:
        key = kind, *point.values()
        if key not in self._rates:
            try:
                self._rates[key] = self.hardware.rate(kind, **point)
            except PlanError as error:
                self._rates[key] = error
        rate = self._rates[key]
        if isinstance(rate, PlanError):
            raise rate
        return rate
