"""Summaries of plans against a walk over all rows, and against sets of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.plan_data import served, write_run

from headrace.dataplane.order.stream import Stream
from headrace.mixtures.mixture_file.mixture import After, Mixture, PhaseSpec, SourceSpec
from headrace.mixtures.planning.continuation import _intersect_spans
from headrace.mixtures.planning.open_plan import OpenedPlan
from headrace.mixtures.planning.resolve_mixture import resolve
from headrace.mixtures.view.summary import summarize
from headrace.mixtures.view.table import format_table, json_data


@pytest.fixture
def mixture(head):
    """Two sequence lengths, an epoch that ends, and a source of two phases."""
    return Mixture(
        chunk=64,
        window=4,
        sources={
            "web": SourceSpec(data=head("web", 9_000)),
            "code": SourceSpec(data=head("code", 1_500), max_epochs=4),
        },
        phases={
            "short": PhaseSpec(
                tokens=5_000, seq_len=16, batch=128, weights={"web": 0.6, "code": 0.4}
            ),
            "long": PhaseSpec(tokens=2_000, seq_len=32, weights={"short": 1}),
        },
    )


def test_summary_equals_a_walk_over_all_rows(mixture):
    plan = resolve(mixture)
    summary = summarize(Stream(plan))
    stream = Stream(plan)
    assert (summary.rows, summary.tokens, summary.hash) == (plan.rows, plan.tokens, plan.hash)
    for use, phase in zip(summary.phases, plan.phases, strict=True):
        located = stream.locate(np.arange(phase.first_row, phase.end_row))
        assert use.tokens_asked in (5_000, 2_000)
        assert use.tokens == phase.rows * phase.seq_len
        for index, source in enumerate(use.sources):
            rows = int((located.sources == index).sum())
            assert source.rows == rows
            assert source.tokens == rows * phase.seq_len
            assert source.share == rows / phase.rows
            size = plan.sources[index].order.tokens
            assert source.epochs == pytest.approx(rows * phase.seq_len / size)
    assert [use.share_asked for use in summary.phases[1].sources] == pytest.approx([0.6, 0.4])
    for index, total in enumerate(summary.total):
        assert total.tokens == sum(phase.sources[index].tokens for phase in summary.phases)


def test_every_token_of_an_epoch_is_taken_or_left_over(mixture):
    """Tokens taken and left over sum to the tokens of the epochs."""
    plan = resolve(mixture)
    summary = summarize(Stream(plan))
    taken = served(plan)
    for index, source in enumerate(plan.sources):
        size = source.order.tokens - 1  # the last token is only ever a target
        use = summary.total[index]
        here = [epoch for name, epoch, _ in taken if name == source.name]
        ended = int(use.stands_at)
        accounted = use.tokens + use.left_over
        assert use.stands_at == pytest.approx(accounted / size)
        in_ended = sum(1 for epoch in here if epoch < ended)
        assert ended * size - in_ended <= use.left_over
    assert summary.total[1].stands_at > 1 and summary.total[1].left_over > 0


def test_the_table_shows_every_column_and_note(mixture):
    text = format_table(summarize(Stream(resolve(mixture))), tokens_per_second=10)
    for part in (
        "phase short: 4,992 tokens (8 fewer than asked: rounded to whole steps)",
        "steps 0 to 39, rows 0 to 312; 8 rows of 16 tokens per step",
        "59.94%",
        "total epochs",
        "8m19s",
        "left over: tokens at the end of an epoch that do not fill a row.",
        "total",
    ):
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 120
    data = json_data(summarize(Stream(resolve(mixture))), tokens_per_second=10)
    assert data["phases"][0]["seconds"] == pytest.approx(499.2)
    assert sum(use["seconds"] for use in data["total"]) == pytest.approx(data["seconds"])


@pytest.mark.parametrize("seq_len", [16, 32, 256])
def test_a_continuing_plan_shows_inherited_positions_and_overlap(mixture, tmp_path, head, seq_len):
    parent = resolve(mixture)
    write_run(tmp_path / "run", parent)
    row = parent.step(21).first_row
    plan = resolve(
        Mixture(
            after=After(run=str(tmp_path / "run"), step=21),
            sources={
                "math": SourceSpec(data=head("math", 4_000)),
                "code": SourceSpec(data=str(tmp_path / "code"), max_epochs=9),
            },
            phases={
                "end": PhaseSpec(
                    tokens=3_000,
                    seq_len=seq_len,
                    batch=256,
                    weights={"web": 0.5, "math": 0.25, "code": 0.25},
                )
            },
        )
    )
    target = OpenedPlan(Stream(plan))
    summary = summarize(target.stream, target.branch)
    assert summary.continues is not None
    assert (summary.continues.step, summary.continues.row) == (21, row)
    mine, sibling = served(plan), served(parent, first=row)
    before = served(parent, last=row)
    for source in summary.continues.sources:
        child_tokens = {key for key in mine if key[0] == source.source}
        sibling_tokens = {key for key in sibling if key[0] == source.source}
        assert source.sibling_tokens == len(sibling_tokens)
        assert source.shared_tokens == len(child_tokens & sibling_tokens)
        taken = sum(1 for name, *_ in before if name == source.source)
        size = next(s.order.tokens for s in parent.sources if s.name == source.source) - 1
        assert source.stands_at == pytest.approx(taken / size, abs=16 / size)
    assert "overlap" in format_table(summary)
    alone = summarize(target.stream)  # as for a plan.json whose parent run cannot be read
    assert f"continues plan {parent.hash} at row {row:,}" in format_table(alone)
    assert "overlap" not in format_table(alone)
    assert any(source.shared_tokens for source in summary.continues.sources)


spans = st.lists(st.integers(0, 60), max_size=12, unique=True).map(
    lambda edges: np.array(sorted(edges)[: len(edges) // 2 * 2], np.int64).reshape(-1, 2)
)


@given(spans, spans)
@settings(max_examples=200, deadline=None)
def test_common_spans_equal_the_intersection_of_sets(ours, theirs):
    def tokens(spans):
        return {token for start, end in spans.tolist() for token in range(start, end)}

    assert tokens(_intersect_spans(ours, theirs)) == tokens(ours) & tokens(theirs)
    # Spans that touch count once.
    if len(ours):
        halves = np.array(
            [[s, (s + e) // 2] for s, e in ours] + [[(s + e) // 2, e] for s, e in ours]
        )
        halves = halves[np.argsort(halves[:, 0], kind="stable")]
        halves = halves[halves[:, 0] < halves[:, 1]]
        assert tokens(_intersect_spans(halves, theirs)) == tokens(ours) & tokens(theirs)
