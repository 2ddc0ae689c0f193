"""Arrow arrays made without pyarrow.array are equal to its arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataplane.arrays import (
    arrow_column,
    arrow_null_texts,
    arrow_numbers,
    arrow_texts,
)

VALUES = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.string(): st.text(),
    pa.binary(): st.binary(),
}


@pytest.mark.parametrize("kind", VALUES, ids=str)
@given(data=st.data())
def test_columns_are_those_of_pyarrow(kind: Any, data: st.DataObject) -> None:
    values = data.draw(st.lists(VALUES[kind] | st.none(), max_size=20))
    result = arrow_column(values, kind)
    result.validate(full=True)
    assert result.type == kind
    assert result.equals(pa.array(values, kind))
    assert result.null_count == values.count(None)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_numbers_are_those_of_pyarrow(dtype: Any) -> None:
    for values in (np.arange(5, dtype=dtype), np.zeros(0, dtype), np.arange(9, dtype=dtype)[3:7]):
        assert arrow_numbers(values).equals(pa.array(values))


@given(st.lists(st.text(), min_size=1, max_size=4), st.data())
def test_texts_by_number_have_the_bytes_of_columns(texts: list[str], data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=20))
    expected = arrow_column([texts[number] for number in numbers], pa.string())
    columns = [(arrow_texts(texts, np.array(numbers, np.int32)), expected)]
    if numbers:
        nulls = arrow_column([None] * len(numbers), pa.string())
        columns.append((arrow_null_texts(len(numbers)), nulls))
    for result, column in columns:
        result.validate(full=True)
        assert result.equals(column)
        pairs = zip(result.buffers(), column.buffers(), strict=True)
        assert all(a == b if a is None or b is None else a.equals(b) for a, b in pairs)
