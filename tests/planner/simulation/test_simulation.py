"""The simulated step of a plan: events, memory, slow ranks and links, and its page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from support.configs import CONFIGS

from headrace.console.errors import MisuseError
from headrace.models.config.config import load_model_config
from headrace.planner.division.problem import price
from headrace.planner.hardware import Hardware
from headrace.planner.prices.layers import Costs
from headrace.planner.prices.machine import Machine
from headrace.planner.search.assemble import build_phase_plan
from headrace.planner.search.make import uniform_phase
from headrace.planner.search.search import search
from headrace.planner.simulation.events import Events
from headrace.planner.simulation.failures import Failures
from headrace.planner.simulation.outlook import PlanOutlook
from headrace.planner.simulation.page import envelope, simulation_page
from headrace.planner.simulation.slow import Slowdown, parse_slowdown
from headrace.planner.simulation.step import Simulation
from headrace.trainer.run.config import RunConfig

pytestmark = pytest.mark.slow

TINY = str(CONFIGS / "tiny.yaml")
BUDGET = 1e9
RANKS = 8
"""Two stages of dp 1 × cp 2 × tp 2, two nodes each."""


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Costs]:
    """A tiny hybrid on nodes of two devices, so that messages pass both kinds of links."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        hardware = Hardware.load("h100")
        pair = Hardware(replace(hardware.file, devices_per_node=2), "pair.yaml")
        run = replace(RunConfig(), precision="bf16")
        machine = Machine(pair, "bf16", roofline=True)
        tiny = load_model_config(TINY)
        kept = {name: tiny.operators[name] for name in ("mamba", "attention", "glu")}
        pattern = "[mamba, attention, mamba, attention]"
        model = replace(tiny, operators=kept, pattern=pattern)
        yield Costs(model, run, machine, uniform_phase(64, 16))


@pytest.fixture(scope="module")
def simulation(costs: Costs) -> Simulation:
    expected = {"pp": 2, "tp": 2, "cp": 2, "schedule": "1f1b", "gather": "block"}
    expected |= {"rows": 1, "attention": "ring"}
    [candidate] = search(costs, RANKS, BUDGET, settings=expected, num_best=1).candidates
    return Simulation(costs, build_phase_plan(candidate), BUDGET)


def test_a_simulated_step_takes_the_seconds_of_the_search(simulation: Simulation) -> None:
    step = simulation.step
    assert step.seconds == pytest.approx(price(simulation.problem, simulation.plan.stages))
    m = simulation.problem.micro_batches
    assert [len(spans) for spans in step.timeline.spans] == [2 * m] * 2
    assert simulation.shorten(m - 1).seconds < step.seconds


def test_the_events_of_a_micro_batch_fill_its_passes(simulation: Simulation) -> None:
    """Lanes that wait for each other have no gap and no overlap; messages beside them are more
    than those that computation does not hide."""
    for chunk in range(2):
        events = Events(simulation).micro_batch_events(chunk)
        waiting = sorted(e[1:3] for e in events if e.lane != "hidden")
        clock = 0.0
        for start, end in waiting:
            assert start == pytest.approx(clock)
            clock = end
        stage = simulation.plan.stages[chunk]
        assert clock == pytest.approx(stage.forward[0] + stage.backward[0])
        lanes = {event.lane for event in events}
        assert {"compute", "tensor", "context", "data", "hidden"} <= lanes
        hidden_seconds = sum(e.end - e.start for e in events if e.lane == "hidden")
        assert hidden_seconds > sum(e.end - e.start for e in events if e.lane == "data") > 0


def test_recorded_messages_are_those_of_the_layout(simulation: Simulation) -> None:
    layers = Events(simulation).messages.layers
    for sent in layers:
        by = {(item.axis, item.collective) for item in sent}
        assert {("tensor", "all-gather"), ("data", "reduce-scatter"), ("context", "p2p")} <= by
        assert all(item.near == (2 if item.axis == "tensor" else 1) for item in sent)
        assert all(item.seconds > 0 and item.size > 0 for item in sent)


def test_memory_over_the_step_reaches_the_counted_level(simulation: Simulation) -> None:
    for stage in range(2):
        curve = list(Events(simulation).memory(stage))
        times, sizes = zip(*curve, strict=True)
        assert list(times) == pytest.approx(sorted(times))
        assert times[-1] == simulation.step.seconds
        assert sizes[0] == min(sizes) < sizes[-1] < max(sizes)  # gradients stay
        assert max(sizes) == pytest.approx(simulation.timelines[stage].highest, rel=1e-3)
    drawn = envelope(curve, times[-1])
    assert max(drawn.y) == max(sizes) and min(drawn.y) == min(sizes)


@pytest.mark.parametrize("part", ["rank", "node", "network"])
@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_a_slow_part_slows_its_stage(simulation: Simulation, part: str, rank: int) -> None:
    def seconds(factor: float) -> float:
        return simulation.slow_down(Slowdown(part, rank, factor)).seconds  # type: ignore[arg-type]

    assert seconds(1.0) == pytest.approx(simulation.step.seconds)
    assert simulation.step.seconds < seconds(1.5) < seconds(3.0)
    slow = simulation.slow_down(Slowdown(part, rank, 3.0)).timeline.spans  # type: ignore[arg-type]
    unaffected = 0 if rank else 1
    for before, after in zip(
        simulation.step.timeline.spans[unaffected], slow[unaffected], strict=True
    ):
        assert after.end - after.start == pytest.approx(before.end - before.start)


def test_a_slow_rank_without_messages_multiplies_its_passes(costs: Costs) -> None:
    """The step is then that of the planner's own price with longer passes of one stage."""
    expected = {"pp": 2, "dp": 1, "tp": 1, "cp": 1, "schedule": "1f1b", "engine": "fsdp2"}
    [candidate] = search(costs, 2, BUDGET, settings=expected, num_best=1).candidates
    simulation = Simulation(costs, build_phase_plan(candidate), BUDGET)
    stages = list(simulation.plan.stages)
    stages[1] = replace(
        stages[1],
        forward=(1.3 * stages[1].forward[0],),
        backward=(1.3 * stages[1].backward[0],),
        update=1.3 * stages[1].update,
    )
    result = simulation.slow_down(Slowdown("rank", 1, 1.3)).seconds
    assert result == pytest.approx(price(simulation.problem, stages))
    assert result != pytest.approx(simulation.slow_down(Slowdown("rank", 0, 1.3)).seconds, rel=0.01)


def test_slow_parts_are_read_from_words() -> None:
    assert parse_slowdown("rank=17:1.3", 32) == Slowdown("rank", 17, 1.3)
    for text in ("rank=17", "disk=3:2", "rank=3:0.5", "rank=3:x", "rank=32:2", "rank=1:1.2.3"):
        with pytest.raises(MisuseError, match="--slow"):
            parse_slowdown(text, 32)


class Reader(HTMLParser):
    """Checks that tags are closed in their order, and collects attributes."""

    VOID = ("meta", "!doctype", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_draws_the_step_and_loads_nothing(simulation: Simulation) -> None:
    slow = [Slowdown("rank", 5, 1.3), Slowdown("network", 2, 2.0)]
    outlook = PlanOutlook("phase steps", simulation, slow, Failures(every=7))
    text = simulation_page("tiny <hybrid>", "8 × GPU", [outlook])
    reader = Reader(text)
    assert not [name for name, _ in reader.attributes if name in ("src", "href", "srcset")]
    assert (
        "url(" not in text
        and "http:" not in text
        and "https:" not in text
        and "tiny &lt;hybrid&gt;" in text
    )
    passes = re.findall(r'class="pass (?:forward|backward)"', text)
    assert len(passes) == 3 * 2 * 2 * simulation.problem.micro_batches
    assert "with rank=5:1.3" in text and "with network=2:2" in text
    assert "nan" not in re.sub(r"<style>.*</style>", "", text)
    result = outlook.dump()
    checkpoints = result["checkpoints"]
    assert set(checkpoints) == {"best", "young", "daly", "every"}
    # Steps of microseconds: neighbouring intervals differ by less than a rounding error.
    best = checkpoints["best"]["goodput"] * (1 + 1e-9)
    assert all(checkpoint["goodput"] <= best for checkpoint in checkpoints.values())
    lines = "\n".join(outlook.lines())
    assert "slow rank=5:1.3" in lines and "a checkpoint each 7 steps" in lines
