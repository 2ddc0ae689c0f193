"""Every layout is the same model, and any checkpoint loads into any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

FP32 = ["deepspeed-0-fp32", "deepspeed-1-fp32", "deepspeed-2-fp32", "deepspeed-3-fp32"]
BF16 = [name.replace("fp32", "bf16") for name in FP32]
FSDP2 = ["fsdp2-0-fp32", "fsdp2-0-bf16"]
EVERY = [*FP32, *BF16, *FSDP2]


def apart(a: list[list[float]], b: list[list[float]]) -> tuple[float, float]:
    """The greatest difference of losses, and the greatest relative one of norms."""
    loss = max(abs(x[0] - y[0]) for x, y in zip(a, b, strict=True))
    norm = max(abs(x[1] - y[1]) / y[1] for x, y in zip(a, b, strict=True))
    return loss, norm


def test_every_layout_trains_the_same_model(in_processes: Any, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    reference = in_processes(1, "parity", alone, layouts=["deepspeed-0-fp32"], steps=3)
    others = in_processes(2, "parity", together, layouts=[*FP32, "fsdp2-0-fp32"], steps=3)
    for layout, found in others.items():
        loss, norm = apart(found, reference["deepspeed-0-fp32"])
        assert loss < 2e-6, (layout, loss)
        assert norm < 2e-5, (layout, norm)
        wanted = torch.load(alone / "deepspeed-0-fp32.pt")
        have = torch.load(together / f"{layout}.pt")
        worst = max(float((have[key] - wanted[key]).abs().max()) for key in wanted)
        assert worst < 2e-4, (layout, worst)


def test_any_checkpoint_loads_into_any_layout(in_processes: Any, tmp_path: Path) -> None:
    kept = in_processes(2, "save_all", tmp_path, layouts=EVERY, steps=2)
    for processes, used in ((2, True), (1, False)):
        found = in_processes(
            processes, "load_all", tmp_path, sources=EVERY, targets=EVERY, steps=2, used=used
        )
        assert len(found) == len(EVERY) ** 2
        for pair, (worst, steps) in found.items():
            source, target = pair.split(" → ")
            assert worst == 0, f"{pair}: the state differs by {worst}"
            if source == target and processes == 2:
                assert steps == kept[source], f"{pair}: a resume is not equal to the bit"
