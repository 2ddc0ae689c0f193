from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataplane.loader.row_weights import RowWeights


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=6), st.data())
def test_weights_are_those_of_each_target(
    rows: list[tuple[bool, bool]], data: st.DataObject
) -> None:
    """Looked up one by one, for rows with codes or without, and of two tables."""
    length = data.draw(st.integers(2, 9))
    tables = [(0.5, 2.0, 0.25), (1.0, 0.0)]
    codes = np.zeros((len(rows), length), np.uint8)
    expected = np.zeros((len(rows), length), np.float32)
    padding = []
    for row, (second, coded) in enumerate(rows):
        low, high = sorted(data.draw(st.tuples(*[st.integers(0, length)] * 2)))
        for place in range(length):
            code = data.draw(st.integers(0, len(tables[second]) - 1)) if coded else 0
            if low <= place < high:
                code = -1
            codes[row, place] = max(code, 0)
            expected[row, place] = tables[second][code]
        padding += [(row * length + low, row * length + high)] if low < high else []
    weights = RowWeights(
        length=length,
        tables=[np.array(table, np.float32) for table in tables],
        table_ids=np.array([second for second, _ in rows], np.int64),
        codes=codes if codes.any() else None,
        padding=np.array(padding, np.int64).reshape(-1, 2),
    )
    out = np.full((len(rows), length - 1), np.nan, np.float32)
    weights.write(out)
    assert np.array_equal(out, expected[:, 1:])
