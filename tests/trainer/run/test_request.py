from __future__ import annotations

from headrace.trainer.run.request import Request


def test_overrides_are_split_by_file() -> None:
    request = Request(overrides=["optimizer.lr=1", "model.width=2", "mixture.seed=3"])
    assert request.run_overrides == ["optimizer.lr=1"]
    assert request.overrides_of("model") == ["width=2"]
    assert request.overrides_of("mixture") == ["seed=3"]
