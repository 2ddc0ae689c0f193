"""Keys that change how engines communicate change no bit, but that of the reductions' format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

SAME = {
    "deepspeed-2-fp32-overlap": "deepspeed-2-fp32",
    "deepspeed-3-bf16-hpz": "deepspeed-3-bf16",
    "fsdp2-0-bf16-ahead": "fsdp2-0-bf16",
}
"""Layouts with other keys, and the same without them."""
ROUNDED, EXACT = "deepspeed-2-fp32-reduced16", "deepspeed-2-fp32"


@pytest.mark.long
def test_keys_of_communication_change_no_bit(in_processes: Any, tmp_path: Path) -> None:
    layouts = [*SAME, *SAME.values(), ROUNDED]
    result = in_processes(2, "parity", tmp_path, layouts=layouts, steps=2)
    for changed, plain in SAME.items():
        assert result[changed] == result[plain], changed
        have, expected = (torch.load(tmp_path / f"{name}.pt") for name in (changed, plain))
        assert all(torch.equal(have[key], expected[key]) for key in expected), changed
    # Negative control, and proof that the key counts: bf16 on the wire rounds.
    norms = [result[name][0][1] for name in (ROUNDED, EXACT)]
    assert 1e-6 < abs(norms[0] / norms[1] - 1) < 1e-2
