"""Compare whole numbers with floats exactly, as Python does.

pyarrow casts one side to the other's type, and raises for a whole number that the type cannot hold.
Here both sides keep their types, and the float is rounded instead: a whole number n is less than
2.5 if n < 3, and above it if n > 2. Results are null where either side is null.
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
"""Operators that round the float up; `>` and `<=` round it down."""
LIMIT = 1 << 63
"""Whole numbers are stored in 64 bits, from -LIMIT to LIMIT - 1."""


def compare_int(field: Any, symbol: str, value: float) -> Any:
    """Compare an integer field with a float."""
    import pyarrow.compute as pc

    if not -LIMIT <= value < LIMIT:  # also infinite
        return constant(field, COMPARE[symbol](0.0, value))
    if symbol in ("==", "!=") and not value.is_integer():
        return constant(field, symbol == "!=")
    bound = math.ceil(value) if symbol in ROUND_UP else math.floor(value)
    return COMPARE[symbol](field, pc.scalar(bound))


def compare_float(field: Any, symbol: str, value: int) -> Any:
    """Compare a float field with a 64-bit integer."""
    import pyarrow.compute as pc

    nearest = float(value)
    if int(nearest) == value:
        return COMPARE[symbol](field, pc.scalar(nearest))
    if symbol in ("==", "!="):
        return constant(field, symbol == "!=")
    if symbol in ("<", "<="):
        return field <= pc.scalar(
            nearest if nearest < value else math.nextafter(nearest, -math.inf)
        )
    return field >= pc.scalar(nearest if nearest > value else math.nextafter(nearest, math.inf))


def compare_fields(ints: Any, symbol: str, floats: Any) -> Any:
    """Compare an integer field with a float field."""
    import pyarrow as pa
    import pyarrow.compute as pc

    rounded = pc.ceil(floats) if symbol in ROUND_UP else pc.floor(floats)
    fits = (rounded >= pc.scalar(-float(LIMIT))) & (rounded < pc.scalar(float(LIMIT)))
    bound = pc.if_else(fits, rounded, pc.scalar(0.0)).cast(pa.int64())
    in_range = COMPARE[symbol](ints, bound)
    if symbol == "==":
        in_range = in_range & (rounded == floats)
    if symbol == "!=":
        in_range = in_range | (rounded != floats)
    # A float out of range is infinite, not a number, or needs more than 64 bits.
    out_of_range = COMPARE[symbol](pc.scalar(0.0), floats)
    compared = pc.if_else(fits, in_range, out_of_range)
    return mask_nulls(ints, compared)


def equals_any(field: Any, kind: str, values: Sequence[Any]) -> Any:
    """Test whether a field equals any of `values`; `kind` is the field's type."""
    import pyarrow as pa

    if kind == "int":
        integers = [int(value) for value in values if math.isfinite(value) and value == int(value)]
        array = pa.array([value for value in integers if -LIMIT <= value < LIMIT], pa.int64())
    elif kind == "float":
        floats = [float(value) for value in values if float(value) == value]
        zeros = [0.0, -0.0] if 0.0 in floats else []  # pyarrow compares the bits
        array = pa.array([*floats, *zeros], pa.float64())
    else:
        array = pa.array(values, {"string": pa.string(), "bool": pa.bool_()}[kind])
    return mask_nulls(field, field.isin(array)) if len(array) else constant(field, False)


def constant(field: Any, value: bool) -> Any:
    """Return a constant truth value that is null where the field is null."""
    import pyarrow.compute as pc

    return mask_nulls(field, pc.scalar(value))


def mask_nulls(field: Any, condition: Any) -> Any:
    """Make a condition null where the field is null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.if_else(field.is_valid(), condition, pc.scalar(None).cast(pa.bool_()))
