"""Kernels on two ranks, which exchange states, halos, sums of groups, and vocabulary statistics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("divided.py")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    """Use `kernel: triton`, which raises where a kernel cannot run."""
    command = [sys.executable, str(PROGRAM), str(tmp_path / "store")]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=500) for process in ranks]
    for process, (_, errors) in zip(ranks, said, strict=True):
        assert process.returncode == 0, errors
    result = json.loads(said[0][0])
    norms = [f"a norm of {groups} groups" for groups in (1, 2, 3)]
    states = (
        "states",
        "states and transition matrices",
        "states of next programs",
        "states of Hyena-LI's next programs",
    )
    for layout in (*states, "channels", "vocabulary", *norms):
        assert result.pop(layout) < 1e-5, layout
    assert len(result) == 11
    for fault, error in result.items():
        assert error > 1e-3, f"negative control: {fault} is not found"
