"""The provider's statement about a model and its data: dataclasses of the YAML.

provider: {name: Mill Ltd, contact: data@mill.example}
model: {name: mill-1b}
sources:
  web:  {category: crawled, crawlers: [millbot], period: 2025-01 to 2025-06}
  code: {category: public, name: The Stack v2, link: "https://…"}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Category = Literal["public", "licensed", "private", "crawled", "user", "synthetic", "other"]
CATEGORIES: Mapping[Category, str] = {
    "public": "a dataset that anybody can get",
    "licensed": "licensed commercially by its rightsholders",
    "private": "obtained from another third party",
    "crawled": "crawled by the provider, or for it",
    "user": "collected from users of the model or of a service",
    "synthetic": "written by a model, for the provider",
    "other": "anything else",
}

DOMAINS, SME_DOMAINS, SME_MAX_DOMAINS = 0.10, 0.05, 1000
"""The template's shares and limit of domain names that are listed."""


@dataclass(frozen=True, kw_only=True)
class ProviderStatement:
    """The provider of the model."""

    name: str = ""
    contact: str = ""
    representative: str = ""
    """Authorised representative in the Union, with contact."""
    sme: bool = False
    """True for a small or medium-sized enterprise, which lists fewer domain names."""


@dataclass(frozen=True, kw_only=True)
class ModelStatement:
    """The model that was trained."""

    name: str = ""
    """Name with version."""
    dependencies: str = ""
    """The model that it was made from, with a link to its summary; `none` if there is none."""
    placed_on_market: str = ""
    """Date of its placement on the Union market."""
    license: str = ""


@dataclass(frozen=True, kw_only=True)
class SourceStatement:
    """Where a source of the mixture comes from."""

    category: Category | None = None
    name: str = ""
    """The name by which the public knows it; default: the source's name in the mixture."""
    link: str = ""
    description: str = ""
    """Type of content, in words."""
    acquired: str = ""
    """Date when the newest of its data were acquired; default: the newest kept date."""
    crawlers: tuple[str, ...] = ()
    """Names of the crawlers."""
    purposes: str = ""
    """Purposes of the crawlers."""
    behaviour: str = ""
    """How the crawlers behave: robots.txt, paywalls, captchas."""
    period: str = ""
    """When the crawlers collected: from, to."""
    collected_from: Literal["model", "service"] | None = None
    """Origin of user data: the model, or another service or product of the provider."""
    generators: tuple[str, ...] = ()
    """Models on the market that wrote synthetic data, with links to their summaries."""
    unpublished_generators: str = ""
    """Models that wrote synthetic data and are not on the market."""

    def __post_init__(self) -> None:
        for key, category in (
            ("crawlers", "crawled"),
            ("purposes", "crawled"),
            ("behaviour", "crawled"),
            ("period", "crawled"),
            ("collected_from", "user"),
            ("generators", "synthetic"),
            ("unpublished_generators", "synthetic"),
        ):
            if getattr(self, key) and self.category != category:
                raise ValueError(f"{key} belongs to a source of the category {category}")


@dataclass(frozen=True, kw_only=True)
class FieldNames:
    """Kept fields of the datasets that the summary counts."""

    language: str = "language"
    url: str = "url"
    date: str = "date"


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Shares from which on the template asks for names.

    Those of domain names are the template's: the top- and second-level domains among the 10% with
    most content; for a small or medium-sized enterprise the 5%, or 1,000 if these are fewer. The
    share of a large dataset is the template's as others read it.
    """

    large_dataset: float = 0.03
    """A public dataset with this share of the public tokens, or a larger one, is listed by name."""
    domains: float | None = None
    """Share of the domain names, those with most tokens first, that is listed; default: 0.10, or
    0.05 for a small or medium-sized enterprise."""
    max_domains: int | None = None
    """Maximum number of listed domain names; default: none, or 1,000 for a small or medium-sized
    enterprise."""

    def __post_init__(self) -> None:
        for key in ("large_dataset", "domains"):
            if not 0 <= (getattr(self, key) or 0) <= 1:
                raise ValueError(f"{key} is a share between 0 and 1")
        if self.max_domains is not None and self.max_domains < 1:
            raise ValueError("max_domains is at least 1")


@dataclass(frozen=True, kw_only=True)
class Statement:
    """All facts that the provider states."""

    version: str = ""
    """Version of the summary, with links to earlier ones."""
    updated: str = ""
    """Date of the summary's last update."""
    provider: ProviderStatement = field(default_factory=ProviderStatement)
    model: ModelStatement = field(default_factory=ModelStatement)
    sources: dict[str, SourceStatement] = field(default_factory=dict)
    """By the source's name in the mixture."""
    content: str = ""
    """Types of content, such as news, books, source code."""
    characteristics: str = ""
    """Other characteristics of the data, such as countries or groups of people."""
    code_of_practice: bool | None = None
    """True if the provider has signed the code of practice on reservations of rights."""
    reservations: str = ""
    """Measures that respect reservations of rights: protocols and opt-outs that were honoured."""
    illegal_content: str = ""
    """Measures against illegal content."""
    processing: str = ""
    """Other facts about the processing of the data."""
    fields: FieldNames = field(default_factory=FieldNames)
    thresholds: Thresholds = field(default_factory=Thresholds)

    def count_listed_domains(self, count: int) -> int:
        """Return how many of `count` domain names the summary lists."""
        thresholds, sme = self.thresholds, self.provider.sme
        share = thresholds.domains
        if share is None:
            share = SME_DOMAINS if sme else DOMAINS
        listed = max(1, round(share * count))
        limit = thresholds.max_domains or (SME_MAX_DOMAINS if sme else None)
        return min(listed, limit or listed)


def render_statement(sources: Sequence[str]) -> str:
    """Render a first statement for the sources of a run, to be filled in."""
    lines = [
        "# What the summary of the training data cannot take from the run. An empty value stays",
        "# empty in the summary, which then says so.",
        'version: ""                # of the summary, with links to earlier ones',
        'updated: ""                # date of its last update',
        "provider:",
        '  name: ""',
        '  contact: ""',
        '  representative: ""        # authorised representative in the Union',
        "  sme: false                # true: a small or medium-sized enterprise",
        "model:",
        '  name: ""                  # with version',
        '  dependencies: ""          # the model that it was made from, or none',
        '  placed_on_market: ""      # date',
        '  license: ""',
        "# Categories of sources:",
        *(f"#   {category:10} {text}" for category, text in CATEGORIES.items()),
        "sources:",
        *(f"  {source}: {{category: null, link: '', description: ''}}" for source in sources),
        'content: ""                 # types of content: news, books, source code, …',
        'characteristics: ""',
        "code_of_practice: null      # true or false: is it signed?",
        'reservations: ""            # how reservations of rights are respected',
        'illegal_content: ""         # measures against illegal content',
        "fields: {language: language, url: url, date: date}   # kept fields of the datasets",
    ]
    return "\n".join(lines) + "\n"
