"""Published runs as the planner sees them: its traces, costs and schedules, by their programs.

What a program does follows from its documentation: FlashAttention 2 or 3, FP8, asynchronous
messages, stored logits and scores, context ranks with uneven shares. torchtitan's H100s have a
slower memory and a lower limit of power than others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headrace.models.config.options.precision import Fp8Config
from headrace.models.config.options.recompute import Rule
from headrace.planner.division.problem import Choice, price_division
from headrace.planner.grid.grid import Grid, make_grid
from headrace.planner.hardware import Hardware
from headrace.planner.hardware.file import Attained, Experts
from headrace.planner.prices.forms import LayerPlan
from headrace.planner.prices.layers import Costs
from headrace.planner.prices.machine import Machine
from headrace.planner.prices.program import TrainingProgram
from headrace.planner.search.make import uniform_phase
from headrace.planner.traces.trace import LayerTrace
from headrace.planner.traces.work import Work
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.cuts import Cuts, even_cuts
from headrace.trainer.run.config import RunConfig

from ._published_runs import RULES, Run

CLUSTERS = {
    "A100": "a100-80",
    "A100-40": "a100-40",
    "H100": "h100",
    "B200": "b200",
    "B300": "b200",
    "GB200": "gb200",
    "GB300": "gb200",
}
"""Hardware files by device. But for 4 bits, B300 and GB300 have the rates of B200 and GB200; their
memory is larger, and their limit of power higher."""
FLASH_2 = 335e12
"""Attention of torch on an H100 in both passes: T. Dao, FlashAttention-2 (arXiv 2307.08691,
2023-07), section 4.1. The hardware file has FlashAttention-3, which NVIDIA's programs equal."""
FLASH_1 = {"A100": (0.4 * 312e12, 0.3 * 312e12), "H100": (FLASH_2 / 2, FLASH_2 / 2)}
"""Attention of llm-foundry (FlashAttention 1 in Triton), forward and backward: 30 to 50% and 25 to
35% of an A100's peak, half as fast as FlashAttention 2 (the same source, section 1)."""
EAGER = 2.0
"""Traffic without a compiler, in times of that with one. Assumed."""
TITAN_MEMORY, TITAN_CLOCK = 2.4 / 3.35, (500 / 700) ** (1 / 3)
"""torchtitan's H100s: HBM2e at 2.4 TB/s, and 500 W (the page of its benchmark of December 2024).
Power goes with the cube of a clock."""
RING = 0.15
"""Traffic that merges a ring's parts in Transformer Engine, relative to ours: kernels of its own
read a part once, and sum it in fp32."""
LOGIT_BYTES = 24
"""Bytes that memory moves for a logit, where no kernel fuses the loss: bf16, then softmax and
gradient in fp32."""
SCORE_BYTES = 4
"""The same for a score of attention, before fused kernels: softmax and dropout in one."""


@dataclass(frozen=True)
class Figures:
    """Fitted figures: those of the shipped file, and one of the programs."""

    attained: Attained
    traffic: float
    """Bytes that memory moves beside products, relative to those of our fused kernels."""


def change_hardware(run: Run, attained: Attained) -> Hardware:
    """Return the shipped cluster with these figures, and the device and kernels of the run."""
    hardware = Hardware.load(CLUSTERS[run.device])
    file, attention, memory = hardware.file, hardware.file.attention, hardware.file.memory
    if run.device == "H100" and run.group.startswith(("fms", "torchtitan", "NeMo 24.03")):
        attention = tuple(replace(row, rate=FLASH_2) for row in attention)
    if run.group.startswith("llm-foundry"):
        rates = dict(zip(("forward", "backward"), FLASH_1[run.family], strict=True))
        attention = tuple(replace(row, rate=rates[row.direction]) for row in attention)
    if run.device == "H100" and run.group.startswith("torchtitan"):
        memory = tuple(replace(row, rate=row.rate * TITAN_MEMORY) for row in memory)
        product, fp8 = attained.product * TITAN_CLOCK, attained.fp8 * TITAN_CLOCK
        attained = replace(attained, product=product, fp8=fp8)
    balanced = Experts(imbalance=1.0, source=file.device.source)  # as the sources say
    changed = replace(
        file,
        attention=attention,
        memory=memory,
        kernels=tuple(row for row in file.kernels if row.kernel == "ssd"),  # others are ours
        attained=attained,
        experts=balanced,
        overhead=None if run.family == "Blackwell" else file.overhead,  # CUDA graphs
    )
    return Hardware(changed, hardware.where)


def describe_program(run: Run, traffic: float) -> TrainingProgram:
    fp8, cp, fused = run.get("fp8", False), run.get("cp"), run.get("fused_experts", False)
    compiled, grouped = run.get("compiled", True), run.get("grouped", True)
    casts: Literal["none", "experts", "all"] = "all"
    if fused or not grouped or run.engine == "xla":
        casts = "none"
    elif run.engine == "transformer":
        casts = "experts"  # Transformer Engine rounds where it computes, but for their rows
    uneven = run.get("form", None) == "gather" and not run.get("even", False)
    return TrainingProgram(
        traffic=1.0 if fused else traffic * (1.0 if compiled else EAGER),
        fp8_backward=1.0,
        fp8_experts=True,
        fp8_casts=casts,
        gather_bytes=1 if run.get("fp8_gather", False) else None,
        gradient_bytes=run.get("reduce_bytes", 4),
        tensor_gather_bytes=1 if fp8 else None,
        async_tensor=run.get("async_tp", False),
        async_experts=run.get("ep_overlap", False),
        experts_by_node=run.get("by_node", False),
        ring_traffic=RING if run.engine == "transformer" else 1.0,
        attention_share=2 - 1 / cp if uneven else 1.0,
        recompute_messages=run.engine != "transformer",
    )


def build_machine(run: Run, figures: Figures) -> Machine:
    fp8 = Fp8Config(smallest=16) if run.get("fp8", False) else None
    hardware, program = (
        change_hardware(run, figures.attained),
        describe_program(run, figures.traffic),
    )
    return Machine(hardware, "bf16", fp8=fp8, roofline=True, program=program)


class PublishedLayout:
    """A run as the planner sees it."""

    def __init__(self, run: Run, figures: Figures) -> None:
        get, model = run.get, run.model
        self.run, self.layers = run, len(model.layers)
        chunks, world = get("virtual"), get("world")
        degrees = {name: get(name) for name in ("pp", "tp", "cp", "ep")}
        layout = LayoutConfig(
            **degrees,
            attention="a2a" if get("form", None) == "gather" else "ring",
            schedule="interleaved" if chunks > 1 else "1f1b",
            chunks=chunks,
        )
        # Megatron gathers and reduces once a step, beside its first and last passes.
        gather = "block" if get("state", "fsdp") == "fsdp" else "step"
        engine = Fsdp2Config(gather=gather, shard=get("shard", None))
        rows = world // layout.shards * get("rows") * get("micro")
        phase = uniform_phase(run.length, rows)
        settings = RunConfig(precision="bf16", layout=layout, engine=engine)
        self.costs = Costs(model, settings, build_machine(run, figures), phase)
        scores = get("scores", get("causal", 0.5) == 1.0)
        store_results(self.costs, scores=scores, repeats=run.recompute == "selective")
        tokens = get("rows") * run.length // layout.cp
        self.grid: Grid = make_grid(layout, engine, tokens, world, phase)
        self.cuts = even_cuts(self.layers, layout.all_chunks)

    @property
    def rules(self) -> list[Rule]:
        cycle = RULES[self.run.recompute]
        return [cycle[layer % len(cycle)] for layer in range(self.layers)]

    def step(self, figures: Figures) -> float:
        """Return the seconds of a step."""
        costs = self.costs.replace_machine(build_machine(self.run, figures))
        return price_time(costs, self.grid, self.cuts, self.rules)


def price_time(costs: Costs, grid: Grid, cuts: Cuts, rules: Sequence[Rule]) -> float:
    """Return the seconds of a step without its bytes: each rule that has a time has a price."""
    problem, [forms] = costs.fastest_problem(grid), costs.forms(grid, simulate=False)
    choices = {}
    for kind, rule in {*zip(problem.layers, rules, strict=True)}:
        passes, engine, parameters, _ = forms[kind]
        busy = passes.backward_seconds + passes.recompute_seconds[rule]
        busy += engine.recompute_seconds(rule)
        backward = engine.backward(busy, parameters)
        plan = LayerPlan(rule, None, passes, engine, parameters)
        choices[kind, rule] = Choice(backward, name=plan)
    by_layer = [choices[pair] for pair in zip(problem.layers, rules, strict=True)]
    return price_division(problem, cuts, by_layer).price


def store_results(costs: Costs, *, scores: bool, repeats: bool) -> None:
    """Let the head store its logits, and attention its `scores`, as programs without our kernels
    do; a backward pass `repeats` the scores."""
    trace = costs.trace
    size = LOGIT_BYTES * trace.seq_len * costs.model.vocab_size
    head = replace(trace.head, forward=(*trace.head.forward, memory_work(size)))
    kinds = trace.kinds
    if scores:
        kinds = tuple(store_scores(kind, backward=3 if repeats else 2) for kind in kinds)
    costs.trace = replace(trace, head=head, kinds=kinds)
    costs.kinds = kinds


def memory_work(size: int) -> Work:
    return Work("memory", "", (), 1, size, "attention")


def store_scores(layer: LayerTrace, backward: int) -> LayerTrace:
    """Replace fused attention by its products, a softmax and a dropout; a backward pass has them
    `backward` times."""

    def expand(work: Work, passes: int) -> list[Work]:
        if work.kind != "attention":
            return [work]
        width, heads, length, _ = work.shape
        shapes = (heads, length, width, length), (heads, length, length, width)
        products = [Work("matmul", "", shape, passes, 0, "attention") for shape in shapes]
        return [*products, memory_work(SCORE_BYTES * heads * length**2 * passes)]

    return replace(
        layer,
        forward=tuple(part for work in layer.forward for part in expand(work, 1)),
        backward=tuple(part for work in layer.backward for part in expand(work, backward)),
    )
