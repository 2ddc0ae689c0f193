"""FP8 under every engine: the products of one rank, exact resumes, gathers of half the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tasks.parity import means

WIDER = ["width=48", "operators.glu.hidden=64", "operators.mamba.head_dim=16"]
"""Sizes of the tiny model that 16 divides."""
REFERENCE = "fsdp2-0-fp32fp8"
LAYOUTS = [
    "deepspeed-1-fp32fp8",
    "deepspeed-2-fp32fp8",
    "deepspeed-3-fp32fp8",
    "fsdp2-0-fp32fp8",
    "deepspeed-1-fp32fp8-tp2",
    "fsdp2-0-fp32fp8-tp2",
    "fsdp2-0-fp32fp8-cp2ring",
]
"""Weights and activations are fp32, so that layouts differ by rare roundings alone."""
LOSS, GRADIENT = 2e-5, 1e-2


def worst_differences(
    results: Any, folder: Path, reference_folder: Path, loss: float
) -> dict[str, tuple[float, float]]:
    """Return the difference of each layout: of the loss, and the greatest one of a gradient."""
    reference = means(reference_folder / f"{REFERENCE}.pt")
    differences = {}
    for layout, [[its_loss, _]] in results.items():
        have = means(folder / f"{layout}.pt")
        away = max(float((have[k] - w).norm() / w.norm()) for k, w in reference.items())
        differences[layout] = (abs(its_loss - loss), away)
    return differences


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        ["deepspeed-1-fp32fp8-tp2", "deepspeed-3-fp32fp8", "fsdp2-0-fp32fp8-cp2ring"],
        pytest.param(LAYOUTS, marks=pytest.mark.long),
    ],
    ids=["some", "all"],
)
def test_every_layout_computes_one_ranks_products(
    in_processes: Any, tmp_path: Path, layouts: list[str]
) -> None:
    """Negative control: products in fp32."""
    alone, together, apart = (tmp_path / name for name in ("alone", "together", "apart"))
    for folder in (alone, together, apart):
        folder.mkdir()
    arguments = {"steps": 1, "changes": WIDER}
    [[loss, _]] = in_processes(1, "parity", alone, layouts=[REFERENCE], **arguments)[REFERENCE]
    result = in_processes(2, "parity", together, layouts=layouts, **arguments)
    for layout, (away, gradient) in worst_differences(result, together, alone, loss).items():
        assert away < LOSS and gradient < GRADIENT, (layout, away, gradient)
    exact = in_processes(2, "parity", apart, layouts=["fsdp2-0-fp32-tp2"], **arguments)
    [(_, gradient)] = worst_differences(exact, apart, alone, loss).values()
    assert gradient > 3 * GRADIENT


@pytest.mark.long
def test_a_resume_is_equal_to_the_bit(in_processes: Any, tmp_path: Path) -> None:
    """FP8 has no state: checkpoints of other precisions load, too."""
    layouts = ["deepspeed-1-fp8", "fsdp2-0-fp8", "fsdp2-0-bf16"]
    names = {"steps": 2, "changes": WIDER}
    kept = in_processes(2, "save_all", tmp_path, layouts=layouts, **names)
    result = in_processes(
        2, "load_all", tmp_path, sources=layouts, targets=layouts[:2], used=True, **names
    )
    assert {state for state, _ in result.values()} == {0.0}
    assert all(result[f"{name} → {name}"][1] == kept[name] for name in layouts[:2])
    assert kept["fsdp2-0-fp8"] != kept["fsdp2-0-bf16"]


@pytest.mark.slow
def test_a_gather_in_fp8_changes_no_bit(in_processes: Any, tmp_path: Path) -> None:
    """FSDP2 gathers e4m3 values and scales; `step` gathers once, and its next step again."""
    layouts = ["fsdp2-0-fp8", "fsdp2-0-fp8-micro", "fsdp2-0-fp8-step"]
    arguments = {"layouts": layouts, "steps": 2, "changes": WIDER}
    result = in_processes(2, "parity", tmp_path, **arguments)
    assert in_processes(2, "parity", tmp_path, fault="wide", **arguments) == result
    rounded, exact = (
        in_processes(2, "collectives", tmp_path, layouts=[layout], changes=WIDER)[layout]
        for layout in ("fsdp2-0-fp8", "fsdp2-0-bf16")
    )
    assert rounded["all-gather"][1] < 0.7 * exact["all-gather"][1]
