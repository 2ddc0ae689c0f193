"""Arrow arrays made without pyarrow.array are equal to its arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataplane.arrays import arrow_column, arrow_numbers

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
