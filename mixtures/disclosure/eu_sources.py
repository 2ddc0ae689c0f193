"""Section 2 of the European summary: the sources, by the six kinds of the template."""

from __future__ import annotations

from collections.abc import Sequence

from .facts import SourceFacts, TrainingFacts
from .sections import Answer, Section, say
from .statement import Category
from .tally import merge_tallies

NO = "No"


def source_sections(facts: TrainingFacts, max_rows: int | None) -> list[Section]:
    """Answer the questions on sources. `max_rows`: of the list of domain names."""
    return [
        _public(facts),
        Section(
            number="2.2",
            title="Private non-publicly available datasets obtained from third parties",
        ),
        _licensed(facts),
        _private(facts),
        _crawled(facts, max_rows),
        _user(facts),
        _synthetic(facts),
        _other(facts),
    ]


def _public(facts: TrainingFacts) -> Section:
    sources = _select(facts, "public")
    share = facts.statement.thresholds.large_dataset
    tokens = sum(source.distinct_tokens for source in sources)
    large = [source for source in sources if source.distinct_tokens >= share * tokens]
    small = [source for source in sources if source not in large]
    answers = [
        _has_any(facts, "public", "Have you used publicly available datasets to train the model?")
    ]
    if large:
        answers.append(
            _list_sources(
                "List of large publicly available datasets",
                large,
                f"{share:.3g} or more of the tokens of all public datasets",
            )
        )
    if small:
        question = "General description of other publicly available datasets not listed above"
        answers.append(_list_sources(question, small))
    return Section(number="2.1", title="Publicly available datasets", answers=tuple(answers))


def _licensed(facts: TrainingFacts) -> Section:
    question = (
        "Have you concluded transactional commercial licensing agreement(s) with "
        "rightsholder(s) or with their representatives?"
    )
    sources = _select(facts, "licensed")
    answers = [_has_any(facts, "licensed", question)]
    answers += [_list_sources("Datasets covered", sources)] if sources else []
    return Section(
        number="2.2.1",
        title="Datasets commercially licensed by rightsholders or their representatives",
        answers=tuple(answers),
    )


def _private(facts: TrainingFacts) -> Section:
    sources = _select(facts, "private")
    question = (
        "Have you obtained private datasets from third parties that are not licensed as described "
        "in Section 2.2.1, such as data obtained from providers of private databases, or data "
        "intermediaries?"
    )
    answers = [_has_any(facts, "private", question)]
    listed = "List of private datasets obtained from other third parties"
    answers += [_list_sources(listed, sources)] if sources else []
    return Section(
        number="2.2.2",
        title="Private datasets obtained from other third parties",
        answers=tuple(answers),
    )


def _crawled(facts: TrainingFacts, max_rows: int | None) -> Section:
    sources = _select(facts, "crawled")
    answers = [
        _has_any(facts, "crawled", "Were crawlers used by the provider or on behalf of?"),
    ]
    for source in sources:
        stated, key = source.statement, f"sources.{source.name}"
        answers += [
            say(f"{question} ({source.title})", text, f"state `{key}.{field}`")
            for question, text, field in (
                ("Crawler name(s)/identifier(s)", ", ".join(stated.crawlers), "crawlers"),
                ("Purposes of the crawler(s)", stated.purposes, "purposes"),
                ("General description of crawler behaviour", stated.behaviour, "behaviour"),
                ("Period of data collection", stated.period, "period"),
                (
                    "Comprehensive description of the type of content and online sources crawled",
                    stated.description,
                    "description",
                ),
            )
        ]
    if sources:
        answers += [_list_sources("Datasets crawled", sources), *_domains(facts, sources, max_rows)]
    return Section(
        number="2.3", title="Data crawled and scraped from online sources", answers=tuple(answers)
    )


def _domains(
    facts: TrainingFacts, sources: Sequence[SourceFacts], max_rows: int | None
) -> list[Answer]:
    """List the domain names with most tokens, up to the share that the law asks for."""
    question = "Summary of the most relevant domain names crawled"
    missing = [source.name for source in sources if source.domains is None]
    key = facts.statement.fields.url
    fill = f"build the datasets of {', '.join(missing)} with `--keep {key}`"
    total, unknown = merge_tallies([source.domains for source in sources])
    if not total:
        return [say(question, "", fill)]
    count = facts.statement.count_listed_domains(len(total))
    shown = count if max_rows is None else min(count, max_rows)
    text = (
        f"the first {count:,} of {len(total):,} domain names, by the tokens that the weights have "
        f"seen; {unknown:,} tokens come from documents without a URL"
    )
    text += f"; {shown:,} are shown here, and all {count:,} in the JSON" if shown < count else ""
    tokens = total.total() + unknown
    rows = tuple(
        (name, f"{number:,}", f"{number / tokens:.3%}")
        for name, number in sorted(total.items(), key=lambda item: (-item[1], item[0]))[:shown]
    )
    head = ("domain name", "tokens", "share of the crawled tokens")
    listed = Answer(question=question, text=text, head=head, rows=rows)
    return [listed, *([say("Domain names of further sources", "", fill)] if missing else [])]


def _user(facts: TrainingFacts) -> Section:
    sources = _select(facts, "user")
    unclear = [s.name for s in sources if s.statement.collected_from is None]
    answers = []
    for origin, question in (
        ("model", "Was data from user interactions with the AI model used to train the model?"),
        (
            "service",
            "Was data collected from user interactions with the provider's other services or "
            "products used to train the model?",
        ),
    ):
        selected = [s for s in sources if s.statement.collected_from == origin]
        if unclear and not selected:
            fill = f"state `collected_from` of the sources {', '.join(unclear)}"
            answers.append(say(question, "", fill))
        else:
            answers.append(_has_any(facts, "user", question, selected))
        answers += [_list_sources("Services or products, and their data", selected)] * bool(
            selected
        )
    return Section(number="2.4", title="User data", answers=tuple(answers))


def _synthetic(facts: TrainingFacts) -> Section:
    sources = _select(facts, "synthetic")
    question = (
        "Was synthetic AI-generated data created by the provider or on their behalf to train "
        "the model?"
    )
    answers = [_has_any(facts, "synthetic", question)]
    for source in sources:
        key = f"sources.{source.name}"
        answers += [
            say(
                "General-purpose AI model(s) on the market used to generate the synthetic data "
                f"({source.title})",
                ", ".join(source.statement.generators),
                f"state `{key}.generators`",
            ),
            say(
                "Other AI models, including the provider's own that are not on the market, used "
                f"to generate the synthetic data ({source.title})",
                source.statement.unpublished_generators,
                f"state `{key}.unpublished_generators`, or that there are none",
            ),
        ]
    answers += [_list_sources("Synthetic datasets", sources)] if sources else []
    return Section(number="2.5", title="Synthetic data", answers=tuple(answers))


def _other(facts: TrainingFacts) -> Section:
    sources = _select(facts, "other")
    question = (
        "Have data sources other than those described in Sections 2.1 to 2.5 been used to train "
        "the model?"
    )
    answers = [_has_any(facts, "other", question)]
    answers += [_list_sources("Description of these data", sources)] if sources else []
    return Section(number="2.6", title="Other sources of data", answers=tuple(answers))


def _select(facts: TrainingFacts, category: Category) -> list[SourceFacts]:
    return [source for source in facts.sources if source.statement.category == category]


def _has_any(
    facts: TrainingFacts,
    category: Category,
    question: str,
    sources: Sequence[SourceFacts] | None = None,
) -> Answer:
    """Answer yes or no. While a source has no category, no is not known."""
    selected = _select(facts, category) if sources is None else sources
    if selected:
        return say(question, "Yes", "")
    uncategorized = [s.name for s in facts.sources if s.statement.category is None]
    fill = f"state `category` of the sources {', '.join(uncategorized)}"
    return say(question, "" if uncategorized else NO, fill)


def _list_sources(question: str, sources: Sequence[SourceFacts], text: str = "") -> Answer:
    head = ("dataset", "modality", "link", "content", "tokens seen", "licences", "origin")
    rows = tuple(
        (
            source.title,
            source.modality,
            source.statement.link or f"`{source.url}`",
            source.statement.description or "not stated",
            f"{source.served_tokens:,}",
            "unknown: the dataset is gone" if source.account is None else source.account.licenses,
            "unknown: the dataset is gone" if source.account is None else source.account.sources,
        )
        for source in sources
    )
    return Answer(question=question, text=text, head=head, rows=rows)
