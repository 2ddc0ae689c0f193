"""Compiled blocks in sharded layouts: each whole block is one graph, its collectives included."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from support.tasks.parity import check_parity, differences

SMALL = ("pattern='[attention]'", "mlp=null")
CORE = ["fsdp2-0-fp32-tp2", "deepspeed-1-fp32-cp2", "deepspeed-3-fp32"]
CONTEXT = ["fsdp2-0-fp32-cp2", "fsdp2-0-fp32-cp2a2a", "fsdp2-0-fp32-cp2ring"]
MIXED = ["fsdp2-0-fp32-tp2cp2ring", "fsdp2-0-fp32-pp2"]
ZERO = ["deepspeed-1-fp32-tp2", "deepspeed-2-fp32-cp2ring"]
FP8 = ["fsdp2-0-fp8", "fsdp2-0-fp32fp8-tp2", "deepspeed-1-fp8", "deepspeed-3-fp32fp8"]
EXPERTS = ["fsdp2-0-fp32-ep2", "deepspeed-1-fp32-tp2ep2"]


def equal(ours: list[list[float]], expected: list[list[float]], bound: float = 2e-6) -> bool:
    """Losses and norms of all steps are equal within rounding."""
    pairs = zip(chain.from_iterable(ours), chain.from_iterable(expected), strict=True)
    return all(
        abs(number - expected_number) < bound * max(1.0, expected_number)
        for number, expected_number in pairs
    )


@pytest.mark.slow
def test_tensor_and_context_parallelism_are_compiled(in_processes: Any) -> None:
    result = in_processes(2, "compiled", layouts=CORE, backend="aot_eager", changes=SMALL)
    for layout, (eager, compiled, graphs, breaks) in result.items():
        assert equal(compiled, eager), (layout, compiled, eager)
        assert (graphs, breaks) == (1, []), layout


@pytest.mark.long
@pytest.mark.timeout(900)
def test_products_in_fp8_are_compiled(in_processes: Any) -> None:
    """Compiled code rounds to bf16 less often, and what moves may round to another FP8 number."""
    sizes = ("pattern='[attention]'", "width=48", "operators.glu.hidden=64")
    result = in_processes(2, "compiled", layouts=FP8, backend="aot_eager", changes=sizes)
    for layout, (eager, compiled, graphs, breaks) in result.items():
        bound = 2e-5 if "fp32" in layout else 4e-3
        assert equal(compiled, eager, bound), (layout, compiled, eager)
        assert (graphs, breaks) == (1, []), layout


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_generated_code_communicates_too(in_processes: Any) -> None:
    result = in_processes(2, "compiled", layouts=CORE, backend="inductor", changes=SMALL)
    for layout, (eager, compiled, graphs, breaks) in result.items():
        assert equal(compiled, eager), (layout, compiled, eager)
        assert (graphs, breaks) == (1, []), layout


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("layouts", [CORE, CONTEXT, MIXED, ZERO])
def test_compiled_blocks_in_more_layouts(
    in_processes: Any, tmp_path: Path, layouts: list[str]
) -> None:
    """Gradients too, beside one rank without compilation."""
    check_parity(differences(in_processes, tmp_path, layouts, "tiny", backend="aot_eager"))


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("model", ["every", "shared"])
def test_every_operator_is_compiled(in_processes: Any, tmp_path: Path, model: str) -> None:
    """These models have shared blocks, which a start refuses to compile under ZeRO-3."""
    layouts = [layout for layout in (*CORE, *EXPERTS) if "deepspeed-3" not in layout]
    check_parity(differences(in_processes, tmp_path, layouts, model, backend="aot_eager"))
