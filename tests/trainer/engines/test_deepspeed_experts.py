"""A changed DeepSpeed, which cannot split experts, is named at the start."""

from __future__ import annotations

from typing import Any

import pytest

CHANGES = {
    "no groups": "has no attribute '_EXPERT_PARALLEL_GROUP'",
    "other groups": "it does not start with them: KeyError('ep_size_2')",
    "other class": "it does not shard experts over the process group",
}
"""Part of the error, by the change of DeepSpeed (changed_deepspeed.py)."""


@pytest.mark.slow
def test_a_changed_deepspeed_is_named(in_processes: Any) -> None:
    layouts = ["deepspeed-1-fp32-ep2", "deepspeed-1-bf16-ep2", "deepspeed-2-fp32-ep2"]
    result = in_processes(2, "changed_deepspeed", layouts=layouts, model="shared")
    for layout in layouts:
        assert result[layout]["none"] == "starts"
        for change, part in CHANGES.items():
            message = result[layout][change]
            assert "differs from the version that headrace splits experts with" in message
            assert part in message and "engine.kind=fsdp2" in message, message
