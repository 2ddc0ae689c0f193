"""Known faults of compilers decide before any launch."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from packaging.requirements import Requirement

from headrace.models.kernels import choice, toeplitz
from headrace.models.kernels.choice import uses_kernel
from headrace.models.kernels.faults import FAULTS, excluded

HALF = (torch.bfloat16, torch.float16)
PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def block_of(dtype: torch.dtype) -> int:
    x = torch.empty(1, 99, 48, dtype=dtype)
    layout = toeplitz._launch_layout(
        x, torch.empty(16, 33), (None, None, None), True, columns_divisor=2
    )
    chunk: int = layout[2]["CHUNK"]
    return chunk


@pytest.mark.parametrize(
    ("version", "block"),
    [("3.6.0", 32), ("3.7.1", 32), ("3.8.0", 64), ("3.9.0", 64), ("4.0.0", 64), (None, 64)],
)
def test_toeplitz_takes_blocks_that_the_compiler_can(version: str | None, block: int) -> None:
    with mock.patch.object(choice, "TRITON", version):
        assert [block_of(dtype) for dtype in HALF] == [block, block]
        assert block_of(torch.float32) == 32


def test_a_fault_without_a_remedy_excludes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not excluded("3.6.0"), "toeplitz has a remedy"
    fault = replace(FAULTS[0], remedy=None)
    monkeypatch.setattr(choice, "FAULTY", excluded("3.6.0", (fault,)))
    assert set(choice.FAULTY) == {("toeplitz", dtype) for dtype in HALF}
    monkeypatch.setattr(choice, "find_device_problem", lambda _: None)
    x = torch.empty(1, dtype=torch.bfloat16)
    monkeypatch.setattr(choice, "requests_kernel", lambda *_: True)
    with pytest.warns(RuntimeWarning, match=r"Triton 3\.6\.0 compiles it wrongly: wrong values"):
        assert not uses_kernel("auto", "toeplitz", x)
    assert uses_kernel("auto", "toeplitz", x.float()), "fp32 was right"


def test_the_package_admits_no_compiler_that_is_wrong() -> None:
    """Of the versions that pyproject.toml admits, a known fault has a remedy."""
    lines = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]["train"]
    [triton] = [line for line in map(Requirement, lines) if line.name == "triton"]
    for fault in FAULTS:
        versions = [
            f"{fault.first[0]}.{minor}.0" for minor in range(fault.first[1], fault.mended[1])
        ]
        admitted = [version for version in versions if triton.specifier.contains(version)]
        assert fault.remedy is not None or not admitted, fault
