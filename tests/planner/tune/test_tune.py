"""`trainer tune` with a runner that computes the seconds of its trials."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from formats.samples import pin_keys

from headrace.console import config as reader
from headrace.console.errors import LayoutError, PlanError, RunError
from headrace.dataplane.storage.sealed import seal
from headrace.models.config.config import load_model_config
from headrace.planner.hardware import Hardware
from headrace.planner.hardware.file import Device, HardwareFile, KernelRate, Overhead
from headrace.planner.search import make
from headrace.planner.tune import tune as work
from headrace.planner.tune.cli import add_threads
from headrace.planner.tune.correct import (
    Correction,
    MeasuredStep,
    apply_correction,
    fit_correction,
)
from headrace.planner.tune.folder import TuneFolder
from headrace.planner.tune.prices import PlanPricer
from headrace.planner.tune.probes import make_probes
from headrace.planner.tune.trial import LayoutTrial, TrialResult, read_result
from headrace.trainer.cli import main
from headrace.trainer.engines import ENGINES
from headrace.trainer.run.config import RunConfig
from headrace.trainer.run.layout_plan import LayoutPlan, load_plan

MODEL = "tiny-transformer"
WRONG = 3.0
"""Planted error: the file's rate of attention in that of the machine."""
HELD_OUT = 96
"""Tokens of a row that no trial has."""


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def truth() -> HardwareFile:
    """The machine: attention takes a third of a step of 64 tokens a row."""
    row = {"source": "here"}
    rates = [
        {"head_width": 32, "heads": 4, "length": 64, "precision": "fp32", "rate": 2e8,
         "direction": direction, **row}
        for direction in ("forward", "backward")
    ]  # fmt: skip
    figures = {
        "name": "cpu",
        "devices_per_node": 1,
        "sources": {"here": {"kind": "measured", "date": "2026-11-22", "text": "a test"}},
        "device": {"name": "cpu", "kind": "cpu", "memory": 1 << 30, **row},
        "reserved": {"bytes": 1, **row},
        "matmul": [{"m": 64, "k": 64, "n": 64, "precision": "fp32", "rate": 1e10, **row}],
        "memory": [{"bytes": 1 << 20, "rate": 1e10, **row}],
        "attention": rates,
    }
    return reader.build(HardwareFile, figures, source="a test")


@pytest.fixture(scope="module")
def pricer() -> PlanPricer:
    return PlanPricer(load_model_config(MODEL), replace(RunConfig(), precision="fp32"))


@pytest.fixture(scope="module")
def planned(truth: HardwareFile, pricer: PlanPricer) -> tuple[Hardware, LayoutPlan]:
    """A file with the planted error, and a plan for two lengths by it."""
    rows = tuple(replace(row, rate=WRONG * row.rate) for row in truth.attention)
    wrong = Hardware(replace(truth, attention=rows), "cpu.yaml")
    phases = [
        replace(make.uniform_phase(length, 512 // length), name=f"of{length}")
        for length in (64, 256)
    ]
    request = make.PlanRequest(
        model=pricer.model, run=pricer.run, hardware=wrong, gpus=1, phases=phases
    )
    plan = make.make_plans(request).best
    assert plan is not None
    return wrong, plan


@pytest.fixture
def tune_request(planned: tuple[Hardware, LayoutPlan], pricer: PlanPricer) -> work.TuneRequest:
    hardware, plan = planned
    return work.TuneRequest(
        plan=plan,
        plan_file="plan.yaml",
        pricer=pricer,
        hardware=hardware,
        memory=0.9,
        trials=4,
        steps=4,
    )


@pytest.fixture
def runner(truth: HardwareFile, pricer: PlanPricer) -> Callable[[LayoutTrial], TrialResult]:
    """Trials of the machine: 2 ms more a step, 5 ms with DeepSpeed, and an error of 1% that differs
    among them."""
    more = Overhead(operation=0.0, step=2e-3, engines={"deepspeed": 5e-3}, source="here")
    machine = Hardware(replace(truth, overhead=more), "the machine")

    def run(trial: LayoutTrial) -> TrialResult:
        exact = pricer.price(trial.plan, machine, trial.seq_len, trial.batch_tokens)[0]
        noise = 0.01 * (-1) ** int(trial.file.stem)
        return TrialResult(outcome="measured", seconds=exact * (1 + noise), memory=1000)

    return run


def test_a_planted_wrong_rate_is_corrected_by_trials(
    tune_request: work.TuneRequest,
    runner: Callable[[LayoutTrial], TrialResult],
    truth: HardwareFile,
    pricer: PlanPricer,
    tmp_path: Path,
) -> None:
    outcome = work.tune(tune_request, TuneFolder(tmp_path / "tune"), runner)
    errors = outcome.errors()
    assert errors["before"] is not None and errors["before"] > 0.15
    assert errors["after"] is not None and errors["after"] < 0.03
    stored = Hardware.load(tmp_path / "tune" / "hardware.yaml")
    [row, *_] = stored.file.attention
    assert row.rate == pytest.approx(truth.attention[0].rate, rel=0.15)
    source = stored.file.sources[row.source]
    assert source.kind == "measured" and "trainer tune" in source.text
    best = load_plan(tmp_path / "tune" / "plan.yaml")
    assert best.measured is not None and best.measured.memory == 1000
    assert best.planned.hardware == f"{stored.file.name}#{stored.digest}"
    assert best.predicted.seconds == pytest.approx(outcome.best.after, rel=1e-6)
    assert sum(best.predicted.by.values()) == pytest.approx(best.predicted.seconds, rel=1e-6)
    rounding = 1 + 1e-12  # the two are sums in different orders
    assert best.predicted.bound <= best.predicted.seconds * rounding
    # A length that no trial had.
    trial = LayoutTrial(
        plan=best, file=Path("00.yaml"), folder=tmp_path, steps=4, seq_len=HELD_OUT,
        batch_tokens=4 * HELD_OUT,
    )  # fmt: skip
    measured = runner(trial).seconds
    assert measured is not None
    at = (HELD_OUT, 4 * HELD_OUT)
    assert pricer.price(best, stored, *at)[0] == pytest.approx(measured, rel=0.05)
    # The other engine at that length, with its own seconds of a step.
    assert {best.engine.kind, outcome.rows[-1].plan.engine.kind} == set(ENGINES)
    runner_up = replace(best, engine=outcome.rows[-1].plan.engine)
    measured_other = runner(replace(trial, plan=runner_up)).seconds
    assert pricer.price(runner_up, stored, *at)[0] == pytest.approx(measured_other, rel=0.05)
    # Negative control: the wrong figures are off there too.
    assert pricer.price(best, tune_request.hardware, *at)[0] < 0.85 * measured
    text = "\n".join(work.format_lines(outcome))
    assert "attention × 0.3" in text and f"rows of {HELD_OUT}" not in text


def test_launches_are_found_where_the_best_layouts_have_the_same(
    tune_request: work.TuneRequest, truth: HardwareFile, pricer: PlanPricer, tmp_path: Path
) -> None:
    """Held out: a second forward pass of each operator call, in rows of another length."""
    overhead = Overhead(operation=1e-4, step=2e-3, source="here")
    machine = Hardware(replace(truth, overhead=overhead), "the machine")

    def run(trial: LayoutTrial) -> TrialResult:
        seconds = pricer.price(trial.plan, machine, trial.seq_len, trial.batch_tokens)[0]
        return TrialResult(outcome="measured", seconds=seconds, memory=1000)

    outcome = work.tune(tune_request, TuneFolder(tmp_path / "tune"), run)
    best, stored = outcome.best.plan, Hardware.load(tmp_path / "tune" / "hardware.yaml")
    layers = tuple(replace(span, recompute="operator") for span in best.layers)
    unmeasured = replace(best, layers=layers, micro_batch_tokens=HELD_OUT)
    at = (HELD_OUT, 4 * HELD_OUT)
    exact = pricer.price(unmeasured, machine, *at)[0]
    assert pricer.price(unmeasured, stored, *at)[0] == pytest.approx(exact, rel=0.05)
    # Negative control: without launches the same layout is far off.
    result = stored.file.overhead
    assert result is not None
    without = replace(stored.file, overhead=replace(result, operation=0.0))
    assert pricer.price(unmeasured, Hardware(without, "x"), *at)[0] < 0.85 * exact


def test_probes_change_one_thing_of_the_best_layout(
    tune_request: work.TuneRequest, pricer: PlanPricer
) -> None:
    best = tune_request.plan
    short, fewer, rows, again, engine = make_probes(best, pricer, tune_request.hardware, 1e12)
    assert engine.engine.kind != best.engine.kind and engine.layout == best.layout
    [first, *_] = best.planned.phases
    assert short.planned.phases[0].seq_len == first.seq_len // 4
    assert fewer.planned.phases[0].batch_tokens == first.batch_tokens // 2
    assert rows.micro_batch_tokens != best.micro_batch_tokens
    assert {span.recompute for span in again.layers} == {"block"}
    assert again.planned.phases[0].seconds > first.seconds
    assert make_probes(best, pricer, tune_request.hardware, 1.0) == []  # none fits


def test_a_tune_that_ended_is_read_from_its_folder(
    tune_request: work.TuneRequest, runner: Callable[[LayoutTrial], TrialResult], tmp_path: Path
) -> None:
    folder = TuneFolder(tmp_path / "tune")
    first = work.render_json(work.tune(tune_request, folder, runner))
    again = work.render_json(work.tune(tune_request, folder, pytest.fail))
    assert json.dumps(first) == json.dumps(again)
    pin_keys("tune", first)
    pin_keys("tune-request", folder.read())
    with pytest.raises(RunError, match=r"trials: the folder has 4, this tune 5"):
        work.tune(replace(tune_request, trials=5), folder, pytest.fail)


def test_trials_that_die_of_memory_are_named(
    tune_request: work.TuneRequest, runner: Callable[[LayoutTrial], TrialResult], tmp_path: Path
) -> None:
    dead = TrialResult(outcome="memory", error="rank 0 ran out of memory (step 0)")

    def run_all_but_first(trial: LayoutTrial) -> TrialResult:
        return dead if trial.file.stem == "00" else runner(trial)

    outcome = work.tune(tune_request, TuneFolder(tmp_path / "some"), run_all_but_first)
    assert outcome.halving.best != 0
    assert "out of memory" in "\n".join(work.format_lines(outcome))
    with pytest.raises(RunError, match=r"none of 4 layouts ran; 4 of them ran out of memory"):
        work.tune(tune_request, TuneFolder(tmp_path / "none"), lambda trial: dead)


def test_a_hardware_file_without_a_row_is_named(
    tune_request: work.TuneRequest, truth: HardwareFile, tmp_path: Path
) -> None:
    hardware = Hardware(replace(truth, attention=()), "cpu.yaml")
    with pytest.raises(PlanError, match=r"cpu\.yaml has no rate of attention"):
        work.tune(replace(tune_request, hardware=hardware), TuneFolder(tmp_path / "x"), pytest.fail)


def test_rows_that_no_step_shows_get_the_common_factor(truth: HardwareFile) -> None:
    """Steps of the file's own seconds change nothing. Collectives keep their figures."""
    hardware = Hardware(truth, "cpu.yaml")

    def price(by: Hardware) -> float:
        return 1e9 / by.file.matmul[0].rate

    result = fit_correction(
        [MeasuredStep(price, 0.1, "fsdp2"), MeasuredStep(price, 0.1, "fsdp2")], hardware
    )
    assert result.factors == pytest.approx(dict.fromkeys(result.factors, 1.0), abs=1e-3)
    output = apply_correction(hardware, result, "2026-11-23", "a test")
    assert output.matmul == truth.matmul and output.sources == truth.sources
    slow = apply_correction(
        hardware,
        fit_correction([MeasuredStep(price, 0.2, "fsdp2")] * 4, hardware),
        "2026-11-23",
        "a test",
    )
    for table in ("matmul", "attention"):
        rates = [getattr(file, table)[0].rate for file in (slow, truth)]
        assert rates[0] == pytest.approx(rates[1] / 2, rel=0.01)
    assert slow.collectives == truth.collectives


def test_a_plan_of_another_model_or_machine_is_refused_with_each_difference(
    tune_request: work.TuneRequest, truth: HardwareFile
) -> None:
    work.check_request(tune_request, None)
    foreign_request = replace(
        tune_request,
        pricer=replace(tune_request.pricer, model=load_model_config("tiny-hybrid")),
        hardware=Hardware(truth, "other.yaml"),
    )
    with pytest.raises(LayoutError) as error:
        work.check_request(foreign_request, 0)
    for words in ("model: the plan has", "hardware: the plan has cpu#", "this machine 0 GPUs"):
        assert words in str(error.value)


def test_a_trial_is_read_from_its_run(tmp_path: Path) -> None:
    measurements = {
        "clock": "seconds",
        "phases": [{"measured": 0.25}],
        "memory": {"measured": [None, 7, 9]},
    }
    (tmp_path / "measured.json").write_bytes(seal(measurements))
    result = read_result(tmp_path)
    assert (result.outcome, result.seconds, result.memory) == ("measured", 0.25, 9)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Missing argument 'PLAN.yaml'"),
        (("p.yaml",), "Missing option '--model'"),
        (("p.yaml", "layout.tp=2", "--model", MODEL, "--hardware", "h100"), "sets layout"),
        (("p.yaml", "--model", MODEL, "--hardware", "h100", "--steps", "3"), "x>=4"),
    ],
)
def test_wrong_words_are_misuse(words: tuple[str, ...], message: str) -> None:
    result: Any = CliRunner().invoke(main, ["tune", *words])
    assert result.exit_code == 2 and message in result.output


def test_trials_have_the_threads_of_the_figures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(name="CPU", kind="cpu", memory=1 << 30, threads=1, source="here")
    assert add_threads(None, ("seed=3",), device) == ("seed=3", "threads=1")
    assert add_threads(None, ("threads=1",), device) == ("threads=1",)
    assert add_threads(None, (), replace(device, threads=None)) == ()
    assert not caplog.records
    (tmp_path / "run.yaml").write_text("threads: 2\n")
    assert add_threads(str(tmp_path / "run.yaml"), (), device) == ()
    assert "2 threads, and the figures are those of 1" in caplog.text


def test_ring_attention_is_corrected_as_attention(truth: HardwareFile) -> None:
    """No trial shows it; it computes what attention does."""

    def row(kernel: str) -> KernelRate:
        return KernelRate(
            kernel=kernel,
            width=128,
            length=64,
            precision="fp32",
            direction="forward",
            rate=1e9,
            source="here",
        )

    hardware = Hardware(replace(truth, kernels=(row("ring_attention"), row("glu"))), "cpu.yaml")
    correction = Correction(factors={"attention": 0.5, "kernels": 2.0}, operation=0.0, steps={})
    corrected = apply_correction(hardware, correction, "2026-11-23", "a test")
    assert [row.rate for row in corrected.kernels] == [2e9, 5e8]
    assert [row.source for row in corrected.kernels] == [
        "here-attention-2026-11-23",
        "here-kernels-2026-11-23",
    ]
    assert corrected.matmul == truth.matmul
