"""Mixtures that continue a run: sources, positions, debts, and their errors."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from support.data.plan_data import served, write_run

from headrace.console.errors import ConfigError
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.stream import Stream
from headrace.dataplane.storage import storage
from headrace.mixtures.mixture_file.mixture import After, Mixture, PhaseSpec, SourceSpec
from headrace.mixtures.planning.open_plan import OpenedPlan
from headrace.mixtures.planning.resolve_mixture import resolve
from headrace.mixtures.view.summary import summarize
from headrace.mixtures.view.table import format_table


def phase(tokens, weights, **options):
    return PhaseSpec(tokens=tokens, weights=weights, **options)


@pytest.fixture
def parent(tmp_path, head):
    """A run of two sources, stopped in the middle."""
    mixture = Mixture(
        seed=3,
        chunk=64,
        window=4,
        sources={
            "web": SourceSpec(data=head("web", 12_000)),
            "code": SourceSpec(data=head("code", 4_000)),
        },
        phases={
            "stable": phase(4_096, {"web": 0.75, "code": 0.25}, seq_len=16, batch=128),
            "tail": phase(1_024, {"web": 0.5, "code": 0.5}),
        },
    )
    plan = resolve(mixture)
    write_run(tmp_path / "run", plan, steps=20)
    return mixture, plan


def branch_of(tmp_path: Path, step: int | None = 20, **options) -> Mixture:
    return Mixture(after=After(run=str(tmp_path / "run"), step=step), **options)


def consumed(plan: Plan, step: int):
    return served(plan, last=plan.step(step).first_row)


def test_an_extended_phase_serves_the_same_rows_as_a_longer_one(tmp_path, parent):
    mixture, _ = parent
    longer = resolve(
        replace(
            mixture,
            phases={"stable": phase(8_192, {"web": 0.75, "code": 0.25}, seq_len=16, batch=128)},
        )
    )
    child = resolve(branch_of(tmp_path, phases={"more": phase(2_048, {"stable": 1})}))
    assert (child.first_row, child.first_step) == (20 * 8, 20)
    assert child.phases[0].first_token == 20 * 128
    assert served(child) == served(longer, first=child.first_row, last=child.end_row)


def test_sources_of_the_run_need_not_be_repeated(tmp_path, parent):
    child = resolve(branch_of(tmp_path, phases={"more": phase(1_024, {"web": 1})}))
    _, plan = parent
    assert max((consumed(plan, 20) + served(child)).values()) == 1
    assert {s.name for s in child.sources} == {"web", "code"}


@pytest.mark.parametrize("seq_len", [16, 48])
def test_a_sorted_source_that_is_not_repeated_keeps_its_order(tmp_path, parent, seq_len):
    """Also one that the branch does not draw from, and in chunks of another size."""
    _, plan = parent
    falling = tuple(
        replace(source, order=replace(source.order, direction=-1)) for source in plan.sources
    )
    write_run(tmp_path / "run", replace(plan, sources=falling))
    phases = {"more": phase(4_096, {"web": 1}, seq_len=seq_len, batch=4 * seq_len)}
    branch = resolve(branch_of(tmp_path, phases=phases))
    for source in branch.sources:
        order, chunks = source.order, 4 * 64 // source.order.chunk
        assert (order.direction, order.window) == (-1, max(1, chunks))


def test_the_default_step_is_that_of_the_newest_checkpoint(tmp_path, parent):
    assert resolve(branch_of(tmp_path, None, phases={"x": phase(128, {"web": 1})})).first_step == 20
    (tmp_path / "run/checkpoints/step-00000020").rmdir()
    with pytest.raises(ConfigError, match="no checkpoint yet"):
        resolve(branch_of(tmp_path, None, phases={"x": phase(128, {"web": 1})}))


def test_a_source_is_added_to_a_running_run(tmp_path, parent, head):
    _, plan = parent
    child = resolve(
        branch_of(
            tmp_path,
            sources={"math": SourceSpec(data=head("math", 3_000))},
            phases={"more": phase(2_048, {"stable": 0.5, "math": 0.5})},
        )
    )
    taken = served(child)
    assert max((consumed(plan, 20) + taken).values()) == 1
    counts = {
        name: sum(1 for source, *_ in taken if source == name) for name in ("web", "code", "math")
    }
    expected = {"web": 768, "code": 256, "math": 1_024}
    assert all(abs(counts[name] - expected[name]) < 2 * 16 for name in expected), counts


@pytest.mark.parametrize("added", [1_000, 16, 5])
def test_a_grown_dataset_serves_its_remaining_and_its_new_tokens(tmp_path, parent, head, added):
    _, plan = parent
    head("code", added)
    child = resolve(branch_of(tmp_path, phases={"more": phase(1_024, {"code": 1})}))
    assert max((consumed(plan, 20) + served(child)).values()) == 1
    pinned = next(s for s in child.sources if s.name == "code")
    assert pinned.generations == 1  # inherited as the run had it
    url = str(tmp_path / "code")
    child = resolve(
        branch_of(
            tmp_path,
            sources={"code": SourceSpec(data=url)},
            phases={"more": phase(1_024, {"code": 1})},
        )
    )
    taken = served(child)
    assert max((consumed(plan, 20) + taken).values()) == 1
    assert max(token for _, _, token in taken) < 4_000 + added - 1


def test_new_tokens_are_served_after_the_old_ones_are_used_up(tmp_path, head):
    url = head("web", 1_025)
    weights = {"web": 1}
    whole = Mixture(
        sources={"web": SourceSpec(data=url)},
        phases={"all": phase(1_024, weights, seq_len=16, batch=128)},
        chunk=64,
        window=4,
    )
    plan = resolve(whole)
    write_run(tmp_path / "run", plan)
    child = branch_of(tmp_path, 8, phases={"more": phase(512, weights)})
    with pytest.raises(ConfigError, match="runs dry at row 64"):
        resolve(child)
    head("web", 512)
    child = resolve(replace(child, sources={"web": SourceSpec(data=url)}))
    assert served(plan) + served(child) == {("web", 0, token): 1 for token in range(1_536)}


def test_rows_longer_than_the_chunks_of_the_run_start_on_untouched_chunks(tmp_path, parent):
    _, plan = parent
    child = resolve(
        branch_of(tmp_path, phases={"long": phase(1_024, {"web": 1}, seq_len=256, batch=256)})
    )
    assert child.sources[0].order.chunk % 256 == 0
    before, after = consumed(plan, 20), served(child)
    assert after and max((before + after).values()) == 1


def test_a_grandchild_does_not_repeat_tokens_of_the_grandparent(tmp_path, parent, head):
    _, plan = parent
    middle = resolve(
        branch_of(
            tmp_path,
            sources={"math": SourceSpec(data=head("math", 2_000))},
            phases={"math-only": phase(512, {"math": 1})},
        )
    )
    write_run(tmp_path / "middle", middle)
    last = resolve(
        Mixture(
            after=After(run=str(tmp_path / "middle"), step=23),
            phases={"back": phase(2_048, {"web": 0.5, "code": 0.25, "math": 0.25}, seq_len=32)},
        )
    )
    total = consumed(plan, 20) + served(middle, last=middle.step(23).first_row) + served(last)
    assert max(total.values()) == 1
    assert len(served(last)) == 2_048


def test_a_phase_of_any_earlier_run_can_be_replayed(tmp_path, parent, head):
    """With its shares, and with sources that this mixture does not name."""
    middle = resolve(
        branch_of(
            tmp_path,
            sources={"math": SourceSpec(data=head("math", 2_000))},
            phases={"math-only": phase(512, {"math": 1})},
        )
    )
    write_run(tmp_path / "middle", middle)
    after = After(run=str(tmp_path / "middle"), step=24)
    last = resolve(
        Mixture(after=after, phases={"again": phase(2_048, {"stable": 0.5, "math-only": 0.5})})
    )
    rows = Stream(last).counts(last.end_row) * 16
    taken = dict(zip((s.name for s in last.sources), rows.tolist(), strict=True))
    expected = {"web": 768, "code": 256, "math": 1_024}
    assert all(abs(taken[name] - expected[name]) <= 16 for name in expected), taken
    with pytest.raises(ConfigError, match="has a phase of this name"):
        resolve(Mixture(after=after, phases={"stable": phase(128, {"math": 1})}))


def test_a_run_on_an_object_store_is_continued(tmp_path, parent):
    _, plan = parent
    url = f"memory://{tmp_path.name}/runs/first"
    phases = {"more": phase(1_024, {"web": 1})}
    plan.save(f"{url}/plan.json")
    with pytest.raises(ConfigError, match="no checkpoint yet"):
        resolve(Mixture(after=After(run=url), phases=phases))
    for step in (8, 20, 12):
        storage.write(f"{url}/checkpoints/step-{step:08d}/model.bin", b"weights")
    storage.write(f"{url}/checkpoints/latest", b"a file")
    child = resolve(Mixture(after=After(run=url), phases=phases))
    assert (child.first_step, child.first_row) == (20, 160)


def test_a_branch_carries_debts_that_one_row_cannot_hold(tmp_path, head):
    """When the run is left, two of twenty sources with equal shares are owed 0.9 rows; with shares
    of 0.41, one of them is owed 1.31 after the next row, whichever is served."""
    names = [f"s{number}" for number in range(20)]
    sources = {name: SourceSpec(data=head(name, 900)) for name in names}
    phases = {"even": phase(640, dict.fromkeys(names, 0.05), seq_len=16, batch=32)}
    plan = resolve(Mixture(sources=sources, phases=phases))
    write_run(tmp_path / "run", plan)
    owed = Stream(plan).debts(18)
    late = [name for name, debt in zip(names, owed, strict=True) if debt > 0]
    assert len(late) == 2 and max(owed) == Fraction(9, 10) * 16
    shares = {name: 0.41 if name in late else 0.01 for name in names}
    target = OpenedPlan(
        Stream(resolve(branch_of(tmp_path, 9, phases={"uneven": phase(640, shares)})))
    )
    assert list(target.plan.debts) == owed
    rows = range(target.plan.first_row, target.plan.end_row + 1)
    worst = [max(map(abs, target.stream.debts(row))) for row in rows]
    assert 16 < max(worst) < 2 * 16
    assert max(worst[20:]) < 16, "they are paid"
    summary = summarize(target.stream, target.branch)
    assert summary.continues is not None
    for source in summary.continues.sources:
        whole = Fraction(144, 10) if source.source in late else Fraction(-16, 10)
        assert (source.owed, source.unpaid) == (round(whole), 0)
    assert "does not carry" not in format_table(summary)


@pytest.mark.parametrize("added", [0, 160])
def test_an_epoch_is_not_restarted_after_a_run_that_did_not_draw_from_it(tmp_path, head, added):
    """The grandparent reads one and a half epochs; the parent has other chunks and reads none."""
    sources = {
        "web": SourceSpec(data=head("web", 801), max_epochs=9),
        "code": SourceSpec(data=head("code", 8_001), max_epochs=9),
    }

    def run_of(name: str, before: Plan | None, chunk: int | None, drawn: str, tokens: int) -> Plan:
        after = before and After(run=str(tmp_path / before.phases[0].name), step=before.end_step)
        plan = resolve(
            Mixture(
                after=after,
                sources=sources,
                chunk=chunk,
                window=2,
                phases={name: phase(tokens, {drawn: 1}, seq_len=8, batch=8)},
            )
        )
        write_run(tmp_path / name, plan)
        return plan

    grandparent = run_of("grandparent", None, 16, "web", 1_200)
    parent = run_of("parent", grandparent, 32, "code", 80)
    if added:
        head("web", added)
    child = run_of("child", parent, None, "web", 1_600)
    taken = served(grandparent) + served(parent) + served(child)
    assert max(taken.values()) == 1


def test_all_problems_of_a_continuing_mixture_are_reported_together(tmp_path, parent, head):
    unrelated = head("other", 9_000)
    mixture = branch_of(
        tmp_path,
        sources={
            "web": SourceSpec(data=unrelated),
            "again": SourceSpec(data=str(tmp_path / "code")),
            "alien": SourceSpec(data=head("alien", 900, fingerprint="else")),
        },
        phases={"stable": phase(1_024, {"web": 0.5, "again": 0.25, "alien": 0.25})},
    )
    with pytest.raises(ConfigError) as caught:
        resolve(mixture)
    text = str(caught.value)
    for part in (
        "phases.stable: the run that this mixture continues has a phase of this name",
        "sources.web.data: is not the dataset that the run uses under this name",
        "sources.again.data: is the run's source code",
        "sources.alien.data: was built with another tokenizer",
    ):
        assert part in text, part


def test_the_tokenizer_of_the_run_decides_even_against_a_majority(tmp_path, parent, head):
    aliens = {
        name: SourceSpec(data=head(name, 900, fingerprint="else", vocab_size=77))
        for name in ("one", "two", "three")
    }
    mixture = branch_of(
        tmp_path,
        sources=aliens,
        phases={"a": phase(1_024, {"web": 0.25, "one": 0.25, "two": 0.25, "three": 0.25})},
    )
    with pytest.raises(ConfigError) as caught:
        resolve(mixture)
    assert {problem.path for problem in caught.value.problems} == {
        f"sources.{name}.data" for name in aliens
    }
    assert "than the run that this mixture continues" in str(caught.value)


def test_an_unreadable_run_does_not_hide_other_problems(tmp_path, parent, head):
    mixture = Mixture(
        after=After(run=str(tmp_path / "nowhere"), step=3),
        sources={"math": SourceSpec(data=head("math", 100))},
        phases={"a": phase(1_024, {"math": -0.5, "stable": 1.5})},
    )
    with pytest.raises(ConfigError) as caught:
        resolve(mixture)
    assert {problem.path for problem in caught.value.problems} == {"after", "phases.a.weights.math"}
    with pytest.raises(ConfigError, match=r"no step 41: its plan covers steps 0 to 40"):
        resolve(branch_of(tmp_path, 41, phases={"a": phase(128, {"web": 1})}))


def test_fewer_generations_than_the_run_used_are_refused(tmp_path, head):
    url = head("web", 1_000, 1_000)
    weights = {"web": 1}
    whole = Mixture(
        sources={"web": SourceSpec(data=url)},
        phases={"all": phase(1_024, weights, seq_len=16, batch=128)},
    )
    write_run(tmp_path / "run", resolve(whole))
    with pytest.raises(ConfigError, match="the run has already used 2 generations"):
        resolve(
            branch_of(
                tmp_path,
                4,
                sources={"web": SourceSpec(data=url, generations=1)},
                phases={"b": phase(128, weights)},
            )
        )
