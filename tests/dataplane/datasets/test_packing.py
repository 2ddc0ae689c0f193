"""Packed views in mixtures, loaders, audits and training steps."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.data.corpora import ONE, snapshot
from support.data.packed_data import Document, L, mixture, packed, pieces_of, write_corpus
from support.data.small_data import END, plan_of, random_documents, write_dataset

from headrace.console.config import build
from headrace.console.errors import ConfigError
from headrace.dataplane.datasets import packing
from headrace.dataplane.datasets.chunks import CHUNK_BYTES
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.loader.loader import Loader
from headrace.dataplane.loader.rows import RowReader
from headrace.mixtures.audit.auditor import Auditor
from headrace.mixtures.planning.open_plan import OpenedPlan, open_plan
from headrace.mixtures.view.card import render_card
from headrace.mixtures.view.summary import summarize
from headrace.mixtures.view.table import format_table
from headrace.models.config.config import ModelConfig
from headrace.models.documents import Documents
from headrace.models.model.model import Model
from headrace.tokenize.views.pack import PackConfig, pack
from headrace.trainer.engines.objective import Objective


def test_packed_and_concatenated_side_by_side(tmp_path: Path) -> None:
    """Rows, targets, weights and boundaries through the loader, epochs, a resume and the audit."""
    documents = write_corpus(tmp_path / "base", seed=1)
    write_corpus(tmp_path / "other", 200, seed=2)
    result = packed(tmp_path / "base", tmp_path / "packed")
    plan = mixture(
        {"packed": tmp_path / "packed", "other": tmp_path / "other"},
        tokens=4 * result.tokens,
        epochs=2,
    )
    stream = RowReader(plan).stream
    rows = np.arange(plan.end_row)
    located = stream.locate(rows)
    mine = located.sources == 0
    assert np.bincount(located.sources).tolist() == [2 * result.tokens // L] * 2
    # Each bin once in each epoch, the last one too.
    for epoch in range(2):
        bins = np.sort(located.tokens[mine & (located.epochs == epoch)])
        assert bins.tolist() == list(range(0, result.tokens, L))

    audited = list(Auditor(OpenedPlan(stream)).rows(range(plan.end_row)))
    steps = list(Loader(plan, micro_batch=4))
    digests = [digest for step in steps for batch in step for digest in batch.digests]
    assert digests == [bytes.fromhex(row.tokens_hash) for row in audited]
    again = Loader(plan, micro_batch=3, start_step=5)
    assert [d for step in again for batch in step for d in batch.digests] == digests[20:]
    opened, served = Dataset(str(tmp_path / "packed")), Counter[tuple[int, int]]()
    ends = [opened.document(number) for number in range(result.documents)]
    lengths = [end - start for start, end in ends]
    for step in steps:
        for batch in step:
            bounds = set(batch.cu_seqlens.tolist())
            for place, row in enumerate(batch.rows.tolist()):
                if mine[row]:
                    pieces = json.loads(audited[row].format_json())["documents"]
                    check_bin(pieces, batch, place, documents, lengths)
                    edges = check_bounds(pieces, place)
                    assert {b for b in bounds if place * L <= b < (place + 1) * L} == edges
                    for piece in pieces:
                        first = piece["view"]["first"] + piece["first"]
                        spans = range(first, first + piece["tokens"])
                        served.update((piece["view"]["document"], k) for k in spans)
    whole = {(n, k): 2 for n, document in enumerate(documents) for k in range(len(document))}
    assert served == whole


def check_bin(
    pieces: list[dict[str, Any]],
    batch: Any,
    place: int,
    documents: list[Document],
    lengths: list[int],
) -> None:
    """Compare a row of a packed source with the documents that its audit names."""
    ids, weights, held = np.full(L, END), np.zeros(L), np.zeros(L, bool)
    for piece in pieces:
        at, count, number = piece["at"], piece["tokens"], piece["view"]["document"]
        first = piece["view"]["first"] + piece["first"]
        assert piece["id"] == f"id-{number}" and piece["view"]["packed"] == L
        ids[at : at + count] = documents[number][first : first + count]
        held[at : at + count] = True
        # A target is the next token of the same piece, which may go on in the next bin.
        goes_on = piece["first"] + count < lengths[piece["document"]]
        weights[at : at + count - (not goes_on)] = 1
    assert batch.tokens[place].tolist() == ids.tolist()
    assert batch.weights[place].tolist() == weights.tolist()
    assert held[: held.sum()].all(), "padding is at the end of a bin"


def check_bounds(pieces: list[dict[str, Any]], place: int) -> set[int]:
    """Return where documents and padding begin."""
    edges = {0} | {piece["at"] for piece in pieces}
    edges |= {piece["at"] + piece["tokens"] for piece in pieces} - {L}
    return {place * L + edge for edge in edges}


def test_padding_has_no_influence_on_a_step(tmp_path: Path) -> None:
    """Loss and gradients are the same, whatever the ids of the padding are."""
    documents = random_documents(6, 8, longest=60)
    write_dataset(str(tmp_path / "base"), documents)
    result = packed(tmp_path / "base", tmp_path / "packed")
    rows = result.tokens // L
    plan = mixture({"packed": tmp_path / "packed"}, tokens=result.tokens, batch=result.tokens)
    (batch,) = next(iter(Loader(plan, micro_batch=rows)))
    layers = {"mixer": {"kind": "attention", "heads": 2}, "ssm": {"kind": "mamba2", "head_dim": 8}}
    shape = {"vocab_size": 512, "width": 16, "pattern": "[mixer/ssm]", "operators": layers}
    model = Model(build(ModelConfig, shape, source="a test"))
    model.init_weights(1)
    inside = Documents.build(batch.cu_seqlens, batch.tokens.shape)
    seen = batch.targets[batch.weights > 0]
    assert seen.numel() == sum(map(len, documents)) - len(documents)

    def step(padding: int, weight: float) -> tuple[torch.Tensor, ...]:
        tokens, targets, weights = (
            part.clone() for part in (batch.tokens, batch.targets, batch.weights)
        )
        for pad, part in ((tokens == END, tokens), (targets == END, targets)):
            ends = torch.zeros_like(pad)
            ends[:, 1:] = pad[:, 1:] & pad[:, :-1]  # ends of documents stay
            part[ends] = padding
        if weight:
            weights[:, -1] = weight
        total = Objective(model)(tokens, targets, weights, inside).total
        return (total.detach(), *torch.autograd.grad(total, list(model.parameters())))

    equalities = [torch.equal(a, b) for a, b in zip(step(END, 0), step(77, 0), strict=True)]
    assert all(equalities)
    assert not torch.allclose(step(END, 1.0)[0], step(77, 1.0)[0]), "weights of padding would show"


def test_targets_go_on_within_a_long_document(tmp_path: Path) -> None:
    """A document that fills several bins is cut only before its rest."""
    document = np.append(np.arange(1, 150), END).astype(np.uint16)
    write_dataset(str(tmp_path / "base"), [document])
    packed(tmp_path / "base", tmp_path / "packed")
    assert {(first, len(ids)) for _, first, ids in pieces_of(tmp_path / "packed")} == {
        (0, 128),
        (128, 22),
    }
    reader = RowReader(mixture({"packed": tmp_path / "packed"}, tokens=3 * L, batch=L))
    located = reader.stream.locate(np.arange(3))
    block = reader.read(reader.find(located))
    by_first = dict(zip(block.arrays.tokens[:, 0].tolist(), range(3), strict=True))
    weights = block.arrays.weights
    assert weights[by_first[1]].tolist() == [1] * 64
    assert weights[by_first[65]].tolist() == [1] * 63 + [0]
    assert weights[by_first[129]].tolist() == [1] * 21 + [0] * 43


def test_rows_of_several_bins_and_rows_that_cut_them(tmp_path: Path) -> None:
    write_corpus(tmp_path / "base")
    write_corpus(tmp_path / "other")
    packed(tmp_path / "base", tmp_path / "packed")
    sources = {"packed": tmp_path / "packed"}
    reader = RowReader(mixture(sources, tokens=8 * L, seq_len=2 * L))
    starts = reader.stream.locate(np.arange(4)).tokens
    assert not (starts % (2 * L)).any()
    for wrong in (L // 2, L + 32):
        with pytest.raises(ConfigError) as caught:
            plan_of(
                {
                    "sources": {"packed": {"data": str(tmp_path / "packed")}},
                    "phases": {
                        "all": {
                            "tokens": 4 * wrong,
                            "seq_len": wrong,
                            "batch": wrong,
                            "weights": {"packed": 1},
                        }
                    },
                }
            )
        (problem,) = caught.value.problems
        assert f"rows of {wrong} tokens cut documents of source packed" in problem.message
        assert problem.path == "phases.all.seq_len"
    # A phase that does not draw from it may have any length.
    both = {
        "packed": {"data": str(tmp_path / "packed")},
        "other": {"data": str(tmp_path / "other")},
    }
    short = {"tokens": 320, "seq_len": 32, "batch": 32, "weights": {"other": 1}}
    plan = plan_of(
        {
            "sources": both,
            "phases": {
                "one": short,
                "two": {"tokens": 10 * L, "seq_len": L, "weights": {"packed": 1}, "batch": L},
            },
        }
    )
    located = RowReader(plan).stream.locate(np.arange(10, 20))
    assert not (located.tokens % L).any()


def test_changes_of_length_cut_no_bin_and_lose_none(tmp_path: Path) -> None:
    write_corpus(tmp_path / "base", 400)
    bins = packed(tmp_path / "base", tmp_path / "packed").tokens // L
    phases, remaining = {}, bins
    for number, (several, rows) in enumerate([(1, 31), (2, 9), (1, 13), (4, 7), (2, 5), (1, bins)]):
        rows = min(rows, remaining)
        remaining -= several * rows
        size = {"tokens": several * rows * L, "seq_len": several * L, "batch": several * L}
        phases[f"phase{number}"] = {**size, "weights": {"packed": 1}}
    sources = {"packed": {"data": str(tmp_path / "packed")}}
    plan = plan_of({"chunk": 4 * L, "window": 5, "sources": sources, "phases": phases})
    stream, served = RowReader(plan).stream, []
    for phase in plan.phases:
        located = stream.locate(np.arange(phase.first_row, phase.end_row))
        for place in range(len(located.rows)):
            for start, end in located.spans(place):
                assert start % L == 0 and end % L == 0
                served += range(start // L, end // L)
    assert sorted(served) == list(range(bins))


def test_growth_and_a_continued_run_cut_nothing(tmp_path: Path) -> None:
    write_corpus(tmp_path / "base", 60)
    first = packed(tmp_path / "base", tmp_path / "packed")
    before = mixture({"packed": tmp_path / "packed"}, tokens=8 * L)
    (tmp_path / "run").mkdir()
    before.save(str(tmp_path / "run/plan.json"))
    write_dataset(str(tmp_path / "base"), random_documents(3, 80, longest=100))
    second = packed(tmp_path / "base", tmp_path / "packed")
    assert second.generations[0] == first.generations[0] and len(second.generations) == 2
    state = snapshot(tmp_path / "packed")
    assert packed(tmp_path / "base", tmp_path / "packed") == second
    assert snapshot(tmp_path / "packed") == state
    plan = plan_of(
        {
            "after": {"run": str(tmp_path / "run"), "step": 2},
            "sources": {"packed": {"data": str(tmp_path / "packed")}},
            "phases": {"more": {"tokens": 40 * L, "weights": {"packed": 1}}},
        }
    )
    stream = RowReader(plan).stream
    new = stream.locate(np.arange(plan.first_row, plan.end_row)).tokens
    old = RowReader(before).stream.locate(np.arange(8)).tokens
    assert not (new % L).any() and not set(new.tolist()) & set(old.tolist())
    assert len(set(new.tolist())) == len(new)


def test_a_store_is_asked_for_no_padding(tmp_path: Path) -> None:
    url = f"memory://packed-{os.urandom(4).hex()}"
    write_dataset(f"{url}/base", random_documents(5, 60, longest=100))
    pack(PackConfig(dataset=f"{url}/base", out=f"{url}/packed", length=L, engine=ONE))
    plan = mixture({"packed": f"{url}/packed"}, tokens=Dataset(f"{url}/packed").tokens, batch=L)
    reader = RowReader(plan)
    pieces = reader.find(reader.stream.locate(np.arange(plan.rows))).pieces
    assert len(pieces.padding)
    sizes = [dataset.shards[number].size for dataset, number in pieces.shards]
    asked = pieces.chunks(0, plan.rows)
    assert asked and all(0 <= chunk * CHUNK_BYTES < sizes[place] for place, chunk in asked)
    assert len(list(Loader(plan, micro_batch=4))) == plan.rows


def test_plans_and_cards_show_the_padding(tmp_path: Path) -> None:
    write_corpus(tmp_path / "base")
    write_corpus(tmp_path / "other", seed=1)
    result = packed(tmp_path / "base", tmp_path / "packed")
    share = packing.count_padding(result) / (result.tokens + 1)
    file = tmp_path / "m.yaml"
    file.write_text(
        f"sources: {{packed: {{data: {tmp_path}/packed}}, other: {{data: {tmp_path}/other}}}}\n"
        "phases:\n  all: {tokens: 640, seq_len: 64, batch: 64, "
        "weights: {packed: 0.5, other: 0.5}}\n"
    )
    opened = open_plan(str(file))
    summary = summarize(opened.stream, opened.branch, opened.sources)
    assert [(item.source, item.bins, item.padding) for item in summary.packed] == [
        ("packed", L, share)
    ]
    assert f"packed is packed to 64 tokens: {share:.2%} of its tokens are padding" in format_table(
        summary
    )
    rows = [line.split(" | ") for line in render_card(opened.stream).splitlines() if "`/" in line]
    padding = packing.count_padding(result) / result.tokens
    assert [row[-1].strip(" |") for row in rows] == [f"{padding:.2%}", "none"]
    # One token of padding follows the last bin in the order, and is none of the view's.
    assert f" | {result.tokens:,} | " in render_card(opened.stream)
    assert f" | {result.tokens + 1:,} | " not in render_card(opened.stream)
