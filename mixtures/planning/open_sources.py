"""The sources of a mixture, opened: what their manifests say, and where they do not fit together.

Only the manifests' heads are read: they hold totals, however many shards there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ...console.errors import UserError
from ...dataplane.datasets import manifest as manifests
from ...dataplane.datasets.manifest import Generation, Manifest
from ..spec.check import Finding
from ..spec.mixture import Mixture, SourceSpec, endpoints, sized_phases

READERS = 16
"""Manifests read at once: on an object store each is one request."""


@dataclass(frozen=True)
class OpenedSource:
    """A source with the generations that the plan pins."""

    spec: SourceSpec
    manifest: Manifest
    generations: tuple[Generation, ...]

    @property
    def tokens(self) -> int:
        return sum(generation.tokens for generation in self.generations)

    @property
    def hash(self) -> str:
        return self.generations[-1].hash


def open_sources(specs: Mapping[str, SourceSpec]) -> tuple[dict[str, OpenedSource], list[Finding]]:
    """The sources that can be opened, and what is wrong with the others."""

    def open_one(spec: SourceSpec) -> Manifest | UserError:
        try:
            return manifests.load(spec.data)
        except UserError as error:
            return error

    with ThreadPoolExecutor(READERS) as pool:
        found = list(pool.map(open_one, specs.values()))
    opened: dict[str, OpenedSource] = {}
    wrong: list[Finding] = []
    for (name, spec), manifest in zip(specs.items(), found, strict=True):
        place = ("sources", name, "data")
        if isinstance(manifest, UserError):
            wrong.append(Finding(place, manifest.what))
            continue
        have, wanted = len(manifest.generations), spec.generations
        if wanted is not None and wanted > have:
            what = f"the dataset has {have}, not {wanted}"
            wrong.append(Finding(("sources", name, "generations"), what))
            continue
        # A number below one is reported by check.py.
        source = OpenedSource(spec, manifest, manifest.generations[: wanted and max(wanted, 1)])
        if source.generations and source.tokens:
            opened[name] = source
        else:
            wrong.append(Finding(place, "the dataset is empty"))
    return opened, wrong


def source_mismatches(
    opened: Mapping[str, OpenedSource], tokenizer: tuple[str, int] | None
) -> Iterator[Finding]:
    """Sources whose ids do not mean the same, or that are one dataset. `tokenizer` is the
    fingerprint and vocabulary of the run before; without one, all must have what most have."""
    infos = {name: source.manifest.tokenizer for name, source in opened.items()}
    if infos:
        counted = Counter((info.fingerprint, info.vocab_size) for info in infos.values())
        fingerprint, vocab_size = tokenizer or counted.most_common(1)[0][0]
        who = "the run that this continues"
        if tokenizer is None:
            majority = next(n for n, info in infos.items() if info.fingerprint == fingerprint)
            who = f"source {majority}"
        for name, info in infos.items():
            if info.fingerprint != fingerprint:
                what = (
                    f"was made with another tokenizer ({info.kind}, {info.vocab_size:,} ids, "
                    f"{info.fingerprint[:12]}) than {who} ({fingerprint[:12]})"
                )
            elif info.vocab_size != vocab_size:
                what = f"has a vocabulary of {info.vocab_size:,} ids, and {who} of {vocab_size:,}"
            else:
                continue
            yield Finding(("sources", name, "data"), what)
    seen: dict[str, str] = {}
    for name, source in opened.items():
        hashes = [generation.hash for generation in source.generations]
        twin = next((seen[hash] for hash in hashes if hash in seen), None)
        if twin is not None:
            yield Finding(("sources", name, "data"), f"is the dataset of source {twin} again")
        seen.update(dict.fromkeys(hashes, name))


def sources_too_short(
    mixture: Mixture, opened: Mapping[str, OpenedSource], seq_len: int | None
) -> Iterator[Finding]:
    """Sources that do not hold a single row of a phase that draws from them. `seq_len` is that of
    the run that is continued."""
    drawn: dict[str, set[str]] = {}
    for phase in sized_phases(mixture, seq_len, None):
        names: set[str] = set()
        for name, weight in phase.spec.weights.items():
            if not (isinstance(weight, dict) and len(weight) < 2) and any(endpoints(weight)):
                names |= drawn.get(name, {name})
        drawn[phase.name] = names
        for name in sorted(names & set(opened)):
            tokens, length = opened[name].tokens, phase.seq_len
            if length is not None and 0 < tokens <= length:
                what = (
                    f"a sequence of {length:,} tokens is longer than source {name} "
                    f"({tokens:,} tokens)"
                )
                place = "seq_len" if phase.spec.seq_len else "weights"
                yield Finding(("phases", phase.name, place), what)
