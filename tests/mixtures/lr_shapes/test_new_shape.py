"""A new shape is a file and a line in `SHAPES`: every command of `mixtures` then accepts it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from click.testing import CliRunner

from headrace.dataplane.order.plan import Plan
from headrace.mixtures.cli import main
from headrace.mixtures.learning_rate import lr_factor
from headrace.mixtures.lr_shapes import SHAPES, LearningRate


@dataclass(frozen=True, kw_only=True)
class Stairs(LearningRate):
    """A learning rate that halves `steps` times, at equal distances."""

    shape: Literal["stairs"] = "stairs"
    """Halves at each step."""
    steps: int = 1
    """Number of steps."""

    def after_warmup(self, token: float, tokens: int) -> float:
        return self.peak * 0.5 ** int(self.progress(token, tokens) * (self.steps + 1))

    def shape_problems(self) -> Iterator[tuple[str, str]]:
        if self.steps < 1:
            yield "steps", f"is {self.steps}; shape stairs has at least one step"


@pytest.fixture
def mixture(head: Callable[..., str], tmp_path: Path) -> str:
    file = tmp_path / "mixture.yaml"
    file.write_text(
        f"sources: {{web: {{data: {head('web', 9_000)}}}}}\n"
        "phases:\n"
        "  main:\n"
        "    tokens: 8_192\n"
        "    seq_len: 64\n"
        "    batch: 1024\n"
        "    weights: {web: 1}\n"
        "    lr: {shape: stairs, steps: 3}\n"
    )
    return str(file)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "stairs", Stairs)


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, list(words))
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.mark.usefixtures("registered")
def test_registered_shape_is_checked_planned_plotted_and_offered(
    mixture: str, tmp_path: Path
) -> None:
    assert json.loads(run("check", mixture, "--json"))["ok"] is True
    plan_file = tmp_path / "plan.json"
    run("plan", mixture, "--out", str(plan_file), "--json")
    plan = Plan.load(plan_file)
    assert plan.phases[0].lr["steps"] == 3
    rates = [lr_factor(plan, step) for step in range(8)]
    assert rates == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
    for source in (mixture, str(plan_file)):
        curves = json.loads(run("plot", source, "--out", str(tmp_path / "plot.svg"), "--json"))
        assert set(curves["lr"]) == {1, 0.5, 0.25, 0.125, 0.0625}
    assert "stairs" in run("new")


@pytest.mark.usefixtures("registered")
def test_settings_of_a_registered_shape_are_checked(mixture: str) -> None:
    report = json.loads(run("check", mixture, "phases.main.lr.steps=0", "--json", code=1))
    [problem] = report["problems"]
    assert problem["path"] == "phases.main.lr.steps"
    assert "at least one step" in problem["what"]
    report = json.loads(run("check", mixture, "phases.main.lr.stepz=2", "--json", code=1))
    assert "did you mean `steps`?" in report["problems"][0]["what"]


def test_shape_that_is_not_registered_is_refused(mixture: str) -> None:
    """Negative control: without the line in `SHAPES` the same YAML is an error."""
    report = json.loads(run("check", mixture, "--json", code=1))
    assert report["problems"][0]["path"] == "phases.main.lr.shape"
    assert "stairs" not in run("new")
