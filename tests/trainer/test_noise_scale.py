"""The gradient noise scale: small and whole batches in every layout, and the estimate from them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tasks.noisy_ranks import whole_square
from support.tasks.parity import REFERENCE

from headrace.trainer.loop.signals import GradientSquares, MaskedBatch, select_small_batch
from headrace.trainer.record.noise_scale import STATE, NoiseScale

TWO = ["deepspeed-2-fp32", "fsdp2-0-fp32-tp2"]
FOUR = ["fsdp2-0-fp32-pp2", "deepspeed-1-fp32-pp2x2", "fsdp2-2-fp32-cp2", "deepspeed-0-fp32"]
FOUR += ["deepspeed-3-fp32"]


def check(
    in_processes: Any, folder: Path, ranks: int, layouts: list[str], at_once: int, **more: Any
) -> None:
    result = in_processes(
        ranks, "noisy_ranks.small_batches", folder, layouts=layouts, at_once=at_once, **more
    )
    for layout, (rows, square, unchanged) in result.items():
        assert 0 < rows < 8 and unchanged, (layout, rows, unchanged)
        assert square == pytest.approx(whole_square(more.get("model", "tiny"), rows), rel=1e-4)


@pytest.mark.slow
def test_the_small_batch_has_the_gradient_of_its_rows(
    in_processes: Any, tmp_path: Path, work: Any
) -> None:
    """One rank with one micro-batch, one rank with several, and two ranks."""
    check(in_processes, tmp_path, 1, [REFERENCE], at_once=8)
    check(in_processes, tmp_path, 1, ["deepspeed-1-fp32"], at_once=2)
    check(in_processes, tmp_path, 2, TWO, at_once=2)


@pytest.mark.long
def test_stages_and_replicas_have_it_too(in_processes: Any, tmp_path: Path, work: Any) -> None:
    check(in_processes, tmp_path, 4, FOUR, at_once=1)
    check(in_processes, tmp_path, 4, ["fsdp2-0-fp32-tp2", "fsdp2-0-fp32-pp2"], at_once=2)


def parts(sizes: list[int], dp_rank: int = 0, pp: int = 1, chunks: int = 1) -> list[Any]:
    """Return the rows with weights of the small batch of these micro-batches."""
    shape = torch.ones(1, 3, dtype=torch.long)
    numbers = iter(range(100))
    batches: Any = []
    for size in sizes:
        tokens, rows = shape.expand(size, 3), [next(numbers) for _ in range(size)]
        batches.append(MaskedBatch(tokens, tokens, torch.ones(size, 3), shape[0], rows))
    layout = SimpleNamespace(pp=pp, chunks=chunks)
    parallel: Any = SimpleNamespace(dp_rank=dp_rank, pipe=SimpleNamespace(layout=layout))
    result = select_small_batch(batches, parallel)
    for batch in result:
        kept = len(list(batch.rows))
        empty = len(batch.tokens) - kept
        assert batch.weights.sum(dim=1).tolist() == [3.0] * kept + [0.0] * empty
    return [list(item.rows) for item in result]


def test_the_small_batch_is_a_part_of_any_batch() -> None:
    assert parts([2, 2]) == [[0, 1]]
    assert parts([5]) == [[0, 1]], "half of the rows of one micro-batch"
    assert parts([1], dp_rank=0) == [[0]] and parts([1], dp_rank=1) == [[]], "every other rank"
    assert parts([1, 1, 1, 1], pp=2, chunks=2) == [[0], [1]], "interleaved stages need two"
    assert parts([2, 2], pp=2, chunks=2) == [[0, 1], []]


def squares(trace: float, square: float, small: int, whole: int) -> GradientSquares:
    """Return the expected squares of a gradient and its noise."""
    return GradientSquares(small, square + trace / small, whole, square + trace / whole)


def test_the_scale_of_expected_squares_is_exact() -> None:
    noise = NoiseScale()
    for trace, square in ((600.0, 2.0), (600.0, 2.0), (1200.0, 4.0)):
        entry = noise.add(squares(trace, square, 1024, 16384))
        assert entry["noise_scale"] == pytest.approx(300.0)
    weights = 0.95**2, 0.95, 1.0
    trace = sum(
        w * trace_of_step for w, trace_of_step in zip(weights, (600.0, 600.0, 1200.0), strict=True)
    )
    assert noise.trace == pytest.approx(trace / sum(weights))
    assert noise.square == pytest.approx(noise.trace / 300)


def test_planted_noise_is_found() -> None:
    """Gradients of 64 numbers with independent noise: |G|² = 1, tr(Σ) = 4000."""
    numbers = torch.Generator().manual_seed(1)
    mean = torch.full((64,), 1 / 8, dtype=torch.float64)
    noise, ratios = NoiseScale(), []
    for _ in range(400):
        rows = torch.randn(16, 64, generator=numbers, dtype=torch.float64)
        per_row = mean + rows * math.sqrt(4000 / 64 / 100)  # rows of 100 tokens
        small, whole = (float(part.mean(0).square().sum()) for part in (per_row[:4], per_row))
        entry = noise.add(GradientSquares(400, small, 1600, whole))
        ratios.append(entry["noise_scale"])
    assert sum(ratios[-200:]) / 200 == pytest.approx(4000, rel=0.1)


def test_a_step_without_finite_gradients_is_left_out() -> None:
    noise = NoiseScale()
    assert noise.add(GradientSquares(4, math.nan, 16, 1.0))["noise_scale"] is None
    assert noise.add(GradientSquares(4, 1.0, 16, 2.0))["noise_scale"] is None, "tr(Σ) is negative"
    assert noise.steps == 1


def test_a_resume_continues_the_averages(tmp_path: Path) -> None:
    file = tmp_path / "signals.jsonl"
    assert NoiseScale.restore(file) == NoiseScale()
    noise = NoiseScale()
    lines = [{"step": 0, **noise.add(squares(600.0, 2.0, 4, 16))}, {"step": 2, "layers": {}}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert NoiseScale.restore(file) == noise
    assert lines[0] == {"step": 0, "noise_scale": pytest.approx(300.0)} | dict(
        zip(STATE, (noise.trace, noise.square, 1), strict=True)
    )
