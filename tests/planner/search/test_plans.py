"""Plans of phases, choices of layers, and their seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.configs import CONFIGS
from support.planner.hardware import cpu_hardware

from headrace.dataplane.order.timeline import PhaseRows
from headrace.models.config.config import load_model_config
from headrace.planner.grid.grid import Grid, LayoutShape, distinct_names, enumerate_shapes
from headrace.planner.hardware import Hardware
from headrace.planner.hardware.file import Overhead
from headrace.planner.prices.machine import Machine
from headrace.planner.search.assemble import build_phase_plan, peak_timeline
from headrace.planner.search.make import PlanRequest, make_plans, plans_to_simulate
from headrace.planner.search.search import search
from headrace.planner.traces.work import CALL_LAUNCHES
from headrace.trainer.engines.config import EngineConfig
from headrace.trainer.engines.deepspeed import DeepSpeedConfig
from headrace.trainer.engines.fsdp2 import BLOCK_LAUNCHES, MESSAGE_LAUNCHES, Fsdp2Config
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.run.config import RunConfig

TINY = str(CONFIGS / "tiny.yaml")


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cpu_hardware(tmp_path_factory.mktemp("hardware"))


def question(machine: str, *lengths: int, **more: Any) -> PlanRequest:
    """A question about phases of 64 tokens a step."""
    phases = [
        PhaseRows(
            name=f"of{length}", first_row=0, first_step=0, first_token=0,
            rows=64 // length, seq_len=length, batch_rows=64 // length,
        )
        for length in lengths
    ]  # fmt: skip
    return PlanRequest(
        model=load_model_config(TINY),
        run=replace(RunConfig(), precision="fp32"),
        hardware=Hardware.load(machine),
        gpus=1,
        phases=phases,
        **more,
    )


def test_one_plan_serves_all_phases(machine: str) -> None:
    plans = make_plans(question(machine, 16, 32, 16))
    assert [phase_search.costs.phase.name for phase_search in plans.phases] == ["of16", "of32"]
    assert plans.phases[0].costs.phase.rows == 8  # those of both phases of 16 tokens
    assert plans.best is not None
    seconds = {phase.name: phase.seconds for phase in plans.best.planned.phases}
    for phase_search, phase_best in zip(plans.phases, plans.by_phase, strict=True):
        name = phase_search.costs.phase.name
        assert seconds[name] >= phase_best.predicted.seconds * (1 - 1e-9)
    assert len(plans.best.planned.phases) == 2
    memory = {phase.name: phase.memory for phase in plans.best.planned.phases}
    assert max(size for size in memory.values() if size) == plans.best.predicted.memory
    for phase_search, result in zip(plans.phases, plans.best_in_phases, strict=True):
        assert memory[phase_search.costs.phase.name] == peak_timeline(result.timelines).highest
    for phase_search, result in zip(plans.phases, plans.best_in_phases, strict=True):
        assert result.plan.price == seconds[phase_search.costs.phase.name]


def test_the_plan_of_all_phases_is_drawn_where_it_is_not_the_best_of_the_phase(
    machine: str,
) -> None:
    plans = make_plans(question(machine, 16, 32))
    [first, second] = [build_phase_plan(phase_search.best) for phase_search in plans.phases]
    runner_up = build_phase_plan(plans.phases[0].outcome.candidates[1])
    titles = [
        title
        for title, *_ in plans_to_simulate(replace(plans, best_in_phases=[first, second]), [], None)
    ]
    assert titles == ["phase of16", "phase of32"]
    explained = list(
        zip(plans.phases, (phase_search.best for phase_search in plans.phases), strict=True)
    )
    result = plans_to_simulate(
        replace(plans, best_in_phases=[runner_up, second]), explained[:1], "tp=1"
    )
    assert [title for title, *_ in result] == [
        *titles, "phase of16 with the plan of all phases", "phase of16 with tp=1",
    ]  # fmt: skip
    assert result[2][2] is runner_up


def test_layouts_that_read_alike_are_shown_with_what_differs() -> None:
    def grid(**more: Any) -> Grid:
        layout = LayoutConfig(cp=2, **more)
        return Grid(LayoutShape(layout, 1, 1, 2), DeepSpeedConfig(), layout)

    plain, long, ring = grid(), grid(hyena_li="a2a"), grid(attention="ring")
    names = distinct_names([plain, long, ring])
    assert names[0] == f"{plain.name()}, hyena_li states"
    assert names[1] == f"{plain.name()}, hyena_li a2a"
    assert names[2] == ring.name()  # reads differently by itself
    assert distinct_names([plain, ring]) == [plain.name(), ring.name()]


def test_layouts_of_states_are_tried_by_both_forms(machine: str) -> None:
    """A divided row is shared by states, and by heads where the ranks divide these."""
    model = load_model_config("tiny-delta")
    layouts = [
        (layout.cp, layout.delta)
        for shape, layout, _ in enumerate_shapes(model, 8, 8, question(machine, 8).phases[0])
        if shape is not None and layout.tp == layout.pp == 1
    ]
    assert {form for cp, form in layouts if cp == 1} == {"states"}
    assert {form for cp, form in layouts if cp == 4} == {"states", "a2a"}
    assert {form for cp, form in layouts if cp == 8} == {"states"}  # there are 4 states


def test_reshard_of_a_layer_is_a_choice_of_fsdp2_by_block_alone(machine: str) -> None:
    [phase_search] = make_plans(question(machine, 16)).phases
    costs = phase_search.costs
    layout = LayoutConfig()
    grids = [
        Grid(LayoutShape(layout, 2, 1, 2), engine, layout)
        for engine in (Fsdp2Config(gather="block"), Fsdp2Config(gather="step"), DeepSpeedConfig())
    ]
    for grid in grids:
        problem = costs.problem(grid, 1e9, all_choices=True)
        [first, *_] = problem.kinds
        by = {(c.name.rule, c.name.reshard): c for c in first.choices}
        block = grid.engine == Fsdp2Config(gather="block")
        assert (("none", False) in by) == block
        if block:
            gathered = by["none", False]
            assert gathered.backward <= by["none", None].backward
            assert gathered.state > by["none", None].state


def test_launches_are_those_of_operations_recomputed_calls_and_blocks(machine: str) -> None:
    asks = question(machine, 16)
    file = asks.hardware.file
    overhead = Overhead(operation=1e-3, step=0.0, source=file.device.source)
    plain = asks.costs(Machine(asks.hardware, "fp32"), asks.phases[0])
    slow = plain.replace_machine(
        Machine(Hardware(replace(file, overhead=overhead), "slow.yaml"), "fp32")
    )
    layer = plain.kinds[0]
    ahead, back = (
        sum(work.count for work in item if work.kind == "launch")
        for item in (layer.forward, layer.backward)
    )

    def launches(engine: EngineConfig) -> tuple[float, dict[Any, float], float]:
        layout = LayoutConfig()
        grid = Grid(LayoutShape(layout, 2, 1, 2), engine, layout)
        plain_kind, slow_kind = (
            c.problem(grid, 1e9, all_choices=True).kinds[0] for c in (plain, slow)
        )
        more = {
            a.name.rule: (b.backward - a.backward) / overhead.operation
            for a, b in zip(plain_kind.choices, slow_kind.choices, strict=True)
            if a.name.reshard is None
        }
        ahead, update = slow_kind.forward - plain_kind.forward, slow_kind.update - plain_kind.update
        return ahead / overhead.operation, more, update / overhead.operation

    forward, backward, update = launches(DeepSpeedConfig())
    assert forward == pytest.approx(ahead)
    assert backward["none"] == pytest.approx(back)
    assert backward["block"] == pytest.approx(back + ahead + CALL_LAUNCHES)
    assert backward["operator"] == pytest.approx(back + ahead + layer.calls * CALL_LAUNCHES)
    assert update == 0
    forward, backward, update = launches(Fsdp2Config(gather="step"))
    assert forward == pytest.approx(ahead + BLOCK_LAUNCHES)
    assert update == pytest.approx(2 * MESSAGE_LAUNCHES)
    forward, backward, update = launches(Fsdp2Config(gather="block"))
    assert forward == pytest.approx(ahead + BLOCK_LAUNCHES + MESSAGE_LAUNCHES)
    assert backward["none"] == pytest.approx(back + BLOCK_LAUNCHES + 2 * MESSAGE_LAUNCHES)
    assert update == 0


def test_tensor_ranks_as_context_ranks_are_simulated(machine: str) -> None:
    """Such a layer gathers whole weights, and its messages are those of a context axis."""
    [phase_search] = make_plans(question(machine, 16)).phases
    layout = LayoutConfig(tp=2)
    grid = Grid(LayoutShape(layout, 1, 2, 2), Fsdp2Config(), layout)
    problem = phase_search.costs.problem(grid, 1e9, simulate=True, all_choices=True)
    plain = phase_search.costs.problem(grid, 1e9, all_choices=True)
    for kind, without in zip(problem.kinds, plain.kinds, strict=True):
        by = {c.name.key: c for c in kind.choices}
        rank, whole = by["none", None, False], by["none", None, True]
        assert "context" in whole.name.forward or "tensor" not in whole.name.forward
        assert "tensor" in rank.name.forward
        assert whole.workspace > rank.workspace  # whole weights of all tensor ranks
        assert kind.forward <= without.forward
        same_choice = next(c for c in without.choices if c.name.key == rank.name.key)
        seconds = kind.forward + rank.backward + kind.update / 2  # two micro-batches
        assert seconds == pytest.approx(without.forward + same_choice.backward + without.update / 2)


def test_reasons_of_layouts_that_were_not_asked_for_are_not_listed(machine: str) -> None:
    asks = question(machine, 16)
    node = Hardware(replace(asks.hardware.file, devices_per_node=4), "node.yaml")
    costs = asks.costs(Machine(node, "fp32"), asks.phases[0])
    every = " ".join(search(costs, 4, 1e9, num_best=1).refused)
    assert "cp=4" in every and "cp=2" in every
    asked = search(costs, 4, 1e9, settings={"cp": 4, "attention": "a2a"})
    assert asked.refused and all("cp=4" in reason for reason in asked.refused)
    assert not asked.candidates
