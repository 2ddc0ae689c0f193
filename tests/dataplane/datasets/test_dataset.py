from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.small_data import random_documents, write_dataset

from headrace.console.errors import IntegrityError, PlanError
from headrace.dataplane.datasets import manifest as manifests
from headrace.dataplane.datasets.dataset import Dataset, open_pinned
from headrace.dataplane.datasets.open_shard import OpenShards

DOCUMENTS = random_documents(9, 130)
FLAT = np.concatenate(DOCUMENTS)
STARTS = np.cumsum([0, *map(len, DOCUMENTS)])


@pytest.fixture(scope="module", params=["arrow", "mds"])
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """130 documents in two generations and several shards."""
    url = str(tmp_path_factory.mktemp(request.param) / "corpus")
    write_dataset(url, DOCUMENTS[:90], format=request.param, shard_documents=25)
    write_dataset(url, DOCUMENTS[90:], format=request.param, shard_documents=25)
    return Dataset(url)


@given(st.integers(0, len(FLAT) - 1), st.integers(1, 3000))
@settings(max_examples=150)
def test_any_span_equals_that_of_the_documents_in_order(
    corpus: Dataset, start: int, length: int
) -> None:
    end = min(start + length, len(FLAT))
    out = np.empty(end - start, np.int64)
    corpus.fill(start, out)
    assert np.array_equal(out, FLAT[start:end])
    spans = corpus.documents(start, end)
    numbers = [
        number
        for number in range(len(DOCUMENTS))
        if STARTS[number] < end and STARTS[number + 1] > start
    ]
    assert [span.number for span in spans] == numbers
    assert [span.first_token for span in spans] == STARTS[numbers].tolist()
    assert [span.tokens for span in spans] == [len(DOCUMENTS[number]) for number in numbers]


def test_origins_over_shards_and_generations(corpus: Dataset) -> None:
    result = corpus.origins(80, 100)
    assert [origin.position for origin in result] == [*range(80, 90), *range(10)]
    assert [origin.id for origin in result] == [f"id-{o.position}" for o in result]
    assert {origin.file for origin in result} == {"corpus-0.txt", "corpus-90.txt"}


def test_earlier_generations_form_a_dataset(corpus: Dataset) -> None:
    first = Dataset(corpus.url, generations=1)
    assert first.shard_documents[-1] == 90
    assert first.hash == corpus.manifest.generations[0].hash != corpus.hash


def test_open_pinned_refuses_another_dataset(dataset: Callable[..., str]) -> None:
    url = dataset("web")
    hash = manifests.load(url).hash
    assert open_pinned(url, hash=hash, generations=1, name="web").hash == hash
    with pytest.raises(PlanError, match="source web is not the one"):
        open_pinned(url, hash="0" * 64, generations=1, name="web")
    with pytest.raises(PlanError, match="source web is not the one"):
        open_pinned(url, hash=hash, generations=2, name="web")


def test_a_shard_whose_counts_differ_from_its_table_is_refused(tmp_path: Path) -> None:
    url = str(tmp_path / "lies")
    manifest = write_dataset(url, DOCUMENTS[:20])
    shards = manifests.load_table(url, manifest.generations[0])
    object.__setattr__(shards[0], "documents", 19)
    with pytest.raises(IntegrityError, match=r"20 documents|19"):
        dataset = Dataset(url)
        dataset._shards = shards
        dataset.open_shard(0)


def test_the_number_of_open_shards_is_limited(corpus: Dataset) -> None:
    """Over all datasets of a reader."""
    together = OpenShards(3)
    first, second = (Dataset(corpus.url, open_shards=together) for _ in range(2))
    for number in (0, 1, 2, 0, 3, 4):
        assert first.open_shard(number) is first.open_shard(number)
        assert second.open_shard(number).number == number
        assert len(first._open) + len(second._open) <= 3
