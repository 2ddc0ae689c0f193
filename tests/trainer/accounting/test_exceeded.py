"""The error of a rank that runs out of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.console.errors import RunError
from headrace.console.progress import format_bytes
from headrace.trainer.accounting.describe import describe
from headrace.trainer.accounting.exceeded import (
    count_memory,
    explain_out_of_memory,
    is_out_of_memory,
    out_of_memory_error,
    verdict,
)

MODEL = ("model.pattern='[attention] * 2'", "model.mlp=null")
ROWS = (*MODEL, "synthetic.seq_len=64", "synthetic.batch_rows=16", "micro_batch_tokens=512")


def refusal() -> str:
    """Return the message of torch's allocator on the CPU."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    return str(caught.value)


def test_parts_are_added_up_to_the_one_that_does_not_fit() -> None:
    parts = {"weights": 30 * 10**6, "gradients": 30 * 10**6, "activations": 50 * 10**6}
    assert verdict(parts, 20 * 10**6) == "weights (30 MB) exceed it"
    assert verdict(parts, 70 * 10**6).startswith("activations (50 MB) exceed it beside the 60 MB")
    assert "all of this fits" in verdict(parts, 200 * 10**6)


def test_the_error_has_the_numbers_of_the_accounting(ask: Any) -> None:
    job = ask(*ROWS, "processes=2", "engine.zero=1")
    parts = count_memory(job, 0)
    total = sum(parts.values())
    assert parts == describe(job, activations=True)["memory"]
    before = sum(list(parts.values())[: list(parts).index("activations")])
    limit = before + parts["activations"] // 2
    error = out_of_memory_error(job, 1, "step 3", refusal(), limit)
    assert error.message == "rank 1 ran out of memory (step 3)"
    text = str(error)
    for words in (
        "DefaultCPUAllocator: can't allocate memory",
        f"counted for this rank: {format_bytes(total)}",
        f"it may use {format_bytes(limit)}: activations "
        f"({format_bytes(parts['activations'])}) exceed",
    ):
        assert words in text, text
    for words in ("micro_batch_tokens=256", "engine.zero=2", "recompute=block", "layout.cp=2"):
        size = sum(count_memory(ask(*ROWS, "processes=2", words), 0).values())
        shown = f"{words} ({format_bytes(size)}{', fits' * (size <= limit)})"
        assert (shown in text) == (size < total), (shown, text)
    assert ", fits)" in text


def test_a_micro_batch_shrinks_until_it_fits(ask: Any) -> None:
    job = ask(*ROWS)
    small = sum(count_memory(ask(*ROWS, "micro_batch_tokens=128"), 0).values())
    assert f"micro_batch_tokens=128 ({format_bytes(small)}, fits)" in str(
        out_of_memory_error(job, 0, "step 3", "", small)
    )
    assert "micro_batch_tokens=64 (" in str(out_of_memory_error(job, 0, "step 3", "", 1))
    one_row = ask(*MODEL, "synthetic.seq_len=64", "synthetic.batch_rows=1", "recompute=block")
    assert "use more ranks" in str(out_of_memory_error(one_row, 0, "step 3", "", 1).hint)


def test_only_errors_of_memory_are_explained(ask: Any) -> None:
    cpu = torch.device("cpu")
    with (
        pytest.raises(RuntimeError, match="size mismatch"),
        explain_out_of_memory(ask(), 0, str, cpu),
    ):
        raise RuntimeError("size mismatch")
    for error in (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), MemoryError()):
        with pytest.raises(RunError, match=r"rank 0 ran out of memory \(step 7\)"):  # noqa: SIM117
            with explain_out_of_memory(ask(*ROWS), 0, lambda: "step 7", cpu):
                raise error
