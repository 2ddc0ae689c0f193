"""Steps whose rows have one length: what the model gets, on any ranks."""

from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.data.corpora import ONE
from support.data.packed_data import write_corpus
from support.data.small_data import plan_of, random_documents, write_dataset

from headrace.console.errors import ConfigError
from headrace.dataplane.loader import Loader
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.stream import Stream as OrderStream
from headrace.dataplane.runlog import decisions
from headrace.dataplane.stream.stream import Stream
from headrace.mixtures.steering.decide import decide_by_hand
from headrace.tokenize.views.pack import PackConfig, pack_lengths

L = 64
LENGTHS = (16, 32, 64)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, list[tuple[int, ...]]]:
    """A plan of half an epoch, and the corpus' documents of up to L tokens."""
    folder = tmp_path_factory.mktemp("lengths")
    documents = [
        document
        for seed, (count, longest) in enumerate([(600, 16), (300, 32), (300, 100)])
        for document in random_documents(seed, count, longest=longest)
    ]
    order = np.random.default_rng(0).permutation(len(documents))
    documents = [documents[number] for number in order]
    write_dataset(str(folder / "base"), documents, shard_documents=400)
    config = PackConfig(
        dataset=str(folder / "base"),
        length=L,
        lengths=LENGTHS,
        out=str(folder / "packed"),
        group_bins=16,
        engine=ONE,
    )
    assert all(pack_lengths(config).values())
    return plan_of(spec(folder)), [
        tuple(document.tolist()) for document in documents if len(document) <= L
    ]


def spec(folder: Path, **values: Any) -> dict[str, Any]:
    return {
        "seed": 5,
        "chunk": 4 * L,
        "window": 2,
        "steps_by_length": True,
        "sources": {
            f"to-{length}": {"data": str(folder / "packed" / str(length))} for length in LENGTHS
        },
        "phases": {
            "all": {
                "tokens": 120 * L,
                "seq_len": L,
                "batch": 5 * L,
                "weights": {"to-16": 0.125, "to-32": 0.25, "to-64": 0.625},
            }
        },
        **values,
    }


def test_the_model_gets_whole_documents_in_rows_of_one_length(
    corpus: tuple[Plan, list[tuple[int, ...]]],
) -> None:
    plan, documents = corpus
    known, seen, lengths = set(documents), list[tuple[int, ...]](), list[int]()
    for batches in Loader(plan, micro_batch=2):
        shapes = {tuple(batch.tokens.shape) for batch in batches}
        (shape,) = shapes
        assert shape[0] * shape[1] == 2 * L
        lengths.append(shape[1])
        for batch in batches:
            rows = len(batch.digests) * L // shape[1]
            flat = batch.tokens[:rows].flatten()
            bounds = batch.cu_seqlens.tolist()
            assert set(range(0, len(batch.tokens) * shape[1] + 1, shape[1])) <= set(bounds)
            weights = batch.weights[:rows].flatten()
            for start, end in pairwise(bounds):
                if end > len(flat) or not weights[start : end - 1].any():
                    continue  # a padding row, or the padding of a bin
                assert (batch.positions.flatten()[start:end] == torch.arange(end - start)).all()
                seen.append(tuple(flat[start:end].tolist()))
                assert weights[end - 1] == 0 or end % L == 0  # the next document's token
                assert weights[start : end - 1].all()
    assert {length: lengths.count(length) for length in LENGTHS} == {16: 3, 32: 6, 64: 15}
    whole = [document for document in seen if document in known]
    assert len(set(whole)) == len(whole) > 120


@pytest.mark.parametrize(
    ("world", "micro", "context"), [(1, 5, 1), (2, 1, 1), (3, 2, 1), (1, 2, 4)]
)
def test_any_ranks_read_the_same_rows(
    corpus: tuple[Plan, list[tuple[int, ...]]], world: int, micro: int, context: int
) -> None:
    """Also from a step on, as after a restart."""
    plan, _ = corpus
    whole = [
        torch.cat(
            [batch.tokens[: len(batch.digests) * (L // batch.tokens.shape[1])] for batch in step]
        )
        for step in Loader(plan, micro_batch=5)
    ]
    for start in (0, 13):
        ranks = [
            [
                Loader(
                    plan,
                    micro_batch=micro,
                    rank=rank,
                    world=world,
                    context_rank=place,
                    context_size=context,
                    start_step=start,
                )
                for place in range(context)
            ]
            for rank in range(world)
        ]
        for expected, *steps in zip(whole[start:], *chain(*ranks), strict=True):
            rows = []
            for rank in range(world):
                for batches in zip(*steps[rank * context : (rank + 1) * context], strict=True):
                    tokens = torch.cat([batch.tokens for batch in batches], dim=1)
                    rows.append(tokens[: len(batches[0].digests) * (L // tokens.shape[1])])
            rows = [part for part in rows if len(part)]
            assert torch.equal(torch.cat(rows), expected)


def test_a_stream_for_another_loop_has_these_rows(
    corpus: tuple[Plan, list[tuple[int, ...]]],
) -> None:
    plan, _ = corpus
    items = list(Stream(plan).dataset(0, 1, micro_batch=5))
    batches = [batch for step in Loader(plan, micro_batch=5) for batch in step]
    for item, batch in zip(items, batches, strict=True):
        assert torch.equal(item["tokens"], batch.tokens)
        assert torch.equal(item["positions"], batch.positions)
        assert len(item["rows"]) == 5


def test_ranks_that_cannot_cut_a_short_row_are_refused(
    corpus: tuple[Plan, list[tuple[int, ...]]],
) -> None:
    with pytest.raises(ConfigError, match="rows of 16 tokens cannot be cut into 32 parts"):
        Loader(corpus[0], micro_batch=1, context_size=32)


def test_a_mixture_whose_rows_all_have_one_length_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "packed" / "64")
    values = spec(tmp_path, sources={"to-64": {"data": str(tmp_path / "packed" / "64")}})
    values["phases"]["all"]["weights"] = {"to-64": 1}
    with pytest.raises(ConfigError, match="no source is packed to rows that are shorter"):
        plan_of(values)


def test_shares_change_over_whole_steps(corpus: tuple[Plan, list[tuple[int, ...]]]) -> None:
    plan, _ = corpus
    folder = Path(plan.sources[0].url).parent.parent
    values = spec(folder)
    values["phases"]["all"]["weights"] = {
        "to-16": {"from": 0.3, "to": 0},
        "to-32": 0.2,
        "to-64": {"from": 0.5, "to": 0.8},
    }
    values["phases"]["all"]["tokens"] = 100 * L
    changing = plan_of(values)
    lengths = [batches[0].tokens.shape[1] for batches in Loader(changing, micro_batch=5)]
    early, late = lengths[:10], lengths[10:]
    assert early.count(16) > late.count(16) and early.count(64) < late.count(64)
    assert np.sum(early) < np.sum(late)


def served(plan: Plan) -> list[tuple[int, bytes, float]]:
    """Return the model's length, the digest and the sum of weights of each row."""
    return [
        (batch.tokens.shape[1], batch.digests[0], float(batch.weights.sum()))
        for batches in Loader(plan, micro_batch=1)
        for batch in batches
    ]


def test_a_refilled_row_keeps_its_length(corpus: tuple[Plan, list[tuple[int, ...]]]) -> None:
    folder = Path(corpus[0].sources[0].url).parent.parent
    (folder / "drop.txt").write_text("".join(f"id-{number}\n" for number in range(0, 1200, 40)))
    without = {"without": [str(folder / "drop.txt")]}
    plans = [plan_of(spec(folder, **without, refill=refill)) for refill in (False, True)]
    rows = zip(served(corpus[0]), *map(served, plans), strict=True)
    changed = 0
    for (length, digest, weight), (_, _, masked), (new_length, new_digest, _) in rows:
        assert new_length == length
        assert new_digest != digest or masked == weight
        changed += new_digest != digest
    assert changed == sum(len(source.refills) for source in plans[1].sources) > 5
    digests = [digest for _, digest, _ in served(plans[1])]
    assert len({*digests}) == len(digests)


def test_kept_decisions_of_another_run_begin_with_a_step(
    corpus: tuple[Plan, list[tuple[int, ...]]], tmp_path: Path
) -> None:
    """A run without steps by length decides at a row within a step of its branch."""
    folder = Path(corpus[0].sources[0].url).parent.parent
    parent = plan_of(spec(folder, steps_by_length=False))
    shares = {"to-16": 0.5, "to-64": 0.5}
    decision = decide_by_hand(OrderStream(parent), [], shares, 10, None, "")
    parent.save(tmp_path / decisions.PLAN)
    decisions.append(tmp_path / decisions.NAME, decision)
    values = spec(folder, sources={})
    values["after"] = {"run": str(tmp_path), "step": 5, "decisions": "keep"}
    values["phases"] = {"more": {**values["phases"]["all"], "tokens": 90 * L, "batch": 4 * L}}
    branch = plan_of(values)
    assert [stretch.rows for stretch in branch.phases[0].stretches] == [28, 60]
    assert sum(len(batches) for batches in Loader(branch, micro_batch=4)) == 22
