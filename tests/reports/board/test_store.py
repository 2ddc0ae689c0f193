"""The board and a run whose records are in S3 while it trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import yaml
from support.configs import CONFIGS
from support.pages.board_client import Client
from support.pages.board_runs import write_texts
from support.pages.chromium import wait
from support.stores.swift import Swift

from headrace.trainer.cluster.ranks import INTERRUPTED
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.record.config import WatchConfig
from headrace.trainer.record.mirror import GROWN, Mirror

STEPS = 100_000
"""More than the run takes before it is stopped."""
ROWS, LENGTH = 4, 32


def test_files_are_copied_again_when_they_have_grown(tmp_path: Path) -> None:
    store, url = fsspec.filesystem("memory"), f"memory://mirror-{tmp_path.name}"
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    for name in ("run.yaml", "metrics.after-3.jsonl", ".half.json", "report.html"):
        (folder.root / name).write_text("x")
    folder.metrics.write_text("a" * 1000)
    mirror = Mirror(folder, url)
    mirror.update()
    place = f"/mirror-{tmp_path.name}/run"
    assert sorted(Path(item).name for item in store.ls(place, detail=False)) == [
        "metrics.jsonl",
        "run.yaml",
    ]
    for size, copied in ((1000 * GROWN - 1, 1000), (1000 * GROWN + 1, 1021), (500, 500)):
        folder.metrics.write_text("a" * int(size))
        mirror.update()
        assert store.size(f"{place}/metrics.jsonl") == copied
    folder.metrics.write_text("a" * 501)
    mirror.update(final=True)
    assert store.size(f"{place}/metrics.jsonl") == 501 and store.exists(f"{place}/report.html")
    assert sorted(path.name for path in folder.root.iterdir()) == [
        *(".half.json", "metrics.after-3.jsonl", "metrics.jsonl", "report.html", "run.yaml")
    ]


def test_a_store_that_fails_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run.yaml").write_text("x")
    mirror = Mirror(RunFolder(tmp_path), "nosuchscheme://bucket")
    mirror.update()
    mirror.update()
    assert mirror.failed and caplog.text.count("is not copied to") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
    with pytest.raises(ValueError, match="must be a URL of a store"):
        WatchConfig(mirror="runs/copies")


@pytest.mark.server
@pytest.mark.timeout(900)
def test_the_board_shows_a_run_in_s3_while_it_trains(
    swift: Swift, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dataset and records are in a real S3; the run's folder is read by the run alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    size = write_texts("s3://runs/data/web", 2000)
    batch = {"seq_len": LENGTH, "batch": ROWS * LENGTH, "weights": {"web": 1}}
    phases = {"main": {"tokens": STEPS * ROWS * LENGTH, **batch}}
    mixture = {
        "seed": 1,
        "sources": {"web": {"data": "s3://runs/data/web", "max_epochs": STEPS}},
        "phases": phases,
    }
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(mixture))
    model = CONFIGS / "tiny.yaml"
    command = [sys.executable, "-m", "headrace.trainer.cli", "run", "--model", str(model)]
    command += ["--mixture", str(tmp_path / "mixture.yaml"), "--out", str(tmp_path / "run")]
    command += [
        f"model.vocab_size={size}",
        "engine.kind=fsdp2",
        "threads=1",
        "watch.tensorboard=false",
    ]
    with (tmp_path / "log").open("wb") as log:
        training = subprocess.Popen(
            [*command, "watch.mirror=s3://runs/live"], stdout=log, stderr=log
        )
    try:
        client = Client("s3://runs/live", remote_interval=0.0)

        def listed() -> dict[str, Any]:
            assert training.poll() is None, (tmp_path / "log").read_text()
            client.board.scan()
            client.board.refresh()
            result: list[dict[str, Any]] = client.json("api/runs")["runs"]
            return result[0] if result else {"entries": 0}

        first = wait(lambda: (run := listed())["entries"] and run, 300, "its first steps")
        grown = wait(
            lambda: (run := listed())["entries"] > first["entries"] and run, 300, "more steps"
        )
        assert grown["status"] == "running" and grown["problem"] is None
        rows = client.json(f"api/step/{first['id']}/0")
        assert training.poll() is None, "all of this while it trains"
        assert rows["proved"] and rows["count"] == ROWS
        training.terminate()
        assert training.wait() == INTERRUPTED, (tmp_path / "log").read_text()
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        client.board.refresh()
        [last] = client.json("api/runs")["runs"]
        assert (last["status"], last["entries"]) == ("interrupted", len(lines))
        expected = [json.loads(line)["loss"] for line in lines[:500]]
        [part] = client.curves(run=last["id"], curve="loss", low=0, high=500, width=1000)
        assert np.array_equal(part["values"]["loss"][0][: len(expected)], np.float32(expected))
        assert fsspec.filesystem("s3").exists("runs/live/run/report.html")
        client.server.shutdown()
        client.server.server_close()
    finally:
        training.kill()
