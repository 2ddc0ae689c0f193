from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.config.config import load_model_config
from headrace.models.model.model import Model
from headrace.reports.scores.recall_chart import recall_section
from headrace.tokenize.cli import main as tokenize
from headrace.trainer.cli import main
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.placement.team import Team
from headrace.trainer.scores import recall
from headrace.trainer.scores.likelihood import (
    SCORE,
    Score,
    ScoredRow,
    batch_by_length,
    score_batch,
    score_rows,
)
from headrace.trainer.scores.recall import KEY, TASKS, Material, build_examples, measure_recall

TEXT = Random(5).choices(range(30, 90), k=4000)
BYTES = Material(TEXT, sorted(set(TEXT)))
BASES = Material(Random(5).choices(b"ACGT", k=4000), sorted(b"ACGT"))


def follower(row: ScoredRow, memory: int, window: int) -> Score:
    """Predict what followed the longest match of the last tokens, at most `memory` of them, within
    the last `window` tokens. No model: it only looks the answer up."""
    likeliest = []
    for place in row.scored:
        seen = list(row.ids[max(0, place - window) : place])
        guess, best = None, 0
        for end in range(1, len(seen)):
            match = 0
            while match < min(memory, end) and seen[end - 1 - match] == seen[-1 - match]:
                match += 1
            if match > best:
                guess, best = seen[end], match
        likeliest.append(guess == row.ids[place])
    return Score([math.log(0.9)] * len(likeliest), likeliest)


def measured(material: Material, memory: int, window: int, task: str) -> dict[str, Any]:
    team = Team({SCORE: lambda rows: [follower(row, memory, window) for row in rows]})
    (result,) = measure_recall(team, material, [task], [160], count=3, seed=1, batch_tokens=1)[task]
    return result


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("material", [BYTES, BASES], ids=["bytes", "bases"])
def test_a_lookup_in_the_whole_context_answers_all_and_a_short_one_does_not(
    material: Material, task: str
) -> None:
    whole = measured(material, 40, 160, task)
    assert whole["accuracy"] == 1.0 and whole["loss"] == pytest.approx(-math.log(0.9))
    assert whole["length"] == 160
    for memory, window in ((0, 160), (40, 20)):  # no key, or a context that lacks the answer
        assert measured(material, memory, window, task)["accuracy"] < 0.5


@given(
    task=st.sampled_from(sorted(TASKS)),
    length=st.integers(recall.SHORTEST, 700),
    seed=st.integers(0, 9),
    material=st.sampled_from([BYTES, BASES]),
)
def test_examples_are_functions_of_the_seed(
    task: str, length: int, seed: int, material: Material
) -> None:
    if task == "mqar" and length < 8 * material.word_width(length // 2):
        return  # refused: test_mistakes_are_named
    first, again = (
        list(build_examples(task, material, length, count=3, seed=seed)) for _ in range(2)
    )
    assert first == again
    assert first != list(build_examples(task, material, length, count=3, seed=seed + 1))
    for example in first:
        assert length - 4 * material.word_width(length) <= len(example.row.ids) <= length
        assert set(example.row.ids) <= set(material.ids)
        assert len(example.row.scored) % example.answer_tokens == 0
        assert min(example.row.scored) >= KEY // 2


@given(
    st.lists(st.integers(1, 40), max_size=20),
    st.integers(1, 100),
)
def test_batches_hold_each_row_once_and_few_tokens(lengths: list[int], max_tokens: int) -> None:
    result = list(batch_by_length(lengths, max_tokens))
    assert sorted(number for batch in result for number in batch) == list(range(len(lengths)))
    for batch in result:
        assert len(batch) == 1 or len(batch) * max(lengths[n] for n in batch) <= max_tokens


@pytest.mark.parametrize("name", ["tiny-hybrid", "tiny-transformer"])
def test_scores_are_those_of_each_row_alone(name: str) -> None:
    model = Model(load_model_config(name))
    model.init_weights(1)
    model.eval().requires_grad_(False)
    random = Random(1)
    rows = [
        ScoredRow(
            [random.randrange(200) for _ in range(length)], sorted({1, length // 2, length - 1})
        )
        for length in (2, 30, 7, 19, 30)
    ]
    team = Team({SCORE: partial(score_batch, model)})
    for row, result in zip(rows, score_rows(team, rows, 64), strict=True):
        hidden, _ = model.hidden(torch.tensor([row.ids]))
        logits = model.logits(hidden)[0].log_softmax(-1)
        for place, value, likeliest in zip(
            row.scored, result.log_likelihoods, result.likeliest, strict=True
        ):
            assert value == pytest.approx(float(logits[place - 1, row.ids[place]]), abs=1e-4)
            assert likeliest == (int(logits[place - 1].argmax()) == row.ids[place])


@pytest.fixture
def run(checkpoint_of: Callable[..., RunFolder], tmp_path: Path) -> RunFolder:
    (tmp_path / "text.txt").write_text("water turns the wheel of the old mill. " * 40)
    words = ["build", str(tmp_path / "text.txt"), "--tokenizer", "byte"]
    built = CliRunner().invoke(tokenize, [*words, "--out", str(tmp_path / "data")])
    assert built.exit_code == 0, built.output
    model = Model(load_model_config("tiny-transformer", ["vocab_size=300"]))
    model.init_weights(1)
    return checkpoint_of(model)


def ask(run: RunFolder, *words: str) -> Result:
    data = str(run.root.parent / "data")
    return CliRunner().invoke(main, ["recall", str(run.root), "--data", data, *words])


def test_the_command_stores_results_that_the_report_draws(run: RunFolder) -> None:
    words = ["--lengths", "128,64", "--examples", "2", "--tasks", "copy,needle", "--json"]
    first, again = ask(run, *words), ask(run, *words)
    assert first.exit_code == 0, first.output
    result = json.loads(first.stdout)
    assert result["tasks"] == json.loads(again.stdout)["tasks"]
    assert [item["length"] for item in result["tasks"]["copy"]] == [64, 128]
    assert all(3 < item["loss"] < 9 for item in result["tasks"]["needle"])
    lines = [json.loads(line) for line in run.recall.read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 3] and lines[0]["tasks"] == result["tasks"]
    older = {**lines[0], "step": 1, "tasks": {"mqar": result["tasks"]["copy"]}}
    page = recall_section([*lines, older])
    assert "step 3" in page and page.count("<polyline") == 2 and "mqar" not in page
    assert ">64</text>" in page and ">128</text>" in page
    assert recall_section([]) == ""
    averaged = {**lines[0], "ema": True}
    page = recall_section([*lines, averaged])
    assert page.count("<polyline") == 4 and "copy, ema" in page


@pytest.mark.parametrize(
    ("lengths", "shown"),
    [
        ([256, 512, 1024, 2048, 4096], ["256", "512", "1,024", "2,048", "4,096"]),
        ([100, 384, 1500], ["100", "384", "1,500"]),
        ([2048], ["2,048"]),
        ([64, 1000, 1001, 65536], ["64", "1,000", "65,536"]),  # 1,001 would overlap
    ],
)
def test_each_measured_length_has_a_tick(lengths: list[int], shown: list[str]) -> None:
    results = [{"length": length, "accuracy": 0.5, "loss": 1.0, "answers": 4} for length in lengths]
    page = recall_section([{"step": 1, "ema": False, "tasks": {"copy": results}}])
    assert re.findall(r'class="tick x"[^>]*>([^<]*)<', page) == shown
    ticks = re.findall(r'class="tick x"[^>]* y="([^"]*)"', page)
    (title,) = re.findall(r'class="tick end"[^>]* y="([^"]*)"', page)
    assert float(title) > float(ticks[0]) + 12  # below the ticks


def test_results_that_cannot_be_stored_are_printed(run: RunFolder) -> None:
    """The run may be another person's, and the measurement have taken hours."""
    run.recall.mkdir()
    for words in ([], ["--json"]):
        done = ask(run, "--lengths", "64", "--tasks", "copy", "--examples", "1", *words)
        assert done.exit_code == 1 and "recall.jsonl" in done.stderr
        assert "64 tokens" in done.stdout or json.loads(done.stdout)["stored"] is None


def test_mistakes_are_named(run: RunFolder) -> None:
    assert ask(run, "--lengths", "128,63").exit_code == 2
    assert ask(run, "--lengths", "long").exit_code == 2
    assert ask(run, "--tasks", "nedle").exit_code == 2
    long = ask(run, "--lengths", "99999", "--tasks", "copy")
    assert long.exit_code == 1 and "fewer than a context of 99,999" in long.output
    (run.root.parent / "other.txt").write_text("a" * 900)
    words = ["build", str(run.root.parent / "other.txt"), "--tokenizer", "byte"]
    alike = str(run.root.parent / "alike")
    assert CliRunner().invoke(tokenize, [*words, "--out", alike]).exit_code == 0
    flat = CliRunner().invoke(main, ["recall", str(run.root), "--data", alike, "--lengths", "64"])
    assert flat.exit_code == 1 and "nearly all tokens" in flat.output
    two = Material(TEXT, [1, 2])
    with pytest.raises(recall.InputError, match="no two pairs"):
        list(build_examples("mqar", two, 64, count=1, seed=0))
    ema = ask(run, "--ema", "--lengths", "64")
    assert ema.exit_code == 1 and "holds no moving average" in ema.output
    assert not run.recall.exists()
