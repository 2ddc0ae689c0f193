"""Figures that a plan needs and a hardware file lacks: all of them at once, before the search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...console.errors import PlanError
from ..grid.split import Split
from ..hardware import MEASURE, MEASURE_LINKS, MissingRateError
from ..hardware.links import COLLECTIVES
from ..traces.trace import LayerTrace
from .layers import Costs
from .machine import Machine

MODULE_COLLECTIVES = tuple(name for name in COLLECTIVES if name != "all-to-all")
"""Collectives of modules, which have neither context nor expert parallelism."""


def check_figures(phases: Sequence[Costs], gpus: int) -> None:
    """Raise if the file lacks rates of operations, or links between `gpus` devices."""
    machine = phases[0].machine
    hardware = machine.hardware
    layers = [layer for costs in phases for layer in (*costs.kinds, costs.trace.head)]
    rates = find_missing_rates(machine, layers)
    collectives = COLLECTIVES if phases[0].module is None else MODULE_COLLECTIVES
    links = hardware.find_missing_links(gpus, collectives)
    lacks, hints = [], []
    if rates:
        lacks.append(f"no rate of {_join(rates)} (precision {machine.precision})")
        hints.append(MEASURE)
    if links:
        lacks.append(f"no {_join(links)} for {gpus} devices")
        hints.append(MEASURE_LINKS)
    if {*rates} - {"matmul", "memory", "attention"}:
        hints.append("or price kernels by their bytes and operations: --roofline")
    if lacks:
        raise PlanError(f"{hardware.where} has {', and '.join(lacks)}", hint="; ".join(hints))


def find_missing_rates(machine: Machine, layers: Iterable[LayerTrace]) -> list[str]:
    """Name the kinds of rates without rows, in the order of the operations."""
    missing: dict[str, None] = {}
    for layer in layers:
        for direction, operations in (("forward", layer.forward), ("backward", layer.backward)):
            for work in operations:
                try:
                    machine.seconds([work], direction, Split())  # type: ignore[arg-type]
                except MissingRateError as error:
                    missing[error.kind] = None
    return [*missing]


def refuse_offload(costs: Costs) -> str | None:
    """Return why no engine may keep the optimizer in host memory; None if some may."""
    hardware, optimizer = costs.machine.hardware, costs.run.optimizer
    if costs.device == "cpu":
        return "on a CPU the optimizer is in host memory already"
    if not optimizer.on_host:
        return f"optimizer.kind={optimizer.kind} runs on the device alone"
    if hardware.file.host is None:
        return f"{hardware.where} has no figures of the host's memory (`host`)"
    return None


def _join(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
