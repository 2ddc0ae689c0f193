"""Table of metrics: every number that a run records for a step.

    all ranks ─ `ranks`: combined in step_stats.py ─┐
    rank 0 computes it (record/steps.py) ───────────┴─► a line of metrics.jsonl or signals.jsonl
                      ├─► loggers: a curve named `logger`
                      └─► report and live page: a curve below the heading `title`

A metric that all ranks combine is a line here and a number that each rank measures: in the loop,
or in a hook's `measure` (hooks/hook.py). Keys in a file's line and panels on a page have the order
of this table.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor

HELD_OUT = "held-out/"
"""Prefix of evaluation curves."""
LOSS_UNIT = "loss"
"""Placeholder for the page's unit of losses: nats per token, or bits per byte."""
Group = Literal["sources", "layers"]
GROUPS = get_args(Group)
"""Keys whose objects hold values by source or layer."""


class Combination(ABC):
    """How all ranks' numbers become one value."""

    size: ClassVar[int] = 1
    """Numbers per rank."""
    absent: ClassVar[float] = 0.0
    """Stands for a rank without a measurement."""

    def encode(self, measured: Any) -> list[float]:
        """Return a rank's `size` numbers."""
        return [float(measured)]

    @abstractmethod
    def combine(self, numbers: Tensor, weight: float) -> Any:
        """Combine numbers, fp64 [ranks, size]. `weight` is the divisor of the step's loss. Return
        None if no rank has a measurement."""


class Largest(Combination):
    """The maximum over ranks."""

    absent = -math.inf

    def combine(self, numbers: Tensor, weight: float) -> float | None:
        largest = float(numbers.amax())
        return None if largest == self.absent else largest


class Mean(Combination):
    """The sum over ranks, divided like the loss; None if it is 0."""

    def combine(self, numbers: Tensor, weight: float) -> float | None:
        [total] = add_in_order(numbers).tolist()
        return None if total == 0 else mean(total, weight)


class ByRank(Combination):
    """All ranks' numbers; None if a rank has no measurement."""

    absent = math.nan

    def combine(self, numbers: Tensor, weight: float) -> tuple[float, ...] | None:
        return None if numbers.isnan().any() else tuple(numbers.flatten().tolist())


class Imbalance(Combination):
    """The maximum count over ranks and layers, in multiples of the mean. A rank measures a count
    per layer."""

    size = 3

    def encode(self, measured: Sequence[int]) -> list[float]:
        return [float(max(measured, default=0)), float(sum(measured)), float(len(measured))]

    def combine(self, numbers: Tensor, weight: float) -> float | None:
        _, total, layers = add_in_order(numbers).tolist()
        return float(numbers[:, 0].amax()) * layers / total if total else None


def mean(total: float, weight: float) -> float:
    """Divide by a step's weight, which is 0 if all tokens are masked."""
    return total / max(weight, 1e-30)


def add_in_order(numbers: Tensor) -> Tensor:
    """Add numbers in the order of the ranks (`sum` has another order)."""
    return numbers.cumsum(dim=0)[-1]


@dataclass(frozen=True, kw_only=True)
class Metric:
    title: str | None = None
    """Heading of the panel, which metrics with the same title share; None: pages draw no curve."""
    unit: str = ""
    """Text beside the heading."""
    label: str = ""
    """Name in a legend; empty: the metric's name."""
    format: Literal["percent", "bytes"] | None = None
    """Number format on a page; None: plain."""
    zero: bool = False
    """True if the panel's axis begins at 0."""
    wide: bool = False
    """True if the panel spans the page, above the narrow panels."""
    each_step: bool = False
    """True if every step has a value: a missing value was not finite."""
    logger: str | None = None
    """Name in loggers; None: not logged."""
    ranks: Combination | None = None
    """How ranks combine; None: rank 0 alone computes the value."""
    digits: int | None = None
    """Recorded decimal places; None: all."""
    group: Group | None = None
    """Object that holds values by source or layer; None: the value is a key of the line."""
    signal: bool = False
    """True if the metric is in signals.jsonl, for steps that record signals."""


PAGE_FIELDS = ("title", "unit", "label", "format", "zero", "wide", "each_step")
"""Fields of `Metric` that pages read."""
PER_LAYER: Any = {"group": "layers", "signal": True, "wide": True}

METRICS: dict[str, Metric] = {
    "loss": Metric(title="Loss", unit=LOSS_UNIT, wide=True, each_step=True, logger="loss/all"),
    "z_loss": Metric(
        title="z-loss",
        unit="nats per token, beside the loss",
        label="z-loss",
        logger="objective/z_loss",
        ranks=Mean(),
    ),
    "lr": Metric(title="Learning rate", label="learning rate", zero=True, logger="optimizer/lr"),
    "grad_norm": Metric(
        title="Gradient norm",
        unit="before clipping",
        label="gradient norm",
        zero=True,
        each_step=True,
        logger="optimizer/grad_norm",
    ),
    "tokens_per_second": Metric(
        title="Tokens per second",
        label="tokens/s",
        zero=True,
        logger="speed/tokens_per_second",
        digits=1,
    ),
    "speed/": Metric(title="Tokens per second by source", zero=True),  # computed by the page
    "mfu": Metric(
        title="MFU and HFU", label="MFU", format="percent", zero=True, logger="speed/mfu"
    ),
    "hfu": Metric(
        title="MFU and HFU", label="HFU", format="percent", zero=True, logger="speed/hfu"
    ),
    "memory": Metric(
        title="Memory",
        unit="most of rank 0",
        format="bytes",
        zero=True,
        logger="speed/memory",
        ranks=ByRank(),
    ),
    "data_wait": Metric(
        title="Data wait",
        unit="part of the step",
        label="data wait",
        format="percent",
        zero=True,
        logger="speed/data_wait",
        ranks=Largest(),
        digits=6,
    ),
    "seconds": Metric(title="Seconds per step", label="seconds", zero=True, digits=6),
    "loss/": Metric(title="Loss by source", unit=LOSS_UNIT, wide=True, group="sources"),
    "weight/": Metric(group="sources"),
    "rows/": Metric(group="sources"),
    "expert_load": Metric(
        title="Expert load",
        unit="max / mean",
        label="expert load",
        logger="speed/expert_load",
        ranks=Imbalance(),
        digits=4,
    ),
    "slowest_rank": Metric(),
    "slowest_lag": Metric(
        title="Slowest rank",
        unit="its lag, part of the step",
        label="lag",
        format="percent",
        zero=True,
        logger="speed/slowest_lag",
        digits=4,
    ),
    "slowest_steps": Metric(),
    HELD_OUT + "loss": Metric(
        title="Held-out loss", unit=LOSS_UNIT, label="all", wide=True, each_step=True
    ),
    HELD_OUT + "loss/": Metric(title="Held-out loss", unit=LOSS_UNIT, wide=True),
    HELD_OUT + "weight/": Metric(),
    HELD_OUT + "rows/": Metric(),
    HELD_OUT + "seconds": Metric(),
    "weight_norm/": Metric(title="Weight norm by layer", **PER_LAYER),
    "gradient_norm/": Metric(title="Gradient norm by layer", unit="before clipping", **PER_LAYER),
    "update_norm/": Metric(title="Update norm by layer", **PER_LAYER),
    "activation_rms/": Metric(
        title="Activation RMS by layer", unit="output of each layer", **PER_LAYER
    ),
    "expert_max/": Metric(
        title="Expert load by layer", unit="most of an expert / mean", **PER_LAYER
    ),
    "expert_entropy/": Metric(title="Expert entropy by layer", unit="1: even", **PER_LAYER),
    "own_seconds": Metric(ranks=ByRank(), signal=True, digits=6),
    "noise_scale": Metric(
        title="Gradient noise scale",
        unit="tokens",
        label="noise scale",
        zero=True,
        logger="optimizer/noise_scale",
        signal=True,
    ),
    "noise_trace": Metric(signal=True),
    "noise_square": Metric(signal=True),
    "noise_steps": Metric(signal=True),
    "skipped": Metric(),
}
"""Metrics by name. A name that ends in a slash stands for a curve per source or layer."""


def find_metric(column: str) -> Metric | None:
    """Find a curve's metric: `loss/web` belongs to `loss/`."""
    return METRICS.get(column) or METRICS.get(column.partition("/")[0] + "/")


def combinations() -> dict[str, Combination]:
    """Return the combinations of metrics that all ranks measure, by name."""
    return {name: metric.ranks for name, metric in METRICS.items() if metric.ranks is not None}


def format_record(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step's metrics for a line: in the order of the table, rounded to `digits`, and null
    where a value is not finite."""
    keys = {metric.group or name: metric for name, metric in METRICS.items()}
    if unknown := values.keys() - keys.keys():
        raise KeyError(f"no line of the table of metrics is named {', '.join(sorted(unknown))}")
    return {
        key: _round(values[key], metric.digits) for key, metric in keys.items() if key in values
    }


def _round(value: Any, digits: int | None) -> Any:
    if isinstance(value, tuple):
        return [_round(number, digits) for number in value]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return value if digits is None else round(value, digits)


def signal_keys() -> set[str]:
    """Return the keys in signals.jsonl."""
    return {metric.group or name for name, metric in METRICS.items() if metric.signal}


def grouped_metrics(group: str) -> set[str]:
    """Return the metrics that have a value per source or layer."""
    return {name.rstrip("/") for name, metric in METRICS.items() if metric.group == group}


def list_page_metrics() -> list[dict[str, Any]]:
    """Return the table for a page: names and `PAGE_FIELDS`."""
    return [
        {"name": name, **{key: value for key in PAGE_FIELDS if (value := getattr(metric, key))}}
        for name, metric in METRICS.items()
    ]
