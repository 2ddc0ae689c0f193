"""Format of a hardware YAML: figures of a device and its links, each with its source and date.

`headrace.planner.hardware.Hardware` answers questions from such a file; `trainer profile`
writes one. The tables may be empty: a question that needs a missing row is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from ...console.config import NameIn, Size
from ...console.errors import Problem, Problems
from ...trainer.engines import ENGINES
from .links import COLLECTIVES

DATE = re.compile(r"\d{4}-\d{2}(-\d{2})?")
LINKS = ("node", "network")
"""Links of a device: to the devices of its node, and to other nodes."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Origin of figures."""

    kind: Literal["measured", "published", "computed"]
    """`computed` figures follow from published ones by a formula that `text` names."""
    date: str
    """Date of the measurement or the publication: 2026-11-22 or 2026-11."""
    text: str
    """Command and versions of a measurement; title and address of a publication."""

    def __post_init__(self) -> None:
        if not DATE.fullmatch(self.date):
            what = f"must be YYYY-MM-DD or YYYY-MM, not `{self.date}`"
            raise Problems([Problem("date", what)])


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure with its source."""

    COORDINATES: ClassVar[tuple[str, ...]] = ()
    """Fields of a table's row that are interpolated."""
    LABELS: ClassVar[tuple[str, ...]] = ()
    """Fields of a table's row that must be equal."""

    source: str
    """Name of an entry of `sources`."""

    def __post_init__(self) -> None:
        numbers = {each.name: getattr(self, each.name) for each in fields(self)}
        wrong = [
            Problem(name, f"must be above 0 and finite, not {value}")
            for name, value in numbers.items()
            if isinstance(value, (int, float))
            and not (0 < value < math.inf or (name == "size" and value == 0))
        ]
        if wrong:
            raise Problems(wrong)


@dataclass(frozen=True, kw_only=True)
class Device(Row):
    """A device: a GPU, or on a CPU one rank's part of the machine."""

    name: str
    """Name that the driver reports."""
    kind: Literal["cuda", "cpu"]
    """Kind of the device."""
    memory: Annotated[int, Size()]
    """Bytes of memory of a device."""
    threads: int | None = None
    """Threads of a CPU's rank while it was measured."""


@dataclass(frozen=True, kw_only=True)
class Reserved(Row):
    """Memory of a device that tensors cannot use: the driver's context, buffers of collectives,
    fragmentation."""

    bytes: Annotated[int, Size()]
    """Bytes of each device."""


@dataclass(frozen=True, kw_only=True)
class Peak(Row):
    """Published peak of dense matrix products."""

    precision: str
    """Precision: bf16, fp8, fp32."""
    rate: float
    """FLOP/s."""


@dataclass(frozen=True, kw_only=True)
class Matmul(Row):
    """Rate of `groups` products [m, k] × [k, n]; experts are groups, all others have one."""

    COORDINATES = ("groups", "m", "k", "n")
    LABELS = ("precision",)

    m: int
    """Rows of a product: tokens."""
    k: int
    """Inner size of the product."""
    n: int
    """Columns of the product."""
    groups: int = 1
    """Number of products of a grouped one."""
    precision: str
    """Precision: bf16, fp8, fp32."""
    rate: float
    """FLOP/s: 2 × groups × m × k × n operations by seconds."""


@dataclass(frozen=True, kw_only=True)
class Memory(Row):
    """Rate of a copy of `bytes`."""

    COORDINATES = ("bytes",)

    bytes: Annotated[int, Size()]
    """Bytes that are read; as many are written."""
    rate: float
    """Bytes read and written by seconds."""


@dataclass(frozen=True, kw_only=True)
class Attention(Row):
    """Rate of causal attention without its projections."""

    COORDINATES = ("head_width", "heads", "length")
    LABELS = ("precision", "direction")

    head_width: int
    """Channels of a head."""
    heads: int
    """Query heads; keys and values have as many."""
    length: int
    """Tokens of a row; a measured micro-batch has 16,384 tokens or one row."""
    precision: str
    """Precision: bf16, fp32."""
    direction: Literal["forward", "backward"]
    """Pass."""
    rate: float
    """FLOP/s. The pairs above the diagonal do not count: forward has 2 × length² × heads ×
    head_width operations for each row, backward 2.5 times as many."""


@dataclass(frozen=True, kw_only=True)
class Kernel(Row):
    """Rate of a fused kernel of `headrace.models.kernels`, or of `ring_attention`."""

    COORDINATES = ("size", "width", "length")
    LABELS = ("kernel", "precision", "direction")

    kernel: str
    """Name of its op, such as `ssd` for headrace::ssd. `ring_attention` is attention by a ring
    without fused attention, on one rank: context ranks compute it in tiles."""
    width: int
    """Channels of its output: the hidden width of `glu`, heads × head width of `ssd` and `rope`; of
    its input for `linear_cross_entropy`."""
    length: int
    """Tokens of a row."""
    size: int = 0
    """Taps of a filter (the length for `fft_convolution`), states of a channel, entries of a
    vocabulary or channels of a head; 0 for other kernels."""
    precision: str
    """Precision: bf16, fp32."""
    direction: Literal["forward", "backward"]
    """Pass."""
    rate: float
    """Elements (rows × length × width) by seconds; of `ring_attention` the channels of all computed
    pairs of queries and keys."""


@dataclass(frozen=True, kw_only=True)
class Collective(Row):
    """Bus bandwidth of a collective, while all groups of this shape run it at once."""

    COORDINATES = ("per_node", "nodes", "bytes")
    LABELS = ("collective",)

    collective: Annotated[str, NameIn(COLLECTIVES)]
    """Kind of collective."""
    ranks: int
    """Ranks of a group."""
    per_node: int
    """Ranks of the group on each node; equal to `ranks` for a group within a node."""
    bytes: Annotated[int, Size()]
    """Size as nccl-tests counts it: the tensor of an all-reduce, the whole output of an all-gather,
    the whole input of a reduce-scatter, a rank's send buffer of an all-to-all, the message of p2p.
    Below the smallest measured size a collective takes the time of that size."""
    rate: float
    """Bus bandwidth in bytes by seconds, as nccl-tests counts it: bytes / seconds times 2(n − 1)/n
    for an all-reduce of n ranks, (n − 1)/n for an all-gather, reduce-scatter or all-to-all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks < 2 or self.ranks % self.per_node:
            what = f"{self.ranks} ranks cannot be {self.per_node} on each node"
            raise Problems([Problem("ranks", what)])

    @property
    def nodes(self) -> int:
        return self.ranks // self.per_node

    @property
    def link(self) -> str:
        return "node" if self.nodes == 1 else "network"


@dataclass(frozen=True, kw_only=True)
class Link(Row):
    """Published figures of a link; they price collectives that have no rows."""

    bandwidth: float
    """Bytes by seconds of one device in each direction."""
    latency: float
    """Seconds of a hop."""


@dataclass(frozen=True, kw_only=True)
class Overlap(Row):
    """Slow-down while computation and communication run at the same time."""

    compute: float
    """Time of the computation, in times of the computation alone."""
    communication: float
    """Time of the communication, in times of the communication alone."""


@dataclass(frozen=True, kw_only=True)
class Overhead(Row):
    """Seconds that no rate counts: a CPU's profile has launches, and `trainer tune` finds both."""

    operation: float
    """Seconds to launch an operation, whatever its size."""
    step: float
    """Seconds of a step outside its passes: norms, the optimizer's launches, records."""
    engines: Mapping[Annotated[str, NameIn(ENGINES)], float] = field(default_factory=dict)
    """`step` with these engines, where it is another."""

    def __post_init__(self) -> None:
        seconds = {"operation": self.operation, "step": self.step}
        seconds |= {f"engines.{engine}": each for engine, each in self.engines.items()}
        wrong = [
            Problem(name, f"must be at least 0 and finite, not {value}")
            for name, value in seconds.items()
            if not 0 <= value < math.inf
        ]
        if wrong:
            raise Problems(wrong)

    def step_of(self, engine: str) -> float:
        """Return the seconds of a step outside its passes with an engine."""
        return self.engines.get(engine, self.step)


@dataclass(frozen=True, kw_only=True)
class HardwareFile:
    """Figures of a cluster of equal nodes.

    Rows answer where their words match (precision, direction, kernel, collective). Between the
    numbers of two rows, the logarithm of the rate is linear in the logarithm of each number. Beyond
    the first and the last row the nearest rate counts, and the answer is marked as outside.
    """

    name: str
    """Name of the cluster."""
    devices_per_node: int
    """Devices of a node."""
    nodes: int | Literal["any"] = "any"
    """Nodes of the cluster; `any` where the figures do not depend on their number."""
    sources: Mapping[str, Source]
    """Origins of the figures, by the name that rows use."""
    device: Device
    reserved: Reserved
    peaks: tuple[Peak, ...] = ()
    matmul: tuple[Matmul, ...] = ()
    memory: tuple[Memory, ...] = ()
    attention: tuple[Attention, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    links: Mapping[Annotated[str, NameIn(LINKS)], Link] = field(default_factory=dict)
    """Published figures of links, which price collectives that have no rows by NCCL's tuning model:
    the latency of each hop of a ring (or a tree, for an all-reduce), plus the bytes over the
    bandwidth of the slowest link. A group with several ranks on each node enters it through as many
    links. NVLink SHARP is not counted: NCCL reaches 480 GB/s with it on eight H100, where the
    link's figure is 371."""
    collectives: tuple[Collective, ...] = ()
    overlap: Mapping[Annotated[str, NameIn(LINKS)], Overlap] = field(default_factory=dict)
    overhead: Overhead | None = None

    def __post_init__(self) -> None:
        problems = [
            Problem(f"{path}.source", f"`{row.source}` is not one of {', '.join(self.sources)}")
            for path, row in self.rows()
            if row.source not in self.sources
        ]
        for name in ("devices_per_node", "nodes"):
            value: Any = getattr(self, name)
            if value != "any" and value < 1:
                problems.append(Problem(name, f"must be at least 1, not {value}"))
        if self.reserved.bytes >= self.device.memory:
            what = f"must be below the memory of the device, {self.device.memory:,} bytes"
            problems.append(Problem("reserved.bytes", what))
        for position, row in enumerate(self.collectives):
            if row.per_node > self.devices_per_node:
                what = f"must be at most devices_per_node, {self.devices_per_node}"
                problems.append(Problem(f"collectives.{position}.per_node", what))
        if problems:
            raise Problems(problems)

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield every row with its path."""
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Row):
                yield each.name, value
            elif isinstance(value, tuple):
                yield from ((f"{each.name}.{place}", row) for place, row in enumerate(value))
            elif isinstance(value, Mapping) and each.name != "sources":
                yield from ((f"{each.name}.{name}", row) for name, row in value.items())
