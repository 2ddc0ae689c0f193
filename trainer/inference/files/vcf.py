"""Variants of a VCF file, one allele at a time, checked against the genome."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....console.errors import InputError
from .genome import Genome
from .lines import read_lines

COLUMNS = 5
"""CHROM POS ID REF ALT; those after them are not read."""
SHOWN = 40
"""Letters of an allele in a message."""


@dataclass(frozen=True)
class Allele:
    """One alternative of a VCF record."""

    chrom: str
    position: int
    """Position of the first letter of `ref`, from 1 on."""
    id: str
    ref: str
    alt: str
    skipped: str | None = None
    """Why it is not scored."""

    @property
    def start(self) -> int:
        """Offset of the first letter of `ref`, from 0 on."""
        return self.position - 1


def read_alleles(path: str, genome: Genome) -> Iterator[Allele]:
    """Yield the alleles in the order of the file, several alternatives of a record one by one.
    Raise InputError at the first line that is no VCF or disagrees with the genome."""
    for number, line in enumerate(read_lines(path), start=1):
        if line.startswith(b"#") or not line.strip():
            continue
        where = f"{path}, line {number}"
        columns = line.rstrip(b"\r\n").decode(errors="replace").split("\t", COLUMNS)
        if len(columns) < COLUMNS:
            raise InputError(
                f"{where}: {len(columns)} columns, and a VCF has CHROM POS ID REF ALT",
                hint="separate the columns with tabs",
            )
        chrom, position, id, ref, alternatives = columns[:COLUMNS]
        _check_reference(where, genome, chrom, position, ref)
        for alt in alternatives.split(","):
            yield Allele(chrom, int(position), id, ref, alt, _skip_reason(where, ref, alt))


def _check_reference(where: str, genome: Genome, chrom: str, position: str, ref: str) -> None:
    length = genome.length(chrom, where)
    if not position.isdecimal() or int(position) < 1:
        raise InputError(
            f"{where}: POS is {position!r}", hint="positions are whole numbers from 1 on"
        )
    if not _is_sequence(ref):
        raise InputError(f"{where}: REF is {ref[:SHOWN]!r}", hint="REF is one or more bases")
    end = int(position) - 1 + len(ref)
    if end > length:
        raise InputError(
            f"{where}: REF ends at {end:,}, and {chrom!r} has {length:,} bases",
            hint="name the genome of this VCF with --reference",
        )
    letters = genome.fetch(chrom, end - len(ref), end)
    if letters.upper() != ref.upper():
        raise InputError(
            f"{where}: REF at {chrom}:{position} is {_shorten(ref)}, and the genome has "
            f"{_shorten(letters)}",
            hint="name the genome of this VCF with --reference",
        )


def _skip_reason(where: str, ref: str, alt: str) -> str | None:
    if alt == ".":
        return "no alternative"
    if alt == "*":
        return "overlapped by a deletion"
    if alt.startswith("<"):
        return "symbolic"
    if "[" in alt or "]" in alt or alt.startswith(".") or alt.endswith("."):
        return "breakend"
    if not _is_sequence(alt):
        raise InputError(
            f"{where}: ALT is {alt[:SHOWN]!r}",
            hint="ALT is bases, `*`, `.`, <NAME> or a breakend, separated by commas",
        )
    return "equal to REF" if alt.upper() == ref.upper() else None


def _is_sequence(allele: str) -> bool:
    return allele.isascii() and allele.isalpha()


def _shorten(letters: str) -> str:
    return letters if len(letters) <= SHOWN else f"{letters[:SHOWN]}…"
