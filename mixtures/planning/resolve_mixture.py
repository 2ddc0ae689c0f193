"""A mixture and its datasets' manifests become a plan: exact rows, tokens and epochs.

    YAML → Mixture → shares as fractions → rows, rounded to whole updates → Plan, checked for supply

Everything that is wrong is reported together, with lines, before anything starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path

from ...console.errors import ConfigError, UserError
from ...dataplane.order.apportionment import carried
from ...dataplane.order.plan import Phase, Plan, PlanSource
from ...dataplane.order.source_order import Position, SourceOrder
from ...dataplane.order.stream import Stream
from ..spec.check import Finding, check_mixture
from ..spec.mixture import Mixture, sized_phases
from ..spec.tolerant_read import Draft, read
from .branch_point import (
    BranchPoint,
    continued_order,
    inherited_debts,
    open_branch_point,
    replayed_shares,
    source_conflicts,
    with_inherited_sources,
)
from .open_sources import OpenedSource, open_sources, source_mismatches, sources_too_short
from .shares import Shares, average, phase_shares, stretches

CHUNK_TOKENS = 1 << 23
SMALL_CHUNKS = 256
"""Into how many chunks a source too small for chunks of CHUNK_TOKENS is cut, if rows allow it."""
WINDOW_CHUNKS = 32
"""benchmarks/shuffle.py shows what chunks and windows give and cost."""
WINDOW_PART = 8
"""A change of sequence length passes over a window at most: so much of a small source at most."""


def resolve_file(file: str | Path, overrides: Sequence[str] = ()) -> Plan:
    """The plan of a mixture YAML. Relative paths in it are relative to where one stands."""
    return resolve_draft(read(file, overrides)).plan


def resolve(mixture: Mixture) -> Plan:
    """The plan of a mixture."""
    return resolve_draft(Draft(mixture, "the mixture")).plan


def resolve_draft(draft: Draft) -> Stream:
    """The plan of a mixture that was read, as a stream; or all that is wrong with it."""
    mixture, branch = draft.mixture, None
    found: list[Finding] = []
    if mixture.after is not None:
        try:
            branch = open_branch_point(mixture.after)
        except UserError as error:
            found.append(Finding(("after",), error.what))
    names_incomplete = draft.lacks_section or (mixture.after is not None and branch is None)
    inherited = branch.inherited if branch else None
    found += check_mixture(
        mixture, inherited, unreadable=draft.unreadable_names, names_incomplete=names_incomplete
    )
    if branch:
        mixture = with_inherited_sources(mixture, branch)
    opened, wrong = open_sources(mixture.sources)
    found += wrong
    told = {finding.path for finding in found}
    meant = (branch.plan.tokenizer, branch.plan.vocab_size) if branch else None
    clashes = source_mismatches(opened, meant)
    found += [clash for clash in clashes if clash.path not in told]
    found += sources_too_short(mixture, opened, inherited.seq_len if inherited else None)
    if branch:
        found += source_conflicts(branch, opened)
    problems = [*draft.problems, *filter(None, map(draft.problem, found))]
    if problems:
        raise ConfigError(draft.source, problems)
    stream = Stream(_plan(mixture, opened, branch))
    short = [
        Finding(("phases", each.phase, "tokens"), f"{each.source}: {each.why}")
        for each in stream.shortages()
    ]
    if short:
        raise ConfigError(
            draft.source,
            [problem for problem in map(draft.problem, short) if problem],
            hint="lower the source's weight, shorten the phase, add data, or allow more with "
            "`max_epochs`",
        )
    return stream


def _plan(mixture: Mixture, opened: Mapping[str, OpenedSource], branch: BranchPoint | None) -> Plan:
    before = {source.name: source for source in branch.plan.sources} if branch else {}
    # What the run before has read and this mixture does not weigh is carried along.
    names = [*mixture.sources, *(name for name in before if name not in mixture.sources)]
    phases = _phases(mixture, names, branch)
    lengths = sorted({phase.seq_len for phase in phases})
    planned = []
    for name in names:
        tokens = opened[name].tokens if name in opened else before[name].order.tokens
        chunk, window = _chunking(
            mixture, tokens, lengths, before[name].order if name in before else None
        )
        order = SourceOrder(seed=mixture.seed, name=name, tokens=tokens, chunk=chunk, window=window)
        start = Position()
        if branch and name in before:
            index = branch.plan.sources.index(before[name])
            order, start = continued_order(order, branch, index, phases[0].seq_len, lengths)
        source = opened.get(name)
        planned.append(
            PlanSource(
                name=name,
                url=source.spec.data if source else before[name].url,
                dataset=source.hash if source else before[name].dataset,
                generations=len(source.generations) if source else before[name].generations,
                max_epochs=source.spec.max_epochs if source else before[name].max_epochs,
                order=order,
                start=start,
            )
        )
    tokenizer = next(iter(opened.values())).manifest.tokenizer
    plan = Plan(
        seed=mixture.seed,
        sources=tuple(planned),
        phases=tuple(phases),
        tokenizer=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        isolate_documents=mixture.isolate_documents,
        parent=branch.parent if branch else None,
    )
    if branch is None:
        return plan
    return replace(plan, debts=tuple(carried(plan.segments(), inherited_debts(branch, plan))))


def _phases(mixture: Mixture, names: Sequence[str], branch: BranchPoint | None) -> list[Phase]:
    """The phases in rows, each rounded to whole updates."""
    row, step, token = (branch.row, branch.step, branch.token) if branch else (0, 0, 0)
    before = (branch.inherited.seq_len, branch.inherited.batch) if branch else (None, None)
    replays: dict[str, Shares] = replayed_shares(branch, names) if branch else {}
    phases = []
    for name, spec, seq_len, batch in (
        (each.name, each.spec, each.seq_len, each.batch) for each in sized_phases(mixture, *before)
    ):
        assert seq_len and batch, name
        batch_rows = max(1, round(Fraction(batch, seq_len)))
        rows = max(1, round(Fraction(spec.tokens, batch_rows * seq_len))) * batch_rows
        first, last = phase_shares(spec, names, replays)
        replays[name] = average(first, last)
        phases.append(
            Phase(
                name=name,
                first_row=row,
                first_step=step,
                first_token=token,
                rows=rows,
                seq_len=seq_len,
                batch_rows=batch_rows,
                stretches=stretches(name, rows, first, last),
                lr=asdict(spec.lr),
                asked_tokens=spec.tokens,
            )
        )
        row, step, token = row + rows, step + rows // batch_rows, token + rows * seq_len
    return phases


def _chunking(
    mixture: Mixture, tokens: int, lengths: Sequence[int], before: SourceOrder | None
) -> tuple[int, int]:
    """Tokens of a source's chunks, and chunks of its windows: what is asked for, what the run
    before had, or what suits its size."""
    common = math.lcm(*lengths)
    if mixture.chunk is not None:
        assert mixture.chunk % common == 0, "check.py has asked"
        chunk = mixture.chunk
    elif before is not None and before.chunk % common == 0:
        chunk = before.chunk
    else:
        most = max(1, CHUNK_TOKENS // common)
        chunk = common * min(most, max(1, tokens // (SMALL_CHUNKS * common)))
    if mixture.window is not None:
        return chunk, mixture.window
    if before is not None and chunk == before.chunk:
        return chunk, before.window
    return chunk, min(WINDOW_CHUNKS, max(1, tokens // chunk // WINDOW_PART))
