"""Datasets, views and packs as Hugging Face datasets, and the order as data frames."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.data.corpora import ONE, keep, texts, write_lines
from support.data.small_data import plan_of

from headrace.console.errors import MissingError, PlanError
from headrace.dataplane import Stream, to_datasets
from headrace.dataplane.datasets.dataset import Dataset
from headrace.tokenize.builder.build import BuildConfig, build
from headrace.tokenize.views.pack import PackConfig, pack
from headrace.tokenize.views.select import SelectConfig, select

LENGTH = 64


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of several shards, a view and a packed view."""
    folder = tmp_path_factory.mktemp("data")
    records = [
        {"text": text, "id": f"web-{number}", "score": number / 60}
        for number, text in enumerate(texts(60, seed=3))
    ]
    corpus = write_lines(folder / "web.jsonl", records)
    web, source = str(folder / "web"), replace(keep("score:float"), id_field="id")
    build(BuildConfig(inputs=(str(corpus),), out=web, tokenizer="byte", source=source, engine=ONE))
    select(SelectConfig(dataset=web, where="score >= 0.5", out=str(folder / "good"), engine=ONE))
    pack(PackConfig(dataset=web, length=LENGTH, out=str(folder / "packed"), engine=ONE))
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("name", ["web", "good"])
def test_documents_are_those_of_the_dataset(data: Path, name: str, tmp_path: Path) -> None:
    import datasets

    dataset, examples = Dataset(str(data / name)), to_datasets(str(data / name))
    examples.save_to_disk(tmp_path / "saved")
    examples = datasets.load_from_disk(tmp_path / "saved")
    spans = dataset.documents(0, dataset.tokens)
    assert len(examples) == len(spans) == (60 if name == "web" else 30)
    origins = dataset.origins(0, len(spans))
    for example, span, origin in zip(examples, spans, origins, strict=True):
        tokens = np.empty(span.tokens, np.int64)
        dataset.fill(span.first_token, tokens)
        assert example["input_ids"] == tokens.tolist()
        assert (example["id"], example["position"]) == (origin.id, origin.position)
        assert example["score"] == int(str(origin.id).split("-")[1]) / 60
    assert "labels" not in examples.column_names


def test_bins_are_the_rows_of_the_stream(data: Path) -> None:
    """The rows of an epoch, in another order, with the labels and positions that the stream has for
    transformers."""
    url = str(data / "packed")
    examples = to_datasets(url)
    tokens = len(examples) * LENGTH
    phase = {"tokens": tokens, "seq_len": LENGTH, "batch": LENGTH, "weights": {"web": 1}}
    plan = plan_of({"sources": {"web": {"data": url}}, "phases": {"one": phase}})
    rows = {}
    for item in Stream(plan).dataset(names="transformers"):
        [tokens_], [labels] = item["input_ids"].tolist(), item["labels"].tolist()
        [positions] = item["position_ids"].tolist()
        rows[tuple(tokens_)] = labels, positions
    assert len(rows) == len(examples) > 20
    for example in examples:
        labels, positions = rows[tuple(example["input_ids"])]
        assert example["labels"] == labels
        has_loss = [label >= 0 for label in labels]
        assert [p for p, real in zip(example["position_ids"], has_loss, strict=True) if real] == [
            p for p, real in zip(positions, has_loss, strict=True) if real
        ]


@pytest.mark.parametrize("frame", ["pandas", "polars"])
def test_rows_as_a_frame(data: Path, frame: str) -> None:
    phase = {"tokens": 1024, "seq_len": 32, "batch": 64, "weights": {"web": 1}}
    sources = {"web": {"data": str(data / "web")}}
    stream = Stream(plan_of({"sources": sources, "phases": {"one": phase}}))
    rows = stream.rows(4, 9, frame=frame)
    assert type(rows).__module__.startswith(frame)
    assert int(rows["tokens"].sum()) == 5 * 32
    assert set(rows["row"]) == {4, 5, 6, 7, 8} and set(rows["step"]) == {2, 3, 4}
    assert set(rows["id"]) <= {f"web-{number}" for number in range(60)}
    assert not len(stream.rows(3, 3, frame=frame)) and len(set(stream.rows()["row"])) == 32
    with pytest.raises(PlanError, match="has rows 0 to 32"):
        stream.rows(0, 33)


def test_what_to_install_is_said(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phase = {"tokens": 1024, "seq_len": 32, "batch": 64, "weights": {"web": 1}}
    plan = plan_of({"sources": {"web": {"data": str(data / "web")}}, "phases": {"one": phase}})
    monkeypatch.setattr("headrace.dataplane.stream.stream.find_spec", lambda name: None)
    with pytest.raises(MissingError, match="needs pandas or polars"):
        Stream(plan).rows()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingError, match="needs datasets"):
        to_datasets(str(data / "web"))
