"""Published runs: step times that the planner predicts beside published ones, and a constant rate.

    python -m benchmarks.published_runs

Runs of dense transformers (`published_runs.yaml`, with their sources), priced by the planner itself
as `trainer plan price` does it: traces, costs, schedules by events. Each figure has one origin:

    published   attention (FlashAttention-2 or 3), links, memory: the shipped hardware file
    fitted      one rate of matrix products and one factor of memory traffic for each device
    assumed     EAGER, ASYNC below

Both fits leave out the run that is predicted. The
constant model has one fitted figure for each device, too: operations by seconds, of any kind. What
the planner cannot say is refused by name: products whose three passes are in FP8, attention that
stores its scores, context ranks that share a row unevenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from headrace.console import config as reader
from headrace.models.config.config import ModelConfig
from headrace.models.config.options.recompute import Rule, Selective
from headrace.planner.grid.grid import Grid, make_grid
from headrace.planner.hardware import Hardware
from headrace.planner.prices.layers import Costs
from headrace.planner.prices.machine import Machine
from headrace.planner.search.given_layout import price_time
from headrace.planner.search.make import uniform_phase
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.cuts import even_cuts
from headrace.trainer.run.config import RunConfig

FILE = Path(__file__).parent / "published_runs.yaml"
RATES = [1e14 * 1.04**n for n in range(52)]
"""Rates of matrix products that the fit tries: 100 to 740 TFLOP/s in steps of 4%."""
FACTORS = (1, 2, 3, 4, 5, 6)
"""Factors of the traffic that the fit tries: kernels move the bytes more than once."""
LENGTH = 4096
"""Tokens of a row where the file has none."""
FLASH_2 = 335e12
"""Attention of torch on an H100 in both passes: T. Dao, FlashAttention-2 (arXiv 2307.08691,
2023-07), section 4.1. The hardware file has FlashAttention-3, which NVIDIA's programs equal."""
EAGER = 2.0
"""Traffic without a compiler, in times of that with one."""
ASYNC = 0.5
"""Part of the messages of asynchronous tensor parallelism that products do not hide: the planner
does not know it, so the link within the node is as much faster."""
CLUSTERS = {"A100": "a100-80", "H100": "h100"}
RECOMPUTED = Selective(save=("attention", "scan", "convolution"))
"""Recomputes products, and keeps attention."""


@dataclass(frozen=True, eq=False)
class Run:
    """A published run."""

    group: str
    name: str
    model: Mapping[str, Any]
    layout: Mapping[str, Any]
    recompute: str
    unit: str
    value: float

    def get(self, name: str, default: Any = 1) -> Any:
        return self.layout.get(name, default)

    @property
    def length(self) -> int:
        return int(self.get("seq", LENGTH))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        layout = {name: self.get(name) for name in ("world", "tp", "cp", "pp", "rows", "micro")}
        dp = layout["world"] // (layout["tp"] * layout["cp"] * layout["pp"])
        return int(dp * layout["rows"] * layout["micro"] * self.length)

    @property
    def seconds(self) -> float:
        """Published seconds of a step."""
        world = self.get("world")
        if self.unit == "tokens/s/GPU":
            return self.tokens / (self.value * world)
        if self.unit == "model TFLOP/s/GPU":
            return self.model_flops * self.tokens / (self.value * 1e12 * world)
        return self.value

    @property
    def layer_products(self) -> float:
        """Operations of a layer's matrix products for a token, in a forward pass."""
        m = self.model
        size = m["width"] // m["heads"]
        attention = m["width"] * (2 * m["width"] + 2 * m["kv_heads"] * size)
        return 2.0 * (attention + (3 if m["gated_mlp"] else 2) * m["width"] * m["hidden"])

    @property
    def layer_attention(self) -> float:
        """Operations of causal attention for a token."""
        return 2.0 * self.length * self.model["width"]

    @property
    def head(self) -> float:
        return 2.0 * self.model["width"] * self.model["vocabulary"]

    @property
    def model_flops(self) -> float:
        """Operations for a token that publications count."""
        causal = self.get("causal", 0.5)
        attention = 2 * causal * self.layer_attention
        return 3 * (self.model["layers"] * (self.layer_products + attention) + self.head)

    @property
    def repeated(self) -> tuple[float, float]:
        """Parts of the products and of attention that the backward pass repeats."""
        return {
            "none": (0.0, 0.0),
            "block": (1.0, 1.0),
            "selective": (0.0, 1.0),
            "2 of 5 blocks (inferred from HFU/MFU)": (0.4, 0.4),
            "per-op selective, about half": (0.5, 0.0),
        }[self.recompute]

    @property
    def hardware_flops(self) -> float:
        """Operations for a token with those that are repeated."""
        products, attention = self.repeated
        layer = (3 + products) * self.layer_products + (3.5 + attention) * self.layer_attention
        return float(self.model["layers"] * layer + 3 * self.head)


@cache
def runs() -> tuple[Run, ...]:
    published = []
    for row in yaml.safe_load(FILE.read_text()):
        row["group"], row["name"] = row.pop("source"), row.pop("run")
        row.pop("memory_gib", None)
        published.append(Run(**row))
    return tuple(published)


def refusal(run: Run) -> str | None:
    """Return why the planner cannot say this run, or None."""
    if run.get("fp8", False):
        return "all three products of a matrix in FP8: ours keeps weights' gradients in bf16"
    if run.get("causal", 0.5) == 1.0:
        return "attention that stores its scores, before fused kernels"
    if run.get("cp") > 1:
        return "context ranks that share a row unevenly"
    return None


def change_hardware(run: Run, rate: float, factor: float) -> Hardware:
    """Return the shipped cluster with the fitted figures, and what is assumed of the program."""
    hardware = Hardware.load(CLUSTERS[device(run)])
    file, attention, links = hardware.file, hardware.file.attention, dict(hardware.file.links)
    if run.group.startswith(("fms", "torchtitan")) and "H100" in run.group:
        attention = tuple(replace(row, rate=FLASH_2) for row in attention)
    if run.get("async_tp", False):
        links["node"] = replace(links["node"], bandwidth=links["node"].bandwidth / ASYNC)
    factor *= 1.0 if run.get("compiled", True) else EAGER
    changed = replace(
        file,
        matmul=tuple(replace(row, rate=rate) for row in file.matmul[:1]),
        memory=tuple(replace(row, rate=row.rate / factor) for row in file.memory),
        attention=attention,
        links=links,
    )
    return Hardware(changed, hardware.where)


class PublishedLayout:
    """A run as the planner sees it."""

    def __init__(self, run: Run) -> None:
        get, model = run.get, run.model
        self.run, self.layers = run, model["layers"]
        chunks, world = get("virtual"), get("world")
        schedule = "interleaved" if chunks > 1 else "1f1b"
        layout = LayoutConfig(pp=get("pp"), tp=get("tp"), schedule=schedule, chunks=chunks)
        # Megatron gathers and reduces once a step, beside its first and last passes.
        gather: Literal["block", "step"] = "block" if get("state", "fsdp") == "fsdp" else "step"
        engine = Fsdp2Config(gather=gather, shard=get("shard", None))
        rows = world // layout.shards * get("rows") * get("micro")
        phase = uniform_phase(run.length, rows)
        settings = RunConfig(precision="bf16", layout=layout, engine=engine)
        machine = Machine(change_hardware(run, RATES[0], 1), "bf16")
        self.costs = Costs(build_model(model), settings, machine, phase)
        tokens = get("rows") * run.length
        self.grid: Grid = make_grid(layout, engine, tokens, world, phase)
        self.cuts = even_cuts(self.layers, layout.all_chunks)

    @cached_property
    def rules(self) -> list[Rule]:
        rules: Mapping[str, tuple[Rule, ...]] = {
            "none": ("none",),
            "block": ("block",),
            "2 of 5 blocks (inferred from HFU/MFU)": ("none", "block", "none", "block", "none"),
            "per-op selective, about half": (RECOMPUTED, "none"),
        }
        cycle = rules[self.run.recompute]
        return [cycle[layer % len(cycle)] for layer in range(self.layers)]

    def step(self, rate: float, factor: float) -> float:
        """Return the seconds of a step, by the rate of matrix products and the traffic's factor."""
        machine = Machine(change_hardware(self.run, rate, factor), "bf16")
        return price_time(self.costs.replace_machine(machine), self.grid, self.cuts, self.rules)


def build_model(model: Mapping[str, Any]) -> ModelConfig:
    attention = {name: model[name] for name in ("heads", "kv_heads")}
    data = {
        "vocab_size": model["vocabulary"],
        "width": model["width"],
        "pattern": f"[attention] * {model['layers']}",
        "mlp": "mlp",
        "operators": {
            "attention": {"kind": "attention", **attention},
            "mlp": {"kind": "glu" if model["gated_mlp"] else "mlp", "hidden": model["hidden"]},
        },
        "tie_embeddings": model["tied"],
    }
    return reader.build(ModelConfig, data, source=str(FILE))


@cache
def errors(run: Run) -> Mapping[int, Sequence[float]]:
    """Return the relative errors of a run by factor, then by rate.

    A step is a sum of seconds, of which messages hide some: between rates, the reciprocals are
    interpolated.
    """
    layout, knots = PublishedLayout(run), RATES[::10] + RATES[-1:]
    predictions = {}
    for factor in FACTORS:
        seconds = [layout.step(rate, factor) for rate in knots]
        predictions[factor] = [
            interpolate(1 / rate, [1 / knot for knot in knots], seconds) / run.seconds - 1
            for rate in RATES
        ]
    return predictions


def interpolate(x: float, falling: Sequence[float], values: Sequence[float]) -> float:
    number = max(n for n in range(len(falling) - 1) if falling[n] >= x or n == 0)
    (a, b), (u, v) = falling[number : number + 2], values[number : number + 2]
    return u + (v - u) * (x - a) / (b - a)


def device(run: Run) -> str:
    return "A100" if "A100" in run.group else "H100"


def priced() -> Iterator[Run]:
    return (run for run in runs() if refusal(run) is None)


@cache
def groups() -> Mapping[str, tuple[Run, ...]]:
    names = dict.fromkeys(run.group for run in priced())
    return {name: tuple(run for run in priced() if run.group == name) for name in names}


@dataclass(frozen=True)
class Prediction:
    """A run, predicted from runs of other programs on its device."""

    run: Run
    error: float
    constant: float
    """Error of the constant rate."""
    rate: float
    factor: int


def leave_one_out() -> list[Prediction]:
    """Predict each run from all others on its device."""
    return predict(lambda run, other: other is not run)


def leave_group_out() -> list[Prediction]:
    """Predict each run from the runs of other programs on its device, where there are any."""
    return predict(lambda run, other: other.group != run.group)


def predict(is_known: Callable[[Run, Run], bool]) -> list[Prediction]:
    predictions = []
    for run in priced():
        known = [
            other for other in priced() if device(other) == device(run) and is_known(run, other)
        ]
        if not known:
            continue
        _, factor, number = min(
            (sum(abs(errors(other)[factor][number]) for other in known), factor, number)
            for factor in FACTORS
            for number in range(len(RATES))
        )
        error, constant = errors(run)[factor][number], constant_error(run, known)
        predictions.append(Prediction(run, error, constant, RATES[number], factor))
    return predictions


def constant_error(run: Run, others: Sequence[Run]) -> float:
    """Return the error of a run with the rate of operations that fits the others best."""

    def error(run: Run, rate: float) -> float:
        return run.hardware_flops * run.tokens / rate / run.get("world") / run.seconds - 1

    best = min(RATES, key=lambda rate: sum(abs(error(other, rate)) for other in others))
    return error(run, best)


def mean(values: Iterable[float]) -> float:
    sizes = [abs(each) for each in values]
    return sum(sizes) / len(sizes)


def main() -> None:
    predictions = leave_one_out()
    print("run                       published  predicted  constant   products  traffic")
    for name in groups():
        own = [each for each in predictions if each.run.group == name]
        for each in own:
            print(
                f"{each.run.name:<24} {each.run.seconds:8.2f} s  {each.error:+9.1%} "
                f"{each.constant:+9.1%}  {each.rate / 1e12:4.0f} TFLOP/s  × {each.factor}"
            )
        both = mean(e.error for e in own), mean(e.constant for e in own)
        won = "the constant is better" if both[1] < both[0] else "the planner is better"
        print(f"  {name}: {both[0]:.1%}, constant {both[1]:.1%}: {won}")
    both = mean(e.error for e in predictions), mean(e.constant for e in predictions)
    worst = max(predictions, key=lambda each: abs(each.error))
    print(
        f"mean error of {len(predictions)}: {both[0]:.1%}, worst {worst.error:+.1%}; constant "
        f"{both[1]:.1%}"
    )
    without = leave_group_out()
    print(
        f"{len(without)} runs without all runs of their program: "
        f"{mean(e.error for e in without):.1%}, constant {mean(e.constant for e in without):.1%}"
    )
    rates = {name: Hardware.load(file).file.matmul[0].rate for name, file in CLUSTERS.items()}
    shipped = [
        PublishedLayout(run).step(rates[device(run)], 1) / run.seconds - 1 for run in priced()
    ]
    print(f"with the shipped figures: {mean(shipped):.1%}, worst {max(shipped, key=abs):+.1%}")
    refused = [(run, reason) for run in runs() if (reason := refusal(run)) is not None]
    for reason in dict.fromkeys(reason for _, reason in refused):
        names = [run.name for run, why in refused if why == reason]
        print(f"refused, {len(names)}: {reason}")


if __name__ == "__main__":
    main()
