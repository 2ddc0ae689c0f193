"""Plans whose optimizer is in host memory: where that is faster, where nothing fits without, or
where it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from headrace.console.errors import PlanError
from headrace.models.config.config import load_model_config
from headrace.planner.hardware import Hardware
from headrace.planner.search.make import PlanRequest, explain, make_plans, uniform_phase
from headrace.trainer.engines.deepspeed import DeepSpeedConfig
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.optimizers.muon import MuonConfig
from headrace.trainer.run.config import RunConfig
from headrace.trainer.run.layout_plan import LayoutPlan


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def question(memory: float, hardware: Hardware | None = None, **run: Any) -> PlanRequest:
    return PlanRequest(
        model=load_model_config("tiny-transformer"),
        run=replace(RunConfig(), precision="bf16", **run),
        hardware=hardware or Hardware.load("h100"),
        gpus=1,
        phases=[uniform_phase(256, 4)],
        memory=memory,
        roofline=True,
    )


@pytest.mark.slow
def test_the_optimizer_is_offloaded_where_nothing_fits_without() -> None:
    plain = make_plans(question(0.9)).best
    assert plain is not None and not plain.engine.offloads
    hardware = Hardware.load("h100")
    needed = plain.predicted.memory_by
    state = needed["masters"] + needed["optimizer"]
    tight = question(0.95 * state / hardware.usable_memory)
    best = make_plans(tight).best
    assert best is not None and best.engine.offloads
    assert best.predicted.memory <= tight.budget
    assert best.predicted.by["update"] > 10 * plain.predicted.by["update"]
    # Negative controls: figures of the host are needed, and an optimizer that runs there.
    lacking = Hardware(replace(hardware.file, host=None), "mine.yaml")
    with pytest.raises(PlanError) as without:
        make_plans(replace(tight, hardware=lacking))
    assert "Offload was not tried: mine.yaml has no figures of the host" in without.value.where
    with pytest.raises(PlanError) as muon:
        make_plans(replace(tight, run=replace(tight.run, optimizer=MuonConfig())))
    assert "Offload was not tried: optimizer.kind=muon runs on the device" in muon.value.where


@pytest.mark.slow
def test_the_optimizer_is_offloaded_where_that_is_faster() -> None:
    """Where a plan without fits, too, but recomputes; with a slow host that plan is the best."""
    plain = make_plans(question(0.9)).best
    hardware = Hardware.load("h100")
    known_host = hardware.file.host
    assert plain is not None and known_host is not None
    tight = question(0.7 * plain.predicted.memory / hardware.usable_memory)

    def find_best(rate: float | None) -> LayoutPlan:
        host = replace(known_host, copy=rate, update=rate) if rate else None
        cluster = Hardware(replace(hardware.file, host=host), "mine.yaml")
        best = make_plans(replace(tight, hardware=cluster)).best
        assert best is not None and best.predicted.memory <= tight.budget
        return best

    on_device, fast, slow = map(find_best, (None, 1e14, 1e8))
    assert "recompute" in on_device.predicted.by and not on_device.engine.offloads
    assert fast.engine.offloads
    assert fast.predicted.seconds < 0.99 * on_device.predicted.seconds
    assert slow.predicted.seconds == on_device.predicted.seconds and not slow.engine.offloads


def test_offload_is_explained_where_it_is_asked_for() -> None:
    plans = make_plans(question(0.9))
    [(_, offloaded)] = explain(plans, {"offload": "cpu"})
    assert not isinstance(offloaded, PlanError)
    assert offloaded.grid.settings()["offload"] == "cpu"
    assert offloaded.solution.price > plans.phases[0].best.solution.price
    lacking = Hardware(replace(plans.request.hardware.file, host=None), "mine.yaml")
    [(_, refused)] = explain(make_plans(question(0.9, lacking)), {"offload": "cpu"})
    assert isinstance(refused, PlanError)
    assert "offload=cpu: mine.yaml has no figures of the host's memory" in refused.where


def test_every_engine_that_can_offload_is_tried() -> None:
    assert Fsdp2Config(gather="step").offloading() == Fsdp2Config(gather="step", offload="cpu")
    assert DeepSpeedConfig(zero=0).offloading() is None
    for zero in (1, 2, 3):
        engine = DeepSpeedConfig(zero=zero).offloading()  # type: ignore[arg-type]
        assert engine is not None and engine.offloads and engine.zero == zero
