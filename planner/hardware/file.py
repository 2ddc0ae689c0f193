"""Format of a hardware YAML: figures for a device and its links, with sources and dates.

`headrace.planner.hardware.Hardware` answers questions from such a file; `trainer profile`
writes it. Tables may be empty: a question that needs a missing row is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from ...console.config import NameIn, Size, added_field
from ...console.errors import ConfigProblem, ConfigProblems
from ...trainer.engines import ENGINES
from .links import COLLECTIVES

DATE = re.compile(r"\d{4}-\d{2}(-\d{2})?")
LINKS = ("node", "network")
KINDS = ("dense", "fp8", "context", "experts", "hybrids")
"""Kinds of runs with an error of their own."""
"""A device's links: within its node, and to other nodes."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where figures come from."""

    kind: Literal["measured", "published", "computed", "fitted"]
    """`computed` figures follow from published ones by a formula that `text` names, `fitted` ones
    from runs of whole programs."""
    date: str
    """Date when it was measured or published: 2026-11-22 or 2026-11."""
    text: str
    """A measurement's command and versions; a publication's title and address."""

    def __post_init__(self) -> None:
        if not DATE.fullmatch(self.date):
            problem = ConfigProblem("date", f"must be YYYY-MM-DD or YYYY-MM, not `{self.date}`")
            raise ConfigProblems([problem])


@dataclass(frozen=True, kw_only=True)
class HardwareRow:
    """A figure with its source."""

    COORDINATES: ClassVar[tuple[str, ...]] = ()
    """Fields that are interpolated."""
    LABELS: ClassVar[tuple[str, ...]] = ()
    """Fields that must be equal."""

    source: str
    """Entry in `sources`."""

    def __post_init__(self) -> None:
        values = {column.name: getattr(self, column.name) for column in fields(self)}
        problems = [
            ConfigProblem(name, f"must be above 0 and finite, not {value}")
            for name, value in values.items()
            if isinstance(value, (int, float))
            and not (0 < value < math.inf or (name == "size" and value == 0))
        ]
        if problems:
            raise ConfigProblems(problems)


@dataclass(frozen=True, kw_only=True)
class Device(HardwareRow):
    """A GPU, or on a CPU one rank's part of the machine."""

    name: str
    """Name that the driver reports."""
    kind: Literal["cuda", "cpu"]
    """Device type."""
    memory: Annotated[int, Size()]
    """Device memory in bytes."""
    threads: int | None = None
    """Threads per rank while a CPU was measured."""


@dataclass(frozen=True, kw_only=True)
class Reserved(HardwareRow):
    """Device memory that tensors cannot use: the driver's context, communication buffers,
    fragmentation."""

    bytes: Annotated[int, Size()]
    """Bytes per device."""


@dataclass(frozen=True, kw_only=True)
class Peak(HardwareRow):
    """Published peak for dense matrix products."""

    precision: str
    """Precision: bf16, fp8, fp32."""
    rate: float
    """FLOP/s."""


@dataclass(frozen=True, kw_only=True)
class MatmulRate(HardwareRow):
    """Rate for `groups` products [m, k] × [k, n]; experts are groups, a plain product has one."""

    COORDINATES = ("groups", "m", "k", "n")
    LABELS = ("precision",)

    m: int
    """Rows per product: tokens."""
    k: int
    """Inner size."""
    n: int
    """Columns."""
    groups: int = 1
    """Number of products."""
    precision: str
    """Precision: bf16, fp8, fp32."""
    rate: float
    """FLOP/s; one call has 2 × groups × m × k × n operations."""


@dataclass(frozen=True, kw_only=True)
class MemoryRate(HardwareRow):
    """Rate for copying `bytes`."""

    COORDINATES = ("bytes",)

    bytes: Annotated[int, Size()]
    """Bytes read; as many are written."""
    rate: float
    """Bytes read and written per second."""


@dataclass(frozen=True, kw_only=True)
class AttentionRate(HardwareRow):
    """Rate for causal attention without projections."""

    COORDINATES = ("head_width", "heads", "length")
    LABELS = ("precision", "direction")

    head_width: int
    """Channels per head."""
    heads: int
    """Query heads; keys and values have as many."""
    length: int
    """Tokens per row; a measured micro-batch has 16,384 tokens or one row."""
    precision: str
    """Precision: bf16, fp32."""
    direction: Literal["forward", "backward"]
    """Pass that is timed."""
    rate: float
    """FLOP/s. Pairs above the diagonal do not count: forward has 2 × length² × heads × head_width
    operations per row, backward 2.5 times as many."""


@dataclass(frozen=True, kw_only=True)
class KernelRate(HardwareRow):
    """Rate for a fused kernel in `headrace.models.kernels`, or for `ring_attention`."""

    COORDINATES = ("size", "width", "length")
    LABELS = ("kernel", "precision", "direction")

    kernel: str
    """Op name, such as `ssd` for headrace::ssd. `ring_attention` is ring attention without a fused
    kernel, on one rank: context ranks compute it in tiles."""
    width: int
    """Output channels: the hidden width for `glu`, heads × head width for `ssd` and `rope`. Input
    channels for `linear_cross_entropy`."""
    length: int
    """Tokens per row."""
    size: int = 0
    """Filter taps (the length for `fft_convolution`), states per channel, vocabulary entries, or
    channels per head; 0 for other kernels."""
    precision: str
    """Precision: bf16, fp32."""
    direction: Literal["forward", "backward"]
    """Pass that is timed."""
    rate: float
    """Elements (rows × length × width) per second; for `ring_attention`, computed query-key pairs
    times width."""


@dataclass(frozen=True, kw_only=True)
class CollectiveRate(HardwareRow):
    """Bus bandwidth while all groups with this shape run a collective at once."""

    COORDINATES = ("per_node", "nodes", "bytes")
    LABELS = ("collective",)

    collective: Annotated[str, NameIn(COLLECTIVES)]
    """Collective."""
    ranks: int
    """Ranks per group."""
    per_node: int
    """Ranks per node; equal to `ranks` for a group within a node."""
    bytes: Annotated[int, Size()]
    """Size as nccl-tests counts it: an all-reduce's tensor, an all-gather's whole output, a
    reduce-scatter's whole input, a rank's send buffer in an all-to-all, a p2p message. A smaller
    collective takes as long as the smallest measured one."""
    rate: float
    """Bus bandwidth in bytes per second, as nccl-tests counts it: bytes / seconds times 2(n − 1)/n
    for an all-reduce among n ranks, (n − 1)/n for an all-gather, reduce-scatter or all-to-all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks < 2 or self.ranks % self.per_node:
            problem = f"{self.ranks} ranks cannot be {self.per_node} on each node"
            raise ConfigProblems([ConfigProblem("ranks", problem)])

    @property
    def nodes(self) -> int:
        return self.ranks // self.per_node

    @property
    def link(self) -> str:
        return "node" if self.nodes == 1 else "network"


@dataclass(frozen=True, kw_only=True)
class Link(HardwareRow):
    """Published figures for a link, which price collectives without rows."""

    bandwidth: float
    """Bytes per second from one device in each direction."""
    latency: float
    """Seconds per hop."""


@dataclass(frozen=True, kw_only=True)
class Overlap(HardwareRow):
    """Slow-down while computation and communication run at the same time."""

    compute: float
    """Computation time, relative to the computation alone."""
    communication: float
    """Communication time, relative to the communication alone."""


@dataclass(frozen=True, kw_only=True)
class Overhead(HardwareRow):
    """Seconds that no rate counts: a CPU's profile has launches, and `trainer tune` finds both."""

    operation: float
    """Seconds to launch an operation, whatever its size."""
    step: float
    """Seconds per step outside the passes: norms, the optimizer's launches, records."""
    engines: Mapping[Annotated[str, NameIn(ENGINES)], float] = field(default_factory=dict)
    """`step` for engines that differ."""

    def __post_init__(self) -> None:
        seconds = {"operation": self.operation, "step": self.step}
        seconds |= {f"engines.{engine}": step for engine, step in self.engines.items()}
        problems = [
            ConfigProblem(name, f"must be at least 0 and finite, not {value}")
            for name, value in seconds.items()
            if not 0 <= value < math.inf
        ]
        if problems:
            raise ConfigProblems(problems)

    def step_seconds(self, engine: str) -> float:
        """Return the seconds that a step takes outside the passes, with an engine."""
        return self.engines.get(engine, self.step)


@dataclass(frozen=True, kw_only=True)
class Host(HardwareRow):
    """Memory of the machine, as an engine that offloads the optimizer uses it."""

    copy: float
    """Bytes per second between one device and the memory, while all devices copy."""
    update: float
    """Bytes per second and device that the CPU reads and writes in the optimizer step."""


@dataclass(frozen=True, kw_only=True)
class Attained(HardwareRow):
    """What whole programs attain of the file's rates, which are those of the best shapes alone."""

    product: float = 1.0
    """Rate of matrix products, relative to the file's."""
    fp8: float = 1.0
    """The same for products in FP8."""
    node: float = 1.0
    """Bandwidth within a node, relative to the link's: NVLink SHARP moves more."""
    doubling: float = 1.0
    """Bandwidth between nodes, relative to the same message among half as many nodes; to the link's
    figure, for two nodes."""
    exposed: float = 1.0
    """Part of asynchronous messages that computation does not hide."""


@dataclass(frozen=True, kw_only=True)
class Band(HardwareRow):
    """How far predictions of a kind of runs were off, each without the run itself."""

    LABELS = ("runs",)

    runs: Annotated[str, NameIn(KINDS)]
    """Kind of the runs: `dense` in bf16, `fp8`, `context` (ranks share rows), `experts`,
    `hybrids`."""
    error: float
    """Mean relative error of seconds."""
    count: int
    """Number of runs."""


@dataclass(frozen=True, kw_only=True)
class Experts(HardwareRow):
    """How unevenly tokens choose experts: a figure of runs, not of devices."""

    imbalance: float
    """Tokens of the busiest rank on an expert axis, relative to their mean: `expert_load` in a
    run's metrics."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.imbalance < 1:
            problem = f"must be at least 1, not {self.imbalance}: the busiest rank has the most"
            raise ConfigProblems([ConfigProblem("imbalance", problem)])


@dataclass(frozen=True, kw_only=True)
class HardwareFile:
    """Figures for a cluster with equal nodes.

    Rows answer where their words match (precision, direction, kernel, collective). Between the
    numbers in two rows, the logarithm of the rate is linear in the logarithm of every number.
    Outside the first and the last row the nearest rate answers.
    """

    name: str
    """Cluster name."""
    devices_per_node: int
    """Devices per node."""
    nodes: int | Literal["any"] = "any"
    """Nodes in the cluster; `any` where figures do not depend on the number."""
    sources: Mapping[str, Source]
    """Where the figures come from, by the name in the rows."""
    device: Device
    reserved: Reserved
    peaks: tuple[Peak, ...] = ()
    matmul: tuple[MatmulRate, ...] = ()
    memory: tuple[MemoryRate, ...] = ()
    attention: tuple[AttentionRate, ...] = ()
    kernels: tuple[KernelRate, ...] = ()
    links: Mapping[Annotated[str, NameIn(LINKS)], Link] = field(default_factory=dict)
    """Published figures for links, which price collectives without rows by NCCL's tuning model: the
    latency of every hop in a ring (or a tree, for an all-reduce), plus bytes over the slowest
    link's bandwidth. A group with several ranks per node enters a node through as many links.
    NVLink SHARP is not counted: NCCL reaches 480 GB/s with it on eight H100, where the link's
    figure is 371."""
    collectives: tuple[CollectiveRate, ...] = ()
    overlap: Mapping[Annotated[str, NameIn(LINKS)], Overlap] = field(default_factory=dict)
    overhead: Overhead | None = None
    experts: Experts | None = added_field(None)  # noqa: RUF009, it is immutable
    host: Host | None = added_field(None)  # noqa: RUF009, it is immutable
    attained: Attained | None = added_field(None)  # noqa: RUF009, it is immutable
    bands: tuple[Band, ...] = added_field(())

    def __post_init__(self) -> None:
        problems = [
            ConfigProblem(
                f"{path}.source", f"`{row.source}` is not one of {', '.join(self.sources)}"
            )
            for path, row in self.rows()
            if row.source not in self.sources
        ]
        for name in ("devices_per_node", "nodes"):
            value: Any = getattr(self, name)
            if value != "any" and value < 1:
                problems.append(ConfigProblem(name, f"must be at least 1, not {value}"))
        if self.reserved.bytes >= self.device.memory:
            limit = f"must be below the memory of the device, {self.device.memory:,} bytes"
            problems.append(ConfigProblem("reserved.bytes", limit))
        for position, row in enumerate(self.collectives):
            if row.per_node > self.devices_per_node:
                limit = f"must be at most devices_per_node, {self.devices_per_node}"
                problems.append(ConfigProblem(f"collectives.{position}.per_node", limit))
        if problems:
            raise ConfigProblems(problems)

    def rows(self) -> Iterator[tuple[str, HardwareRow]]:
        """Yield (path, row) for every row."""
        for column in fields(self):
            value = getattr(self, column.name)
            if isinstance(value, HardwareRow):
                yield column.name, value
            elif isinstance(value, tuple):
                yield from ((f"{column.name}.{number}", row) for number, row in enumerate(value))
            elif isinstance(value, Mapping) and column.name != "sources":
                yield from ((f"{column.name}.{key}", row) for key, row in value.items())
