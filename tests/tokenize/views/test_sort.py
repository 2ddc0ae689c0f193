"""Sorted views, and sources that a run reads in their order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.corpora import ONE, snapshot, texts
from support.data.small_data import plan_of

from headrace.console.errors import ConfigError, MisuseError
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.loader import Loader
from headrace.dataplane.order.stream import Stream
from headrace.mixtures.exposure.pieces import find_pieces
from headrace.mixtures.mixture_file.mixture import OrderSpec
from headrace.tokenize.cli import main
from headrace.tokenize.sources.fields import KeptField
from headrace.tokenize.sources.format import SourceConfig
from headrace.tokenize.verify import verify
from headrace.tokenize.views.pack import PackConfig, pack
from headrace.tokenize.views.select import SelectConfig, select
from headrace.tokenize.views.sort import SortConfig, sort

L, N = 32, 200


@pytest.fixture
def base(tmp_path: Path, run_build: Callable[..., Path]) -> Path:
    """A dataset of several shards, with a field that some documents lack."""
    rng = np.random.default_rng(0)
    lines = [
        json.dumps(
            {
                "text": text,
                "score": None if number % 11 == 0 else round(rng.normal(), 2),
                "date": f"20{rng.integers(10, 26)}-{rng.integers(1, 13):02}",
            }
        )
        for number, text in enumerate(texts(N, seed=1))
    ]
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "0.jsonl").write_text("\n".join(lines) + "\n")
    keep = (KeptField(name="score"), KeptField(name="date"))
    url = run_build(tmp_path / "c", source=SourceConfig(keep=keep), shard_size=8192)
    assert len(Dataset(str(url)).shards) > 2
    return url


def sorted_view(base: Path, out: Path, by: str = "score") -> Dataset:
    sort(SortConfig(dataset=str(base), by=by, out=str(out), engine=ONE))
    return Dataset(str(out))


def contents(dataset: Dataset, first: int, end: int) -> list[tuple[int, ...]]:
    tokens = np.empty(dataset.tokens, np.int64)
    dataset.fill(0, tokens)
    spans = [dataset.document(number) for number in range(first, end)]
    return [tuple(tokens[start:stop].tolist()) for start, stop in spans]


@pytest.mark.parametrize("by", ["score", "date"])
def test_a_sorted_view_has_all_documents_in_order(base: Path, tmp_path: Path, by: str) -> None:
    """Exactly within a part of a shard; parts follow one another; no value comes last."""
    whole, view = Dataset(str(base)), sorted_view(base, tmp_path / "v", by)
    count = int(whole.shard_documents[-1])
    assert int(view.shard_documents[-1]) == count
    assert Counter(contents(view, 0, count)) == Counter(contents(whole, 0, count))
    values = view.columns(0, count, [by]).column(by).to_pylist()
    valued = [value for value in values if value is not None]
    assert len(valued) == (count - 19 if by == "score" else count)
    assert values[: len(valued)] == valued
    ranks = np.searchsorted(np.sort(np.array(valued, object)), np.array(valued, object))
    assert np.abs(ranks - np.arange(len(valued))).max() < len(valued) / 4
    numbers = [number for number, _ in view.base_positions(0, count)]
    assert contents(view, 0, count) == [contents(whole, n, n + 1)[0] for n in numbers]
    assert verify(str(tmp_path / "v")) == []
    result = snapshot(tmp_path / "v")
    sorted_view(base, tmp_path / "v", by)
    assert snapshot(tmp_path / "v") == result


def test_one_shard_is_sorted_exactly(tmp_path: Path, run_build: Callable[..., Path]) -> None:
    (tmp_path / "c").mkdir()
    lines = [json.dumps({"text": text}) for text in texts(90)]
    (tmp_path / "c" / "0.jsonl").write_text("\n".join(lines))
    view = sorted_view(
        run_build(tmp_path / "c", shard_size=1 << 20, slice_size=1 << 20), tmp_path / "v", "tokens"
    )
    lengths = view.columns(0, 90, ["tokens"]).column("tokens").to_pylist()
    assert lengths == sorted(lengths) and len(view.shards) == 1


def spec(url: Path, tokens: int, **order: Any) -> dict[str, Any]:
    return {
        "chunk": 2 * L,
        "sources": {"web": {"data": str(url), "max_epochs": 3, "order": {"by": "score", **order}}},
        "phases": {"all": {"tokens": tokens, "seq_len": L, "batch": 4 * L, "weights": {"web": 1}}},
    }


@pytest.mark.parametrize("rising", [True, False])
def test_a_run_reads_a_source_by_its_field(base: Path, tmp_path: Path, rising: bool) -> None:
    """In two epochs, and after a restart at any step; `find` is its inverse."""
    view = sorted_view(base, tmp_path / "v")
    plan = plan_of(spec(tmp_path / "v", 2 * view.tokens, rising=rising, window="12.5%"))
    steps = [torch_rows(batches) for batches in Loader(plan, micro_batch=4)]
    for start in (1, len(steps) // 2):
        later = [torch_rows(batches) for batches in Loader(plan, micro_batch=2, start_step=start)]
        assert later == steps[start:]
    stream = Stream(plan)
    located = stream.locate(np.arange(plan.rows))
    for epoch in (0, 1):
        firsts = located.tokens[located.epochs == epoch]
        window = plan.sources[0].order.window * 2
        assert abs(window / len(firsts) - 0.125) < 0.02
        medians = [np.median(firsts[at : at + window]) for at in range(0, len(firsts), window)]
        ordered = medians if rising else medians[::-1]
        assert all(a < b for a, b in pairwise(ordered[1:-1]))
    assert not np.array_equal(*(located.tokens[located.epochs == epoch][:50] for epoch in (0, 1)))
    pieces = find_pieces(stream, 0, view, np.arange(N), plan.rows)
    assert pieces.tokens.sum() == plan.rows * L  # every input is found


def torch_rows(batches: Any) -> list[Any]:
    return [row for batch in batches for row in batch.tokens[: len(batch.digests)].tolist()]


def test_what_cannot_be_sorted_or_ordered_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="keeps no number or string `scor`"):
        sorted_view(base, tmp_path / "x", "scor")
    sorted_view(base, tmp_path / "v")
    with pytest.raises(MisuseError, match="packed or sorted already"):
        sorted_view(tmp_path / "v", tmp_path / "x")
    with pytest.raises(MisuseError, match="a selection would not be"):
        select(
            SelectConfig(
                dataset=str(tmp_path / "v"), where="score > 0", out=str(tmp_path / "x"), engine=ONE
            )
        )
    with pytest.raises(MisuseError, match="bins would not be"):
        pack(PackConfig(dataset=str(tmp_path / "v"), length=L, out=str(tmp_path / "x")))
    with pytest.raises(ConfigError, match="the dataset is not sorted"):
        plan_of(spec(base, 1024))
    with pytest.raises(ConfigError, match="the dataset is sorted by score"):
        plan_of(spec(tmp_path / "v", 1024, by="date"))


@given(st.one_of(st.text("0123456789.%e-", max_size=5), st.sampled_from(["10%", "0.5%", "100%"])))
@settings(max_examples=80)
def test_a_window_is_a_percentage(text: str) -> None:
    try:
        share = OrderSpec(by="x", window=text).share
    except ValueError:
        return
    assert 0 < share <= 1 and text.endswith("%")
    assert float(share) == pytest.approx(float(text[:-1]) / 100)


def test_the_command_sorts(base: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["sort", str(base), "--by", "score", "--out", f"{tmp_path}/v"])
    assert done.exit_code == 0, done.output
    assert f"{N} documents" in done.output and "sorted by score" in done.output
