"""What the harness prints while it scores."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import lm_eval.api.model
import pytest
import yaml
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from headrace.trainer.scores import harness
from headrace.trainer.scores.config import ScoresConfig


class Certain(LM):  # type: ignore[misc]  # the harness has no types
    """Finds every text certain."""

    def loglikelihood(self, requests: Any) -> Any:
        return [(0.0, True) for _ in requests]

    def loglikelihood_rolling(self, requests: Any) -> Any:
        return [0.0 for _ in requests]

    def generate_until(self, requests: Any) -> Any:
        return ["" for _ in requests]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder outside a repository, which is the working directory, with two tasks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "a mill"}) + "\n")
    task = {
        "task": "texts",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "texts.jsonl"}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (tmp_path / "texts.yaml").write_text(yaml.safe_dump(task))
    task |= {"task": "ends", "output_type": "loglikelihood", "metric_list": [{"metric": "acc"}]}
    (tmp_path / "ends.yaml").write_text(yaml.safe_dump(task))
    return tmp_path


def metrics(folder: Path, task: str) -> dict[str, float]:
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    model: Any = Certain()
    result = harness.evaluate_task(model, task, ScoresConfig(tasks=(task,)), tasks)
    return dict(result[task]["metrics"])


def test_git_writes_no_error_outside_a_repository(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert metrics(folder, "texts") == {"bits_per_byte,none": 0.0}
    assert "fatal" not in capfd.readouterr().err


def test_no_bar_where_stderr_is_no_terminal(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert metrics(folder, "ends")["acc,none"] == 1.0
    assert "%|" not in capfd.readouterr().err
    # The harness's own class for models encodes the texts of all requests below a bar.
    assert list(lm_eval.api.model.tqdm([1], desc="Tokenizing inputs", disable=False)) == [1]
    assert not capfd.readouterr().err


def test_no_warning_of_what_the_yaml_of_a_task_leaves_to_the_harness(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics(folder, "ends")
    logging.getLogger("lm_eval.api.task").warning("another")
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "another"
    ]


def test_notes_of_the_harness_are_no_part_of_the_output(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    task = yaml.safe_load((folder / "ends.yaml").read_text())
    task |= {"task": "guesses", "metric_list": [{"metric": "perplexity"}]}
    (folder / "guesses.yaml").write_text(yaml.safe_dump(task))
    (folder / "texts.jsonl").write_text(2 * (json.dumps({"text": "a mill"}) + "\n"))
    assert metrics(folder, "guesses")["perplexity,none"] == 1.0
    written = capfd.readouterr()
    assert not written.out and "bootstrapping" in written.err
