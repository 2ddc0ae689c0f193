"""A dataset's card: a page of Markdown with its size, origin, lengths and what was left out.

Totals are those of the manifest. Lengths, bytes and fields are counted in a sample of the shards,
spread over the dataset; the page says how large it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..console.markdown import table
from ..console.progress import as_bytes
from ..dataplane.account.account import Account, account_of
from ..dataplane.account.fields import described_field
from ..dataplane.account.sample import QUANTILES, Sample, sample_of
from ..dataplane.datasets import about, manifest, packing
from ..dataplane.datasets.about import About
from ..dataplane.datasets.manifest import Manifest


def card(url: str, *, licenses: Sequence[str] = (), sources: Sequence[str] = ()) -> str:
    """Return the card of a dataset. Licences and sources that are given replace those that were
    stated before."""
    manifest.load(url)  # nothing is stated where there is no dataset
    if licenses or sources:
        stated = about.load(url)
        stated = About(
            licenses=tuple(licenses) or stated.licenses, sources=tuple(sources) or stated.sources
        )
        about.save(url, stated)
    account = account_of(url)
    held, sample = account.held, sample_of(url)
    name = url.rstrip("/").rsplit("/", 1)[-1]
    parts = [
        [f"# Dataset {name}", "", *_totals(url, account, sample)],
        _origin(account),
        _lengths(held, sample),
        *_left_out(account),
        _settings(held),
        *(described_field(key, sample, f"## Field `{key}`") for key in held.kept_fields),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _totals(url: str, account: Account, sample: Sample) -> list[str]:
    held, view = account.held, account.view
    info = held.tokenizer
    rows: list[tuple[str, str]] = [
        ("URL", f"`{url}`"),
        *([("view of", f"`{view.url}` {view.text}")] if view else []),
        ("hash", f"`{held.hash}`"),
        ("tokens", f"{held.tokens:,}"),
        *([("packed", packing.describe(held))] if packing.length_of(held) else []),
        ("pieces of documents" if packing.length_of(held) else "documents", f"{held.documents:,}"),
        ("tokens of a document", f"{held.tokens / max(1, held.documents):,.1f} on average"),
        ("tokenizer", f"{info.kind}, {info.vocab_size:,} ids, `{info.fingerprint[:16]}`"),
    ]
    if (ratio := sample.bytes_of_token) is not None:
        rows.append(("bytes of a token", f"{ratio:.3f} in {sample.tokens:,} tokens of the sample"))
    for weight, count in sorted(sample.weights.items()):
        share = count / sample.weights.total()
        rows.append((f"tokens of loss weight {weight:g}", f"{share:.2%} in the sample"))
    inputs = [made.provenance.get("inputs", {}) for made in account.base.generations]
    files = sum(each.get("files", 0) for each in inputs)
    size = sum(each.get("bytes", 0) for each in inputs)
    if files:
        rows.append(("built from", f"{files:,} files, {as_bytes(size)}"))
    rows.append(("generations", f"{len(held.generations)}"))
    return table(("", ""), rows)


def _origin(account: Account) -> list[str]:
    return [
        "## Origin",
        "",
        f"Licences: {account.licenses}.  ",
        f"Sources: {account.sources}.",
    ]


def _lengths(held: Manifest, sample: Sample) -> list[str]:
    if not len(sample.lengths):
        return []
    total = sum(made.shards for made in held.generations)
    return [
        "## Lengths",
        "",
        f"Tokens of a document, in {len(sample.lengths):,} documents of {sample.shards:,} of "
        f"{total:,} shards. A row says that this share of the documents is not longer.",
        "",
        *table(
            ("share", "tokens"),
            [
                (f"{share:.0%}", f"{tokens:,}")
                for share, tokens in zip(QUANTILES, sample.length_quantiles, strict=True)
            ],
        ),
    ]


def _left_out(account: Account) -> list[list[str]]:
    of = " of its dataset" if account.view else ""
    return [
        _counts("Left out by the view", account.left_out_by_view),
        _counts(f"Left out by the build{of}", account.left_out_by_build),
        _counts(f"Other counts of the build{of}", account.other_counts),
    ]


def _counts(heading: str, counts: Mapping[str, int]) -> list[str]:
    rows = [(name, f"{count:,}") for name, count in counts.items()]
    return [f"## {heading}", "", *table(("kind", "count"), rows)] if rows else []


def _settings(held: Manifest) -> list[str]:
    flat = {key: value for key, value in held.settings.items() if value not in (None, {}, [])}
    if chat := flat.pop("chat", None):
        flat["chat"] = {key: value for key, value in chat.items() if key != "source"}
    if not flat:
        return []
    rows = [(f"`{key}`", f"`{value}`") for key, value in sorted(flat.items())]
    lines = ["## Settings of the build", "", *table(("setting", "value"), rows)]
    if chat:
        lines += ["", "The chat template:", "", "````", chat["source"].rstrip(), "````"]
    return lines
