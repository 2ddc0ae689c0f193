"""Resolve a mixture and its datasets' manifests into a plan: exact rows, tokens, epochs.

    YAML → Mixture → shares as fractions → rows, rounded to whole steps → Plan → supply check

All problems are reported together, with line numbers, before anything starts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

from ...console.errors import UserError
from ...dataplane.order.plan import Phase, Plan, PlanSource, Stretch
from ...dataplane.order.source_order import Position, SourceOrder
from ...dataplane.order.stream import Stream
from ..mixture_file.check import MixtureFinding, check_mixture
from ..mixture_file.mixture import Mixture, find_temperature, sized_phases
from ..mixture_file.tolerant_read import Draft, read
from .branch_point import (
    BranchPoint,
    add_inherited_sources,
    check_checkpoint,
    continued_order,
    inherited_debts,
    keep_decisions,
    open_branch_point,
    replayed_shares,
    source_conflicts,
)
from .controlled import control_problems
from .open_sources import (
    OpenedSource,
    check_lengths,
    check_orders,
    open_sources,
    source_mismatches,
    unfit_rows,
)
from .refill import refill_rows
from .shares import Shares, average_shares, fit_tables, make_line, phase_shares, split_stretches
from .size_weights import describe_rule, size_weights
from .supply import rows_left
from .without import TokenSpans, check_unlearnt, find_unlearnt, warn_learnt_again

CHUNK_TOKENS = 1 << 23
SMALL_CHUNKS = 256
"""Chunks in a source too small for CHUNK_TOKENS, if rows allow it."""
WINDOW_CHUNKS = 32
"""benchmarks/shuffle.py measures how well chunks and windows shuffle, and what they cost."""
MAX_WITHHELD_ROWS = 3
"""Maximum rows that a rule may withhold from a source."""
WINDOW_FRACTION = 8
"""A window is at most 1/8 of a small source, because a change of sequence length can move a window
to the end of the epoch."""


def resolve_file(file: str | Path, overrides: Sequence[str] = ()) -> Plan:
    """Resolve a mixture YAML to a plan. Relative paths start at the working directory."""
    return resolve_draft(read(file, overrides)).plan


def resolve(mixture: Mixture) -> Plan:
    """Resolve a mixture to a plan."""
    return resolve_draft(Draft(mixture, "the mixture")).plan


def resolve_draft(draft: Draft) -> Stream:
    """Resolve a draft to a plan's stream, or raise ConfigError with all problems."""
    return resolve_with_sources(draft)[0]


def resolve_with_sources(draft: Draft) -> tuple[Stream, dict[str, OpenedSource]]:
    """Resolve a draft to a plan's stream, and open the datasets of its sources."""
    mixture, branch = draft.mixture, None
    findings: list[MixtureFinding] = []
    if mixture.after is not None:
        try:
            branch = open_branch_point(mixture.after)
            check_checkpoint(mixture.after)
        except UserError as error:
            findings.append(MixtureFinding(("after",), error.message))
    names_incomplete = draft.lacks_section or (mixture.after is not None and branch is None)
    inherited = branch.inherited if branch else None
    findings += check_mixture(
        mixture, inherited, unreadable=draft.unreadable_names, names_incomplete=names_incomplete
    )
    if branch:
        branch = replace(branch, listed=frozenset(mixture.sources))
        mixture = add_inherited_sources(mixture, branch)
    opened, source_findings = open_sources(mixture.sources)
    findings += source_findings
    reported = {finding.path for finding in findings}
    tokenizer = (branch.plan.tokenizer, branch.plan.vocab_size) if branch else None
    mismatches = source_mismatches(opened, tokenizer)
    findings += [mismatch for mismatch in mismatches if mismatch.path not in reported]
    findings += unfit_rows(mixture, opened, inherited.seq_len if inherited else None)
    findings += check_orders(opened)
    if not source_findings:
        findings += check_lengths(mixture, opened, inherited.seq_len if inherited else None)
    if branch:
        findings += source_conflicts(branch, opened)
    draft.refuse(findings)
    unlearnt = find_unlearnt(mixture.without, opened)
    draft.refuse(check_unlearnt(mixture.without, unlearnt))
    if branch:
        warn_learnt_again(mixture.without, branch.plan.sources, opened)
    stream = _resolve_stream(mixture, opened, branch, unlearnt)
    shortages = (
        MixtureFinding(("phases", shortage.phase, "tokens"), f"{shortage.source}: {shortage.why}")
        for shortage in stream.shortages()
    )
    draft.refuse(
        shortages,
        hint="lower the source's weight, shorten the phase, add data, or raise `max_epochs`",
    )
    findings = []
    if mixture.refill:
        stream, findings = refill_rows(stream)
    draft.refuse([*findings, *control_problems(stream.plan)])
    return stream, opened


def _resolve_stream(
    mixture: Mixture,
    opened: Mapping[str, OpenedSource],
    branch: BranchPoint | None,
    unlearnt: Mapping[str, TokenSpans],
) -> Stream:
    """Resolve a mixture to a stream without shortages of limited sources, if possible.

    The order may serve a row early. If a rule has assigned a source's last row, that is one row too
    many, so the row is withheld.
    """
    withheld_rows: Counter[str] = Counter()
    while True:
        stream = Stream(_resolve_plan(mixture, opened, branch, unlearnt, withheld_rows))
        limited = {name for phase in stream.plan.phases for name in phase.left_out}
        short = {shortage.source for shortage in stream.shortages()} & limited
        # A source of one length gets its rows in whole steps.
        unit = max(phase.batch_rows for phase in stream.plan.phases) if stream.plan.lengths else 1
        if not short or max(withheld_rows.values(), default=0) >= MAX_WITHHELD_ROWS * unit:
            return stream
        withheld_rows.update(dict.fromkeys(short, unit))


def _resolve_plan(
    mixture: Mixture,
    opened: Mapping[str, OpenedSource],
    branch: BranchPoint | None,
    unlearnt: Mapping[str, TokenSpans],
    withheld_rows: Mapping[str, int],
) -> Plan:
    before = {source.name: source for source in branch.plan.sources} if branch else {}
    # Sources of the run that this mixture does not use stay in the plan, with their positions.
    names = [*mixture.sources, *(name for name in before if name not in mixture.sources)]
    sources = _plan_sources(mixture, opened, names, branch, unlearnt)
    tokenizer = next(iter(opened.values())).manifest.tokenizer
    debts = inherited_debts(branch, names) if branch else ()
    lengths = _model_lengths(mixture, opened, names, branch) if mixture.steps_by_length else ()

    def build_plan(phases: Sequence[Phase]) -> Plan:
        return Plan(
            seed=mixture.seed,
            sources=sources,
            phases=tuple(phases),
            tokenizer=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            isolate_documents=mixture.isolate_documents,
            debts=debts,
            parent=branch.parent if branch else None,
            lengths=lengths,
        )

    phases, edge_shares_by_phase = _resolve_phases(
        mixture, opened, names, branch, partial(rows_left, build_plan, withheld_rows)
    )
    limited = any(phase.left_out for phase in phases)
    if (
        branch
        or limited
        or mixture.steps_by_length
        or not all(fit_tables(*edge_shares) for edge_shares in edge_shares_by_phase)
    ):
        plan = build_plan(phases)
        return plan if branch is None else keep_decisions(plan, branch)
    return build_plan(
        [
            replace(phase, stretches=split_stretches(phase.rows, *edge_shares))
            for phase, edge_shares in zip(phases, edge_shares_by_phase, strict=True)
        ]
    )


def _plan_sources(
    mixture: Mixture,
    opened: Mapping[str, OpenedSource],
    names: Sequence[str],
    branch: BranchPoint | None,
    unlearnt: Mapping[str, TokenSpans],
) -> tuple[PlanSource, ...]:
    """Resolve the sources, with their orders and first positions."""
    before = {source.name: source for source in branch.plan.sources} if branch else {}
    lengths = _sequence_lengths(mixture, branch)
    first = next(sized_phases(mixture, branch.inherited.seq_len if branch else None, None))
    planned = []
    for name in names:
        tokens = opened[name].tokens if name in opened else before[name].order.tokens
        chunk, window = _chunking(
            mixture, tokens, lengths, before[name].order if name in before else None
        )
        order = SourceOrder(seed=mixture.seed, name=name, tokens=tokens, chunk=chunk, window=window)
        if name in opened and (by_field := opened[name].spec.order) is not None:
            window = max(1, round(by_field.share * ((tokens - 1) // chunk)))
            order = replace(order, window=window, direction=1 if by_field.rising else -1)
        start = Position()
        if branch and name in before:
            index = branch.plan.sources.index(before[name])
            assert first.seq_len, first.name
            order, start = continued_order(order, branch, index, first.seq_len, lengths)
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
                unlearnt=unlearnt.get(name, ()),
            )
        )
    return tuple(planned)


def _sequence_lengths(mixture: Mixture, branch: BranchPoint | None) -> list[int]:
    """Collect the distinct sequence lengths of the phases, sorted."""
    before = branch.inherited.seq_len if branch else None
    return sorted({sized.seq_len for sized in sized_phases(mixture, before, None) if sized.seq_len})


def _model_lengths(
    mixture: Mixture,
    opened: Mapping[str, OpenedSource],
    names: Sequence[str],
    branch: BranchPoint | None,
) -> tuple[int, ...]:
    """Return, by source, the tokens of the model's rows; 0 if they are whole rows of all phases."""
    before = dict[str, int]()
    if branch and branch.plan.lengths:
        sources = [source.name for source in branch.plan.sources]
        before = dict(zip(sources, branch.plan.lengths, strict=True))
    whole = _sequence_lengths(mixture, branch)
    lengths = [
        (opened[name].bins or 0) if name in opened else before.get(name, 0) for name in names
    ]
    return tuple(0 if [length] == whole else length for length in lengths)


def _resolve_phases(
    mixture: Mixture,
    opened: Mapping[str, OpenedSource],
    names: Sequence[str],
    branch: BranchPoint | None,
    rows_left: Callable[[Sequence[Phase], int], Mapping[str, Fraction]],
) -> tuple[list[Phase], list[tuple[Shares, Shares]]]:
    """Resolve the phases, rounded to whole steps, and their exact shares at start and end.

    `rows_left` computes the remaining rows by source after a list of phases.
    """
    row, step, token = (branch.row, branch.step, branch.token) if branch else (0, 0, 0)
    before = (branch.inherited.seq_len, branch.inherited.batch) if branch else (None, None)
    replays: dict[str, Shares] = replayed_shares(branch, names) if branch else {}
    known = {*names, *mixture.phases, *replays}
    sizes = {name: source.tokens for name, source in opened.items()}
    phases: list[Phase] = []
    edge_shares_by_phase: list[tuple[Shares, Shares]] = []
    for sized in sized_phases(mixture, *before):
        name, spec, seq_len, batch = sized.name, sized.spec, sized.seq_len, sized.batch
        assert seq_len and batch, name
        batch_rows = max(1, round(Fraction(batch, seq_len)))
        rows = max(1, round(Fraction(spec.tokens, batch_rows * seq_len))) * batch_rows
        temperature, rule, left_out = find_temperature(spec, known), "", dict[str, int]()
        if temperature is None:
            first, last = phase_shares(spec, names, replays)
        else:
            remaining_rows = rows_left(phases, seq_len)
            sized_weights = size_weights(
                name, sizes, temperature, rows, {source: remaining_rows[source] for source in sizes}
            )
            rule = describe_rule(temperature, sized_weights)
            left_out = {source: count * seq_len for source, count in sized_weights.left_out.items()}
            first = tuple(sized_weights.shares.get(source, Fraction(0)) for source in names)
            last = first
        replays[name] = average_shares(first, last)
        stretches: tuple[Stretch, ...] = (make_line(rows, first, last),)
        if mixture.steps_by_length:  # shares are constant over whole steps
            stretches = tuple(
                replace(stair, rows=stair.rows * batch_rows)
                for stair in split_stretches(rows // batch_rows, first, last)
            )
        phases.append(
            Phase(
                name=name,
                first_row=row,
                first_step=step,
                first_token=token,
                rows=rows,
                seq_len=seq_len,
                batch_rows=batch_rows,
                stretches=stretches,
                lr=asdict(spec.lr),
                control=asdict(spec.control) if spec.control is not None else {},
                asked_tokens=spec.tokens,
                weights_rule=rule,
                left_out=left_out,
            )
        )
        edge_shares_by_phase.append((first, last))
        row, step, token = row + rows, step + rows // batch_rows, token + rows * seq_len
    return phases, edge_shares_by_phase


def _chunking(
    mixture: Mixture, tokens: int, lengths: Sequence[int], before: SourceOrder | None
) -> tuple[int, int]:
    """Choose a source's tokens per chunk and chunks per window: from the mixture, else from the
    continued run, else by size."""
    common = math.lcm(*lengths)
    if mixture.chunk is not None:
        assert mixture.chunk % common == 0, "check.py has checked it"
        chunk = mixture.chunk
    elif before is not None and before.chunk % common == 0:
        chunk = before.chunk
    else:
        largest = max(1, CHUNK_TOKENS // common)
        chunk = common * min(largest, max(1, tokens // (SMALL_CHUNKS * common)))
    if mixture.window is not None:
        return chunk, mixture.window
    if before is not None and chunk == before.chunk:
        return chunk, before.window
    return chunk, min(WINDOW_CHUNKS, max(1, tokens // chunk // WINDOW_FRACTION))
