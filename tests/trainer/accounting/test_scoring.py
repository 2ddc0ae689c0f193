"""Memory of a batch that is scored, beside what torch's allocator holds on the CPU."""

from __future__ import annotations

import pytest
import torch
from support.models.allocator import levels

from headrace.models.accounting.shape import Shape
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.model.model import Model
from headrace.trainer.accounting.memory import batch_memory
from headrace.trainer.scores.likelihood import ScoredRow, score_batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "length", "words"),
    [
        ("tiny-hybrid", 4, 96, ()),
        ("tiny-transformer", 8, 256, ()),
        ("tiny-transformer", 8, 256, ("vocab_size=20000",)),  # the logits are the most
        ("tiny-zamba", 4, 96, ()),
    ],
)
def test_a_batch_holds_what_the_count_says(
    name: str, rows: int, length: int, words: tuple[str, ...]
) -> None:
    config = load_model_config(name, words)
    model = Model(config)
    model.init_weights(1)
    ids = torch.arange(length + 1) % config.vocab_size
    batch = [ScoredRow(ids.tolist(), range(1, length + 1))] * rows
    score_batch(model, batch)  # tables that are computed once
    held = levels(lambda: score_batch(model, batch)).peak
    shape = Shape(
        rows=rows, seq_len=length, precision=PRECISIONS["fp32"], device="cpu",
        threads=torch.get_num_threads(),
    )  # fmt: skip
    counted = batch_memory(config, shape)
    assert ("logits" in counted) == ("vocab_size=20000" in words)
    assert sum(counted.values()) == pytest.approx(held, rel=0.1)
