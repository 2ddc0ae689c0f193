"""Render a dataset's card: a Markdown page with its size, origin, lengths and what was left out.

Totals come from the manifest. Lengths, bytes and fields are counted in sampled shards, spread over
the dataset; the page gives the sample's size. A view's card takes licences, sources and counts from
the dataset with the tokens, and says what the view leaves out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..console.page import table
from ..dataplane.account.account import Account, load_account
from ..dataplane.account.fields import describe_field
from ..dataplane.account.sample import QUANTILES, DatasetSample, take_sample
from ..dataplane.datasets import about, packing
from ..dataplane.datasets import manifest as manifests
from ..dataplane.datasets.about import About
from ..dataplane.datasets.manifest import Manifest
from .inspect import describe_inputs
from .sources.fields import KeptField


def card(url: str, *, licenses: Sequence[str] = (), sources: Sequence[str] = ()) -> str:
    """Write a dataset's card. `licenses` and `sources`, if given, replace those stated before."""
    manifests.load(url)  # nothing is stated where there is no dataset
    if licenses or sources:
        stated = about.load(url)
        stated = About(
            licenses=tuple(licenses) or stated.licenses, sources=tuple(sources) or stated.sources
        )
        about.save(url, stated)
    account = load_account(url)
    manifest, sample = account.held, take_sample(url)
    sections = [
        [f"# Dataset {_name(url, account)}", "", *_totals(url, account, sample)],
        _origin(account),
        _lengths(manifest, sample),
        *_left_out_sections(account),
        _settings(manifest),
        *(describe_field(key, sample, f"## Field `{key}`") for key in manifest.kept_fields),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _name(url: str, account: Account) -> str:
    """Return a dataset's name: its folder, and for a split also the folder above."""
    *_, folder, name = ("", *url.rstrip("/").split("/"))
    splits = dict(account.base.settings.get("splits", ()))
    return f"{folder}/{name}" if folder and splits and name in ("train", *splits) else name


def _totals(url: str, account: Account, sample: DatasetSample) -> list[str]:
    manifest, view = account.held, account.view
    info = manifest.tokenizer
    rows: list[tuple[str, str]] = [
        ("URL", f"`{url}`"),
        *([("view of", f"`{view.url}` {view.text}")] if view else []),
        ("hash", f"`{manifest.hash}`"),
        ("tokens", f"{manifest.tokens:,}"),
        *([("packed", packing.describe(manifest))] if packing.bin_length(manifest) else []),
        (
            "pieces of documents" if packing.bin_length(manifest) else "documents",
            f"{manifest.documents:,}",
        ),
        (
            "tokens of a document",
            f"{manifest.tokens / max(1, manifest.documents):,.1f} on average",
        ),
        ("tokenizer", f"{info.kind}, {info.vocab_size:,} ids, `{info.fingerprint[:16]}`"),
    ]
    if (ratio := sample.bytes_of_token) is not None:
        rows.append(("bytes of a token", f"{ratio:.3f} in {sample.tokens:,} tokens of the sample"))
    for weight, count in sorted(sample.weights.items()):
        share = count / sample.weights.total()
        rows.append((f"tokens of loss weight {weight:g}", f"{share:.2%} in the sample"))
    inputs = [
        generation.provenance["inputs"]
        for generation in account.base.generations
        if generation.provenance
    ]
    if inputs:
        rows.append(("built from", describe_inputs(inputs)))
    rows.append(("generations", f"{len(manifest.generations)}"))
    return table(("", ""), rows)


def _origin(account: Account) -> list[str]:
    return [
        "## Origin",
        "",
        f"Licences: {account.licenses}.  ",
        f"Sources: {account.sources}.",
    ]


def _lengths(manifest: Manifest, sample: DatasetSample) -> list[str]:
    if not len(sample.lengths):
        return []
    total = sum(generation.shards for generation in manifest.generations)
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


def _left_out_sections(account: Account) -> list[list[str]]:
    context = " of its dataset" if account.view else ""
    context += f" ({account.splits})" if account.splits else ""
    return [
        _count_section("Left out by the view", account.left_out_by_view),
        _count_section(f"Left out by the build{context}", account.left_out_by_build),
        _count_section(f"Other counts of the build{context}", account.other_counts),
    ]


def _count_section(heading: str, counts: Mapping[str, int]) -> list[str]:
    rows = [(name, f"{count:,}") for name, count in counts.items()]
    return [f"## {heading}", "", *table(("kind", "count"), rows)] if rows else []


def _settings(manifest: Manifest) -> list[str]:
    settings = dict(manifest.settings)
    chat = settings.pop("chat", None)
    if chat:
        settings["chat"] = {key: value for key, value in chat.items() if key != "source"}
    if keep := settings.get("source", {}).get("keep"):
        fields = ", ".join(str(KeptField(**field)) for field in keep)
        settings["source"] = {**settings["source"], "keep": fields}
    if splits := settings.get("splits"):
        settings["splits"] = ", ".join(f"{name} {fraction:g}" for name, fraction in splits)
    if tokenizer := settings.get("tokenizer"):
        kind, fingerprint, spec = tokenizer
        settings["tokenizer"] = {"kind": kind, "fingerprint": fingerprint, **spec}
    rows = list(_setting_rows(settings))
    if not rows:
        return []
    lines = ["## Settings of the build", "", *table(("setting", "value"), rows)]
    if chat:
        lines += ["", "The chat template:", "", "````", chat["source"].rstrip(), "````"]
    return lines


def _setting_rows(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield a row per setting with a value: the name, after the enclosing settings' names, and the
    value as a person would write it."""
    for key, value in sorted(settings.items()):
        name = f"{prefix} {key}".strip().replace("_", " ")
        if isinstance(value, Mapping):
            yield from _setting_rows(value, name)
        elif value not in (None, [], ()):
            yield name, f"`{_format_value(value)}`"


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_format_value, value))
    text = str(value)
    return text if text.isprintable() else json.dumps(text)
