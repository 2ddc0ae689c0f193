"""The table of metrics: a line in it is all that a number of the ranks needs to be seen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.models.small_loops import begin, saving
from support.pages.board_client import Client

from headrace.dataplane.runlog import writer as lines
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.layout.groups import Parallel
from headrace.trainer.loop.hooks.hook import Hook
from headrace.trainer.loop.metrics import METRICS, Largest, Metric
from headrace.trainer.record.logger import ScalarLogger
from headrace.trainer.record.steps import RunRecorder


class Dummies(Hook):
    def measure(self) -> Mapping[str, Any]:
        return {"dummy": 0.127}


class Curves(ScalarLogger):
    """Keeps the curves of the last step."""

    def scalars(self, values: dict[str, float], step: int) -> None:
        self.values = values


def test_a_metric_is_a_line_of_the_table_and_a_number_of_each_rank(
    tmp_path: Path, parallel: Parallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the records, the loggers, and what the live page reads."""
    line = Metric(title="Dummies", unit="apples", logger="speed/d", ranks=Largest(), digits=2)
    monkeypatch.setitem(METRICS, "dummy", line)
    folder = RunFolder(tmp_path / "run")
    loop = saving(folder, parallel)
    [recorder] = loop.hooks.hooks
    assert isinstance(recorder, RunRecorder)
    recorder.loggers = [*recorder.loggers, curves := Curves(recorder.loggers[0].run)]
    loop.hooks.hooks.append(Dummies())
    loop.run(begin())
    assert [entry["dummy"] for entry in lines.read(folder.metrics)] == [0.13] * 4
    assert curves.values["speed/d"] == 0.13
    folder.run.write_text("seed: 1\n")
    client = Client(tmp_path)
    try:
        assert "dummy" in client.json("api/runs")["runs"][0]["series"]
        shown = {"name": "dummy", "title": "Dummies", "unit": "apples"}
        assert shown in client.json("api/metrics")
    finally:
        client.server.shutdown()
        client.server.server_close()
