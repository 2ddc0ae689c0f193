"""Sequences of genomes as documents: windows, reverse complements, lineage tags; groups for splits.

    chr1      ├──────────────────────────────────────┤
    windows   ├─────────────┤
                     ├─────────────┤                    a window begins every `stride` bases
                            ├──────────────┤ …          the last ends with the sequence
    document  |d__Bacteria;p__None;…|ACGU…              its tag, and one after every so many bases;
                                                        as RNA or DNA

A document is one window on one strand, so neither a window nor a reverse complement reaches beyond
a sequence. All draws are hashes of the seed, the sequence's id and the window, so they depend on no
workers, files or order of documents.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ...console.config import added_field, plain
from ...console.errors import InputError
from ...dataplane.account import account
from ...dataplane.storage import storage
from ...dataplane.tokenizers.byte import ByteConfig
from ..sources.format import Texts
from .read_stats import ReadStats

ADDED_COUNT = account.EXPANDED
"""Name of the count of further windows and strands; manifests store it."""
UNTAGGED_COUNT = "genomes: documents without a lineage"
COMPLEMENT = str.maketrans("ACGTURYSWKMBDHVNacgturyswkmbdhvn", "TGCAAYRSWMKVHDBNtgcaayrswmkvhdbn")
"""Complements of the IUPAC codes, in both cases; gaps and other letters stay."""
DROPPED_COUNT = "dropped by --drop-n-runs"
"""Name of the count of documents with runs of N."""
RNA = str.maketrans("Tt", "Uu")
DNA = str.maketrans("Uu", "Tt")
Strands = Literal["both"] | float
LINEAGE_EVERY = 131_072
RANKS = re.compile(r"(\s*\w+__[^;|]*(;|$))+")
"""A lineage: d__Eukaryota;p__Chordata."""


@dataclass(frozen=True, kw_only=True)
class GenomeConfig:
    """How sequences become documents."""

    window: int | None = None
    """Bases of a document; longer sequences are cut into windows."""
    stride: int | None = None
    """Bases from one window to the next. Default: those of a window."""
    reverse_complement: Strands = 0.0
    """both: each document also as its reverse complement; a number: the share of documents that
    are replaced by theirs."""
    lineages: str | None = None
    """File with a line for each sequence: its id, a tab, and its lineage d__…;p__…;….."""
    lineage_dropout: float = 0.0
    """Probability with which a rank of a tag is None."""
    lineage_every: int = LINEAGE_EVERY
    """Bases after which a tag is repeated in a document."""
    groups: str | None = None
    """File with a line for each sequence: its id, a tab, and its group. A group is never divided
    between splits; one with the name of a split belongs to it."""
    seed: int = 0
    """Seed of the strands and of the dropout."""
    transcribe: Literal["rna", "dna"] | None = added_field(None)
    """rna: documents as RNA, U for T; dna: as DNA, T for U. The strand is turned before."""
    drop_n_runs: int | None = added_field(None)
    """Leave out documents with a run of so many N, or a longer one."""

    def __post_init__(self) -> None:
        for name in ("window", "stride", "lineage_every", "drop_n_runs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.stride is not None and self.window is None:
            raise ValueError("stride (--stride) needs a window (--window)")
        if self.stride is not None and self.window is not None and self.stride > self.window:
            raise ValueError(
                f"stride is {self.stride}, window is {self.window}: bases between windows would be "
                "left out"
            )
        for name in ("reverse_complement", "lineage_dropout"):
            value = getattr(self, name)
            if value != "both" and not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; a share is between 0 and 1")
        if self.lineages is None and self.lineage_dropout:
            raise ValueError("lineage_dropout needs lineages (--lineages FILE)")
        if self.lineages is None and self.lineage_every != LINEAGE_EVERY:
            raise ValueError("lineage_every needs lineages (--lineages FILE)")

    def check_build(
        self,
        byte: ByteConfig | None,
        chat: object | None,
        has_splits: bool,
        piecewise: Mapping[str, object | None],
    ) -> None:
        """Raise ValueError for other settings of a build that contradict these; `piecewise` are
        those that windows exclude."""
        if chat is not None:
            raise ValueError("chat and genome: a conversation is no genome")
        changes_documents = self.window or self.reverse_complement or self.lineages
        changes_bases = self.transcribe or self.drop_n_runs
        if (changes_documents or changes_bases) and (byte is None or not byte.genome):
            raise ValueError(
                "windows, strands, lineages and bases (--window, --reverse-complement, --lineages, "
                "--transcribe, --drop-n-runs) need --tokenizer byte with --dna or "
                "--mask-control-tags"
            )
        if self.drop_n_runs and piecewise["max_document_tokens"] is not None:
            raise ValueError(
                "drop_n_runs and max_document_tokens: documents are cut after they are read; cut "
                "sequences into windows (--window)"
            )
        if self.lineages and not (byte and byte.mask_control_tags):
            raise ValueError("--lineages needs --mask-control-tags: a tag is no sequence to learn")
        if self.groups and not has_splits:
            raise ValueError("--split-groups needs --split NAME=FRACTION")
        for name, value in piecewise.items():
            if self.window is not None and value is not None:
                raise ValueError(
                    f"window and {name}: windows (--window) are cut from pieces of a sequence, "
                    "before its end is read: leave out one of them"
                )


@dataclass(frozen=True)
class Genome:
    """The configuration with its files."""

    config: GenomeConfig
    lineages: Mapping[str, str] = field(default_factory=dict, repr=False)
    groups: Mapping[str, str] = field(default_factory=dict, repr=False)
    digests: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, config: GenomeConfig) -> Genome:
        tables, digests = {}, {}
        for name in ("lineages", "groups"):
            url = getattr(config, name)
            tables[name], digests[name] = _read_table(url) if url else ({}, "")
        for id, lineage in tables["lineages"].items():
            if not RANKS.fullmatch(lineage):
                raise InputError(
                    f"{config.lineages}: the lineage of {id} is {lineage}",
                    hint="write ranks as d__Eukaryota;p__Chordata: other tags would get a loss",
                )
        return cls(config, tables["lineages"], tables["groups"], digests)

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the documents; manifests store it."""
        return {
            **plain(self.config),
            **{name: hash for name, hash in self.digests.items() if hash},
        }

    def expand(self, file: str, batches: Iterable[Texts], stats: ReadStats) -> Iterator[Texts]:
        """Turn the sequences of a slice into documents. A long sequence is read in pieces with one
        position: a window may begin in a piece and end in the next."""
        carried, offset = "", 0
        for texts, next_texts in _pair_with_next(batches):
            owners, documents, groups, ids = (
                list[int](),
                list[str](),
                list[str](),
                list[str | None](),
            )
            for k, text in enumerate(texts.texts):
                id = None if texts.ids is None else texts.ids[k]
                name = id or f"{file}:{texts.positions[k]}"
                is_last = k == len(texts.texts) - 1
                ended = not (
                    is_last and next_texts and next_texts.positions[0] == texts.positions[k]
                )
                text, start = carried + text, offset
                carried, offset = "", 0
                windows, rest = self._cut(text, start, ended=ended)
                if not ended:
                    carried, offset = text[rest - start :], rest
                for first, window in windows:
                    if self._has_n_run(window):
                        num_strands = 1 + (self.config.reverse_complement == "both")
                        stats.counts[DROPPED_COUNT] += num_strands
                        stats.counts[ADDED_COUNT] += num_strands
                        continue
                    for strand, sequence in self._strands(name, first, window):
                        owners.append(k)
                        documents.append(self._tag(name, first, strand, sequence, stats))
                        groups.append(self.groups.get(name, name))
                        ids.append(self._name(id, first, len(window), strand))
                stats.counts[ADDED_COUNT] -= ended
            stats.counts[ADDED_COUNT] += len(documents)
            expanded = texts.select(owners)
            yield replace(
                expanded,
                texts=documents,
                ids=None if texts.ids is None else ids,
                groups=groups,
            )

    def _cut(self, text: str, start: int, *, ended: bool) -> tuple[list[tuple[int, str]], int]:
        """Return the windows, with their first bases in the sequence, of a text that begins at base
        `start`; and the first base that a later window needs."""
        window = self.config.window
        if window is None:
            return [(start, text)], start + len(text)
        stride, end = self.config.stride or window, start + len(text)
        windows, first = [], start
        while first + window < end:
            windows.append((first, text[first - start : first - start + window]))
            first += stride
        if ended:  # the window that ends with the sequence
            windows.append((first, text[first - start :]))
        return windows, first

    def _has_n_run(self, window: str) -> bool:
        """Return True if the window holds a run of N that `drop_n_runs` excludes."""
        length = self.config.drop_n_runs
        return length is not None and "N" * length in window.upper()

    def _strands(self, name: str, first: int, window: str) -> Iterator[tuple[str, str]]:
        share = self.config.reverse_complement
        if share == "both":
            yield "+", window
            yield "-", reverse_complement(window)
        elif share and self._draw("strand", name, first) < share:
            yield "-", reverse_complement(window)
        else:
            yield "+", window

    def _tag(self, name: str, first: int, strand: str, sequence: str, stats: ReadStats) -> str:
        """Return a document with its lineage tags, transcribed."""
        if self.config.transcribe is not None:
            sequence = sequence.translate(RNA if self.config.transcribe == "rna" else DNA)
        if self.config.lineages is None:
            return sequence
        lineage = self.lineages.get(name)
        if lineage is None:
            stats.counts[UNTAGGED_COUNT] += 1
            return sequence
        every = self.config.lineage_every
        return "".join(
            self._write_tag(lineage, name, first, strand, at) + sequence[at : at + every]
            for at in range(0, len(sequence), every)
        )

    def _write_tag(self, lineage: str, name: str, first: int, strand: str, at: int) -> str:
        ranks = [
            f"{rank.partition('__')[0]}__None"
            if self._draw("rank", name, first, strand, at, number) < self.config.lineage_dropout
            else rank
            for number, rank in enumerate(lineage.split(";"))
        ]
        return f"|{';'.join(ranks)}|"

    def _name(self, id: str | None, first: int, bases: int, strand: str) -> str | None:
        """Return a document's id: that of the sequence, with the bases and the strand."""
        if id is None:
            return None
        place = "" if self.config.window is None else f":{first}-{first + bases}"
        return f"{id}{place}{'(-)' if strand == '-' else ''}"

    def _draw(self, *name: str | int) -> float:
        """Draw a number in [0, 1)."""
        text = "\0".join(map(str, (self.config.seed, *name)))
        digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"genome").digest()
        return int.from_bytes(digest, "little") / 2**64


def reverse_complement(sequence: str) -> str:
    """Return the other strand; lower case stays with its base."""
    return sequence.translate(COMPLEMENT)[::-1]


def _pair_with_next(batches: Iterable[Texts]) -> Iterator[tuple[Texts, Texts | None]]:
    """Yield each batch with the next one that has texts."""
    held: Texts | None = None
    for texts in batches:
        if not texts.texts:
            yield texts, None
            continue
        if held is not None:
            yield held, texts
        held = texts
    if held is not None:
        yield held, None


def _read_table(url: str) -> tuple[dict[str, str], str]:
    """Read a file of ids and values, separated by tabs, and its hash."""
    data = storage.read(url)
    table: dict[str, str] = {}
    for number, line in enumerate(data.decode(errors="replace").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        id, tab, value = line.partition("\t")
        value = value.strip().strip("|")
        if not tab or not value or table.setdefault(id, value) != value:
            raise InputError(
                f"{url}, line {number}: not an id, a tab and a value, each id once",
                hint="write lines such as chr1<TAB>d__Eukaryota;p__Chordata",
            )
    return table, hashlib.sha256(data).hexdigest()
