"""Sequences of genomes as documents, against plain definitions on whole sequences."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.corpora import ids_of, read_dataset

from headrace.console.config import plain
from headrace.console.errors import InputError
from headrace.dataplane.datasets.manifest import load
from headrace.dataplane.tokenizers.byte import ByteConfig
from headrace.tokenize.builder.build import BuildConfig
from headrace.tokenize.cli import main
from headrace.tokenize.corpus.genome import (
    DROPPED_COUNT,
    Genome,
    GenomeConfig,
    reverse_complement,
)
from headrace.tokenize.corpus.read_stats import ReadStats
from headrace.tokenize.corpus.screen import count_documents_read
from headrace.tokenize.sources.format import Texts

DNA = st.text("ACGTUNNnacgtRYK-", min_size=1, max_size=120)
PAIRS = dict(zip("ACGTUNnacgtRYK-", "TGCAANntgcaYRM-", strict=True))
BYTE = ByteConfig(dna=True, mask_control_tags=True)


def plain_windows(sequence: str, window: int | None, stride: int | None) -> list[tuple[int, str]]:
    """Windows from every stride-th base, up to the first that reaches the end."""
    if window is None:
        return [(0, sequence)]
    result = []
    for first in range(0, len(sequence), stride or window):
        result.append((first, sequence[first : first + window]))
        if first + window >= len(sequence):
            break
    return result


@given(
    sequences=st.lists(DNA, min_size=1, max_size=4),
    window=st.integers(1, 40),
    stride=st.none() | st.integers(1, 40),
    both=st.booleans(),
    transcribe=st.sampled_from([None, "rna", "dna"]),
    drop_n_runs=st.none() | st.integers(1, 3),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_windows_cover_whole_sequences_read_in_any_pieces(
    sequences: list[str],
    window: int,
    stride: int | None,
    both: bool,
    transcribe: Any,
    drop_n_runs: int | None,
    data: st.DataObject,
) -> None:
    stride = stride and min(stride, window)
    config = GenomeConfig(
        window=window,
        stride=stride,
        reverse_complement="both" if both else 0.0,
        transcribe=transcribe,
        drop_n_runs=drop_n_runs,
    )
    batches: list[Texts] = [Texts([], [], [])]
    for number, sequence in enumerate(sequences):
        cuts = sorted(data.draw(st.sets(st.integers(1, max(len(sequence) - 1, 1)), max_size=4)))
        pieces = [sequence[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        for piece in filter(None, pieces):
            if (
                batches[-1].texts
                and batches[-1].positions[-1] != number
                and data.draw(st.booleans())
            ):
                last = batches[-1]
                assert last.ids is not None
                batches[-1] = Texts(
                    [*last.texts, piece], [*last.positions, number], [*last.ids, f"s{number}"]
                )
            else:
                batches.append(Texts([piece], [number], [f"s{number}"]))
    stats = ReadStats()
    result = [
        (id, text)
        for texts in Genome(config).expand("f", batches, stats)
        for id, text in zip(texts.ids or [], texts.texts, strict=True)
    ]
    expected, dropped = [], 0
    for number, sequence in enumerate(sequences):
        windows = plain_windows(sequence, window, stride)
        covered = {base for first, part in windows for base in range(first, first + len(part))}
        assert covered == set(range(len(sequence)))
        for first, part in windows:
            if drop_n_runs is not None and re.search(f"[Nn]{{{drop_n_runs}}}", part):
                dropped += 1 + both
                continue
            name = f"s{number}:{first}-{first + len(part)}"
            expected.append((name, spell(part, transcribe)))
            if both:
                reverse_complement = "".join(PAIRS[base] for base in reversed(part))
                expected.append((f"{name}(-)", spell(reverse_complement, transcribe)))
    assert result == expected
    assert stats.counts[DROPPED_COUNT] == dropped
    assert count_documents_read(len(result), stats.counts) == len(sequences)


def spell(part: str, transcribe: str | None) -> str:
    """Write a part of a sequence as RNA or DNA."""
    if transcribe == "rna":
        return part.replace("T", "U").replace("t", "u")
    return part.replace("U", "T").replace("u", "t") if transcribe == "dna" else part


@given(DNA)
def test_the_complement_of_a_complement_is_the_sequence(sequence: str) -> None:
    assert reverse_complement(reverse_complement(sequence)) == sequence.replace("U", "T")


def one_by_one(config: GenomeConfig, count: int, **tables: Any) -> list[str]:
    texts = Texts(["AAAC"] * count, list(range(count)), [f"s{number}" for number in range(count)])
    (expanded,) = Genome(config, **tables).expand("f", [texts], ReadStats())
    return list(expanded.texts)


def test_a_coin_turns_a_share_of_the_documents() -> None:
    turned = one_by_one(GenomeConfig(reverse_complement=0.3), 2000)
    assert set(turned) == {"AAAC", "GTTT"}
    assert 500 < turned.count("GTTT") < 700
    assert one_by_one(GenomeConfig(reverse_complement=0.3), 100) == turned[:100]
    reseeded = one_by_one(GenomeConfig(reverse_complement=0.3, seed=1), 2000)
    assert reseeded != turned
    assert one_by_one(GenomeConfig(reverse_complement=1.0), 3) == ["GTTT"] * 3


def test_tags_stand_before_documents_and_lose_ranks() -> None:
    lineages = {f"s{number}": "d__B;p__P;s__E coli" for number in range(1000)}
    config = GenomeConfig(lineages="x", lineage_every=2)
    assert one_by_one(config, 1, lineages=lineages) == [
        "|d__B;p__P;s__E coli|AA|d__B;p__P;s__E coli|AC"
    ]
    config = GenomeConfig(lineages="x", lineage_dropout=0.25)
    tagged = one_by_one(config, 1000, lineages=lineages)
    for rank, none in (("d__B", "d__None"), ("p__P", "p__None"), ("s__E coli", "s__None")):
        dropped = sum(none in text for text in tagged)
        assert 190 < dropped < 310 and dropped + sum(rank in text for text in tagged) == 1000
    both = sum("d__None" in text and "p__None" in text for text in tagged)
    assert 30 < both < 100  # independent draws
    assert one_by_one(config, 1, lineages={}) == ["AAAC"]


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    draw = random.Random(1)
    records = [
        (f"chr{number}", "".join(draw.choices("ACGT", k=200 + 97 * number))) for number in range(12)
    ]
    lines = [
        f">{id} x\n" + "\n".join(s[i : i + 60] for i in range(0, len(s), 60)) for id, s in records
    ]
    (tmp_path / "g.fa").write_text("\n".join(lines) + "\n")
    return tmp_path / "g.fa"


def test_a_group_is_never_divided_between_splits(
    fasta: Path, tmp_path: Path, run_build: Callable[..., Path]
) -> None:
    groups = {f"chr{number}": f"genus-{number // 3}" for number in range(9)} | {"chr9": "val"}
    (tmp_path / "groups.tsv").write_text("".join(f"{id}\t{name}\n" for id, name in groups.items()))
    config = GenomeConfig(
        window=100, stride=50, reverse_complement="both", groups=str(tmp_path / "groups.tsv")
    )
    out = run_build(fasta, byte=BYTE, genome=config, splits={"val": 0.4}, slice_size=700)
    ids = {
        name: [(id or "").split(":")[0] for id in ids_of(out / name)] for name in ("train", "val")
    }
    assert set(ids["train"]) | set(ids["val"]) == {f"chr{number}" for number in range(12)}
    in_group = {name: {groups.get(id, id) for id in sequences} for name, sequences in ids.items()}
    assert not in_group["train"] & in_group["val"]
    assert "val" in in_group["val"] and len(in_group["train"]) > 1
    again = run_build(fasta, byte=BYTE, genome=config, splits={"val": 0.4}, out="again")
    for name in ("train", "val"):  # whatever the slices
        assert [row[1:] for row in read_dataset(out / name)] == [
            row[1:] for row in read_dataset(again / name)
        ]


def test_documents_of_a_genome_are_counted_and_named(
    fasta: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lineages.tsv").write_text(
        "chr0\td__Bacteria;p__P\n# a comment\nchr1\t|d__Archaea|\n"
    )
    options = "--tokenizer byte --dna --mask-control-tags --window 150 --reverse-complement both"
    command = ["build", str(fasta), *options.split(), "--lineages", str(tmp_path / "lineages.tsv")]
    done = CliRunner().invoke(main, [*command, "--out", str(tmp_path / "d")])
    assert done.exit_code == 0, done.output
    assert "without a lineage: " in done.output + capfd.readouterr().err
    ids = ids_of(tmp_path / "d")
    assert f"read 12 records as {len(ids)} documents, kept {len(ids)}" in done.output
    assert ids[:4] == ["chr0:0-150", "chr0:0-150(-)", "chr0:150-200", "chr0:150-200(-)"]
    (tmp_path / "lineages.tsv").write_text("chr0\td__Archaea;p__P\n")
    changed = CliRunner().invoke(main, [*command, "--out", str(tmp_path / "d")])
    assert changed.exit_code == 1 and "was built with other settings" in changed.output


def test_runs_of_n_and_letters_of_rna_are_settings_of_a_dataset(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "g.fa").write_text(">a\nACGTACGTACNN\nNNGTACGTACGT\n>b\nACNNTTGTAC\n")
    words = ["build", str(tmp_path / "g.fa"), "--tokenizer", "byte", "--dna", "--window", "10"]
    words += ["--stride", "5", "--drop-n-runs", "3", "--transcribe", "rna", "--mask-n-runs", "2"]
    done = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "d")])
    assert done.exit_code == 0, done.output
    said = "read 2 records as 5 documents, kept 3; left out: 2 dropped by --drop-n-runs"
    assert said in done.output + capfd.readouterr().err
    assert ids_of(tmp_path / "d") == ["a:0-10", "a:15-24", "b:0-10"]
    texts = [row[1] for row in read_dataset(tmp_path / "d")]
    assert texts == ["ACGUACGUAC", "UACGUACGU", "ACNNUUGUAC"]
    manifest = load(str(tmp_path / "d"))
    (generation,) = manifest.generations
    assert generation.provenance["counts"][DROPPED_COUNT] == 2
    genome = manifest.settings["genome"]
    assert genome["drop_n_runs"] == 3 and genome["transcribe"] == "rna"
    assert manifest.tokenizer.spec["mask_n_runs"] == 2
    assert "drop_n_runs" not in plain(GenomeConfig())  # of datasets that were built before
    (tmp_path / "g.fa").write_text("ACGT\n")
    broken = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "e")])
    assert "windows (--window) exclude --on-error skip" in broken.output + capfd.readouterr().err


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"genome": GenomeConfig(drop_n_runs=3)}, "need --tokenizer byte with --dna or"),
        (
            {"genome": GenomeConfig(drop_n_runs=3), "byte": BYTE, "max_document_tokens": 9},
            "drop_n_runs and max_document_tokens",
        ),
        ({"genome": GenomeConfig(window=10)}, "need --tokenizer byte with --dna or"),
        (
            {"genome": GenomeConfig(lineages="x"), "byte": ByteConfig(dna=True)},
            "--lineages needs --mask-control-tags",
        ),
        ({"genome": GenomeConfig(groups="x")}, "--split-groups needs --split"),
        (
            {"genome": GenomeConfig(window=9), "byte": BYTE, "max_document_tokens": 9},
            "window and max_document_tokens",
        ),
    ],
)
def test_settings_that_contradict_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BuildConfig(inputs=("a",), out="b", tokenizer="byte", **values)


def test_wrong_tables_and_numbers_are_refused(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"stride": 3}, r"needs a window \(--window\)"),
        ({"window": 2, "stride": 3}, "bases between windows would be left out"),
        ({"reverse_complement": 2.0}, "a share is between 0 and 1"),
        ({"lineage_dropout": 0.1}, "needs lineages"),
        ({"lineage_every": 100}, "needs lineages"),
        ({"drop_n_runs": 0}, "drop_n_runs is 0; it must be at least 1"),
    ]
    for values, message in wrong:
        with pytest.raises(ValueError, match=message):
            GenomeConfig(**values)
    (tmp_path / "t").write_text("chr0\tgenus-1\n")
    with pytest.raises(InputError, match="the lineage of chr0 is genus-1"):
        Genome.load(GenomeConfig(lineages=str(tmp_path / "t")))
    (tmp_path / "t").write_text("chr0\ta\nchr0\tb\n")
    with pytest.raises(InputError, match="line 2: not an id, a tab and a value"):
        Genome.load(GenomeConfig(groups=str(tmp_path / "t")))
