"""Price operations and messages on a cluster, by the rates in a hardware file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import copy
from functools import cached_property

from ...console.errors import PlanError
from ...models.config.options.precision import PRECISIONS, Fp8Config
from ..grid.split import Direction, Split
from ..hardware import Hardware
from ..hardware.file import Attained, Host, Overhead
from ..traces.work import EXPERTS, Work
from .program import TrainingProgram

MEMORY_BOUND = (
    *("rms_norm", "add_rms_norm", "gated_rms_norm", "glu", "rope"),
    *("spread_rows", "collect_rows"),
)
"""Kernels without a rate that are priced by memory traffic alone."""
RING = "ring_attention"
"""Kernel rate for ring attention without fused kernels: query-key pairs times channels."""
IMBALANCE = 1.15
"""Tokens of the busiest rank on an expert axis relative to their mean, where the file has none."""
UNBOUNDED = ("memory",)
"""Rates that hardly depend on sizes beyond the measured ones."""
CAST_BYTES = 5
"""Bytes that memory moves to find the largest of a number's tensor and to round the number to FP8:
two reads in bf16, and a write."""
MESSAGE_LAUNCHES = 3
"""Launches that take as long as the host's overhead per message: the autograd function, views, the
call and the wait. Measured on a CPU with messages that send nothing."""
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
        program: TrainingProgram | None = None,
    ) -> None:
        self.hardware = hardware
        self.program = program or TrainingProgram()
        self.precision = "bf16" if fp8 else precision
        """Precision for all operations but FP8 products."""
        self.number_bytes = PRECISIONS[self.precision].weight_bytes
        self.fp8 = fp8
        self.roofline = roofline
        """True if kernels without a rate are priced by bytes and FLOP."""
        self.estimated: set[str] = set()
        """Kernels priced by the roofline."""
        self.outside: dict[str, str] = {}
        """Extrapolated sizes, by kind of rate."""
        self._rates: dict[tuple[object, ...], float | PlanError] = {}
        """Rates, or the error that names what the file lacks."""
        self._messages: dict[tuple[str, float, int, int], float] = {}
        self._works: dict[tuple[Work, Direction, Split], float] = {}
        """Seconds by operation: layer kinds share many, such as an MLP's."""

    def renew(self) -> Machine:
        """Return the same prices, without a memory of what was asked."""
        machine = copy(self)
        machine.estimated, machine.outside = set(), {}
        machine._rates, machine._works = {}, {}
        return machine

    @cached_property
    def overhead(self) -> Overhead:
        """Seconds per operation and per step; zero where the file has none."""
        return self.hardware.file.overhead or Overhead(operation=0.0, step=0.0, source="")

    @cached_property
    def imbalance(self) -> float:
        """Tokens of the busiest rank on an expert axis, relative to their mean."""
        experts = self.hardware.file.experts
        return IMBALANCE if experts is None else experts.imbalance

    @cached_property
    def attained(self) -> Attained:
        """What whole programs attain of the file's rates; all of them where it does not say."""
        return self.hardware.file.attained or Attained(source="")

    def exposed(self, *, asynchronous: bool) -> float:
        """Return the part of messages that computation does not hide."""
        return self.attained.exposed if asynchronous else 1.0

    def launches(self, count: float) -> float:
        """Return the seconds that `count` operations take whatever their size: the host's launch on
        a CPU, the time between two kernels on a GPU."""
        return count * self.overhead.operation

    def host(self, launches: float) -> float:
        """Return the seconds of the host's work beside operations, as a number of launches. A GPU
        computes meanwhile."""
        return self.launches(launches) if self.hardware.file.device.kind == "cpu" else 0.0

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
        return size * self.program.traffic / self._memory_rate(size)

    def copy_seconds(self, size: float) -> float:
        """Return the seconds of kernels that read and write `size` bytes, and do no more."""
        return size / self._memory_rate(size)

    def message_copies(self, size: float, copies: int) -> float:
        """Return the seconds that a rank works around a message of `size` bytes, which it copies
        `copies` times."""
        return copies * self.traffic(2 * size) + self.host(MESSAGE_LAUNCHES + copies)

    def host_copy(self, size: float) -> float:
        """Return the seconds of a copy between a device and the memory of its machine."""
        return size / self._host.copy

    def host_update(self, size: float) -> float:
        """Return the seconds in which the CPU reads and writes `size` bytes for a device."""
        return size / self._host.update

    @property
    def _host(self) -> Host:
        if self.hardware.file.host is None:
            raise PlanError(
                f"{self.hardware.where} has no figures of the host's memory, which engines that "
                "offload use",
                hint="add `host: {copy: …, update: …, source: …}`, in bytes per second and device",
            )
        return self.hardware.file.host

    def _memory_rate(self, size: float) -> float:
        # Rates depend on the size. Powers of two are near enough, and can be cached.
        rounded_size = 1 << max(0, int(size).bit_length() - 1)
        return self._rate("memory", bytes=rounded_size)

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
            cast = self._cast_seconds(work, m * k * split.rows / ranks + k * n / split.tp)
            k, n = (max(1, k // split.tp), n) if k > n else (k, max(1, n // split.tp))
            m = max(1, m * split.rows // split.cp)
            dims = {"groups": groups, "m": m, "k": k, "n": n}
            return self._price_product(work, direction, flops, dims) + cast
        if work.kind == "attention":
            width, heads, length, _ = work.shape
            flops = 2.0 * length**2 * heads * width * count / ranks
            dims = {"head_width": width, "heads": max(1, heads // ranks), "length": length}
            flops *= BACKWARD_ATTENTION if direction == "backward" else 1.0
            flops *= self.program.attention_share
            return flops / self._kernel_rate("attention", direction, dims)
        if work.kind == "kernel":
            return self._price_kernel(work, direction, split) * count / ranks
        if work.kind == "pairs":
            size, heads, length = work.shape
            dims = {"size": size, "width": heads * size, "length": length}
            return count * heads * size / self._kernel_rate(RING, direction, dims)
        return self.traffic(work.bytes * count / ranks)

    def _price_product(
        self, work: Work, direction: Direction, flops: float, dims: dict[str, int]
    ) -> float:
        """Return the seconds of products with these local sizes. A product takes its operations and
        its bytes beside each other, as the root of both squares: small ones are slower."""
        program, attained = self.program, self.attained
        rate = self._rate("matmul", **dims, precision=self.precision) * attained.product
        seconds = flops / rate
        if self._in_fp8(work, direction):
            share = 1.0 if direction == "forward" else program.fp8_backward
            fp8_rate = self._rate("matmul", **dims, precision="fp8") * attained.fp8
            seconds = share * (flops / fp8_rate) + (1 - share) * seconds
        groups, m, k, n = dims.values()
        size = groups * (m * k + k * n + m * n) * self.number_bytes
        if self.hardware.file.attained is None:  # measured by shape, but for experts' few tokens
            bounds = work.name == EXPERTS
            return max(seconds, self.traffic(size) * work.count) if bounds else seconds
        return math.hypot(seconds, work.count * size / self._memory_rate(size))

    def _cast_seconds(self, work: Work, numbers: float) -> float:
        """Return the seconds in which kernels of their own round a product's factors to FP8."""
        casts = {"none": (), "experts": (EXPERTS,), "all": (EXPERTS, "")}[self.program.fp8_casts]
        if self.fp8 is None or work.name not in casts:
            return 0.0
        return self.traffic(CAST_BYTES * work.shape[0] * numbers * work.count)

    def _in_fp8(self, work: Work, direction: Direction) -> bool:
        """Return True if large matrices are multiplied. In a backward pass tokens may be any side,
        so all three must be large."""
        groups, *sides = work.shape
        if self.fp8 is None:
            return False
        if work.name == EXPERTS:
            return self.program.fp8_experts
        if groups > 1 or work.name:  # the head stays in bf16
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
                # By the attained figures, products are priced by shape from one row on.
                if kind not in UNBOUNDED and not (kind == "matmul" and self.hardware.file.attained):
                    outside = self.hardware.find_outside(kind, **point)
                    self.outside |= {kind: outside} if outside else {}
            except PlanError as error:
                self._rates[key] = error
        rate = self._rates[key]
        if isinstance(rate, PlanError):
            raise rate
        return rate
