"""Triton's interpreter, mended where it keeps bf16 as integers and computes with their bits.

Products of matrices are of the numbers, and what is rounded goes to the nearest. Any other
arithmetic in bf16 is refused: our programs widen first, so what comes there is a mistake of theirs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def mend() -> None:
    """For this process."""
    builder = interpreter.InterpreterBuilder
    multiply, convert, compute = builder.create_dot, interpreter._convert_float, builder.binary_op

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, _wide(a), _wide(b), *rest)

    def convert_float(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            return _nearest(x)
        return convert(x, source, target, rounding)

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        assert left.dtype.scalar != tl.bfloat16, "arithmetic in bf16"
        return compute(self, left, right, operation)

    builder.create_dot, builder.binary_op = create_dot, binary_op
    interpreter._convert_float = convert_float


def _wide(x: Any) -> Any:
    """As fp32, where it is bf16."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    assert x.data.dtype == np.uint16
    bits = np.left_shift(x.data, 16, dtype=np.uint32)
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _nearest(x: Any) -> Any:
    """The bits in bf16, and of two that are as near the even ones."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).reshape(np.shape(x))
