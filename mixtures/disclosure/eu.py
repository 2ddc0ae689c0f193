"""The public summary of training content of the European Union, Article 53(1)(d) of Regulation (EU)
2024/1689, by the template of the Commission, C(2025) 8311.

Sections, questions and ranges of sizes are the template's, as the summaries filed in 2026 repeat
them. An answer comes from the run, from its datasets or from the provider's statement.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ...console.progress import exact_count
from .eu_sources import NO, source_sections
from .facts import TrainingFacts
from .sections import Answer, Section, count_missing, say
from .tally import merge_tallies

TITLE = "Public summary of training content"
BASIS = (
    "Article 53(1)(d) of Regulation (EU) 2024/1689, by the template of the Commission, "
    "C(2025) 8311."
)
SIZES = ((10**9, "Less than 1 billion tokens"), (10**13, "1 billion to 10 trillion tokens"))
LARGEST = "More than 10 trillion tokens"
MAX_ROWS = 1000
"""Domain names on the page; the JSON has all that are listed."""


def summarize_for_eu(facts: TrainingFacts, *, max_rows: int | None = MAX_ROWS) -> list[Section]:
    """Answer the template's questions. `max_rows`: of the list of domain names; None lists all."""
    statement = facts.statement
    general = (
        say("Version of the summary", statement.version, "state `version`"),
        say("Last update", statement.updated, "state `updated`"),
    )
    return [
        Section(number="1", title="General information", answers=general),
        _provider(facts),
        _model(facts),
        _modalities(facts),
        Section(number="2", title="List of data sources"),
        *source_sections(facts, max_rows),
        Section(number="3", title="Data processing aspects"),
        _reservations(facts),
        _illegal_content(facts),
        _processing(facts),
    ]


def _provider(facts: TrainingFacts) -> Section:
    provider = facts.statement.provider
    return Section(
        number="1.1",
        title="Provider identification",
        answers=(
            say("Provider name", provider.name, "state `provider.name`"),
            say("Contact details", provider.contact, "state `provider.contact`"),
            say(
                "Authorised representative name and contact details",
                provider.representative,
                "state `provider.representative`, or that there is none",
            ),
        ),
    )


def _model(facts: TrainingFacts) -> Section:
    model = facts.statement.model
    return Section(
        number="1.2",
        title="Model identification",
        answers=(
            say("Versioned model name(s)", model.name, "state `model.name`"),
            say("Model dependencies", model.dependencies, "state `model.dependencies`, or `none`"),
            say(
                "Date of placement of the model on the Union market",
                model.placed_on_market,
                "state `model.placed_on_market`",
            ),
        ),
    )


def _modalities(facts: TrainingFacts) -> Section:
    modalities = Counter[str]()
    for source in facts.sources:
        modalities[source.modality] += source.distinct_tokens
    statement = facts.statement
    without_date = [source.name for source in facts.sources if source.newest is None]
    fields = statement.fields
    return Section(
        number="1.3",
        title="Modalities, overall training data size and other characteristics",
        answers=(
            Answer(
                question="Modality and training data size",
                text="each token of a source counts once, however often it was served",
                head=("modality", "training data size", "tokens"),
                rows=tuple(
                    (name, _size_range(count), f"{count:,}")
                    for name, count in sorted(modalities.items(), reverse=True)
                ),
            ),
            say("Types of content", statement.content, "state `content`"),
            say(
                "Latest date of data acquisition/collection for model training",
                _newest(facts),
                f"state `acquired` of the sources {', '.join(without_date)}, or build their "
                f"datasets with `--keep {fields.date}`",
            ),
            *_languages(facts),
            say(
                "Other relevant characteristics of the overall training data",
                statement.characteristics,
                "state `characteristics`",
            ),
        ),
    )


def _newest(facts: TrainingFacts) -> str:
    undated = sum(
        source.tally.undated
        for source in facts.sources
        if source.tally is not None and not source.statement.acquired
    )
    if facts.newest is None or not undated:
        return facts.newest or ""
    return f"{facts.newest}; {undated:,} tokens come from documents without a date"


def _size_range(tokens: int) -> str:
    return next((text for limit, text in SIZES if tokens < limit), LARGEST)


def _languages(facts: TrainingFacts) -> list[Answer]:
    question = "Description of the linguistic characteristics of the overall training data"
    key = facts.statement.fields.language
    total, unknown = merge_tallies([source.languages for source in facts.sources])
    missing = [source.name for source in facts.sources if source.languages is None]
    fill = f"build the datasets of {', '.join(missing)} with `--keep {key}`"
    if not total:
        return [say(question, "", fill)]
    tokens = total.total() + unknown
    rows = [(name, f"{count:,}", f"{count / tokens:.2%}") for name, count in total.most_common()]
    rows += [("unknown", f"{unknown:,}", f"{unknown / tokens:.2%}")] if unknown else []
    listed = Answer(
        question=question,
        text="tokens that the weights have seen, each time that they were served",
        head=("language", "tokens", "share"),
        rows=tuple(rows),
    )
    return [listed, *([say("Languages of further sources", "", fill)] if missing else [])]


def _reservations(facts: TrainingFacts) -> Section:
    signed = {None: "", True: "Yes", False: NO}[facts.statement.code_of_practice]
    answers = [
        say(
            "Are you a Signatory to the Code of Practice for general-purpose AI models that "
            "includes commitments to respect reservations of rights from the TDM exception or "
            "limitation?",
            signed,
            "state `code_of_practice`",
        ),
        say(
            "Measures implemented before model training to respect reservations of rights from "
            "the TDM exception or limitation before and during data collection, including the "
            "opt-out protocols and solutions honoured",
            facts.statement.reservations,
            "state `reservations`",
        ),
    ]
    rows = [
        (source.title, f"left out by the build: {name}", exact_count(count, "documents"))
        for source in facts.sources
        if source.account is not None
        for name, count in source.account.left_out_by_build.items()
        if name.startswith("dropped by ")
    ]
    rows += [
        (source.title, "without loss: `without` in the mixture", f"{tokens:,} tokens")
        for source in facts.sources
        if (tokens := source.unlearnt_tokens)
    ]
    if rows:
        head = ("dataset", "measure", "count")
        answers.append(
            Answer(question="Documents left out by lists and filters", head=head, rows=tuple(rows))
        )
    return Section(
        number="3.1",
        title="Respect of reservation of rights from text and data mining exception or limitation",
        answers=tuple(answers),
    )


def _illegal_content(facts: TrainingFacts) -> Section:
    measures = say(
        "General description of measures taken",
        facts.statement.illegal_content,
        "state `illegal_content`",
    )
    return Section(number="3.2", title="Removal of illegal content", answers=(measures,))


def _processing(facts: TrainingFacts) -> Section:
    rows = [
        (source.title, name, f"{count:,}")
        for source in facts.sources
        if source.account is not None
        for name, count in {
            **source.account.left_out_by_build,
            **source.account.left_out_by_view,
        }.items()
    ]
    proof = [
        ("plan", f"`{facts.plan}`"),
        ("plan and ledger", f"`{facts.commitment}`" if facts.commitment else "no ledger"),
        ("steps", "planned" if facts.steps is None else f"{facts.steps:,}"),
        ("tokens served", f"{facts.served_tokens:,}"),
        *(("continues", f"`{run}`") for run in facts.continues),
        *([("earlier rows", f"unknown: {facts.unknown}")] if facts.unknown else []),
        *(
            (f"documents of {s.name}", f"not counted: {s.problem}")
            for s in facts.sources
            if s.problem
        ),
    ]
    answers = [
        Answer(
            question="Other relevant information about data processing",
            text=facts.statement.processing,
            head=("of the run", "is"),
            rows=tuple(proof),
        )
    ]
    if rows:
        head = ("dataset", "left out", "count")
        answers.append(
            Answer(question="Documents left out before training", head=head, rows=tuple(rows))
        )
    return Section(number="3.3", title="Other information", answers=tuple(answers))


def render_eu(facts: TrainingFacts) -> str:
    """Render the summary as a Markdown page."""
    sections = summarize_for_eu(facts)
    lines = [f"# {TITLE}", "", BASIS, ""]
    if facts.steps is None:
        lines += ["The rows are planned; no run has taken them.", ""]
    lines += [line for section in sections for line in section.render()]
    return "\n".join(lines).rstrip() + "\n"


def eu_data(facts: TrainingFacts, sections: list[Section]) -> dict[str, Any]:
    """Return the summary as JSON."""
    return {
        "template": "C(2025) 8311",
        "run": facts.run,
        "plan": facts.plan,
        "commitment": facts.commitment,
        "missing": count_missing(sections),
        "sections": [section.json_data() for section in sections],
    }
