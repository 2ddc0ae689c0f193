from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.configs import CONFIGS

from headrace.console.errors import CheckpointError
from headrace.trainer.checkpoints import store
from headrace.trainer.launch import restore
from headrace.trainer.run.request import RunRequest
from headrace.trainer.run.resolve import resolve

TINY = str(CONFIGS / "tiny.yaml")


class Unloaded:
    """An engine that must not receive weights of another plan."""

    def fragments(self) -> list[Any]:
        return []


def test_a_checkpoint_of_another_plan_is_rejected(
    tmp_path: Path, parallel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["synthetic.steps=6", "processes=1"]
    job = resolve(RunRequest(model=TINY, out=str(tmp_path / "run"), overrides=words))
    (job.folder.checkpoints / store.name(3)).mkdir(parents=True)
    state = store.RunState(
        step=3, row=24, tokens=9, plan_hash="another", updates=3, ledger="", seed=1
    )
    monkeypatch.setattr(restore.savers, "load", lambda *_: state)
    engine: Any = Unloaded()
    with pytest.raises(CheckpointError, match="another plan \\(another, not") as caught:
        saved = restore.list_checkpoints(job, parallel)
        restore.load_initial_state(job, engine, parallel, saved, fallback=False)
    assert f"after: {{run: {job.folder.root}, step: 3}}" in str(caught.value.hint)
