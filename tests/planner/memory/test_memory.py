"""The memory of a plan is that of its dry run, which is traced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from support.planner.hardware import cpu_hardware

from benchmarks._memory import job_of
from headrace.models.accounting.level import EngineMemory, Moment
from headrace.models.accounting.state import device_bytes
from headrace.models.config.config import load_model_config
from headrace.models.config.options.recompute import Rule, Selective
from headrace.planner.grid.grid import Grid, LayoutShape
from headrace.planner.hardware import Hardware
from headrace.planner.prices.layers import Costs
from headrace.planner.prices.machine import Machine
from headrace.planner.search.make import uniform_phase
from headrace.planner.search.search import search
from headrace.trainer.accounting.memory import timelines
from headrace.trainer.engines.config import EngineConfig
from headrace.trainer.engines.deepspeed import DeepSpeedConfig
from headrace.trainer.engines.fsdp.one_rank_memory import OneRankMemory
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.fsdp2_memory import Fsdp2Memory
from headrace.trainer.engines.shard_groups import LayerShards
from headrace.trainer.engines.zero.step_memory import ZeroMemory
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.run.config import RunConfig

NAME = "tiny-transformer"
LENGTH, ROWS, MICRO = 64, 16, 2
OWN = LayerShards(layers=(1, 2), reshard=False)
SPANS = "[{layers: [1, 2], reshard: false}]"
TP = ["layout.tp=2", "engine.gather=micro-batch"]


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Costs:
    hardware = Hardware.load(cpu_hardware(tmp_path_factory.mktemp("hardware")))
    machine = Machine(hardware, "fp32", roofline=True)
    phase = uniform_phase(LENGTH, ROWS)
    return Costs(load_model_config(NAME), replace(RunConfig(), precision="fp32"), machine, phase)


def grid_of(engine: EngineConfig, layout: LayoutConfig, dp: int) -> Grid:
    plain = LayoutConfig(pp=layout.pp, tp=layout.tp, cp=layout.cp)
    return Grid(LayoutShape(plain, dp, MICRO, ROWS // dp // MICRO), engine, layout)


@pytest.mark.parametrize(
    ("engine", "layout", "words"),
    [
        (Fsdp2Config(layers=(OWN,)), LayoutConfig(), [f"engine.layers={SPANS}"]),
        (Fsdp2Config(), LayoutConfig(pp=2, cuts=(2,)), ["layout.pp=2", "layout.cuts=[2]"]),
        (Fsdp2Config(gather="micro-batch"), LayoutConfig(tp=2), TP),
        (DeepSpeedConfig(zero=3), LayoutConfig(cp=2), ["layout.cp=2", "engine.zero=3"]),
        (DeepSpeedConfig(zero=1), LayoutConfig(), ["engine.zero=1"]),
    ],
    ids=["reshard", "pp", "tp", "zero3-cp", "zero1"],
)  # fmt: skip
def test_the_planner_counts_as_the_dry_run(
    costs: Costs, engine: EngineConfig, layout: LayoutConfig, words: list[str]
) -> None:
    """Both call one function. The planner hands rules, shards and micro-batches to it."""
    layers = len(costs.trace.layers)
    rules: Sequence[Rule] = ["none", "block", *["operator"] * (layers - 2)]
    dp = 2 // layout.shards
    grid = grid_of(engine, layout, dp)
    result = costs.memory.timelines(grid, engine, layout.cuts or (), rules)
    asked = [
        f"synthetic.seq_len={LENGTH}", f"synthetic.batch_rows={ROWS}", "processes=2", *words,
        f"micro_batch_tokens={MICRO * LENGTH // layout.cp}", f"engine.kind={engine.kind}",
        f"recompute=[{', '.join(map(str, rules))}]",
    ]  # fmt: skip
    with job_of(NAME, asked) as job:
        for stage, timeline in enumerate(result):
            counted = max(timelines(job, stage), key=lambda candidate: candidate.highest)
            assert timeline.parts == counted.parts


def test_a_found_plan_fits_by_its_timeline_and_less_memory_takes_longer(costs: Costs) -> None:
    expected = {"engine": "fsdp2", "gather": "block", "rows": 8, "tp": 1, "cp": 1, "pp": 1}
    [free] = search(costs, 2, 1e12, settings=expected, num_best=1).candidates
    unlimited = free.timelines[0].highest
    nearest = search(costs, 2, 1.0, settings=expected, num_best=1).nearest
    assert nearest is not None
    minimum = nearest.timelines[0].highest
    assert minimum < 0.8 * unlimited
    budget = (minimum + unlimited) / 2
    [tight] = search(costs, 2, budget, settings=expected, num_best=1).candidates
    assert tight.timelines[0].highest <= budget
    assert tight.solution.price > free.solution.price
    ways = [choice.name for choice in tight.solution.choices]
    again = costs.timelines(tight.grid, tight.solution.cuts, ways, every=True)
    assert again[0].highest == tight.timelines[0].highest
    # Layers that need most while they run come first: later ones have given theirs back by then.
    works = [choice.workspace for choice in tight.solution.choices]
    by_kind = [
        [w for w, s in zip(works, costs.trace.layers, strict=True) if s == kind]
        for kind in {*costs.trace.layers}
    ]
    assert all(item == sorted(item, reverse=True) for item in by_kind)
    assert not search(costs, 2, 0.98 * minimum, settings=expected, num_best=1).candidates


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_alike_micro_batches_do_not_change_the_highest_level(costs: Costs, schedule: str) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    layout = LayoutConfig(pp=2, schedule=schedule, chunks=chunks)
    cuts = (1, 2, 3) if chunks > 1 else (2,)
    rules: list[Rule] = ["none", Selective(save=("matmul",))] * (len(costs.trace.layers) // 2)
    rules += ["none"] * (len(costs.trace.layers) - len(rules))
    for stage in range(2):
        sizes = []
        for number in (23, layout.pipeline_schedule.sample_size(2, 23)):
            grid = replace(
                grid_of(Fsdp2Config(), layout, 1),
                shape=LayoutShape(LayoutConfig(pp=2), 1, 1, number),
            )
            [*level_by_micro] = costs.memory.timelines(grid, Fsdp2Config(), cuts, rules, every=True)
            sizes.append(level_by_micro[stage].highest)
        assert sizes[1] == pytest.approx(sizes[0], rel=1e-3)


ENGINES: list[EngineConfig] = [
    Fsdp2Config(gather="step"),
    Fsdp2Config(gather="block", shard=2),
    *(DeepSpeedConfig(zero=zero) for zero in (0, 1, 2, 3)),
]


def sizes_of(moment: Moment) -> tuple[object, ...]:
    nonzero = [
        {part: size for part, size in sizes.items() if size} for sizes in (moment.high, moment.end)
    ]
    return moment.name, moment.layer, moment.micro, *nonzero


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_passes_that_repeat_are_counted_as_if_each_ran(
    costs: Costs, schedule: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(costs.run, precision=precision)
    machine = Machine(costs.machine.hardware, precision, roofline=True)
    memory = Costs(costs.model, run, machine, costs.phase).memory
    chunks = 2 if schedule == "interleaved" else 1
    layout, layers = LayoutConfig(pp=2, schedule=schedule, chunks=chunks), len(costs.trace.layers)
    cuts = (1, 2, 3) if chunks > 1 else (2,)
    rules: list[Rule] = ["none", *["block"] * (layers - 1)]
    repeated = 0
    for engine, dp in [*((engine, 4) for engine in ENGINES), (Fsdp2Config(), 1)]:
        grid = replace(grid_of(engine, layout, dp), shape=LayoutShape(LayoutConfig(pp=2), dp, 1, 9))
        counted = memory.timelines(grid, engine, cuts, rules, every=True)
        repeated += sum(bool(stretch.added) for line in counted for stretch in line.stretches)
        with monkeypatch.context() as patch:
            for kind in (Fsdp2Memory, ZeroMemory, OneRankMemory):
                patch.setattr(kind, "save", EngineMemory.save)
            ran = memory.timelines(grid, engine, cuts, rules, every=True)
        for line, reference in zip(counted, ran, strict=True):
            assert [*map(sizes_of, line.moments)] == [*map(sizes_of, reference.moments)]
            highest = max(reference.moments, key=lambda moment: device_bytes(moment.high))
            assert sizes_of(line.peak) == sizes_of(highest)
    assert repeated > 100
