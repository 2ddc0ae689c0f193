"""A run whose rank cannot allocate what a step needs: the machine's own refusal."""

from __future__ import annotations

from typing import Any

import pytest

LENGTH = 1 << 20
"""Tokens of a row; the mask of its window has 2⁴⁰ bytes."""


@pytest.mark.slow
def test_an_allocation_that_fails_is_explained(trainer: Any) -> None:
    row = (f"synthetic.seq_len={LENGTH}", "synthetic.batch_rows=1", f"micro_batch_tokens={LENGTH}")
    model = ("model.pattern='[attention]'", "model.operators.attention.window=8", "model.mlp=null")
    error = trainer.run(*row, *model, code=1)
    assert "error: rank 0 ran out of memory (step 0)" in error
    for words in (
        f"can't allocate memory: you tried to allocate {LENGTH * LENGTH}",
        "working set (",
        "exceed it beside the",
        "hint:",
    ):
        assert words in error, error
    assert "Traceback" not in error
    assert trainer.lines("events.jsonl")[-1]["event"] == "fail"
