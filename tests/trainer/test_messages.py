"""One stage communicates as the trainer did before it had pipelines."""

from __future__ import annotations

from typing import Any

import pytest

BEFORE = {
    "deepspeed-0-fp32": {"all-reduce": [3, 243100]},
    "deepspeed-1-fp32": {"all-gather": [2, 121552], "all-reduce": [33, 243108]},
    "deepspeed-2-fp32": {"all-gather": [2, 121552], "all-reduce": [152, 972360]},
    "deepspeed-1-bf16": {"all-gather": [2, 60776], "all-reduce": [4, 243120]},
    "fsdp2-0-fp32": {
        "all-gather": [48, 973280],
        "all-reduce": [2, 16],
        "reduce-scatter": [24, 486640],
    },
    "fsdp2-0-fp32-tp2": {
        "all-gather": [200, 309504],
        "all-reduce": [27, 4612],
        "reduce-scatter": [200, 309504],
    },
    "fsdp2-0-fp32-cp2": {
        "all-gather": [96, 1946560],
        "all-reduce": [10, 48],
        "all-to-all": [160, 155712],
        "reduce-scatter": [48, 973280],
    },
}
"""Calls and bytes of a rank's collectives in a step, recorded at commit 8e5b2f2."""
ROOT = 11232 // 4
"""Bytes that a rank sends to gather the embedding and the norm of the model. FSDP2 gathered them
once more for each backward pass; now it keeps them from the forward pass on."""
SAVED = {"fsdp2-0-fp32": (4, ROOT), "fsdp2-0-fp32-cp2": (8, ROOT)}
"""Micro-batches of the layouts in which FSDP2 has ranks to gather from."""


def check_collectives(in_processes: Any, layouts: list[str]) -> None:
    result = in_processes(2, "collectives", layouts=layouts)
    for layout in SAVED.keys() & result.keys():
        micro_batches, size = SAVED[layout]
        calls, sent = result[layout]["all-gather"]
        result[layout]["all-gather"] = [calls + micro_batches, sent + micro_batches * size]
    assert result == {layout: BEFORE[layout] for layout in layouts}


def test_one_stage_calls_the_collectives_that_it_did_before_pipelines(in_processes: Any) -> None:
    check_collectives(in_processes, ["deepspeed-1-fp32", "fsdp2-0-fp32"])


@pytest.mark.long
def test_every_layout_of_one_stage_does(in_processes: Any) -> None:
    check_collectives(in_processes, list(BEFORE))
