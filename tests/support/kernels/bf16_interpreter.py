"""Corrections of Triton's interpreter for bf16, which it keeps as integers and computes on as bits.

Matrix products use the values, and conversion to bf16 and e4m3 rounds to the nearest. Other
arithmetic in bf16 fails an assertion: our programs convert to fp32 first, so it would be their
mistake.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def correct_bf16() -> None:
    """Correct the interpreter in this process."""
    builder = interpreter.InterpreterBuilder
    multiply, convert, compute = builder.create_dot, interpreter._convert_float, builder.binary_op

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, _wide(a), _wide(b), *rest)

    def convert_float(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            return _nearest(x)
        if (source, target) == (tl.float32, tl.float8e4nv):  # which Triton's interpreter truncates
            narrow = torch.from_numpy(np.array(x, dtype=np.float32)).to(torch.float8_e4m3fn)
            return narrow.view(torch.uint8).numpy()
        return convert(x, source, target, rounding)

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        assert left.dtype.scalar != tl.bfloat16, "arithmetic in bf16"
        return compute(self, left, right, operation)

    builder.create_dot, builder.binary_op = create_dot, binary_op
    interpreter._convert_float = convert_float


def _wide(x: Any) -> Any:
    """Convert bf16 to fp32; return other types unchanged."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    assert x.data.dtype == np.uint16
    bits = np.left_shift(x.data, 16, dtype=np.uint32)
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _nearest(x: Any) -> Any:
    """Return the bits of the nearest bf16; ties go to the even one."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).reshape(np.shape(x))
