"""MLflow against its store of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.trainer.record.loggers import mlflow as logger


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what the logger sets within the test."""
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)


def stored(store: Path, experiment: str = "headrace") -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=str(store))
    result = client.get_experiment_by_name(experiment)
    return [] if result is None else list(client.search_runs([result.experiment_id]))


def history(store: Path, run: Any, name: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=str(store))
    return [(metric.step, metric.value) for metric in client.get_metric_history(run, name)]


def test_each_start_continues_one_run(records: Any, environment: None, tmp_path: Path) -> None:
    store, run = tmp_path / "mlflow", records()
    for step, end, status in ((3, "stop", "KILLED"), (4, "finish", "FINISHED")):
        recorder = run.open(mlflow=str(store))
        recorder.step_done(run.step(step, 3.0 - step / 10))
        (result,) = stored(store)
        assert result.info.status == "RUNNING"
        recorder.event(end, step + 1)
        recorder.close()
        (result,) = stored(store)
        assert result.info.status == status
    assert result.info.run_name == run.folder.root.name
    assert result.data.tags["headrace.folder"] == str(run.folder.root)
    losses = history(store, result.info.run_id, "loss/all")
    assert losses == [(3, pytest.approx(2.7)), (4, pytest.approx(2.6))]
    assert history(store, result.info.run_id, "speed/mfu")[0] == (3, pytest.approx(0.2))


def test_the_experiment_is_that_of_the_environment(
    records: Any, environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "rivers")
    records().open(mlflow=str(tmp_path / "mlflow")).close()
    assert len(stored(tmp_path / "mlflow", "rivers")) == 1
    assert stored(tmp_path / "mlflow") == []


def test_names_that_mlflow_refuses_are_changed(
    records: Any, environment: None, tmp_path: Path
) -> None:
    store = tmp_path / "mlflow"
    recorder = records().open(mlflow=str(store))
    (opened,) = (item for item in recorder.loggers if isinstance(item, logger.MLflow))
    opened.scalars({"loss/web+code": 2.0}, 1)
    (result,) = stored(store)
    assert history(store, result.info.run_id, "loss/web_code") == [(1, 2.0)]
