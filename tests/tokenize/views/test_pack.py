"""Packed views: every document once, none cut but by rule, whoever packs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.corpora import ONE, snapshot
from support.data.packed_data import L, mixture, packed, pieces_of, write_corpus
from support.data.small_data import random_documents, write_dataset

from headrace.console.errors import InputError, IntegrityError, MisuseError
from headrace.dataplane.datasets import manifest as manifests
from headrace.dataplane.datasets import packing
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.loader.rows import RowReader
from headrace.tokenize import inspect
from headrace.tokenize.card import card
from headrace.tokenize.cli import main
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.sources.fields import KeptField
from headrace.tokenize.sources.format import SourceConfig
from headrace.tokenize.verify import verify
from headrace.tokenize.views.pack import Long, PackConfig, pack_shard
from headrace.tokenize.views.select import SelectConfig, select


@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=80),
    length=st.integers(2, 90),
    long=st.sampled_from(["cut", "drop", "keep-first"]),
)
@settings(max_examples=150)
def test_each_token_once_and_only_long_documents_cut(
    lengths: list[int], length: int, long: Long
) -> None:
    config = PackConfig(dataset="a", length=length, out="b", long=long, group_bins=16)
    result, counts = pack_shard(np.array(lengths), config, "a shard")
    tokens, at = Counter[tuple[int, int]](), 0
    columns = (result.documents, result.first, result.tokens, result.padding)
    for document, first, count, padding in np.stack(columns, axis=1).tolist():
        tokens.update((document, first + k) for k in range(count))
        begin, end = at, at + count
        assert begin // length == (end - 1) // length or (begin % length == 0 == end % length)
        assert not padding or (end + padding) % length == 0
        assert padding < length
        if lengths[document] <= length:
            assert (first, count) == (0, lengths[document])
        at = end + padding
    max_tokens = {"cut": 10**9, "drop": 0, "keep-first": length}[long]
    expected = {
        (document, k)
        for document, whole in enumerate(lengths)
        for k in range(whole if whole <= length else min(whole, max_tokens))
    }
    assert tokens == Counter(expected)
    assert at % length == 0 and at == counts["bins"] * length
    assert counts["padding"] == at - len(expected)
    assert counts["tokens"] + counts["left_out"] == sum(lengths)


@given(lengths=st.lists(st.integers(0, 200), min_size=1, max_size=120))
@settings(max_examples=60, deadline=None)
def test_several_lengths_share_the_documents(lengths: list[int]) -> None:
    """Each token is in one view. A bin begins with no gap for a document of its own length, so a
    document lies in a longer row than it needs only beside one that needs this row."""
    levels = (16, 32, 64)
    tokens = Counter[tuple[int, int]]()
    for shorter, length in zip((0, *levels), levels, strict=False):
        config = PackConfig(dataset="a", length=length, lengths=levels, out="b", group_bins=4)
        pieces, counts = pack_shard(np.array(lengths), config, "a shard")
        columns = (pieces.documents, pieces.first, pieces.tokens, pieces.padding)
        longest_by_bin, at = Counter[int](), 0
        for document, first, count, padding in np.stack(columns, axis=1).tolist():
            tokens.update((document, first + k) for k in range(count))
            assert count == lengths[document] or lengths[document] > 64
            assert count <= length or (length == 64 and count % 64 == 0)
            longest_by_bin[at // length] = max(longest_by_bin[at // length], count)
            at += count + padding
        assert at == counts["bins"] * length
        assert min(longest_by_bin.values(), default=length) > shorter
    assert tokens == Counter((d, k) for d, whole in enumerate(lengths) for k in range(whole))


def test_bins_of_one_kind_are_no_neighbours() -> None:
    """Best-fit puts the long documents into the first bins, each in front."""
    lengths = np.random.default_rng(0).integers(1, 65, 4000)
    config = PackConfig(dataset="a", length=64, out="b")
    result, _ = pack_shard(lengths, config, "a shard")
    bins = (np.cumsum(result.tokens + result.padding) - 1) // 64
    longest = np.zeros(bins[-1] + 1)
    np.maximum.at(longest, bins, result.tokens)
    assert abs(np.corrcoef(longest[1:], longest[:-1])[0, 1]) < 0.1
    several = np.flatnonzero(np.diff(bins, prepend=-1) & (np.diff(bins, append=10**9) == 0))
    in_front = np.mean(result.tokens[several] == longest[bins[several]])
    assert 0.2 < in_front < 0.8


@pytest.mark.parametrize("format", ["arrow", "mds"])
def test_a_packed_view_has_the_documents_of_its_dataset(tmp_path: Path, format: str) -> None:
    documents = write_corpus(tmp_path / "base", format=format)
    result = packed(tmp_path / "base", tmp_path / "packed")
    whole: dict[int, list[int]] = {}
    for number, first, tokens in sorted(pieces_of(tmp_path / "packed")):
        assert len(whole.setdefault(number, [])) == first
        whole[number] += tokens
    assert [whole[number] for number in range(120)] == [document.tolist() for document in documents]
    assert result.tokens % L == 0 and result.weights == (1.0, 0.0)
    assert packing.count_padding(result) == result.tokens - sum(map(len, documents)) > 0
    assert not list(tmp_path.glob("packed/shards/*"))
    if format == "arrow":
        assert verify(str(tmp_path / "packed")) == []


@pytest.mark.parametrize("rule", ["drop", "keep-first"])
def test_long_documents_by_rule(tmp_path: Path, rule: Long) -> None:
    documents = write_corpus(tmp_path / "base")
    output = packed(tmp_path / "base", tmp_path / "packed", long=rule)
    over = sum(len(document) > L for document in documents)
    max_tokens = 0 if rule == "drop" else L
    expected = [document[:L] for document in documents if len(document) <= L or max_tokens]
    result = {number: ids for number, _, ids in pieces_of(tmp_path / "packed")}
    assert [result[number] for number in sorted(result)] == [item.tolist() for item in expected]
    counts = output.generations[0].provenance["counts"]
    gone = sum(len(document) - max_tokens for document in documents if len(document) > L)
    name = "documents longer than a bin"
    assert counts == (
        {name: over} if rule == "drop" else {"tokens after the first bin of a document": gone}
    )
    assert f"{over:,} longer than a bin" in inspect.describe(str(tmp_path / "packed"))


def test_a_view_with_weights_is_packed(tmp_path: Path) -> None:
    documents = random_documents(4, 90, longest=100)
    codes = [np.arange(len(document)) % 2 for document in documents]
    write_dataset(str(tmp_path / "base"), documents, codes=codes, weight_table=(1.0, 0.5))
    engine = ONE
    where = "tokens > 10 and position >= 3"
    select(
        SelectConfig(
            dataset=str(tmp_path / "base"), where=where, out=str(tmp_path / "v"), engine=engine
        )
    )
    output = packed(tmp_path / "v", tmp_path / "packed")
    assert output.weights == (1.0, 0.5, 0.0)
    numbers = {n for n, document in enumerate(documents) if len(document) > 10 and n >= 3}
    result = pieces_of(tmp_path / "packed")
    assert {number for number, _, _ in result} == numbers
    for number, first, ids in result:
        assert documents[number][first : first + len(ids)].tolist() == ids
    dataset = Dataset(str(tmp_path / "packed"))
    assert dataset.view is not None
    assert (dataset.view.url, dataset.view.where) == (str(tmp_path / "base"), where)
    for number, (document, first, ids) in enumerate(result):
        start, end = dataset.document(number)
        expected = codes[document][first : first + len(ids)].tolist()
        assert np.concatenate(dataset.codes(start, end)).tolist() == expected
    reader = RowReader(mixture({"packed": tmp_path / "packed"}, tokens=output.tokens, batch=L))
    block = reader.read(reader.find(reader.stream.locate(np.arange(output.tokens // L))))
    assert set(np.unique(block.arrays.weights).tolist()) == {0.0, 0.5, 1.0}
    with pytest.raises(MisuseError, match="is packed already"):
        packed(tmp_path / "packed", tmp_path / "x")
    with pytest.raises(MisuseError, match="its documents lie in bins"):
        select(
            SelectConfig(
                dataset=str(tmp_path / "packed"), where="tokens > 1", out=str(tmp_path / "x")
            )
        )


def test_a_rule_for_long_documents_needs_none(tmp_path: Path) -> None:
    write_corpus(tmp_path / "base")
    result = packed(tmp_path / "base", tmp_path / "packed", length=1024, long="drop")
    assert result.generations[0].provenance["counts"] == {}


def test_a_killed_run_and_parallel_tasks_leave_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "base")
    packed(tmp_path / "base", tmp_path / "packed")
    with monkeypatch.context() as patched:
        patched.setattr(manifests, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            packed(tmp_path / "base", tmp_path / "again")
    (tmp_path / "again/views" / ("0" * 32 + ".arrow")).write_bytes(b"x")
    packed(tmp_path / "base", tmp_path / "again", engine=ExecutorConfig(workers=2))
    assert snapshot(tmp_path / "again") == snapshot(tmp_path / "packed")
    name = next((tmp_path / "packed/views").iterdir())
    name.write_bytes(name.read_bytes()[:-1] + b"x")
    with pytest.raises(IntegrityError, match="does not match the hash in its name"):
        pieces_of(tmp_path / "packed")
    assert verify(str(tmp_path / "packed"))


def test_the_command(tmp_path: Path, run_build: Callable[..., Path], corpus: Path) -> None:
    source = SourceConfig(keep=(KeptField(name="name"),))
    out, target = run_build(corpus, source=source), str(tmp_path / "packed")
    arguments = ["pack", str(out), "--length", "2048", "--out", target]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "bins of 2,048 tokens" in result.output
    lines = inspect.describe(target)
    assert f"view of {out}: packed to 2,048 tokens" in lines and "244 of 244 documents" in lines
    for number, (document, _) in enumerate(Dataset(target).base_positions(0, 244)):
        if number % 40 == 0:  # text, origin and kept fields
            shown = replace(inspect.document(target, number), weights=None)
            assert shown == inspect.document(str(out), document)
    assert inspect.document(target, 0).fields
    assert "% of them padding" in card(target)
    result = CliRunner().invoke(main, ["pack", str(out), "--length", "1", "--out", target])
    assert result.exit_code == 2 and "at least 2 and" in result.output
    with pytest.raises(InputError, match=r"no document of .* has at most 2 tokens"):
        packed(out, tmp_path / "none", length=2, long="drop")
