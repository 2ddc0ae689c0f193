"""What the harness prints while it scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def test_git_writes_no_error_outside_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
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
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    model: Any = Certain()
    found = harness.metrics_of(model, "texts", ScoresConfig(tasks=("texts",)), tasks)
    assert found["texts"]["metrics"] == {"bits_per_byte,none": 0.0}
    assert "fatal" not in capfd.readouterr().err
