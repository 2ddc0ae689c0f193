"""A mixture and its datasets' manifests become a plan: exact rows, tokens and epochs.

    YAML → Mixture → shares as fractions → rows, rounded to whole updates → Plan, checked for supply

Everything that is wrong is reported together, with lines, before anything starts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path

from ..console import config
from ..console.config import Lines
from ..console.errors import ConfigError, PlanError, Problem, UserError
from ..dataplane import manifest as manifests
from ..dataplane import storage
from ..dataplane.manifest import Generation, Manifest
from ..dataplane.plan import Parent, Phase, Plan, Source, Step, Stretch
from ..dataplane.source_order import Position, Rest, SourceOrder
from ..dataplane.stream import Stream
from . import check
from .shares import Shares, average, phase_shares, stretches
from .spec import Mixture, SourceSpec

CHUNK_TOKENS = 1 << 20
WINDOW_CHUNKS = 64
"""benchmarks/shuffle.py shows what these two give and cost."""


@dataclass(frozen=True)
class Opened:
    """A source with the generations that the plan pins."""

    spec: SourceSpec
    manifest: Manifest
    generations: tuple[Generation, ...]

    @property
    def tokens(self) -> int:
        return sum(generation.tokens for generation in self.generations)


@dataclass(frozen=True)
class Branch:
    """The run that a mixture continues: its plan, and the row from which on it is not followed."""

    plan: Plan
    stream: Stream
    row: int
    step: int
    token: int

    @property
    def parent(self) -> Parent:
        return Parent(hash=self.plan.hash, row=self.row)

    @property
    def last_phase(self) -> Phase:
        return self.plan.phase_at(max(self.row - 1, self.plan.first_row))


def resolve_file(file: str | Path, overrides: Sequence[str] = ()) -> Plan:
    """The plan of a mixture YAML. Relative paths in it are relative to where one stands."""
    data, lines = config.read_yaml(file)
    data = config.apply_overrides(data, overrides)
    mixture = config.build(Mixture, data, source=str(file), lines=lines)
    return resolve(mixture, source=str(file), lines=lines)


def resolve(mixture: Mixture, *, source: str = "the mixture", lines: Lines | None = None) -> Plan:
    """The plan of a mixture."""
    branch = open_branch(mixture) if mixture.after else None
    mixture = _with_inherited_sources(mixture, branch)
    earlier = {phase.name: phase for phase in branch.plan.phases} if branch else {}
    problems = list(check.problems(mixture, earlier))
    opened = _open_sources(mixture.sources, problems)
    if problems:
        raise ConfigError(source, _with_lines(problems, lines or {}))
    plan = _plan(mixture, opened, branch)
    Stream(plan).check_supply()
    return plan


def open_branch(mixture: Mixture) -> Branch:
    """Where in another run the mixture begins."""
    assert mixture.after is not None
    run = mixture.after.run
    plan = Plan.load(storage.join(run, "plan.json"))
    step = mixture.after.step
    if step is None:
        step = _newest_step(run)
    if not plan.first_step <= step <= plan.last_step:
        raise PlanError(
            f"the run {run} has no step {step}: its plan covers steps {plan.first_step} to "
            f"{plan.last_step}",
            mend="name a step of the run in `after.step`",
        )
    if step == plan.last_step:
        row, token = plan.last_row, plan.phases[-1].first_token + plan.phases[-1].tokens
    else:
        at: Step = plan.step(step)
        row, token = at.first_row, at.first_token
    return Branch(plan, Stream(plan), row, step, token)


def _newest_step(run: str) -> int:
    """The step at which a run's ledger ends."""
    lines = storage.read(storage.join(run, "ledger.jsonl")).decode().splitlines()
    if not lines:
        raise PlanError(f"the run {run} has not taken a step yet", mend="name one in `after.step`")
    return int(json.loads(lines[-1])["step"]) + 1


def _with_inherited_sources(mixture: Mixture, branch: Branch | None) -> Mixture:
    """Replaying a phase of the run before needs that phase's sources, where none is given."""
    if branch is None:
        return mixture
    names = {name for phase in mixture.phases.values() for name in phase.weights}
    sources = dict(mixture.sources)
    for phase in branch.plan.phases:
        drawn = _replayed(phase)
        for planned, share in zip(branch.plan.sources, drawn, strict=True):
            wanted = planned.name in names or (phase.name in names and share > 0)
            if wanted and planned.name not in sources:
                sources[planned.name] = SourceSpec(
                    data=planned.url,
                    max_epochs=planned.max_epochs,
                    generations=planned.generations,
                )
    return replace(mixture, sources=sources)


def _open_sources(specs: Mapping[str, SourceSpec], problems: list[Problem]) -> dict[str, Opened]:
    """The manifests of all sources, and what is wrong with them."""

    def open_one(name: str) -> Manifest | UserError:
        try:
            return manifests.load(specs[name].data)
        except UserError as error:
            return error

    opened: dict[str, Opened] = {}
    with ThreadPoolExecutor(max_workers=16) as pool:
        found = dict(zip(specs, pool.map(open_one, specs), strict=True))
    for name, manifest in found.items():
        if isinstance(manifest, UserError):
            problems.append(Problem(f"sources.{name}.data", manifest.what))
            continue
        wanted = specs[name].generations
        have = len(manifest.generations)
        if wanted is not None and wanted > have:
            problems.append(
                Problem(f"sources.{name}.generations", f"the dataset has {have}, not {wanted}")
            )
            continue
        opened[name] = Opened(specs[name], manifest, manifest.generations[:wanted])
        if not opened[name].tokens:
            problems.append(Problem(f"sources.{name}.data", "the dataset is empty"))
    problems += _disagreements(opened)
    return opened


def _disagreements(opened: Mapping[str, Opened]) -> list[Problem]:
    problems = []
    names = list(opened)
    for name in names[1:]:
        first, other = opened[names[0]].manifest.tokenizer, opened[name].manifest.tokenizer
        if other.fingerprint != first.fingerprint:
            problems.append(
                Problem(
                    f"sources.{name}.data",
                    f"was made with another tokenizer ({other.kind}, {other.vocab_size:,} ids, "
                    f"{other.fingerprint[:12]}) than source {names[0]} ({first.kind}, "
                    f"{first.vocab_size:,} ids, {first.fingerprint[:12]})",
                )
            )
    seen: dict[str, str] = {}
    for name, source in opened.items():
        hash = source.generations[-1].hash if source.generations else ""
        if hash in seen:
            problems.append(
                Problem(f"sources.{name}.data", f"is the dataset of source {seen[hash]} again")
            )
        seen[hash] = name
    return problems


def _plan(mixture: Mixture, opened: Mapping[str, Opened], branch: Branch | None) -> Plan:
    names = list(mixture.sources)
    phases = _phases(mixture, names, branch)
    lengths = sorted({phase.seq_len for phase in phases})
    chunk, window = _grain(mixture, lengths, branch)
    sources, debts = [], []
    inherited = {s.name: index for index, s in enumerate(branch.plan.sources)} if branch else {}
    for name in names:
        order = SourceOrder(
            seed=mixture.seed, name=name, tokens=opened[name].tokens, chunk=chunk, window=window
        )
        start = Position()
        if branch and name in inherited:
            order, start = _continued(order, branch, inherited[name], phases[0].seq_len, lengths)
        sources.append(
            Source(
                name=name,
                url=opened[name].spec.data,
                dataset=opened[name].generations[-1].hash,
                generations=len(opened[name].generations),
                max_epochs=opened[name].spec.max_epochs,
                order=order,
                start=start,
            )
        )
    if branch:
        debts = _inherited_debts(branch, names, phases[0].stretches[0])
    first = next(iter(opened.values())).manifest.tokenizer
    return Plan(
        seed=mixture.seed,
        sources=tuple(sources),
        phases=tuple(phases),
        tokenizer=first.fingerprint,
        vocab_size=first.vocab_size,
        isolate_documents=mixture.isolate_documents,
        debts=tuple(debts),
        parent=branch.parent if branch else None,
    )


def _phases(mixture: Mixture, names: Sequence[str], branch: Branch | None) -> list[Phase]:
    """The phases in rows, each rounded to whole updates."""
    replays: dict[str, Shares] = {}
    row = step = token = 0
    seq_len = batch = 0
    if branch:
        row, step, token = branch.row, branch.step, branch.token
        seq_len = branch.last_phase.seq_len
        batch = branch.last_phase.batch_rows * seq_len
        for earlier in branch.plan.phases:
            drawn = dict(
                zip((s.name for s in branch.plan.sources), _replayed(earlier), strict=True)
            )
            replays[earlier.name] = tuple(drawn.get(name, Fraction(0)) for name in names)
    phases = []
    for name, spec in mixture.phases.items():
        seq_len, batch = spec.seq_len or seq_len, spec.batch or batch
        batch_rows = max(1, round(batch / seq_len))
        rows = max(1, round(spec.tokens / (batch_rows * seq_len))) * batch_rows
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


def _replayed(phase: Phase) -> Shares:
    """The shares by which a planned phase drew, over all of it."""
    sums = [Fraction(0)] * len(phase.stretches[0].weights)
    for stretch in phase.stretches:
        total = sum(stretch.weights)
        for index, weight in enumerate(stretch.weights):
            sums[index] += Fraction(weight * stretch.rows, total * phase.rows)
    return tuple(sums)


def _grain(mixture: Mixture, lengths: Sequence[int], branch: Branch | None) -> tuple[int, int]:
    """Tokens of a chunk, and chunks of a window."""
    common = math.lcm(*lengths)
    chunk, window = mixture.chunk, mixture.window
    if branch:
        before = branch.plan.sources[0].order
        window = window or before.window
        if chunk is None and before.chunk % common == 0:
            chunk = before.chunk
    if chunk is None:
        chunk = -(-CHUNK_TOKENS // common) * common
    if chunk % common:
        raise PlanError(
            f"a chunk of {chunk:,} tokens is not a multiple of the sequence lengths "
            f"{', '.join(map(str, lengths))}",
            mend=f"use a multiple of {common:,}",
        )
    return chunk, window or WINDOW_CHUNKS


def _continued(
    fresh: SourceOrder, branch: Branch, index: int, length: int, lengths: Sequence[int]
) -> tuple[SourceOrder, Position]:
    """A source's order after the run before: that one's own where it fits, else what it left."""
    before = branch.plan.sources[index].order
    position = branch.stream.positions(branch.row)[index]
    before_length = branch.last_phase.seq_len
    same = replace(before, rest=None) == replace(fresh, seed=before.seed)
    if same and all(before.chunk % each == 0 for each in lengths):
        if length == before_length:
            return before, position
        window = before.next_window(position, before_length)
        return before, before.convert(window, before_length, length)
    rest = Rest(order=before, position=position, length=before_length)
    return replace(fresh, rest=rest), Position(epoch=position.epoch)


def _inherited_debts(branch: Branch, names: Sequence[str], first: Stretch) -> list[Fraction]:
    """What each source is still owed; the debts of sources that are gone are shared out."""
    owed = dict(
        zip((s.name for s in branch.plan.sources), branch.stream.debts(branch.row), strict=True)
    )
    kept = [owed.get(name, Fraction(0)) for name in names]
    gone = -sum(kept, Fraction(0))
    total = sum(first.weights)
    return [
        debt + gone * Fraction(weight, total)
        for debt, weight in zip(kept, first.weights, strict=True)
    ]


def _with_lines(problems: Sequence[Problem], lines: Lines) -> list[Problem]:
    """Problems with the lines on which their paths stand."""
    found = []
    for problem in problems:
        path: tuple[str | int, ...] = tuple(problem.path.split(".")) if problem.path else ()
        while path and path not in lines:
            path = path[:-1]
        found.append(replace(problem, line=lines.get(path)))
    return found
