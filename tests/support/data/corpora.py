"""Small corpora, and helpers that read them and the datasets built from them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.dataplane.datasets import manifest
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.shards.documents import DocumentOrigin
from headrace.dataplane.tokenizers import load
from headrace.tokenize import sources
from headrace.tokenize.corpus.inputs import find_files
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.files import open_file
from headrace.tokenize.options import parse_kept_field
from headrace.tokenize.sources import corpus_format
from headrace.tokenize.sources.fields import KeptField
from headrace.tokenize.sources.format import LIMITS, BadRecord, ReadLimits, SourceConfig

Records = tuple[list[tuple[int, str, str | None]], list[BadRecord]]

ONE = ExecutorConfig(workers=1)
"""The executor of most tests: no worker processes."""

WORDS = [*("water", "wheel", "mill", "stream", "水", "roue", "🙂", "naïve", "\n\n   return")]


def texts(count: int, *, seed: int = 0, longest: int = 80) -> list[str]:
    rng = random.Random(seed)
    return [
        f"{seed}-{number} " + " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, longest)))
        for number in range(count)
    ]


def write_jsonl(path: Path, documents: Iterable[str]) -> Path:
    lines = [
        json.dumps({"text": text, "name": f"{path.name}#{number}"})
        for number, text in enumerate(documents)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def write_lines(path: Path, records: Iterable[object]) -> Path:
    """Write records as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def keep(*words: str) -> SourceConfig:
    """Return the settings of `--keep` with these words."""
    return SourceConfig(keep=tuple(KeptField(**parse_kept_field(word)) for word in words))


def documents_with_fields(out: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the text and the kept fields of every document."""
    documents = read_dataset(out)
    rows = Dataset(str(out)).fields(0, len(documents))
    assert len(rows) == len(documents)
    return [(text, row) for (_, text, _), row in zip(documents, rows, strict=True)]


@contextmanager
def small_blocks(size: int) -> Iterator[None]:
    """Read and decompress files in blocks of `size` bytes, wherever a command opens them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_file, "BLOCK_BYTES", size)
        yield


def read_file(
    path: Path, size: int = 1 << 30, limits: ReadLimits = LIMITS, **options: Any
) -> Records:
    """Read all documents of a file, in slices of about `size` bytes."""
    config = SourceConfig(**options)
    (file,) = find_files([str(path)], config)
    documents, problems = [], []
    for part in sources.cut(file, config, size, skip_bad=False):
        for block in corpus_format(file.format).read(part, config, limits):
            ids = block.ids or [None] * len(block.texts)
            documents += list(zip(block.positions, block.texts, ids, strict=True))
            problems += block.problems
    return documents, problems


def read_dataset(url: str | Path) -> list[tuple[DocumentOrigin, str, list[int]]]:
    """Return the origin, the text and the ids of every document of a dataset."""
    dataset = Dataset(str(url))
    tokenizer = load(dataset.manifest.tokenizer, str(url))
    total = int(dataset.shard_tokens[-1])
    ids = np.empty(total, dataset.manifest.dtype)
    dataset.fill(0, ids)
    bounds = [*(span.first_token for span in dataset.documents(0, total)), total]
    origins = dataset.origins(0, int(dataset.shard_documents[-1]))
    end = dataset.manifest.tokenizer.end_of_document
    documents = []
    for origin, low, high in zip(origins, bounds[:-1], bounds[1:], strict=True):
        document = ids[low:high].tolist()
        assert document[-1] == end
        documents.append((origin, tokenizer.decode(document[:-1]), document))
    return documents


def ids_of(url: str | Path) -> list[str | None]:
    """Return the id of every document of a dataset."""
    return [origin.id for origin, _, _ in read_dataset(url)]


def counts_of(url: str | Path) -> dict[str, int]:
    """Return the counts of the last build of a dataset."""
    result = manifest.load(str(url)).generations[-1]
    counts: dict[str, int] = result.provenance["counts"]
    return counts


def snapshot(url: str | Path) -> dict[str, bytes]:
    """Return the content of every file of a dataset, by name."""
    root = Path(url)
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def write_megatron(path: Path, documents: list[list[int]], dtype: str) -> None:
    """Write a Megatron dataset from the format's description: magic, version, type, counts, sizes,
    pointers, documents."""
    path.parent.mkdir(exist_ok=True)
    sizes = np.array([len(document) for document in documents], np.int32)
    width = np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64)]) * width
    path.with_suffix(".bin").write_bytes(b"".join(np.array(d, dtype).tobytes() for d in documents))
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + (1).to_bytes(8, "little")
        + {"int32": b"\x04", "uint16": b"\x08"}[dtype]
        + len(documents).to_bytes(8, "little")
        + (len(documents) + 1).to_bytes(8, "little")
        + sizes.tobytes()
        + pointers.astype(np.int64).tobytes()
        + np.arange(len(documents) + 1, dtype=np.int64).tobytes()
    )
