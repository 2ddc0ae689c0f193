"""An engine and a schedule that are added to their tables are planned, by `trainer plan` too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from click.testing import CliRunner
from support.planner.hardware import cpu_hardware

from headrace.console.errors import LayoutError
from headrace.models.accounting.level import EngineMemory
from headrace.models.accounting.state import BytesPerParameter, Degrees, Shards, StatePart
from headrace.models.config.options.precision import Precision
from headrace.trainer.cli import main
from headrace.trainer.engines import ENGINES
from headrace.trainer.engines.config import EngineConfig, StateOnDevice
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.shard_groups import LayerShards
from headrace.trainer.engines.traffic import Traffic, UnshardedWeights
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.schedules import SCHEDULES, Orders, Schedule

MEMORY = Fsdp2Config(gather="step")


@dataclass(frozen=True, kw_only=True)
class Silent(EngineConfig):
    """An engine that sends nothing, and holds what FSDP2 holds."""

    kind: Literal["silent"] = "silent"

    @classmethod
    def candidates(cls, shard: int | None, *, alone: bool) -> Sequence[Silent]:
        return [] if shard is not None else [cls()]

    @classmethod
    def fewest_messages(cls) -> Silent:
        return cls()

    def choices(self, layout: LayoutConfig) -> dict[str, object]:
        return {"silence": "golden"}

    def traffic(self, layout: LayoutConfig, device: str) -> Traffic:
        return Traffic()

    def unsharded_weights(self, layout: LayoutConfig) -> UnshardedWeights:
        return MEMORY.unsharded_weights(layout)

    def check(self, layout: LayoutConfig, processes: int, precision: Precision) -> None:
        return

    def describe(self) -> str:
        return "Silent"

    def state_layout(
        self,
        precision: Precision,
        optimizer_bytes: BytesPerParameter,
        device: str,
        layout: LayoutConfig,
    ) -> list[StatePart]:
        return MEMORY.state_layout(precision, optimizer_bytes, device, layout)

    def memory(self, state: StateOnDevice, shards: Shards, degrees: Degrees) -> EngineMemory:
        return MEMORY.memory(state, shards, degrees)

    def build(self, *arguments: Any) -> Any:
        raise NotImplementedError


class Ninths(Schedule):
    """Interleaved with nine chunks. It says of itself nothing but its lists."""

    name = "ninths"
    has_chunks = True

    def chunk_counts(self, stages: int, layers: int) -> Sequence[int]:
        return (9,)

    def orders(self, stages: int, chunks: int, micro_batches: int) -> Orders:
        return SCHEDULES["interleaved"].orders(stages, chunks, micro_batches)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cpu_hardware(tmp_path_factory.mktemp("hardware"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def words(machine: str) -> list[str]:
    """Return the command that plans eighteen layers on two devices."""
    file = Path(machine).parent / "eighteen.yaml"
    file.write_text(
        "{width: 36, vocab_size: 64, pattern: '[attention] * 18', mlp: glu, operators:"
        " {attention: {kind: attention, heads: 2}, glu: {kind: glu, hidden: 48}}}"
    )
    batch = ["--seq-len", "16", "--batch-tokens", "128"]
    cluster = ["--hardware", machine, "--gpus", "2", "--roofline", "--json"]
    return ["plan", "--model", str(file), *batch, *cluster]


def plan(machine: str, *more: str) -> Any:
    """Return what the command prints."""
    result = CliRunner().invoke(main, [*words(machine), *more], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def slow(machine: str) -> str:
    """Return the machine with links on which a message takes a tenth of a second."""
    figures = json.loads(Path(machine).read_text())
    figures["links"]["node"]["latency"] = 0.1
    file = Path(machine).with_name("slow.yaml")
    file.write_text(json.dumps(figures))
    return str(file)


def planned(plans: Any, name: str) -> set[Any]:
    """Return the values of a setting among the best layouts."""
    [phase] = plans["phases"]
    return {layout[name] for layout in phase["best"]}


def test_an_engine_in_the_table_is_planned_and_wins(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = slow(machine)
    plain = plan(file)
    assert planned(plain, "engine") <= {"fsdp2", "deepspeed"}  # negative control
    monkeypatch.setitem(ENGINES, "silent", Silent)
    plans = plan(file, "--explain", "silence=golden,pp=2")
    assert plans["plan"]["engine"]["kind"] == "silent"
    assert "silent" in planned(plans, "engine")
    assert plans["plan"]["predicted"]["seconds"] < plain["plan"]["predicted"]["seconds"] / 2
    [explained] = plans["explained"]
    assert explained["layout"]["engine"] == "silent" and explained["layout"]["pp"] == 2


def test_a_schedule_in_the_table_is_planned_and_wins(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [plain] = plan(machine, "--explain", "pp=2")["explained"]
    assert plain["layout"]["schedule"] == "interleaved"  # negative control
    monkeypatch.setitem(SCHEDULES, "ninths", Ninths())
    [explained] = plan(machine, "--explain", "pp=2")["explained"]
    assert explained["layout"]["schedule"] == "ninths" and explained["layout"]["chunks"] == 9
    assert explained["seconds"] < plain["seconds"]


def test_an_engine_that_does_not_answer_is_an_error(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Untried(Silent):
        @classmethod
        def candidates(cls, shard: int | None, *, alone: bool) -> Sequence[Silent]:
            return []

    monkeypatch.setitem(ENGINES, "silent", Untried)
    result = CliRunner().invoke(main, words(machine))
    assert result.exit_code == 1
    assert "error: the engine `silent` has no settings that the planner may try" in result.output
    with pytest.raises(ValueError, match="an engine sends 'scatter'; prices have gather, reduce"):
        Traffic(backward=("scatter",))  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"engine.kind=silent has no .* layers \[1, 2\] choose"):
        Silent().replace_layer_shards([LayerShards(layers=(1, 2))])
    with pytest.raises(TypeError, match=r"abstract class .* traffic"):
        type("Mute", (Silent,), {"traffic": EngineConfig.traffic})()
