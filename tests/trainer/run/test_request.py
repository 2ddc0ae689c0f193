from __future__ import annotations

from headrace.trainer.run.request import RunRequest


def test_overrides_are_split_by_file() -> None:
    request = RunRequest(overrides=["optimizer.lr=1", "model.width=2", "mixture.seed=3"])
    assert request.run_overrides == ["optimizer.lr=1"]
    assert request.select_overrides("model") == ["width=2"]
    assert request.select_overrides("mixture") == ["seed=3"]
