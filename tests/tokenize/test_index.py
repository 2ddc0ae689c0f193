from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.data.corpora import ONE, write_megatron

from headrace.console.errors import InputError, IntegrityError, MisuseError, StorageError
from headrace.dataplane.datasets.dataset import Dataset
from headrace.tokenize.index import IndexConfig, index
from headrace.tokenize.verify import verify

DOCUMENTS = [np.append(np.arange(1, 1 + n) * 7 % 250, 256).tolist() for n in (3, 300, 1, 70_000)]


def check(folder: Path, **options: Any) -> Dataset:
    """Index a folder, and check that it has DOCUMENTS."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    result = index(IndexConfig(url=str(folder), engine=ONE, end_id=256, **options))
    assert (result.documents, result.tokens) == (len(DOCUMENTS), sum(map(len, DOCUMENTS)))
    assert result.tokenizer.end_of_document == 256
    dataset = Dataset(str(folder))
    ids = np.empty(result.tokens, np.int64)
    dataset.fill(0, ids)
    assert ids.tolist() == [id for document in DOCUMENTS for id in document]
    starts = np.cumsum([0, *map(len, DOCUMENTS)])[:-1].tolist()
    spans = dataset.documents(0, result.tokens)
    assert [span.first_token for span in spans] == starts
    assert all(path.read_bytes() == data for path, data in before.items())
    assert verify(str(folder), ONE) == []
    return dataset


@pytest.mark.parametrize(
    ("encoding", "compression"),
    [
        *(("ndarray:uint16", name) for name in (None, "zstd:3", "gz", "br:4", "snappy", "bz2:9")),
        *(("ndarray:int64", name) for name in (None, "zstd:3")),
        *(("bytes", name) for name in (None, "gz")),
    ],
)
def test_mds(tmp_path: Path, encoding: str, compression: str | None) -> None:
    from streaming import MDSWriter

    dtype = encoding.partition(":")[2] or "int64"
    columns = {"ids": encoding, "name": "str"}
    with MDSWriter(
        columns=columns, out=str(tmp_path / "d"), compression=compression, size_limit=100_000
    ) as writer:
        for number, document in enumerate(DOCUMENTS):
            value: Any = np.array(document, dtype)
            value = value.tobytes() if encoding == "bytes" else value
            writer.write({"ids": value, "name": f"n{number}"})
    extra = {"dtype": "int64"} if encoding == "bytes" else {}
    check(tmp_path / "d", column="ids", **extra)


def test_arrow_lists(tmp_path: Path) -> None:
    for number, part in enumerate((DOCUMENTS[:2], DOCUMENTS[2:])):
        table = pa.table({"n": [1] * len(part), "input_ids": pa.array(part, pa.list_(pa.int32()))})
        with pa.ipc.new_file(str(tmp_path / f"{number}.arrow"), table.schema) as out:
            out.write_table(table)
    dataset = check(tmp_path, column="input_ids")
    assert [(o.file, o.position) for o in dataset.origins(1, 3)] == [("0.arrow", 1), ("1.arrow", 0)]


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_list(pa.uint16()),
        pa.list_view(pa.int32()),
        pa.large_list_view(pa.uint32()),
    ],
    ids=str,
)
def test_other_lists_beside_columns_of_views(tmp_path: Path, kind: Any) -> None:
    """Columns of views have any number of buffers, before the tokens and after them."""
    words = ["a", "a word that no view holds inside itself"] * len(DOCUMENTS)
    note = pa.array(words[: len(DOCUMENTS)], pa.string_view())
    table = pa.table({"note": note, "ids": pa.array(DOCUMENTS, kind), "last": note})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as out:
        out.write_table(table, max_chunksize=2)
    check(tmp_path, column="ids")


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("stream", [False, True])
def test_arrow_files_with_compressed_buffers(
    tmp_path: Path, compression: str, stream: bool
) -> None:
    """Feather compresses the buffers of its files."""
    url = tmp_path / "d"
    url.mkdir()
    for number, part in enumerate((DOCUMENTS[:2], DOCUMENTS[2:])):
        table = pa.table({"note": ["x"] * len(part), "ids": pa.array(part, pa.list_(pa.uint16()))})
        options = pa.ipc.IpcWriteOptions(compression=compression)
        start = pa.ipc.new_stream if stream else pa.ipc.new_file
        with start(str(url / f"{number}.feather"), table.schema, options=options) as out:
            out.write_table(table, max_chunksize=1)
    dataset = check(url, column="ids")
    assert [(o.file, o.position) for o in dataset.origins(1, 3)] == [
        ("0.feather", 1),
        ("1.feather", 0),
    ]
    damaged = bytearray((url / "0.feather").read_bytes())
    damaged[len(damaged) // 2] ^= 255
    (url / "0.feather").write_bytes(damaged)
    assert [item.name for item in verify(str(url), ONE)] == ["0.feather"]


def saved_to_disk(folder: Path) -> None:
    """Write a folder as `Dataset.save_to_disk` does: IPC streams, and a list of them."""
    schema = pa.schema([("input_ids", pa.list_(pa.int32()))])
    folder.mkdir(parents=True)
    for number, part in enumerate((DOCUMENTS[:2], DOCUMENTS[2:])):
        name = folder / f"data-{number:05}-of-00002.arrow"
        with pa.ipc.new_stream(str(name), schema) as out:
            for document in part:
                rows = pa.array([document], schema[0].type)
                out.write_batch(pa.record_batch([rows], schema=schema))
    (folder / "cache-8a1f.arrow").write_bytes(b"the result of a map, which is no part of it")
    names = [{"filename": f"data-{number:05}-of-00002.arrow"} for number in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": names, "_split": "train"}))


def test_a_folder_of_save_to_disk(tmp_path: Path) -> None:
    saved_to_disk(tmp_path / "d" / "train")
    dataset = check(tmp_path / "d" / "train", column="input_ids")
    assert [o.file for o in dataset.origins(1, 3)] == [
        "data-00000-of-00002.arrow",
        "data-00001-of-00002.arrow",
    ]
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(InputError, match="holds the splits of a dataset") as caught:
        index(IndexConfig(url=str(tmp_path / "d"), column="input_ids", engine=ONE))
    assert "name the folder of a split: train" in str(caught.value.hint)
    (tmp_path / "d" / "train" / "manifest.json").unlink()
    (tmp_path / "d" / "train" / "state.json").write_text("{}")
    with pytest.raises(IntegrityError, match="does not list the files"):
        index(IndexConfig(url=str(tmp_path / "d" / "train"), column="input_ids", engine=ONE))


def test_arrow_with_one_record_batch_per_document(tmp_path: Path) -> None:
    schema = pa.schema([("tokens", pa.uint32())])
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), schema) as out:
        for document in DOCUMENTS:
            out.write_batch(pa.record_batch([pa.array(document, pa.uint32())], schema=schema))
    check(tmp_path)


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_megatron(tmp_path: Path, dtype: str) -> None:
    write_megatron(tmp_path / "a", DOCUMENTS[:3], dtype)
    write_megatron(tmp_path / "b", DOCUMENTS[3:], dtype)
    dataset = check(tmp_path)
    assert [(o.file, o.position) for o in dataset.origins(2, 4)] == [("a.bin", 2), ("b.bin", 0)]


def test_a_tokenizer_decodes_ids(tmp_path: Path) -> None:
    from headrace.tokenize import inspect

    write_megatron(tmp_path / "a", [[*b"hello", 256]], "uint16")
    index(IndexConfig(url=str(tmp_path), tokenizer="byte", engine=ONE))
    result = inspect.document(str(tmp_path), 0)
    origin, ids = result.origin, result.ids
    assert inspect.text(str(tmp_path), ids) == "hello<|endoftext|>"
    assert origin.file == "a.bin"


def test_decoding_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    from headrace.tokenize import inspect

    write_megatron(tmp_path / "a", DOCUMENTS, "uint16")
    index(IndexConfig(url=str(tmp_path), engine=ONE))
    with pytest.raises(InputError, match="names no tokenizer"):
        inspect.text(str(tmp_path), [1])


def test_folders_that_cannot_be_indexed(
    tmp_path: Path, run_build: Callable[..., Path], corpus: Path
) -> None:
    with pytest.raises(InputError, match="no dataset of a known format"):
        index(IndexConfig(url=str(tmp_path)))
    with pytest.raises(StorageError, match="already has a manifest"):
        index(IndexConfig(url=str(run_build(corpus))))
    write_megatron(tmp_path / "a", [[300, 256]], "uint16")
    with pytest.raises(InputError, match="has the id 300, but byte has only 257"):
        index(IndexConfig(url=str(tmp_path), tokenizer="byte", format="megatron", engine=ONE))


def test_a_missing_column_is_reported_with_the_existing_ones(tmp_path: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(columns={"ids": "bytes", "text": "str"}, out=str(tmp_path / "d")) as writer:
        writer.write({"ids": b"ab", "text": "ab"})
    with pytest.raises(InputError, match="no column `tokens`") as caught:
        index(IndexConfig(url=str(tmp_path / "d")))
    assert "ids" in str(caught.value)
    with pytest.raises(InputError, match="does not record the type"):
        index(IndexConfig(url=str(tmp_path / "d"), column="ids"))
    for dtype in (None, "int64"):
        with pytest.raises(InputError, match="holds no arrays of ids"):
            index(IndexConfig(url=str(tmp_path / "d"), column="text", dtype=dtype))
    assert json.loads((tmp_path / "d" / "index.json").read_text())["version"] == 2


def test_options_that_the_format_defines_are_misuse(tmp_path: Path) -> None:
    from streaming import MDSWriter

    write_megatron(tmp_path / "megatron" / "a", DOCUMENTS[:1], "uint16")
    for option in ({"dtype": "uint16"}, {"column": "tokens"}):
        with pytest.raises(MisuseError, match="which defines it"):
            index(IndexConfig(url=str(tmp_path / "megatron"), **option))
    with MDSWriter(columns={"tokens": "ndarray:uint16"}, out=str(tmp_path / "mds")) as writer:
        writer.write({"tokens": np.array([1, 2], np.uint16)})
    with pytest.raises(MisuseError, match="records the type of its ids: uint16"):
        index(IndexConfig(url=str(tmp_path / "mds"), dtype="int64"))
    with pytest.raises(ValueError, match="needs a tokenizer"):
        IndexConfig(url="x", tokenizer="byte", end_of_document="</s>")


def list_file(path: Path, ids: list[Any], **options: Any) -> None:
    kind = pa.int32() if not ids or isinstance(ids[0], int) else pa.list_(pa.int32())
    table = pa.table({"tokens": pa.array(ids, kind)})
    with pa.ipc.new_file(str(path), table.schema, **options) as out:
        out.write_table(table)


def cut_stream(path: Path) -> None:
    table = pa.table({"tokens": [[1, 2]]})
    with pa.ipc.new_stream(str(path), table.schema) as out:
        out.write_table(table)
    path.write_bytes(path.read_bytes()[:-8])


def cut_index(path: Path, size: int) -> None:
    write_megatron(path, DOCUMENTS, "int32")
    index_file = path.with_suffix(".idx")
    index_file.write_bytes(index_file.read_bytes()[:size])


def crossed_index(path: Path) -> None:
    write_megatron(path, DOCUMENTS, "int32")
    index_file = path.with_suffix(".idx")
    index_file.write_bytes(index_file.read_bytes()[:-8] + (9).to_bytes(8, "little"))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: list_file(path, [[1, 2], [3, None]]), "nulls among its ids"),
        (lambda path: list_file(path, [1, None]), "nulls among its ids"),
        (lambda path: list_file(path, [[1, -1]]), "has -1, which is not an id"),
        (lambda path: list_file(path, []), "has no tokens"),
        (cut_stream, "not a whole Arrow IPC stream"),
        (lambda path: cut_index(path, 20), "is truncated"),
        (lambda path: cut_index(path, 70), "is truncated"),
        (crossed_index, "are not made of its sequences"),
    ],
)
def test_files_that_are_not_a_dataset(tmp_path: Path, write: Any, message: str) -> None:
    write(tmp_path / "a.arrow")
    with pytest.raises((InputError, IntegrityError), match=message) as caught:
        index(IndexConfig(url=str(tmp_path), engine=ONE))
    assert str(tmp_path) in str(caught.value) or "a.idx" in str(caught.value)
    assert not (tmp_path / "manifest.json").exists()


def end_of(folder: Path, **options: Any) -> int | None:
    """Return the end-of-document id of a new index, and remove its manifest."""
    result = index(IndexConfig(url=str(folder), engine=ONE, **options))
    (folder / "manifest.json").unlink()
    return result.tokenizer.end_of_document


def test_the_end_of_documents_is_not_guessed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If all documents end with the same id, a warning says so, and nothing else follows."""
    write_megatron(tmp_path / "a", [[5, 7], [6, 7], [7]], "uint16")
    assert end_of(tmp_path) is None
    assert "unknown: all end with the id 7" in caplog.text
    assert end_of(tmp_path, tokenizer="byte") is None
    assert "all end with the id 7, the tokenizer's end is 256" in caplog.text
    caplog.clear()
    assert end_of(tmp_path, end_id=7) == 7
    assert end_of(tmp_path, end_id="none") is None
    assert end_of(tmp_path, end_id="none", tokenizer="byte") is None
    assert not caplog.text
    write_megatron(tmp_path / "b", [[5, 8]], "uint16")
    assert end_of(tmp_path) is None
    assert "they end with different ids" in caplog.text


def test_a_named_end_must_end_every_document(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[5, 256], [256]], "uint16")
    write_megatron(tmp_path / "b", [[5, 256], [6, 9]], "uint16")
    with pytest.raises(InputError, match=r"a document of b\.bin ends with the id 9, not with 256"):
        index(IndexConfig(url=str(tmp_path), end_id=256, engine=ONE))
    assert not (tmp_path / "manifest.json").exists()
    for name in ("b.bin", "b.idx"):
        (tmp_path / name).unlink()
    assert end_of(tmp_path, tokenizer="byte") == 256  # its usual end, and every document has it


def test_invalid_ends_are_errors() -> None:
    for options, message in (
        ({"tokenizer": "t.json", "end_of_document": "a", "end_id": 5}, "give only one of them"),
        ({"end_id": -1}, "ids start at 0"),
    ):
        with pytest.raises(ValueError, match=message):
            IndexConfig(url="x", **options)  # type: ignore[arg-type]
