"""Rates, links and memory of a cluster, from a hardware YAML.

    hardware = Hardware.load("h100")      a file of configs/hardware, or one of `trainer profile`
    hardware.rate("matmul", m=8192, k=4096, n=4096, precision="bf16")      FLOP/s
    hardware.rate("glu", width=4096, length=8192, precision="bf16", direction="backward")
    hardware.seconds("all-reduce", 256 << 20, ranks=16, per_node=8)

Nothing is invented: a missing row is an error that names the command to measure it. This package
needs neither torch nor numpy.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from ...console import config as reader
from ...console.errors import PlanError
from ...console.explain import hint
from ...dataplane.storage.atomic import replacing
from . import links
from .file import (
    Attained,
    AttentionRate,
    CollectiveRate,
    HardwareFile,
    HardwareRow,
    KernelRate,
    MatmulRate,
    MemoryRate,
)
from .interpolation import Point, RateTable, find_ranges

ROW_TYPES: dict[str, type[HardwareRow]] = {
    "matmul": MatmulRate,
    "memory": MemoryRate,
    "attention": AttentionRate,
}
"""Row type by kind of rate; any other kind names a kernel."""
MEASURE = "measure it: trainer profile --out HARDWARE.yaml, on a machine of the cluster"
MEASURE_LINKS = "measure it: torchrun … -m headrace.trainer.cli profile --links --out HARDWARE.yaml"
FAR = 2.0
"""Factor beyond the measured sizes from which an answer counts as extrapolated."""
DEFAULTS = {"groups": 1, "size": 0, "nodes": 1}
"""Values of the fields that a question may leave out."""


def shipped_hardware() -> dict[str, Path]:
    """List the files in `configs/hardware/`, by name."""
    folder = Path(str(resources.files("headrace.configs"))) / "hardware"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


class MissingRateError(PlanError):
    """The file has no rate of this kind with these labels."""

    def __init__(self, where: str, kind: str, details: str) -> None:
        super().__init__(
            f"{where} has no rate of {kind}{f' ({details})' if details else ''}", hint=MEASURE
        )
        self.kind = kind


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
            suggestion = hint(str(name_or_path), shipped)
            raise PlanError(
                f"no hardware `{name_or_path}`{suggestion} Known: {', '.join(shipped)}",
                hint="or give a YAML, which `trainer profile --out` writes",
            )
        return cls(reader.load(HardwareFile, path), str(path))

    def save(self, path: str | Path) -> None:
        """Write the YAML atomically."""
        with replacing(Path(path)) as file:
            file.write(reader.dump(self.file).encode())

    @cached_property
    def digest(self) -> str:
        """Hash all figures."""
        text = json.dumps(reader.plain(self.file), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def usable_memory(self) -> int:
        """Bytes on a device for tensors."""
        return self.file.device.memory - self.file.reserved.bytes

    def rate(self, kind: str, **point: Any) -> float:
        """Return a rate: FLOP/s for `matmul` and `attention`, bytes/s for `memory`, elements/s for
        any other kind, which names a kernel.

        `point` has the labels and coordinates of the row type in `file.py`, such as m, k, n and
        precision. Labels must match; coordinates are interpolated (`interpolation.py`).
        """
        row_type, labels, fields = self._question(kind, point)
        table = self._tables.get((row_type, *labels.values()))
        if table is None:
            details = ", ".join(
                f"{name} {value}" for name, value in labels.items() if name != "kernel"
            )
            raise MissingRateError(self.where, kind, details)
        return table.interpolate(tuple(fields[name] for name in row_type.COORDINATES))

    def find_outside(self, kind: str, **point: Any) -> str | None:
        """Name the coordinate that lies furthest outside the measured ones, by more than a factor
        of two: the nearest rate answers. None if none does."""
        row_type, labels, fields = self._question(kind, point)
        ranges = self._ranges.get((row_type, *labels.values()), [])
        factors = {}
        for name, (low, high) in zip(row_type.COORDINATES, ranges, strict=False):
            value = fields[name]
            if value:
                factors[max(low / value, value / high if high else 1.0)] = (
                    f"{name} {value:,}, measured at {low:,}"
                    + (f" to {high:,}" if high != low else "")
                )
        furthest = max(factors, default=1.0)
        return factors[furthest] if furthest > FAR else None

    def _question(
        self, kind: str, point: dict[str, Any]
    ) -> tuple[type[HardwareRow], dict[str, Any], dict[str, Any]]:
        """Return the row type that answers, its labels, and all fields."""
        row_type = ROW_TYPES.get(kind, KernelRate)
        fields = {**DEFAULTS, "kernel": kind, **point}
        return row_type, {name: fields[name] for name in row_type.LABELS}, fields

    def seconds(
        self, collective: str, size: float, ranks: int, per_node: int | None = None
    ) -> float:
        """Return the seconds of a collective of `size` bytes (as `links.py` counts them).

        The group has `per_node` ranks on every node; by default it fills the nodes. Measured rows
        come first: the bus bandwidth is interpolated over per_node, nodes and bytes, and a smaller
        message takes as long as the smallest measured one. Without rows, the link's published
        figures answer.
        """
        per_node = min(ranks, self.file.devices_per_node) if per_node is None else per_node
        if ranks == 1:
            return 0.0
        assert ranks % per_node == 0, "equally many ranks of a group on each node"
        self._check_nodes(ranks // per_node)
        link = "node" if ranks == per_node else "network"
        table = self._tables.get((CollectiveRate, collective, link))
        if table is None:
            return self._computed_seconds(collective, size, ranks, per_node)
        priced_size = max(size, self._min_sizes[collective, link])
        bandwidth = table.interpolate((per_node, ranks // per_node, priced_size))
        return links.bus_factor(collective, ranks) * priced_size / bandwidth

    def find_missing_links(self, gpus: int, collectives: Sequence[str]) -> list[str]:
        """Name the links that groups of a run cross, and that neither rows nor published figures
        price."""
        per_node = self.file.devices_per_node
        crossed = {"node": gpus > 1 and per_node > 1, "network": gpus > per_node}
        return [
            f"links.{link}"
            for link, is_crossed in crossed.items()
            if is_crossed
            and link not in self.file.links
            and any((CollectiveRate, name, link) not in self._tables for name in collectives)
        ]

    def overlap(self, link: str) -> tuple[float, float]:
        """Return the slow-downs of computation and communication while both run."""
        if link not in self.file.overlap:
            raise self._missing_link(f"overlap.{link}")
        row = self.file.overlap[link]
        return row.compute, row.communication

    def _computed_seconds(self, collective: str, size: float, ranks: int, per_node: int) -> float:
        """Price a collective by the published figures of its links."""
        crossed = {"node": per_node > 1, "network": ranks > per_node}
        for name, is_crossed in crossed.items():
            if is_crossed and name not in self.file.links:
                raise self._missing_link(f"collectives ({collective}) and links.{name}")
        published = self.file.links
        node = published.get("node", published.get("network"))
        network = published.get("network", node)
        assert node is not None and network is not None
        group = (collective, ranks, per_node)
        attained = self.file.attained or Attained(source="")
        within_node = node.bandwidth * attained.node
        between_nodes = network.bandwidth * attained.doubling ** math.log2(ranks // per_node)
        bandwidth = links.bus_bandwidth(*group, within_node, between_nodes)
        latency = links.latency(*group, node.latency, network.latency)
        return latency + links.bus_factor(collective, ranks) * size / bandwidth

    def _check_nodes(self, nodes: int) -> None:
        if self.file.nodes != "any" and nodes > self.file.nodes:
            raise PlanError(
                f"{self.where} describes {self.file.nodes} nodes, and the group has {nodes}",
                hint="use fewer devices, or profile the whole cluster",
            )

    def _missing_link(self, name: str) -> PlanError:
        return PlanError(
            f"{self.where} has no {name}",
            hint=MEASURE_LINKS,
        )

    @cached_property
    def _tables(self) -> dict[tuple[Any, ...], RateTable]:
        return {key: RateTable(rates) for key, rates in self._rates.items()}

    @cached_property
    def _ranges(self) -> dict[tuple[Any, ...], list[tuple[float, float]]]:
        """Smallest and largest coordinates, by table."""
        return {key: find_ranges([point for point, _ in r]) for key, r in self._rates.items()}

    @cached_property
    def _rates(self) -> dict[tuple[Any, ...], list[tuple[Point, float]]]:
        """Rates by row type and labels; of collectives also by link."""
        rates: dict[tuple[Any, ...], list[tuple[Point, float]]] = {}
        file = self.file
        rows: list[MatmulRate | MemoryRate | AttentionRate | KernelRate | CollectiveRate] = [
            *file.matmul,
            *file.memory,
            *file.attention,
            *file.kernels,
            *file.collectives,
        ]
        for row in rows:
            labels = [getattr(row, name) for name in row.LABELS]
            if isinstance(row, CollectiveRate):
                labels.append(row.link)
            point = tuple(getattr(row, name) for name in row.COORDINATES)
            rates.setdefault((type(row), *labels), []).append((point, row.rate))
        return rates

    @cached_property
    def _min_sizes(self) -> dict[tuple[str, str], int]:
        """Smallest measured bytes by collective and link."""
        min_sizes: dict[tuple[str, str], int] = {}
        for row in self.file.collectives:
            key = row.collective, row.link
            min_sizes[key] = min(row.bytes, min_sizes.get(key, row.bytes))
        return min_sizes
