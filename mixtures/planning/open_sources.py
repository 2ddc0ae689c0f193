"""Open the datasets of a mixture, and check that they fit together.

Only the heads of the manifests are read: they hold the totals, however many shards there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ...console.errors import UserError
from ...dataplane.datasets import manifest as manifests
from ...dataplane.datasets import packing, view
from ...dataplane.datasets.manifest import Generation, Manifest
from ..mixture_file.check import MixtureFinding
from ..mixture_file.mixture import (
    Mixture,
    SourceSpec,
    endpoints,
    explicit_shares,
    find_temperature,
    sized_phases,
)

READERS = 16
"""Manifests read in parallel; on an object store each of them is one request."""


@dataclass(frozen=True)
class OpenedSource:
    """A source, with the generations that the plan pins."""

    spec: SourceSpec
    manifest: Manifest
    generations: tuple[Generation, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the order, whose last one is only ever a target. After the last bin of a packed
        view, that is one more token of padding."""
        return sum(made.tokens for made in self.generations) + (self.bins is not None)

    @property
    def bins(self) -> int | None:
        """Tokens of a bin, if the dataset is a packed view."""
        return packing.length_of(self.manifest)

    @property
    def padding(self) -> int:
        """Tokens of padding in the bins of a packed view."""
        return packing.padding_of(self.manifest, len(self.generations))

    @property
    def hash(self) -> str:
        return self.generations[-1].hash


def open_sources(
    specs: Mapping[str, SourceSpec],
) -> tuple[dict[str, OpenedSource], list[MixtureFinding]]:
    """Return the sources that can be opened, and the problems of the others."""

    def open_one(spec: SourceSpec) -> Manifest | UserError:
        try:
            manifest = manifests.load(spec.data)
            view.check_dataset(spec.data, view.view_of(spec.data, manifest))
            return manifest
        except UserError as error:
            return error

    with ThreadPoolExecutor(READERS) as pool:
        loaded = list(pool.map(open_one, specs.values()))
    opened: dict[str, OpenedSource] = {}
    findings: list[MixtureFinding] = []
    for (name, spec), manifest in zip(specs.items(), loaded, strict=True):
        place = ("sources", name, "data")
        if isinstance(manifest, UserError):
            hint = f"; {manifest.hint}" if manifest.hint else ""
            findings.append(MixtureFinding(place, f"{manifest.what}{hint}"))
            continue
        available, wanted = len(manifest.generations), spec.generations
        if wanted is not None and wanted > available:
            what = f"is {wanted}, but the dataset has {available}"
            findings.append(MixtureFinding(("sources", name, "generations"), what))
            continue
        # check.py reports a number below 1.
        source = OpenedSource(spec, manifest, manifest.generations[: wanted and max(wanted, 1)])
        if source.generations and source.tokens:
            opened[name] = source
        else:
            findings.append(MixtureFinding(place, "the dataset is empty"))
    return opened, findings


def source_mismatches(
    opened: Mapping[str, OpenedSource], tokenizer: tuple[str, int] | None
) -> Iterator[MixtureFinding]:
    """Yield sources of another tokenizer, and sources that are the same dataset.

    `tokenizer` is the fingerprint and vocabulary size of the run that the mixture continues.
    Without one, the most frequent tokenizer is the expected one.
    """
    infos = {name: source.manifest.tokenizer for name, source in opened.items()}
    if infos:
        counts = Counter((info.fingerprint, info.vocab_size) for info in infos.values())
        fingerprint, vocab_size = tokenizer or counts.most_common(1)[0][0]
        reference = "the run that this mixture continues"
        if tokenizer is None:
            majority = next(n for n, info in infos.items() if info.fingerprint == fingerprint)
            reference = f"source {majority}"
        for name, info in infos.items():
            if info.fingerprint != fingerprint:
                what = (
                    f"was built with another tokenizer ({info.kind}, {info.vocab_size:,} ids, "
                    f"{info.fingerprint[:12]}) than {reference} ({fingerprint[:12]})"
                )
            elif info.vocab_size != vocab_size:
                what = (
                    f"has a vocabulary of {info.vocab_size:,} ids, but {reference} has "
                    f"{vocab_size:,}"
                )
            else:
                continue
            yield MixtureFinding(("sources", name, "data"), what)
    owners: dict[str, str] = {}
    for name, source in opened.items():
        hashes = [generation.hash for generation in source.generations]
        owner = next((owners[hash] for hash in hashes if hash in owners), None)
        if owner is not None:
            yield MixtureFinding(
                ("sources", name, "data"), f"is the same dataset as source {owner}"
            )
        owners.update(dict.fromkeys(hashes, name))


def unfit_rows(
    mixture: Mixture, opened: Mapping[str, OpenedSource], seq_len: int | None
) -> Iterator[MixtureFinding]:
    """Yield phases whose rows are longer than a source that they draw from, or cut its bins.

    `seq_len` is that of the run that the mixture continues.
    """
    drawn: dict[str, set[str]] = {}
    known = {*mixture.sources, *mixture.phases}
    for phase in sized_phases(mixture, seq_len, None):
        names: set[str] = set()
        if find_temperature(phase.spec, known) is not None:
            names |= set(opened)
        for name, weight in explicit_shares(phase.spec).items():
            if not (isinstance(weight, dict) and len(weight) < 2) and any(endpoints(weight)):
                names |= drawn.get(name, {name})
        drawn[phase.name] = names
        for name in sorted(names & set(opened)):
            length = phase.seq_len
            if length is not None and (what := _unfit(name, opened[name], length)):
                place = "seq_len" if phase.spec.seq_len else "weights"
                yield MixtureFinding(("phases", phase.name, place), what)


def _unfit(name: str, source: OpenedSource, length: int) -> str | None:
    """Return why rows of a length cannot be drawn from a source, or None."""
    tokens, bins = source.tokens, source.bins
    if bins is not None and length % bins:
        return (
            f"rows of {length:,} tokens cut documents of source {name}, which is packed to "
            f"{bins:,} tokens; take a multiple of that, or pack its dataset with `tokenize pack "
            f"--length {length}`"
        )
    if 0 < tokens <= length:
        return f"a row of {length:,} tokens is longer than source {name} ({tokens:,} tokens)"
    return None
