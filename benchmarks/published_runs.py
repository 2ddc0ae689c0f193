"""Published runs: predicted step times beside published ones, and beside a constant rate.

    python -m benchmarks.published_runs

39 runs of dense transformers (`published_runs.yaml`, with their sources) in seven groups: one
training program, one kind of GPU and one precision. Costs are those of the planner's machine, with
the closed form of a schedule of equal stages. Each figure has one origin:

    published   attention (FlashAttention-2 or 3), memory, links: the shipped hardware file
    fitted      matrix products: one rate for each group
    fitted      traffic of norms and activations: one factor of its bytes for all groups
    assumed     EAGER, ASYNC, SCORES below

Both fits leave out the run that is predicted. The constant model has one fitted figure for each
group, too: operations by seconds, of any kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from headrace.planner.grid.split import Split
from headrace.planner.hardware import Hardware
from headrace.planner.prices.machine import Machine
from headrace.planner.traces.work import Work

FILE = Path(__file__).parent / "published_runs.yaml"
RATES = [1e14 * 1.04**n for n in range(80)]
"""Rates of matrix products that the fit tries: 100 to 2,200 TFLOP/s in steps of 4%."""
FACTORS = (1, 2, 3, 4, 5, 6)
"""Factors of the traffic that the fit tries: kernels move the bytes more than once."""
LENGTH = 4096
"""Tokens of a row where the file has none."""
GRADIENT_BYTES, WEIGHT_BYTES, UPDATE_BYTES = 4, 2, 30
TRAFFIC = ((20, 4), (28, 8))
"""Bytes that norms, residual sums and activations move in a forward and a backward pass, for each
channel of a token's stream, and of its hidden layer."""
FLASH_2 = 335e12
"""Attention of torch on an H100 in both passes: T. Dao, FlashAttention-2 (arXiv 2307.08691,
2023-07), section 4.1. The hardware file has FlashAttention-3, which NVIDIA's programs equal."""
SCORES = (12, 16)
"""Bytes that unfused attention moves for each score in a forward and a backward pass."""
EAGER = 2.0
"""Traffic without a compiler, in times of that with one."""
ASYNC = 0.5
"""Part of the messages of asynchronous tensor parallelism that products do not hide."""


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
    found = []
    for row in yaml.safe_load(FILE.read_text()):
        row["group"], row["name"] = row.pop("source"), row.pop("run")
        row.pop("memory_gib", None)
        found.append(Run(**row))
    return tuple(found)


@cache
def machine(group: str) -> Machine:
    """Return the costs of the shipped file of a group's cluster."""
    hardware = Hardware.load("a100-80" if "A100" in group else "h100")
    if group.startswith(("fms", "torchtitan")) and "H100" in group:
        file = hardware.file
        rows = tuple(replace(row, rate=FLASH_2) for row in file.attention)
        hardware = Hardware(replace(file, attention=rows), hardware.where)
    return Machine(hardware, "bf16")


class Parts:
    """Seconds of a run's step: those of matrix products are operations until a rate is known."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.machine = machine(run.group)
        get = run.get
        self.tp, self.cp, self.pp = get("tp"), get("cp"), get("pp")
        self.dp = get("world") // (self.tp * self.cp * self.pp)
        self.tokens = get("rows") * run.length / self.cp
        """Tokens of a micro-batch on the ranks of a tensor group."""
        self.here = self.tokens / self.tp
        self.micro = get("micro")
        layers = run.model["layers"]
        self.layers = layers / self.pp
        self.most = math.ceil(layers / self.pp)

    @cached_property
    def attention(self) -> tuple[float, float, float]:
        """Seconds of a layer's attention forward and backward, and operations at the rate of matrix
        products."""
        run, model = self.run, self.run.model
        if run.get("causal", 0.5) == 1.0:  # before fused kernels: all pairs, scores in memory
            flops = 2 * run.layer_attention * self.here
            scores = model["heads"] * run.length * self.here
            return (
                self.machine.traffic(SCORES[0] * scores),
                self.machine.traffic(SCORES[1] * scores),
                flops,
            )
        width = model["width"] // model["heads"]
        work = Work("attention", "", (width, model["heads"], run.length, 1), 1, 0)
        split = Split(1, self.tp, 1)
        # Ranks hold contiguous tokens: the last one attends to all before it.
        late = 2 - 1 / self.cp
        each = [
            late * self.machine.seconds([work], direction, split) * self.here * self.tp / run.length
            for direction in ("forward", "backward")
        ]
        return each[0], each[1], 0.0

    @cached_property
    def traffic(self) -> tuple[float, ...]:
        """Seconds of norms, activations and residual sums of a layer, if their bytes move once."""
        model = self.run.model
        hidden = model["hidden"] * (1.5 if model["gated_mlp"] else 1.0)
        factor = 1.0 if self.run.get("compiled", True) else EAGER
        return tuple(
            factor * self.machine.traffic(self.here * (a * model["width"] + b * hidden))
            for a, b in TRAFFIC
        )

    @cached_property
    def operands(self) -> float:
        """Seconds in which the operands of a layer's products are read and written once."""
        m = self.run.model
        kv = 2 * m["kv_heads"] * m["width"] / m["heads"]
        products = 3 if m["gated_mlp"] else 2
        split = (2 * m["width"] + kv + products * m["hidden"]) / self.tp
        return self.machine.traffic(self.tokens * WEIGHT_BYTES * (split + 4 * m["width"]))

    @cached_property
    def tensor(self) -> float:
        """Seconds of the messages of a pass of a layer over the tensor axis that are not hidden."""
        if self.tp == 1:
            return 0.0
        size = self.tokens * self.run.model["width"] * WEIGHT_BYTES
        each = self.machine.collective("all-gather", size, self.tp, 1)
        each += self.machine.collective("reduce-scatter", size, self.tp, 1)
        return 2 * each * (ASYNC if self.run.get("async_tp", False) else 1.0)

    @cached_property
    def context(self) -> float:
        if self.cp == 1:
            return 0.0
        model = self.run.model
        size = 2 * model["kv_heads"] * model["width"] / model["heads"] / self.tp
        size *= self.tokens * self.cp * WEIGHT_BYTES
        return self.machine.collective("all-gather", size, self.cp, self.tp)

    @cached_property
    def parameters(self) -> float:
        """Parameters of a layer on a rank before they are sharded over data."""
        return self.run.layer_products / 2 / self.tp

    def messages(self, elements: float) -> tuple[float, float]:
        """Seconds of a gather and of a reduction of these parameters over the data axis."""
        get, ranks, stride = self.run.get, self.dp * self.cp, self.tp
        shard = get("shard", ranks)
        weights = elements * (1 if get("fp8_gather", False) else WEIGHT_BYTES)
        gradients = elements * get("reduce_bytes", GRADIENT_BYTES)
        send = self.machine.collective
        reduce = send("reduce-scatter", gradients, shard, stride)
        reduce += send("all-reduce", gradients / shard, ranks // shard, stride * shard)
        return send("all-gather", weights, shard, stride), reduce

    def step(self, rate: float, factor: float) -> float:
        """Return the seconds of a step, by the rate of matrix products and the traffic's factor."""
        run, get = self.run, self.run.get
        products, attended = run.repeated
        ahead, back, flops = self.attention
        mm = run.layer_products * self.here / rate + self.operands
        at = flops / rate
        norms = [factor * seconds for seconds in self.traffic]
        forward = mm + at + ahead + norms[0] + self.tensor + self.context
        backward = 2 * (mm + at) + back + norms[1] + self.tensor + 2 * self.context
        if get("regather", False):
            backward += self.tensor / 4
        backward += products * (mm + norms[0] + self.tensor + self.context)
        backward += attended * (at + ahead)
        gather, reduce = self.messages(self.parameters)
        update = self.machine.traffic(UPDATE_BYTES * self.parameters * self.layers / self.dp)
        span = self.tp * get("shard", self.dp * self.cp)
        if get("state", "fsdp") == "fsdp":
            forward = self.machine.overlapped(forward, gather, span)
            backward = self.machine.overlapped(backward, gather + reduce, span)
        elif self.dp > 1:  # once in a step, beside the first forward and the last backward pass
            for busy, message in ((forward, gather), (backward, reduce)):
                together = self.machine.overlapped(busy, message, span)
                update += self.layers * (together - busy)
        head = 3 * run.head * self.here / rate
        layer = forward + backward
        total = run.model["layers"] * layer + head
        slowest = max(self.most * layer, self.layers * layer + head) if self.pp > 1 else total
        hop = 0.0
        if self.pp > 1:
            size = self.here * run.model["width"] * WEIGHT_BYTES
            hop = 2 * self.machine.hop(size, self.tp * self.cp * self.dp)
        filling = (total - slowest + (self.pp - 1) * hop) / get("virtual")
        return self.micro * slowest + filling + update


@cache
def errors(run: Run) -> Mapping[int, Sequence[float]]:
    """Return the relative errors of a run by factor, then by rate."""
    parts = Parts(run)
    return {n: [parts.step(rate, n) / run.seconds - 1 for rate in RATES] for n in FACTORS}


def fitted(known: Sequence[Run], factor: int) -> tuple[float, int]:
    """Return the least sum of errors of a group's runs, and its rate."""
    rows = [errors(run)[factor] for run in known]
    return min((sum(abs(row[n]) for row in rows), n) for n in range(len(RATES)))


@cache
def groups() -> Mapping[str, tuple[Run, ...]]:
    names = dict.fromkeys(run.group for run in runs())
    return {name: tuple(run for run in runs() if run.group == name) for name in names}


@dataclass(frozen=True)
class Prediction:
    """A run, predicted from the other runs."""

    run: Run
    error: float
    constant: float
    """Error of the constant rate."""
    rate: float
    factor: int


def leave_one_out(factors: Sequence[int] = FACTORS) -> list[Prediction]:
    whole = {(name, n): fitted(own, n) for name, own in groups().items() for n in factors}
    found = []
    for name, own in groups().items():
        for run in own:
            others = [other for other in own if other is not run]
            without = {n: fitted(others, n) for n in factors}

            def total(n: int, here: str = name, known: Any = without) -> float:
                rest = sum(whole[other, n][0] for other in groups() if other != here)
                return float(rest + known[n][0])

            factor = min(factors, key=total)
            number = without[factor][1]
            constant = constant_error(run, others)
            error = errors(run)[factor][number]
            found.append(Prediction(run, error, constant, RATES[number], factor))
    return found


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
        won = "the constant is better" if both[1] < both[0] else "the model is better"
        print(f"  {name}: {both[0]:.1%}, constant {both[1]:.1%}: {won}")
    both = mean(e.error for e in predictions), mean(e.constant for e in predictions)
    print(f"mean error of {len(predictions)}: {both[0]:.1%}, constant {both[1]:.1%}")


if __name__ == "__main__":
    main()
