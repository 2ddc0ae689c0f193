"""`trainer plan` from outside: what is named before a search, and what is printed after it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.console.errors import StorageError
from headrace.planner.hardware import Hardware
from headrace.trainer.cli import main

DENSE = ("--seq-len", "4096", "--batch-tokens", "1Mi", "--hardware", "h100")
SHORT = ("--seq-len", "1024", "--batch-tokens", "4Ki", "--hardware", "h100", "--roofline")


def plan(*words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["plan", *words])
    assert result.exit_code == code, result.output
    return result


def test_all_missing_figures_are_named_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--model", "mamba2-130m", *DENSE, "--hardware", "a100-80", "--gpus", "2")
    file = Hardware.load("a100-80").file
    linkless = tmp_path / "linkless.yaml"
    Hardware(replace(file, links={}, overlap={}), "linkless").save(linkless)
    with monkeypatch.context() as patch:
        patch.setattr("headrace.planner.search.make.search", None)
        text = plan(*words, code=1).stderr
        assert "has no rate of short_convolution and ssd (precision bf16)" in text
        assert "trainer profile --out" in text and "--roofline" in text and "links" not in text
        text = plan(*words, "--hardware", str(linkless), code=1).stderr
        assert "and ssd (precision bf16), and no links.node for 2 devices" in text
        assert "profile --links" in text
    assert "ssd: no measured rate" in plan(*words, "--roofline").stderr


def test_a_plan_is_printed_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr("headrace.planner.cli._write_plan", fail)
    words = ("--model", "tiny-transformer", *SHORT, "--gpus", "1")
    result = plan(*words, "--out", str(tmp_path / "plan.yaml"), code=1)
    assert "tokens/s on each device" in result.stderr and "the disk is full" in result.stderr
