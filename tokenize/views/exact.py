"""Compare whole numbers with floats exactly, as Python does.

pyarrow casts one side of such a comparison to the other's type, and raises for a whole number that
the type cannot hold. Here each side keeps its type, and the float is rounded instead: a whole
number n is less than 2.5 if n < 3, and above it if n > 2. Every result is null where a side is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
ROUND_UP = ("<", ">=")
"""Operators whose float is rounded up; that of `>` and `<=` is rounded down."""
LIMIT = 1 << 63
"""Whole numbers are stored in 64 bits, from -LIMIT to LIMIT - 1."""


def compare_int(field: Any, by: str, value: float) -> Any:
    """Return the comparison of a field of whole numbers with a float."""
    import pyarrow.compute as pc

    if not -LIMIT <= value < LIMIT:  # also infinite
        return constant(field, COMPARE[by](0.0, value))
    if by in ("==", "!=") and not value.is_integer():
        return constant(field, by == "!=")
    bound = math.ceil(value) if by in ROUND_UP else math.floor(value)
    return COMPARE[by](field, pc.scalar(bound))


def compare_float(field: Any, by: str, value: int) -> Any:
    """Return the comparison of a field of floats with a whole number of 64 bits."""
    import pyarrow.compute as pc

    nearest = float(value)
    if int(nearest) == value:
        return COMPARE[by](field, pc.scalar(nearest))
    if by in ("==", "!="):
        return constant(field, by == "!=")
    if by in ("<", "<="):
        return field <= pc.scalar(
            nearest if nearest < value else math.nextafter(nearest, -math.inf)
        )
    return field >= pc.scalar(nearest if nearest > value else math.nextafter(nearest, math.inf))


def compare_fields(ints: Any, by: str, floats: Any) -> Any:
    """Return the comparison of a field of whole numbers with a field of floats."""
    import pyarrow as pa
    import pyarrow.compute as pc

    rounded = pc.ceil(floats) if by in ROUND_UP else pc.floor(floats)
    fits = (rounded >= pc.scalar(-float(LIMIT))) & (rounded < pc.scalar(float(LIMIT)))
    bound = pc.if_else(fits, rounded, pc.scalar(0.0)).cast(pa.int64())
    inside = COMPARE[by](ints, bound)
    if by == "==":
        inside = inside & (rounded == floats)
    if by == "!=":
        inside = inside | (rounded != floats)
    outside = COMPARE[by](pc.scalar(0.0), floats)  # infinite, or beyond 64 bits, or not a number
    compared = pc.if_else(fits, inside, outside)
    return null_with(ints, compared)


def is_in(field: Any, kind: str, values: Sequence[Any]) -> Any:
    """Return whether a field of a kind has one of these values."""
    import pyarrow as pa

    if kind == "int":
        whole = [int(value) for value in values if math.isfinite(value) and value == int(value)]
        array = pa.array([value for value in whole if -LIMIT <= value < LIMIT], pa.int64())
    elif kind == "float":
        same = [float(value) for value in values if float(value) == value]
        zeros = [0.0, -0.0] if 0.0 in same else []  # pyarrow compares the bits
        array = pa.array([*same, *zeros], pa.float64())
    else:
        array = pa.array(values, {"string": pa.string(), "bool": pa.bool_()}[kind])
    return null_with(field, field.isin(array)) if len(array) else constant(field, False)


def constant(field: Any, value: bool) -> Any:
    """Return a truth value that does not depend on the field, but is null with it."""
    import pyarrow.compute as pc

    return null_with(field, pc.scalar(value))


def null_with(field: Any, condition: Any) -> Any:
    """Return a condition that is null where the field is null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.if_else(field.is_valid(), condition, pc.scalar(None).cast(pa.bool_()))
