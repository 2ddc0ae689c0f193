"""Seconds of operations and messages on a cluster, from the figures of a hardware file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

from ...console.errors import PlanError
from ...models.config.options.precision import Fp8Config
from ..grid.split import Direction, Split
from ..hardware import Hardware
from ..hardware.file import Overhead
from ..traces.work import Work

MEMORY_BOUND = (
    *("rms_norm", "add_rms_norm", "gated_rms_norm", "glu", "rope"),
    *("spread_rows", "collect_rows"),
)
"""Kernels that take as long as the bytes that they read and write, where no row says otherwise."""
RING = "ring_attention"
"""Rows of attention by a ring without fused attention: pairs of queries and keys by channels."""
BACKWARD_ATTENTION = 2.5
"""Operations of attention's backward pass, in those of its forward pass."""


class Machine:
    """A cluster, with a memory of what it was asked."""

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
        """Precision of all operations but the products of FP8."""
        self.fp8 = fp8
        self.roofline = roofline
        """True if kernels without a row are priced by their bytes and operations."""
        self.estimated: set[str] = set()
        """Kernels that were priced so."""
        self._rates: dict[tuple[object, ...], float] = {}
        self._messages: dict[tuple[str, float, int, int], float] = {}
        self._works: dict[tuple[Work, Direction, Split], float] = {}
        """Seconds of operations: kinds of layers share many, such as those of an MLP."""

    @cached_property
    def overhead(self) -> Overhead:
        """Seconds of each operation and each step; nothing where the file has none."""
        return self.hardware.file.overhead or Overhead(operation=0.0, step=0.0, source="")

    def launches(self, count: float) -> float:
        """Return the seconds in which a device's host launches so many operations."""
        return count * self.overhead.operation

    @property
    def per_node(self) -> int:
        return self.hardware.file.devices_per_node

    def collective(self, name: str, size: float, ranks: int, stride: int) -> float:
        """Return the seconds of a collective of ranks that stand `stride` apart."""
        if ranks == 1 or not size:
            return 0.0
        key = name, size, ranks, stride
        if key not in self._messages:
            near = math.gcd(ranks, max(1, self.per_node // stride))
            self._messages[key] = self.hardware.seconds(name, size, ranks, near)
        return self._messages[key]

    def hop(self, size: float, stride: int) -> float:
        """Return the seconds of a message to a rank that stands `stride` away."""
        key = "p2p", size, 2, stride
        if key not in self._messages:
            near = 2 if stride < self.per_node else 1
            self._messages[key] = self.hardware.seconds("p2p", size, 2, near)
        return self._messages[key]

    def ring_hop(self, size: float, ranks: int, stride: int) -> float:
        """Return the seconds in which each rank of a ring sends to the next: its slowest link
        counts. `stride` is the distance of two neighbours."""
        return self.hop(size, stride if stride * ranks <= self.per_node else self.per_node)

    def chain(self, size: float, ranks: int, stride: int) -> float:
        """Return the seconds of a message that passes all ranks, one after the other."""
        far = -(-stride * ranks // self.per_node) - 1 if stride < self.per_node else ranks - 1
        links = (ranks - 1 - far, stride), (far, max(stride, self.per_node))
        return sum(count * self.hop(size, apart) for count, apart in links if count)

    def traffic(self, size: float) -> float:
        """Return the seconds in which a device reads and writes so many bytes."""
        if not size:
            return 0.0
        # Tables are by size: powers of two are near enough to be remembered.
        about = 1 << max(0, int(size).bit_length() - 1)
        return size / self._rate("memory", bytes=about)

    def overlapped(self, compute: float, message: float, span: int) -> float:
        """Return the seconds of computation and a message that run at the same time. The ranks of
        the message are among `span` neighbours."""
        if not message:
            return compute
        slower, longer = self._overlap["node" if span <= self.per_node else "network"]
        if message * longer <= compute * slower:  # the message hides behind the computation
            return compute + message * longer * (1 - 1 / slower)
        return compute * slower + message - compute * slower / longer

    @cached_property
    def _overlap(self) -> dict[str, tuple[float, float]]:
        """Slow-downs of both; 1 where the file has none."""
        known = self.hardware.file.overlap
        return {
            link: self.hardware.overlap(link) if link in known else (1.0, 1.0)
            for link in ("node", "network")
        }

    def seconds(self, work: Iterable[Work], direction: Direction, split: Split) -> float:
        """Return the seconds of a rank's part of these operations."""
        total = 0.0
        for operation in work:
            key = operation, direction, split
            known = self._works.get(key)
            if known is None:
                known = self._works[key] = self._one(*key)
            total += known
        return total

    def _one(self, work: Work, direction: Direction, split: Split) -> float:
        if work.kind == "launch":
            return self.launches(work.count)
        times, part = work.count * split.rows, split.ranks
        if work.kind == "matmul":
            groups, m, k, n = work.shape
            flops = 2.0 * groups * m * k * n * times / part
            # Rates depend on the sizes of a rank's part: the longer side of a matrix is split.
            k, n = (max(1, k // split.tp), n) if k > n else (k, max(1, n // split.tp))
            m = max(1, m * split.rows // split.cp)
            at = {"groups": groups, "m": m, "k": k, "n": n}
            seconds = flops / self._rate("matmul", **at, precision=self.precision)
            if not self._in_fp8(work, direction):
                return seconds
            quick = flops / self._rate("matmul", **at, precision="fp8")
            # Half of a matrix's products in a backward pass are its gradients, in bf16.
            return quick if direction == "forward" else (quick + seconds) / 2
        if work.kind == "attention":
            width, heads, length, _ = work.shape
            flops = 2.0 * length**2 * heads * width * times / part
            at = {"head_width": width, "heads": max(1, heads // part), "length": length}
            flops *= BACKWARD_ATTENTION if direction == "backward" else 1.0
            return flops / self._rate(
                "attention", **at, precision=self.precision, direction=direction
            )
        if work.kind == "kernel":
            return self._kernel(work, direction, split) * times / part
        if work.kind == "pairs":
            size, heads, length = work.shape
            at = {"size": size, "width": heads * size, "length": length}
            return times * heads * size / self._of_kernel(RING, direction, at)
        return self.traffic(work.bytes * times / part)

    def _in_fp8(self, work: Work, direction: Direction) -> bool:
        """True for products of large matrices. In a backward pass any side may be the tokens, so
        all three must be large."""
        groups, *sides = work.shape
        if self.fp8 is None or groups > 1 or work.name:  # experts and the head stay in bf16
            return False
        return min(sides[1:] if direction == "forward" else sides) >= self.fp8.smallest

    def _kernel(self, work: Work, direction: Direction, split: Split) -> float:
        """Return the seconds of a kernel for one whole row, at the rate of a rank's part."""
        size, width, length = work.shape
        at = {"size": size, "width": max(1, width // split.tp), "length": length // split.cp}
        try:
            rate = self._of_kernel(work.name, direction, at)
        except PlanError:
            if work.name in MEMORY_BOUND:
                return self.traffic(work.bytes)
            if not self.roofline:
                raise
            self.estimated.add(work.name)
            return max(self.traffic(work.bytes), self._least(work, direction))
        return length * width / rate

    def _of_kernel(self, name: str, direction: Direction, at: dict[str, int]) -> float:
        return self._rate(name, **at, precision=self.precision, direction=direction)

    def has_kernel(self, name: str) -> bool:
        """True if the file has rows of the kernel in this precision."""
        return any(
            row.kernel == name and row.precision == self.precision
            for row in self.hardware.file.kernels
        )

    def _least(self, work: Work, direction: Direction) -> float:
        """Return the seconds of a kernel's operations at the rate of large matrix products."""
        size, width, length = work.shape
        flops = 4.0 * length * width * max(1, size)  # taps, or states: into them and out of them
        if work.name == "fft_convolution":
            flops = 15.0 * length * width * math.log2(2 * length)
        flops *= 2 if direction == "backward" else 1
        return flops / self._rate(
            "matmul", groups=1, m=8192, k=8192, n=8192, precision=self.precision
        )

    def _rate(self, kind: str, **at: object) -> float:
        key = kind, *at.values()
        if key not in self._rates:
            try:
                self._rates[key] = self.hardware.rate(kind, **at)
            except PlanError as error:
                self._rates[key] = math.nan
                self._errors[key] = error
        rate = self._rates[key]
        if math.isnan(rate):
            raise self._errors[key]
        return rate

    @cached_property
    def _errors(self) -> dict[tuple[object, ...], PlanError]:
        return {}
