"""`tokenize index` believes the types that files record, and leaves no file out in silence."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from streaming import MDSWriter
from support.data.corpora import ONE, write_megatron

from headrace.console.errors import InputError, IntegrityError, MisuseError, UserError
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.shards.megatron import HEADER_BYTES
from headrace.tokenize.index import IndexConfig, index
from headrace.tokenize.verify import verify

DOCUMENTS = [[1, 2, 3, 9], [4, 9], list(range(1, 300)), [5, 6, 9]]


def write_mds(folder: Path, encoding: str, values: list[Any], **options: Any) -> str:
    with MDSWriter(columns={"tokens": encoding}, out=str(folder), **options) as writer:
        for value in values:
            writer.write({"tokens": value})
    return str(folder)


def indexed(url: str, **options: Any) -> list[int]:
    result = index(IndexConfig(url=url, engine=ONE, end_id="none", **options))
    ids = np.empty(result.tokens, np.int64)
    Dataset(url).fill(0, ids)
    assert verify(url, ONE) == []
    Path(url, "manifest.json").unlink()
    shutil.rmtree(Path(url, "tables"))
    return ids.tolist()


@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint64"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_the_type_in_each_mds_sample_is_believed(
    tmp_path: Path, dtype: str, compression: str | None
) -> None:
    values = [np.array(document, dtype) for document in DOCUMENTS]
    url = write_mds(tmp_path / "d", "ndarray", values, compression=compression, size_limit=600)
    expected = [id for document in DOCUMENTS for id in document]
    assert indexed(url) == indexed(url, dtype=dtype) == expected
    with pytest.raises(MisuseError, match=f"records the type of its ids: {dtype}, not int16"):
        index(IndexConfig(url=url, dtype="int16", engine=ONE))


def test_mds_columns_with_a_static_shape(tmp_path: Path) -> None:
    rows = [np.arange(4, dtype=np.uint32) + k for k in range(3)]
    assert indexed(write_mds(tmp_path / "d", "ndarray:uint32:4", rows)) == np.ravel(rows).tolist()


@pytest.mark.parametrize(
    ("encoding", "values", "options", "message"),
    [
        ("ndarray", ["uint16", "int32"], {}, "sample 1, column `tokens`: it holds int32, but the"),
        ("ndarray", ["float32"], {}, "are float32: ids are integers"),
        ("ndarray:float16", ["float16"], {}, "are float16: ids are integers"),
        ("bytes", [b"abc"], {"dtype": "uint16"}, "its 3 bytes are not a whole number of uint16"),
        ("bytes", [b"abcd"], {"dtype": "float32"}, "are float32: ids are integers"),
        ("bytes", [b"abcd"], {"dtype": "token"}, "are token: ids are integers"),
        ("ndarray", [np.array([1, 1 << 63], np.uint64)], {}, "it has 9223372036854775808: ids are"),
        ("ndarray", [np.array([1, 1 << 32], np.int64)], {}, "ids are less than 4,294,967,296"),
    ],
)
def test_values_that_are_not_ids_of_one_type(
    tmp_path: Path, encoding: str, values: list[Any], options: dict[str, str], message: str
) -> None:
    arrays = [np.ones(5, value) if isinstance(value, str) else value for value in values]
    url = write_mds(tmp_path / "d", encoding, arrays)
    with pytest.raises(InputError, match=message):
        index(IndexConfig(url=url, engine=ONE, **options))
    assert not Path(url, "manifest.json").exists()


def test_arrow_ids_beyond_every_vocabulary(tmp_path: Path) -> None:
    table = pa.table({"tokens": pa.array([[1, 1 << 63]], pa.list_(pa.uint64()))})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as out:
        out.write_table(table)
    with pytest.raises(InputError, match="it has 9223372036854775808"):
        index(IndexConfig(url=str(tmp_path), engine=ONE))


def test_mds_files_that_no_index_lists(tmp_path: Path) -> None:
    values = [np.array(document, np.uint16) for document in DOCUMENTS]
    url = write_mds(tmp_path / "d", "ndarray:uint16", values)
    write_mds(tmp_path / "d" / "val", "ndarray:uint16", values)  # a dataset of its own
    assert len(indexed(url)) == sum(map(len, DOCUMENTS))
    shutil.copy(tmp_path / "d" / "shard.00000.mds", tmp_path / "d" / "shard.00001.mds")
    with pytest.raises(InputError, match=r"does not list 1 MDS files.*shard\.00001\.mds"):
        index(IndexConfig(url=url, engine=ONE))
    (tmp_path / "d" / "index.json").write_text("{")
    with pytest.raises(IntegrityError, match=r"index\.json is not a whole index"):
        index(IndexConfig(url=url, engine=ONE))


def longer(folder: Path) -> None:
    with (folder / "a.bin").open("ab") as file:
        file.write(b"\1\0")


def gap(folder: Path) -> None:
    """The documents leave out the last sequence, which no writer of Megatron reports."""
    data = bytearray((folder / "a.idx").read_bytes())
    documents = HEADER_BYTES + 12 * len(DOCUMENTS)
    data[documents + 8 * len(DOCUMENTS) :] = (len(DOCUMENTS) - 1).to_bytes(8, "little")
    (folder / "a.idx").write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "a.idx").unlink(), r"a\.bin has no a\.idx beside it"),
        (lambda folder: (folder / "a.bin").unlink(), r"a\.idx has no a\.bin beside it"),
        (longer, r"a\.bin has 618 bytes; the documents of its \.idx have 616"),
        (gap, "are not made of its sequences"),
    ],
)
def test_megatron_files_that_do_not_fit(tmp_path: Path, damage: Any, message: str) -> None:
    for name in ("a", "b"):
        write_megatron(tmp_path / name, DOCUMENTS, "uint16")
    assert len(indexed(str(tmp_path))) == 2 * sum(map(len, DOCUMENTS))
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        index(IndexConfig(url=str(tmp_path), engine=ONE))
