"""Stages: which modules several of them hold."""

from __future__ import annotations

import pytest
from support.configs import CONFIGS

from headrace.console.errors import LayoutError
from headrace.models.config.config import load_model_config
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.stages import choose_cuts, list_chunks, shared_modules


def test_tied_embeddings_and_shared_blocks_are_on_the_stages_that_use_them() -> None:
    every, untied, shared = (
        load_model_config(CONFIGS / f"{name}.yaml") for name in ("every", "untied", "shared")
    )
    layout = LayoutConfig(pp=3)
    assert shared_modules(layout, every, (4, 8)) == {"embedding": (0, 2)}
    assert shared_modules(layout, every, (4, 10)) == {"embedding": (0, 2), "shared.block": (1, 2)}
    assert shared_modules(layout, untied, (4, 8)) == {}
    assert shared_modules(LayoutConfig(pp=2), shared, (2,)) == {"shared.shared": (0, 1)}
    chunked = LayoutConfig(pp=2, schedule="interleaved", chunks=2)
    assert shared_modules(chunked, shared, (1, 2, 3)) == {}, "both calls are on stage 1"
    assert [list_chunks(chunked, stage) for stage in (0, 1)] == [[0, 2], [1, 3]]


def test_cuts_are_chosen_unless_they_are_given() -> None:
    model = load_model_config("tiny-hybrid")
    assert choose_cuts(LayoutConfig(), model, 64) == ()
    assert choose_cuts(LayoutConfig(pp=2, cuts=(1,)), model, 64) == (1,)
    assert len(choose_cuts(LayoutConfig(pp=4), model, 64)) == 3
    with pytest.raises(LayoutError, match="are 8 chunks, and the model has 5 layers"):
        choose_cuts(LayoutConfig(pp=8), model, 64)
