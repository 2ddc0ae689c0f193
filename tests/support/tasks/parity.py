"""Differences between the layouts of a model and one rank: loss, norm, gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

REFERENCE = "fsdp2-0-fp32"
LOSS, NORM, GRADIENT = 2e-6, 1e-6, 1e-5


def differences(
    in_processes: Any, folder: Path, layouts: list[str], model: str, **options: Any
) -> dict[str, tuple[float, float, float]]:
    """Return the differences of each layout after a step: loss; norm and worst gradient,
    relative."""
    alone, together = folder / "alone", folder / "together"
    for place in (alone, together):
        place.mkdir()
    arguments = {"steps": 1, "model": model}
    [[loss, norm]] = in_processes(1, "parity", alone, layouts=[REFERENCE], **arguments)[REFERENCE]
    result = in_processes(4, "parity", together, layouts=layouts, **arguments, **options)
    expected = means(alone / f"{REFERENCE}.pt")
    worst = {}
    for layout, [[its_loss, its_norm]] in result.items():
        have = means(together / f"{layout}.pt")
        assert have.keys() == expected.keys()
        gradient = max(
            float(
                (have[key] - expected[key]).abs().max() / expected[key].abs().max().clamp(min=1e-9)
            )
            for key in expected
        )
        worst[layout] = (abs(its_loss - loss), abs(its_norm - norm) / norm, gradient)
    return worst


def means(file: Path) -> dict[str, torch.Tensor]:
    return {key: t for key, t in torch.load(file).items() if key.startswith("exp_avg.")}


def check_parity(worst: dict[str, tuple[float, float, float]]) -> None:
    for layout, (loss, norm, gradient) in worst.items():
        assert loss < LOSS and norm < NORM and gradient < GRADIENT, (layout, loss, norm, gradient)
