"""The contract of shard formats, and other libraries that read their files."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.console.errors import InputError, IntegrityError
from headrace.dataplane.shards import arrow as arrow_format
from headrace.dataplane.shards import shard_format
from headrace.dataplane.shards.documents import DocumentOrigin, ShardDocuments
from headrace.dataplane.shards.format import ShardLayout
from headrace.dataplane.shards.mds import index_columns

NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)


@st.composite
def some_documents(draw: st.DrawFn, *, weighted: bool | None = None) -> ShardDocuments:
    dtype = draw(st.sampled_from((np.uint16, np.uint32)))
    # Lengths around the edges at which MDS widens the shape in front of an array.
    lengths = draw(st.lists(st.integers(1, 40) | st.sampled_from((255, 256, 65536)), max_size=12))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    count = len(lengths)
    starts = np.cumsum([0, *lengths]).astype(np.int64)
    files = tuple(draw(st.lists(NAMES, min_size=1, max_size=3)))
    ids = draw(st.none() | st.lists(st.none() | NAMES, min_size=count, max_size=count).map(tuple))
    with_weights = draw(st.booleans()) if weighted is None else weighted
    return ShardDocuments(
        tokens=rng.integers(0, np.iinfo(dtype).max, starts[-1], dtype),
        starts=starts,
        files=files,
        file=rng.integers(0, len(files), count, np.int32),
        position=rng.integers(0, 2**40, count),
        ids=ids,
        weights=rng.integers(0, 4, starts[-1], np.uint8) if with_weights else None,
    )


def written(name: str, documents: ShardDocuments) -> bytes:
    out = io.BytesIO()
    shard_format(name).write(out, documents)
    return out.getvalue()


def tokens_of(data: bytes, layout: ShardLayout, dtype: str) -> np.ndarray:
    runs = zip(np.diff(layout.run_tokens).tolist(), layout.run_bytes.tolist(), strict=False)
    return np.concatenate(
        [np.empty(0, dtype), *(np.frombuffer(data, dtype, count, at) for count, at in runs)]
    )


def expected_origins(documents: ShardDocuments) -> list[DocumentOrigin]:
    ids = documents.ids or (None,) * len(documents)
    return [
        DocumentOrigin(documents.files[file], position, id)
        for file, position, id in zip(
            documents.file.tolist(), documents.position.tolist(), ids, strict=True
        )
    ]


@pytest.mark.parametrize("name", ["arrow", "mds"])
@settings(deadline=None, max_examples=60)
@given(documents=some_documents())
def test_layout_and_origins_match_the_written_documents(
    name: str, documents: ShardDocuments
) -> None:
    data = written(name, documents)
    dtype = documents.tokens.dtype.name
    format = shard_format(name)

    def read(start: int, end: int) -> bytes:
        assert 0 <= start <= end <= len(data)
        return data[start:end]

    layout = format.layout(read, len(data), dtype=dtype, details={})
    np.testing.assert_array_equal(layout.document_starts, documents.starts)
    np.testing.assert_array_equal(tokens_of(data, layout, dtype), documents.tokens)
    if documents.weights is None:
        assert layout.weight_bytes is None
    else:
        assert layout.weight_bytes is not None
        codes = ShardLayout(layout.document_starts, layout.run_tokens, layout.weight_bytes)
        np.testing.assert_array_equal(tokens_of(data, codes, "uint8"), documents.weights)
    origins = expected_origins(documents)
    if name == "mds":  # MDS strings cannot be null
        origins = [
            DocumentOrigin(origin.file, origin.position, origin.id or None) for origin in origins
        ]
    assert format.origins(read, len(data), 0, len(documents), details={}) == origins
    middle = len(documents) // 2
    assert format.origins(read, len(data), middle, len(documents), details={}) == origins[middle:]


@pytest.mark.parametrize("name", ["arrow", "mds"])
def test_layout_does_not_read_the_tokens(name: str) -> None:
    documents = many(3000)
    data = written(name, documents)
    sizes = []

    def read(start: int, end: int) -> bytes:
        sizes.append(end - start)
        return data[start:end]

    shard_format(name).layout(read, len(data), dtype="uint16", details={})
    assert sum(sizes) < len(data) / 5
    assert len(sizes) < 12


@pytest.mark.parametrize("name", ["arrow", "mds"])
def test_a_truncated_file_is_refused(name: str) -> None:
    data = written(name, many(5))[:-7]
    with pytest.raises(IntegrityError, match="not a whole"):
        shard_format(name).layout(lambda a, b: data[a:b], len(data), dtype="uint16", details={})


def test_arrow_splits_record_batches_and_reads_across_them() -> None:
    documents, out = many(50), io.BytesIO()
    arrow_format.ArrowFormat(batch_bytes=3000).write(out, documents)
    data = out.getvalue()
    assert pa.ipc.open_file(data).num_record_batches > 5
    layout = arrow_format.FORMAT.layout(
        lambda a, b: data[a:b], len(data), dtype="uint16", details={}
    )
    np.testing.assert_array_equal(tokens_of(data, layout, "uint16"), documents.tokens)
    origins = arrow_format.FORMAT.origins(lambda a, b: data[a:b], len(data), 7, 43, details={})
    assert origins == expected_origins(documents)[7:43]


def test_pyarrow_and_polars_open_an_arrow_shard(tmp_path: Path) -> None:
    documents = many(30, weighted=True)
    path = tmp_path / "a.arrow"
    path.write_bytes(written("arrow", documents))
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    table.validate(full=True)
    frame = polars.read_ipc(path)
    for rows in (table.to_pylist(), frame.to_dicts()):
        for number, row in enumerate(rows):
            part = documents[number : number + 1]
            assert row["tokens"] == part.tokens.tolist()
            assert row["weights"] == part.weights.tolist()
            assert (row["file"], row["position"]) == ("corpus.txt", number)
            assert row["id"] == (f"n{number}" if number % 2 else None)
    assert frame.schema["tokens"] == polars.List(polars.UInt16)


def test_streaming_dataset_opens_mds_shards_unmodified(tmp_path: Path) -> None:
    from streaming import StreamingDataset

    documents = many(30, weighted=True)
    (tmp_path / "shards").mkdir()
    shards = []
    for number, part in enumerate((documents[:18], documents[18:])):
        data = written("mds", part)
        (tmp_path / "shards" / f"{number}.mds").write_bytes(data)
        raw = {"basename": f"shards/{number}.mds", "bytes": len(data), "hashes": {}}
        shards.append(
            {
                **index_columns("uint16", weighted=True),
                "compression": None,
                "hashes": [],
                "raw_data": raw,
                "zip_data": None,
                "samples": len(part),
                "size_limit": None,
            }
        )
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    dataset = StreamingDataset(local=str(tmp_path), batch_size=1)
    assert len(dataset) == len(documents)
    for number in range(len(documents)):
        sample, part = dataset[number], documents[number : number + 1]
        np.testing.assert_array_equal(sample["tokens"], part.tokens)
        assert sample["tokens"].dtype == np.uint16
        np.testing.assert_array_equal(sample["weights"], part.weights)
        assert (sample["file"], sample["position"]) == ("corpus.txt", number)


@pytest.mark.parametrize("encoding", ["ndarray:uint16", "bytes"])
def test_mds_shards_written_by_streaming_are_read(tmp_path: Path, encoding: str) -> None:
    from streaming import MDSWriter

    documents = many(9)
    columns = {"more": "str", "tokens": encoding}
    with MDSWriter(columns=columns, out=str(tmp_path)) as writer:
        for number in range(len(documents)):
            tokens = documents[number : number + 1].tokens
            value = tokens if encoding != "bytes" else tokens.tobytes()
            writer.write({"more": "x" * number, "tokens": value})
    data = (tmp_path / "shard.00000.mds").read_bytes()
    format = shard_format("mds")
    layout = format.layout(lambda a, b: data[a:b], len(data), dtype="uint16", details={})
    np.testing.assert_array_equal(layout.document_starts, documents.starts)
    np.testing.assert_array_equal(tokens_of(data, layout, "uint16"), documents.tokens)


def test_an_arrow_file_with_one_record_batch_per_document_is_read(tmp_path: Path) -> None:
    documents = many(9)
    schema = pa.schema([("tokens", pa.uint32())])
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, schema) as writer:
        for number in range(len(documents)):
            tokens = documents[number : number + 1].tokens.astype(np.uint32)
            writer.write_batch(pa.record_batch([pa.array(tokens)], schema=schema))
    data = sink.getvalue()
    layout = arrow_format.FORMAT.layout(
        lambda a, b: data[a:b], len(data), dtype="uint32", details={}
    )
    np.testing.assert_array_equal(layout.document_starts, documents.starts)
    np.testing.assert_array_equal(tokens_of(data, layout, "uint32"), documents.tokens)
    origins = arrow_format.FORMAT.origins(lambda a, b: data[a:b], len(data), 2, 4, details={})
    assert origins == [DocumentOrigin("", 2), DocumentOrigin("", 3)]


@settings(deadline=None, max_examples=40)
@given(parts=st.lists(some_documents(weighted=True), min_size=1, max_size=4))
def test_concatenate_and_slicing_are_inverse(parts: list[ShardDocuments]) -> None:
    whole = ShardDocuments.concatenate(parts)
    assert len(whole) == sum(map(len, parts))
    at = 0
    for part in parts:
        again = whole[at : at + len(part)]
        np.testing.assert_array_equal(again.tokens, part.tokens)
        np.testing.assert_array_equal(again.starts, part.starts)
        np.testing.assert_array_equal(again.weights, part.weights)
        assert expected_origins(again) == expected_origins(part)
        at += len(part)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InputError, match="no shard format `mdx`"):
        shard_format("mdx")


@pytest.mark.long  # installing the environment takes minutes
def test_hugging_face_datasets_opens_an_arrow_shard(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Runs in its own environment: its requirements conflict with headrace's."""
    documents = many(30, weighted=True)
    path = tmp_path / "a.arrow"
    path.write_bytes(written("arrow", documents))
    python = environment(request, "datasets==5.2.0")
    script = (
        "import datasets, json, sys\n"
        "found = datasets.load_dataset('arrow', data_files=sys.argv[1], cache_dir=sys.argv[2])\n"
        "print(json.dumps(found['train'][3]))\n"
    )
    run = subprocess.run(
        [python, "-c", script, path, tmp_path / "cache"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    part = documents[3:4]
    row = {"tokens": part.tokens.tolist(), "weights": part.weights.tolist()}
    row |= {"file": "corpus.txt", "position": 3, "id": "n3"}
    assert json.loads(run.stdout.splitlines()[-1]) == row


def environment(request: pytest.FixtureRequest, requirement: str) -> Path:
    """Return the Python of an environment with `requirement` installed, kept between runs."""
    assert request.config.cache is not None
    folder = request.config.cache.mkdir(requirement.replace("=", "-"))
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True)
        run = subprocess.run(
            [python, "-m", "pip", "install", "-q", requirement], capture_output=True, text=True
        )
        if run.returncode:
            pytest.skip(f"{requirement} cannot be installed here: {run.stderr[-300:]}")
        (folder / "done").touch()
    return python


def many(count: int, *, weighted: bool = False) -> ShardDocuments:
    rng = np.random.default_rng(count)
    starts = np.cumsum([0, *rng.integers(1, 300, count)]).astype(np.int64)
    return ShardDocuments(
        tokens=rng.integers(0, 60000, starts[-1], np.uint16),
        starts=starts,
        files=("corpus.txt",),
        file=np.zeros(count, np.int32),
        position=np.arange(count),
        ids=tuple(f"n{k}" if k % 2 else None for k in range(count)),
        weights=rng.integers(0, 2, starts[-1], np.uint8) if weighted else None,
    )
