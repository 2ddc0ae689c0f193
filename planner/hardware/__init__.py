"""Rates, links and memory of a cluster, from a hardware YAML.

    hardware = Hardware.load("h100")      a file of configs/hardware, or one of `trainer profile`
    hardware.rate("matmul", m=8192, k=4096, n=4096, precision="bf16")      FLOP/s
    hardware.rate("glu", width=4096, length=8192, precision="bf16", direction="backward")
    hardware.seconds("all-reduce", 256 << 20, ranks=16, per_node=8)

Answers are numbers that carry the sources of the figures behind them. Nothing is invented: what
has no row is an error that says which command measures it. It needs neither torch nor numpy.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from ...console import config as reader
from ...console.errors import PlanError
from ...console.explain import hint
from ...dataplane.storage.atomic import replacing
from . import links
from .file import Attention, Collective, HardwareFile, Kernel, Matmul, Memory, Row, Source
from .interpolation import At, Table

TABLES: dict[str, type[Row]] = {"matmul": Matmul, "memory": Memory, "attention": Attention}
"""Kinds of rates with a table of their own; all others are kernels."""
DEFAULTS = {"groups": 1, "size": 0, "nodes": 1}


class Figure(float):
    """A number with its provenance."""

    sources: tuple[str, ...]
    """Names of the sources of the rows behind it."""
    outside: bool
    """True beyond the measured sizes: the figure is that of the nearest size."""
    computed: bool
    """True if it follows from the published bandwidth of a link."""

    def __new__(
        cls,
        value: float,
        sources: tuple[str, ...],
        *,
        outside: bool = False,
        computed: bool = False,
    ) -> Figure:
        made = super().__new__(cls, value)
        made.sources, made.outside, made.computed = sources, outside, computed
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _figure, (float(self), self.sources, self.outside, self.computed)


def _figure(value: float, sources: tuple[str, ...], outside: bool, computed: bool) -> Figure:
    return Figure(value, sources, outside=outside, computed=computed)


def shipped_hardware() -> dict[str, Path]:
    """Files of `configs/hardware/`, by name."""
    folder = Path(str(resources.files("headrace.configs"))) / "hardware"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


class Hardware:
    """Answers from a hardware file. `where` names the file in errors."""

    def __init__(self, file: HardwareFile, where: str) -> None:
        self.file = file
        self.where = where

    @classmethod
    def load(cls, name_or_path: str | Path) -> Hardware:
        """Read a shipped cluster by its name, or a YAML."""
        shipped = shipped_hardware()
        path = shipped.get(str(name_or_path), Path(name_or_path))
        if path.suffix not in (".yaml", ".yml") and not path.exists():
            known = hint(str(name_or_path), shipped)
            what = f"no hardware `{name_or_path}`{known} Known: {', '.join(shipped)}"
            raise PlanError(what, hint="or give a YAML, which `trainer profile --out` writes")
        return cls(reader.load(HardwareFile, path), str(path))

    def save(self, path: str | Path) -> None:
        """Write the file; it appears whole."""
        with replacing(Path(path)) as file:
            file.write(reader.dump(self.file).encode())

    @cached_property
    def digest(self) -> str:
        """Digest of the figures."""
        text = json.dumps(reader.plain(self.file), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def usable_memory(self) -> int:
        """Bytes of a device that tensors can use."""
        return self.file.device.memory - self.file.reserved.bytes

    def sources(self, figure: Figure) -> list[Source]:
        """Return the origins of a figure."""
        return [self.file.sources[name] for name in figure.sources]

    def peak(self, precision: str) -> Figure | None:
        """Return the published peak of matrix products in FLOP/s, None if the file has none."""
        rows = [row for row in self.file.peaks if row.precision == precision]
        return Figure(rows[-1].rate, (rows[-1].source,)) if rows else None

    def rate(self, kind: str, **at: Any) -> Figure:
        """Return the rate of `matmul` or `attention` (FLOP/s), of `memory` (bytes/s), or of the
        kernel with this name (elements/s).

        `at` has the labels and coordinates of the kind's row in `file.py`, such as m, k, n and
        precision. Labels must match; coordinates are interpolated (`interpolation.py`).
        """
        table = TABLES.get(kind, Kernel)
        labels = {"kernel": kind} if table is Kernel else {}
        given = DEFAULTS | labels | at
        point = tuple(given[name] for name in table.COORDINATES)
        label = tuple(given[name] for name in table.LABELS)
        rows = self._tables.get((table, *label))
        if rows is None:
            named = ", ".join(f"{name} {given[name]}" for name in table.LABELS if name != "kernel")
            what = f"{self.where} has no rate of {kind}{f' ({named})' if named else ''}"
            advice = "measure it: trainer profile --out HARDWARE.yaml, on a machine of the cluster"
            raise PlanError(what, hint=advice)
        found = rows.at(point)
        return Figure(found.rate, found.sources, outside=found.outside)

    def seconds(
        self, collective: str, size: float, ranks: int, per_node: int | None = None
    ) -> Figure:
        """Return the seconds of a collective of `size` bytes (as `links.py` counts them).

        `per_node` ranks of the group are on each node; without it, as many as a node has. Rows of
        the collective count first: the bus bandwidth is interpolated over per_node, nodes and
        bytes; below the smallest measured size the seconds are those of that size. Without rows,
        the published figures of the link are used, and the answer is marked as computed.
        """
        per_node = min(ranks, self.file.devices_per_node) if per_node is None else per_node
        if ranks == 1:
            return Figure(0.0, ())
        assert ranks % per_node == 0, "equally many ranks of a group on each node"
        self._check_nodes(ranks // per_node)
        link = "node" if ranks == per_node else "network"
        rows = self._tables.get((Collective, collective, link))
        if rows is None:
            return self._computed(collective, size, ranks, per_node)
        least = self._least[collective, link]
        counted = max(size, least)
        found = rows.at((per_node, ranks // per_node, counted))
        seconds = links.bus_factor(collective, ranks) * counted / found.rate
        return Figure(seconds, found.sources, outside=found.outside or size < least)

    def overlap(self, link: str) -> tuple[Figure, Figure]:
        """Return how much longer computation and communication take while both run."""
        if link not in self.file.overlap:
            raise self._missing_link(f"overlap.{link}")
        row = self.file.overlap[link]
        return Figure(row.compute, (row.source,)), Figure(row.communication, (row.source,))

    def _computed(self, collective: str, size: float, ranks: int, per_node: int) -> Figure:
        within = ranks == per_node
        missing = {"node": per_node > 1, "network": not within}
        for name, needed in missing.items():
            if needed and name not in self.file.links:
                raise self._missing_link(f"collectives ({collective}) and links.{name}")
        known = self.file.links
        node = known.get("node", known.get("network"))
        network = known.get("network", node)
        assert node is not None and network is not None
        shape = (collective, ranks, per_node)
        rate = links.bus_bandwidth(*shape, node.bandwidth, network.bandwidth)
        wait = links.latency(*shape, node.latency, network.latency)
        seconds = wait + links.bus_factor(collective, ranks) * size / rate
        sources = (node.source,) if within else (node.source, network.source)
        return Figure(seconds, tuple(dict.fromkeys(sources)), computed=True)

    def _check_nodes(self, nodes: int) -> None:
        if self.file.nodes != "any" and nodes > self.file.nodes:
            what = f"{self.where} describes {self.file.nodes} nodes, and the group has {nodes}"
            raise PlanError(what, hint="use fewer devices, or profile the whole cluster")

    def _missing_link(self, name: str) -> PlanError:
        advice = (
            "measure it: torchrun … -m headrace.trainer.cli profile --links --out HARDWARE.yaml"
        )
        return PlanError(f"{self.where} has no {name}", hint=advice)

    @cached_property
    def _tables(self) -> dict[tuple[Any, ...], Table]:
        """Rows by their class and labels; collectives also by link."""
        tables: dict[tuple[Any, ...], list[At]] = {}
        file = self.file
        rated: list[Matmul | Memory | Attention | Kernel | Collective] = [
            *file.matmul,
            *file.memory,
            *file.attention,
            *file.kernels,
            *file.collectives,
        ]
        for row in rated:
            label = tuple(getattr(row, name) for name in row.LABELS)
            if isinstance(row, Collective):
                label = (*label, row.link)
            point = tuple(getattr(row, name) for name in row.COORDINATES)
            tables.setdefault((type(row), *label), []).append(At(point, row.rate, row.source))
        return {name: Table(rows) for name, rows in tables.items()}

    @cached_property
    def _least(self) -> dict[tuple[str, str], int]:
        """Smallest measured size of each collective and link."""
        least: dict[tuple[str, str], int] = {}
        for row in self.file.collectives:
            place = row.collective, row.link
            least[place] = min(row.bytes, least.get(place, row.bytes))
        return least
