"""The facts of a run's training data: what its plan, ledger and datasets know, by source.

Everything that a summary or an inventory prints is here or in the provider's statement; a fact that
cannot be had is None, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...console.errors import ConfigError, ConfigProblem, PlanError, UserError
from ...dataplane.account.account import Account, load_account
from ...dataplane.datasets.dataset import Dataset, open_pinned
from ...dataplane.order.plan import PlanSource
from ...dataplane.runlog import ledger
from ..exposure.lineage import Lineage, open_lineages
from .served_tokens import ServedTokens, count_served
from .statement import SourceStatement, Statement
from .tally import FieldTally, SourceTally, tally_source

TEXT, SEQUENCES = "Text", "Other: nucleotide sequences"
"""Modalities."""


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """Facts of a source that the run drew from."""

    name: str
    url: str
    dataset: str
    """Hash of the dataset."""
    tokenizer: str | None
    """Kind of the tokenizer; None if the dataset is gone."""
    statement: SourceStatement
    served_tokens: int
    """Tokens in the rows that the weights hold, each time that they were served."""
    distinct_tokens: int
    unlearnt_tokens: int
    """Tokens of the documents that the plan takes the loss off."""
    account: Account | None
    tally: SourceTally | None
    problem: str | None
    """Why the documents could not be counted."""

    @property
    def title(self) -> str:
        """The name for the public."""
        return self.statement.name or self.name

    @property
    def modality(self) -> str:
        return SEQUENCES if self.tokenizer == "genome" else TEXT

    @property
    def licenses(self) -> tuple[str, ...]:
        """Licences as the dataset states them, or for a view without any, the dataset below."""
        if self.account is None:
            return ()
        return self.account.stated.licenses or self.account.base_stated.licenses

    @property
    def languages(self) -> FieldTally | None:
        return None if self.tally is None else self.tally.languages

    @property
    def domains(self) -> FieldTally | None:
        return None if self.tally is None else self.tally.domains

    @property
    def newest(self) -> str | None:
        """When the newest data were acquired."""
        return self.statement.acquired or (None if self.tally is None else self.tally.newest)


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """Facts of a run's training data."""

    run: str
    plan: str
    """Hash of the plan."""
    commitment: str | None
    """Hash of the plan and the ledger; None without a ledger."""
    steps: int | None
    """Steps that the run has taken; None for a plan without a run."""
    continues: tuple[str, ...]
    unknown: str | None
    """Why rows before the oldest known run are unknown."""
    sources: tuple[SourceFacts, ...]
    statement: Statement

    @property
    def distinct_tokens(self) -> int:
        return sum(source.distinct_tokens for source in self.sources)

    @property
    def served_tokens(self) -> int:
        return sum(source.served_tokens for source in self.sources)

    @property
    def newest(self) -> str | None:
        """When the newest data were acquired; None if this is unknown of a source."""
        dates = [source.newest for source in self.sources]
        return max((date for date in dates if date), default=None) if all(dates) else None


def list_sources(run: str) -> list[str]:
    """Return the names of the sources that a run drew from."""
    (lineage,) = open_lineages([run])
    return [name for name in _list_sources(lineage) if count_served(lineage, name).times.any()]


def gather_facts(
    run: str, statement: Statement, statement_file: str, step: int | None = None
) -> TrainingFacts:
    """Gather the facts of a run, a saved plan or a mixture. `step`: of the weights after so many
    steps; None: of the newest."""
    (lineage,) = open_lineages([run])
    if step is not None:
        lineage = cut_lineage(lineage, step)
    plan_sources = _list_sources(lineage)
    _check_names(statement.sources, plan_sources, statement_file)
    newest = lineage.served[-1]
    commitment = None
    taken_steps = lineage.taken_steps
    if (
        newest.ledger is not None
        and taken_steps is not None
        and taken_steps > newest.plan.first_step
    ):
        commitment = ledger.commit(newest.ledger, newest.plan.learnt_hash, taken_steps - 1)
    facts = []
    for name, source in plan_sources.items():
        served = count_served(lineage, name)
        if served.times.any():
            facts.append(_gather_source(source, served, statement))
    return TrainingFacts(
        run=lineage.name,
        plan=newest.plan.hash,
        commitment=commitment,
        steps=taken_steps,
        continues=tuple(served.run for served in lineage.served[:-1]),
        unknown=lineage.unknown,
        sources=tuple(facts),
        statement=statement,
    )


def cut_lineage(lineage: Lineage, step: int) -> Lineage:
    """Return the lineage of the weights before `step`."""
    newest = lineage.served[-1]
    plan, taken_steps = newest.plan, lineage.taken_steps
    end_step = plan.end_step if taken_steps is None else taken_steps
    if not plan.first_step <= step <= end_step:
        raise PlanError(
            f"{lineage.name} has no weights of step {step:,}",
            hint=f"its steps go from {plan.first_step:,} to {end_step:,}",
        )
    end_row = plan.end_row if step == plan.end_step else plan.step(step).first_row
    taken_rows = newest.taken_rows and min(newest.taken_rows, end_row)
    cut = replace(newest, end_row=end_row, taken_rows=taken_rows)
    return replace(lineage, served=(*lineage.served[:-1], cut))


def _list_sources(lineage: Lineage) -> dict[str, PlanSource]:
    """Return all sources of a lineage by name; the newest plan that names one describes it."""
    return {
        source.name: source
        for served in lineage.served  # the oldest first
        for source in served.plan.sources
    }


def _check_names(
    stated: Mapping[str, SourceStatement], sources: Mapping[str, PlanSource], file: str
) -> None:
    problems = [
        ConfigProblem(f"sources.{name}", f"the run has no such source; it has {', '.join(sources)}")
        for name in stated
        if name not in sources
    ]
    if problems:
        raise ConfigError(file, problems)


def _gather_source(source: PlanSource, served: ServedTokens, statement: Statement) -> SourceFacts:
    account = tally = problem = None
    zero, end = np.array([0]), np.array([source.order.tokens])
    try:
        account = load_account(source.url, source.generations)
        dataset: Dataset = open_pinned(
            source.url, hash=source.dataset, generations=source.generations, name=source.name
        )
        tally = tally_source(dataset, served, statement.fields)
    except UserError as error:
        problem = error.message
    return SourceFacts(
        name=source.name,
        url=source.url,
        dataset=source.dataset,
        tokenizer=None if account is None else account.held.tokenizer.kind,
        statement=statement.sources.get(source.name, SourceStatement()),
        served_tokens=int(served.count(zero, end)[0]),
        distinct_tokens=int(served.count_distinct(zero, end)[0]),
        unlearnt_tokens=sum(end - start for start, end in source.unlearnt),
        account=account,
        tally=tally,
        problem=problem,
    )
