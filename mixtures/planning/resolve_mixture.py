"""Resolve a mixture and the manifests of its datasets into a plan: exact rows, tokens, epochs.

    YAML → Mixture → shares as fractions → rows, rounded to whole steps → Plan → supply check

All problems are reported together, with line numbers, before anything starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path

from ...console.errors import ConfigError, UserError
from ...dataplane.order.plan import CUT, FAIR, TABLES, Phase, Plan, PlanSource
from ...dataplane.order.source_order import Position, SourceOrder
from ...dataplane.order.stream import Stream
from ..spec.check import Finding, check_mixture
from ..spec.mixture import Mixture, PhaseSpec, Weight, sized_phases, temperature_of
from ..spec.tolerant_read import Draft, read
from .branch_point import (
    BranchPoint,
    check_checkpoint,
    continued_order,
    inherited_debts,
    open_branch_point,
    replayed_shares,
    source_conflicts,
    with_inherited_sources,
)
from .continuation import epochs_consumed
from .open_sources import OpenedSource, open_sources, source_mismatches, unfit_rows
from .shares import Shares, average, fits_tables, line, phase_shares, stretches
from .size_weights import Supply, size_weights

CHUNK_TOKENS = 1 << 23
SMALL_CHUNKS = 256
"""Number of chunks of a source that is too small for chunks of CHUNK_TOKENS, if rows allow it."""
WINDOW_CHUNKS = 32
"""benchmarks/shuffle.py measures how well chunks and windows shuffle, and what they cost."""
WINDOW_FRACTION = 8
"""A window is at most this fraction (1/8) of a small source: a change of sequence length moves at
most one window to the end of the epoch."""


def resolve_file(file: str | Path, overrides: Sequence[str] = ()) -> Plan:
    """Return the plan of a mixture YAML. Its relative paths start at the working directory."""
    return resolve_draft(read(file, overrides)).plan


def resolve(mixture: Mixture) -> Plan:
    """Return the plan of a mixture."""
    return resolve_draft(Draft(mixture, "the mixture")).plan


def resolve_draft(draft: Draft) -> Stream:
    """Return the plan of a mixture as a stream, or raise ConfigError with all its problems."""
    return resolve_with_sources(draft)[0]


def resolve_with_sources(draft: Draft) -> tuple[Stream, dict[str, OpenedSource]]:
    """Return the plan of a mixture as a stream, and the datasets of its sources."""
    mixture, branch = draft.mixture, None
    findings: list[Finding] = []
    if mixture.after is not None:
        try:
            branch = open_branch_point(mixture.after)
            check_checkpoint(mixture.after)
        except UserError as error:
            findings.append(Finding(("after",), error.what))
    names_incomplete = draft.lacks_section or (mixture.after is not None and branch is None)
    inherited = branch.inherited if branch else None
    findings += check_mixture(
        mixture, inherited, unreadable=draft.unreadable_names, names_incomplete=names_incomplete
    )
    if branch:
        mixture = with_inherited_sources(mixture, branch)
    opened, source_findings = open_sources(mixture.sources)
    findings += source_findings
    reported = {finding.path for finding in findings}
    tokenizer = (branch.plan.tokenizer, branch.plan.vocab_size) if branch else None
    mismatches = source_mismatches(opened, tokenizer)
    findings += [mismatch for mismatch in mismatches if mismatch.path not in reported]
    findings += unfit_rows(mixture, opened, inherited.seq_len if inherited else None)
    if branch:
        findings += source_conflicts(branch, opened)
    problems = [*draft.problems, *filter(None, map(draft.problem, findings))]
    if problems:
        raise ConfigError(draft.source, problems)
    stream = Stream(_plan(mixture, opened, branch))
    shortages = [
        Finding(("phases", shortage.phase, "tokens"), f"{shortage.source}: {shortage.why}")
        for shortage in stream.shortages()
    ]
    if shortages:
        raise ConfigError(
            draft.source,
            [problem for problem in map(draft.problem, shortages) if problem],
            hint="lower the source's weight, shorten the phase, add data, or raise `max_epochs`",
        )
    return stream, opened


def _plan(mixture: Mixture, opened: Mapping[str, OpenedSource], branch: BranchPoint | None) -> Plan:
    before = {source.name: source for source in branch.plan.sources} if branch else {}
    # Sources of the run that this mixture does not use stay in the plan, with their positions.
    names = [*mixture.sources, *(name for name in before if name not in mixture.sources)]
    lengths = _lengths(mixture, branch)
    version, phases = _phases(mixture, opened, names, branch)
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
    changes = len({phase.seq_len for phase in phases}) > 1
    plan = Plan(
        version=version + CUT if branch or changes else version,
        seed=mixture.seed,
        sources=tuple(planned),
        phases=tuple(phases),
        tokenizer=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        isolate_documents=mixture.isolate_documents,
        parent=branch.parent if branch else None,
    )
    return replace(plan, debts=inherited_debts(branch, names)) if branch else plan


def _lengths(mixture: Mixture, branch: BranchPoint | None) -> list[int]:
    """Return the sequence lengths of the phases."""
    before = branch.inherited.seq_len if branch else None
    return sorted({sized.seq_len for sized in sized_phases(mixture, before, None) if sized.seq_len})


def _supply(
    mixture: Mixture, opened: Mapping[str, OpenedSource], branch: BranchPoint | None
) -> Supply:
    """Return the tokens that each source has left at the start of the plan."""
    left = {}
    before = (
        {source.name: index for index, source in enumerate(branch.plan.sources)} if branch else {}
    )
    for name, source in opened.items():
        epochs = 0.0
        if branch and name in before:
            order = branch.plan.sources[before[name]].order
            position = branch.positions[before[name]]
            epochs = epochs_consumed(order, position, branch.last_phase.seq_len)
        left[name] = source.spec.max_epochs * (source.tokens - 1) - epochs * source.tokens
    return Supply(left, branch.inherited.seq_len if branch else 0)


def _with_shares(
    name: str,
    spec: PhaseSpec,
    temperature: float,
    rows: int,
    supply: Supply,
    opened: Mapping[str, OpenedSource],
) -> tuple[PhaseSpec, str]:
    """Return a phase with the shares that follow from the sizes of its sources, and the rule."""
    sizes = {name: source.tokens for name, source in opened.items()}
    most = {name: supply.rows(name, source.spec.max_epochs) for name, source in opened.items()}
    weights, limited = size_weights(name, sizes, temperature, rows, most)
    rule = "proportional to the sizes of the sources"
    if temperature != 1:
        rule = f"proportional to the sizes of the sources to the power of 1/{temperature:g}"
    if limited:
        rule += f"; max_epochs limits {', '.join(limited)}"
    return replace(spec, weights=dict[str, Weight](weights)), rule


def _phases(
    mixture: Mixture,
    opened: Mapping[str, OpenedSource],
    names: Sequence[str],
    branch: BranchPoint | None,
) -> tuple[int, list[Phase]]:
    """Return the plan's version, and the phases in rows, each rounded to whole steps."""
    row, step, token = (branch.row, branch.step, branch.token) if branch else (0, 0, 0)
    before = (branch.inherited.seq_len, branch.inherited.batch) if branch else (None, None)
    replays: dict[str, Shares] = replayed_shares(branch, names) if branch else {}
    supply, known = _supply(mixture, opened, branch), {*names, *mixture.phases, *replays}
    phases: list[Phase] = []
    sides: list[tuple[Shares, Shares]] = []
    for sized in sized_phases(mixture, *before):
        name, spec, seq_len, batch = sized.name, sized.spec, sized.seq_len, sized.batch
        assert seq_len and batch, name
        batch_rows = max(1, round(Fraction(batch, seq_len)))
        rows = max(1, round(Fraction(spec.tokens, batch_rows * seq_len))) * batch_rows
        supply.change_length(seq_len)
        temperature, rule = temperature_of(spec, known), ""
        if temperature is not None:
            spec, rule = _with_shares(name, spec, temperature, rows, supply, opened)
        first, last = phase_shares(spec, names, replays)
        replays[name] = average(first, last)
        drawn = dict(zip(names, map(float, replays[name]), strict=True))
        supply.take({name: drawn[name] for name in opened}, rows * seq_len)
        phases.append(
            Phase(
                name=name,
                first_row=row,
                first_step=step,
                first_token=token,
                rows=rows,
                seq_len=seq_len,
                batch_rows=batch_rows,
                stretches=(),
                lr=asdict(spec.lr),
                asked_tokens=spec.tokens,
                weights_rule=rule,
            )
        )
        sides.append((first, last))
        row, step, token = row + rows, step + rows // batch_rows, token + rows * seq_len
    # Tables could not carry all debts of the run that is continued.
    version = TABLES if branch is None and all(fits_tables(*both) for both in sides) else FAIR
    return version, [
        replace(
            phase,
            stretches=stretches(phase.rows, *both)
            if version == TABLES
            else (line(phase.rows, *both),),
        )
        for phase, both in zip(phases, sides, strict=True)
    ]


def _chunking(
    mixture: Mixture, tokens: int, lengths: Sequence[int], before: SourceOrder | None
) -> tuple[int, int]:
    """Return the tokens of a source's chunks, and the number of chunks of its windows.

    They come from the mixture, else from the run that it continues, else from the source's size.
    """
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
