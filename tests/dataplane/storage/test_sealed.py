"""Seals: a changed byte is noticed, and a file of another program is no damaged one."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.console.errors import IntegrityError
from headrace.dataplane.storage import sealed as seals
from headrace.dataplane.storage.sealed import open_parquet, seal, seal_parquet, unseal

TABLE = pa.table({"input": ["0" * 32] * 60, "record": list(range(60))})


def test_a_document_keeps_its_content_and_the_order_of_its_keys() -> None:
    data = {"b": [1, 2.5, None], "a": {"z": "ä", "y": True}}
    text = seal(data, indent=1)
    assert list(unseal("f.json", text, hint="")) == ["b", "a"]
    assert unseal("f.json", text, hint="") == data
    for wrong in (text.replace(b"2.5", b"2.4"), b"[]", b"{}", b"", text[:-1], text[1:]):
        with pytest.raises(IntegrityError, match=r"f\.json is damaged") as caught:
            unseal("f.json", wrong, hint="again")
        assert caught.value.hint == "again"


def test_every_bit_of_a_table_counts() -> None:
    """Only in the name of the seal's key a bit may change, and then the table is the same."""
    data, unseen = seal_parquet(TABLE.schema, [TABLE]), set[int]()
    for at in range(len(data)):
        wrong = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        try:
            stream = open_parquet("t.parquet", io.BytesIO(wrong), hint="")
        except IntegrityError:
            continue
        unseen.add(at)
        assert pq.read_table(stream).equals(TABLE)
    key = data.rindex(seals.PARQUET_KEY)
    assert unseen <= set(range(key, key + len(seals.PARQUET_KEY)))


def test_a_table_that_another_program_writes_again_is_its_own(tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    file.write_bytes(seal_parquet(TABLE.schema, [TABLE]))
    pq.write_table(pq.read_table(file).slice(0, 7), file)
    with file.open("rb") as stream:
        assert pq.read_table(open_parquet(str(file), stream, hint="")).num_rows == 7
