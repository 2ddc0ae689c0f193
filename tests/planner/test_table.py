"""The page of a search: lines that are different ideas, and what each other kind would cost."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner, Result
from formats.samples import pin_keys

from headrace.console.progress import format_bytes, format_seconds
from headrace.planner.memory.sizes import format_sizes, merge_small
from headrace.trainer.cli import main

WORDS = ("--model", "tiny-transformer", "--seq-len", "256", "--batch-tokens", "16Ki")
H100 = ("--hardware", "h100", "--roofline")


def plan(*words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["plan", *WORDS, *H100, *words])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def page() -> Result:
    return plan("--gpus", "16", "--json")


def test_lines_are_different_ideas_and_kinds_that_are_missing_have_a_price(page: Result) -> None:
    ideas = json.loads(page.stdout)["phases"][0]["ideas"]
    assert len({tuple(idea["idea"].values()) for idea in ideas}) == len(ideas) > 3
    assert [idea["seconds"] for idea in ideas] == sorted(idea["seconds"] for idea in ideas)
    lines = [line for line in page.stderr.splitlines() if re.match(r" +\d+ ", line)]
    assert len(lines) == min(10, len(ideas))
    for line, idea in zip(lines, ideas, strict=False):
        assert idea["layout"] in line and format_seconds(idea["seconds"]) in line
        assert f"{idea['mfu']:.1%}" in line and format_bytes(idea["memory"]) in line
    omitted = {
        "tp": lambda idea: idea["tp"] > 1,
        "pp": lambda idea: idea["pp"] > 1,
        "cp": lambda idea: idea["cp"] > 1,
        "HSDP": lambda idea: idea["shard"] > 1,
    }
    for kind, has in omitted.items():
        if has(ideas[0]["idea"]):
            continue
        [line] = [line for line in page.stderr.splitlines() if f"why not {kind}:" in line]
        first = next((idea for idea in ideas if has(idea["idea"])), None)
        if first is None:
            assert "twice the best step" in line
        else:
            assert first["layout"] in line
            assert f"{first['seconds'] / ideas[0]['seconds'] - 1:+.1%}" in line


def test_several_numbers_of_devices_are_a_table() -> None:
    result = plan("--gpus", "2,8", "--tokens", "1B", "--json")
    rows = json.loads(result.stdout)
    assert [row["gpus"] for row in rows] == [2, 8]
    pin_keys("plan-scales", rows[:1])
    for row in rows:
        days = 1e9 / row["tokens_per_second"] / 86_400
        assert row["days"] == pytest.approx(days)
        assert row["gpu_hours"] == pytest.approx(24 * days * row["gpus"])
        assert row["layout"] in result.stderr
    alone = json.loads(plan("--gpus", "8", "--tokens", "1B", "--json").stdout)
    assert alone["scales"] == [rows[1]]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--gpus", "8,0"), "`0` is not a number of devices"),
        (("--gpus", "8,16", "--out", "plan.yaml"), "--out: give one number of devices"),
        (("--gpus", "8", "--tokens", "none"), "--tokens none is no number of tokens"),
    ],
)
def test_wrong_numbers_are_named(words: tuple[str, ...], reason: str) -> None:
    assert reason in plan(*words, code=2).output


def test_small_parts_are_added_up() -> None:
    parts = {"inputs": 18, "activations": 70 * 10**9, "buffers": 5, "logits": 18 * 10**9}
    merged = merge_small(parts, sum(parts.values()))
    assert list(merged.items()) == [
        ("activations", 70 * 10**9),
        ("logits", 18 * 10**9),
        ("others", 23),
    ]
    assert format_bytes(merged["logits"]) == "18 GB" and format_bytes(18) == "18 bytes"


def test_bytes_in_host_memory_stand_apart() -> None:
    sizes = {"host optimizer": 4 * 10**6, "activations": 7 * 10**6, "weights": 10**6}
    assert format_sizes(sizes) == ("activations 7 MB, weights 1 MB; in host memory optimizer 4 MB")
