"""Open a mixture's datasets, and check that they fit together.

Only the heads of manifests are read, which hold the totals for any number of shards.
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

NUM_READERS = 16
"""Manifests read in parallel; an object store needs a request per manifest."""


@dataclass(frozen=True)
class OpenedSource:
    """A source, with the generations that the plan pins."""

    spec: SourceSpec
    manifest: Manifest
    generations: tuple[Generation, ...]

    @property
    def tokens(self) -> int:
        """Tokens in the order. The last one is only a target: for a packed view, an extra token of
        padding."""
        return sum(generation.tokens for generation in self.generations) + (self.bins is not None)

    @property
    def bins(self) -> int | None:
        """Tokens per bin; None unless the dataset is a packed view."""
        return packing.bin_length(self.manifest)

    @property
    def padding(self) -> int:
        """Padding tokens in a packed view."""
        return packing.count_padding(self.manifest, len(self.generations))

    @property
    def sorted_by(self) -> str | None:
        """Field by which the documents are sorted; None if they are not."""
        dataset_view = view.parse_view(self.spec.data, self.manifest)
        if dataset_view is None or len(self.generations) > 1:  # each is sorted alone
            return None
        return dataset_view.sorted_by

    @property
    def hash(self) -> str:
        return self.generations[-1].hash


def open_sources(
    specs: Mapping[str, SourceSpec],
) -> tuple[dict[str, OpenedSource], list[MixtureFinding]]:
    """Open the sources in parallel; also returns the problems of failed ones."""

    def load_manifest(spec: SourceSpec) -> Manifest | UserError:
        try:
            manifest = manifests.load(spec.data)
            view.check_dataset(spec.data, view.parse_view(spec.data, manifest))
            return manifest
        except UserError as error:
            return error

    with ThreadPoolExecutor(NUM_READERS) as pool:
        loaded = list(pool.map(load_manifest, specs.values()))
    opened: dict[str, OpenedSource] = {}
    findings: list[MixtureFinding] = []
    for (name, spec), manifest in zip(specs.items(), loaded, strict=True):
        path = ("sources", name, "data")
        if isinstance(manifest, UserError):
            hint = f"; {manifest.hint}" if manifest.hint else ""
            findings.append(MixtureFinding(path, f"{manifest.message}{hint}"))
            continue
        available, requested = len(manifest.generations), spec.generations
        if requested is not None and requested > available:
            message = f"is {requested}, but the dataset has {available}"
            findings.append(MixtureFinding(("sources", name, "generations"), message))
            continue
        # check.py reports a number below 1.
        source = OpenedSource(
            spec, manifest, manifest.generations[: requested and max(requested, 1)]
        )
        if source.generations and source.tokens:
            opened[name] = source
        else:
            findings.append(MixtureFinding(path, "the dataset is empty"))
    return opened, findings


def source_mismatches(
    opened: Mapping[str, OpenedSource], tokenizer: tuple[str, int] | None
) -> Iterator[MixtureFinding]:
    """Yield sources with a different tokenizer, and sources that share a dataset.

    `tokenizer` is the fingerprint and vocabulary size in the continued run; without a run, the most
    frequent tokenizer is expected.
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
                message = (
                    f"was built with another tokenizer ({info.kind}, {info.vocab_size:,} ids, "
                    f"{info.fingerprint[:12]}) than {reference} ({fingerprint[:12]})"
                )
            elif info.vocab_size != vocab_size:
                message = (
                    f"has a vocabulary of {info.vocab_size:,} ids, but {reference} has "
                    f"{vocab_size:,}"
                )
            else:
                continue
            yield MixtureFinding(("sources", name, "data"), message)
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
    """Yield phases whose rows are longer than a drawn source, or cut its bins.

    `seq_len` comes from the continued run.
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
            if length is not None and (message := _explain_unfit(name, opened[name], length)):
                key = "seq_len" if phase.spec.seq_len else "weights"
                yield MixtureFinding(("phases", phase.name, key), message)


def check_orders(opened: Mapping[str, OpenedSource]) -> Iterator[MixtureFinding]:
    """Yield sources with an order by a field that their datasets are not sorted by."""
    for name, source in opened.items():
        order = source.spec.order
        if order is None or source.sorted_by == order.by:
            continue
        fact = f"is sorted by {source.sorted_by}" if source.sorted_by else "is not sorted"
        dataset_view = view.parse_view(source.spec.data, source.manifest)
        base = dataset_view.url if dataset_view and dataset_view.sorted_by else source.spec.data
        yield MixtureFinding(
            ("sources", name, "order", "by"),
            f"the dataset {fact}; make a view with `tokenize sort {base} --by {order.by} --out …`, "
            "and name it in `data`",
        )


def check_lengths(
    mixture: Mixture, opened: Mapping[str, OpenedSource], seq_len: int | None
) -> Iterator[MixtureFinding]:
    """Yield a problem if steps by length would all have one. `seq_len` is the continued run's."""
    lengths = {phase.seq_len for phase in sized_phases(mixture, seq_len, None)}
    if mixture.steps_by_length and all(
        source.bins is None or {source.bins} == lengths for source in opened.values()
    ):
        yield MixtureFinding(
            ("steps_by_length",),
            "no source is packed to rows that are shorter than those of a phase; make such "
            "sources with `tokenize pack --length 512,1024,…`",
        )


def _explain_unfit(name: str, source: OpenedSource, length: int) -> str | None:
    """Explain why a source cannot serve rows with `length` tokens; None if it can."""
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
