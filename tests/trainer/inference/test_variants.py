"""`trainer variants`: scores of alleles beside the plain model, over ranks, after a kill."""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner, Result
from support.configs import CONFIGS
from support.ranks import forked
from support.ranks.ports import free_ports

from headrace.dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS, Fp8Config
from headrace.models.model.model import Model
from headrace.tokenize.cli import main as tokenize
from headrace.trainer.cli import main
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.inference import parts
from headrace.trainer.inference.files.genome import Genome, reverse_complement
from headrace.trainer.inference.parts import PartWriter
from headrace.trainer.inference.rows import score_batch
from headrace.trainer.inference.variants import SCORE, Variants
from headrace.trainer.placement.placement import choose_precision
from headrace.trainer.placement.team import Team
from headrace.trainer.weights.source import find

WINDOW = 32
DRAW = random.Random(4)
BASES = "".join(DRAW.choices("ACGT", k=300))
SEQUENCES = {"one": BASES[:200], "two": BASES[200:].lower(), "single": "G", "empty": ""}


def write_genome(folder: Path, *, width: int = 60, end: str = "\n", packed: bool = False) -> Path:
    text = "".join(
        f">{name} its description{end}"
        + "".join(f"{bases[at : at + width]}{end}" for at in range(0, len(bases), width))
        for name, bases in SEQUENCES.items()
    )
    file = folder / f"genome.fa{'.gz' * packed}"
    file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return file


def write_variants(folder: Path, records: Sequence[Sequence[object]], *, packed: bool) -> Path:
    lines = ["##fileformat=VCFv4.3", "#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO"]
    lines += ["\t".join([*map(str, record), ".", "PASS", "."]) for record in records]
    text = "\n".join(lines).encode()
    file = folder / f"calls.vcf{'.gz' * packed}"
    file.write_bytes(gzip.compress(text) if packed else text)
    return file


def base(name: str, position: int, length: int = 1) -> str:
    return SEQUENCES[name][position - 1 : position - 1 + length].upper()


def mutate(name: str, position: int) -> str:
    return "ACGT"[("ACGT".index(base(name, position)) + 1) % 4]


RECORDS = [
    ("one", 1, "first", base("one", 1), mutate("one", 1)),
    ("one", 100, "many", base("one", 100), f"{mutate('one', 100)},<DEL>,*,{base('one', 100)}GT"),
    ("one", 120, "deletion", base("one", 120, 5), base("one", 120)),
    ("one", 130, "long", base("one", 130, 40), base("one", 130)),
    ("one", 200, "last", base("one", 200), mutate("one", 200)),
    ("one", 150, "none", base("one", 150), "."),
    ("one", 151, "same", base("one", 151), base("one", 151).lower()),
    ("one", 152, "breakend", base("one", 152), f"{base('one', 152)}[two:3["),
    ("two", 50, "masked", base("two", 50), mutate("two", 50)),
    ("single", 1, "alone", "G", "C"),
]
SKIPPED = {
    ("many", "<DEL>"): "symbolic",
    ("many", "*"): "overlapped by a deletion",
    ("long", base("one", 130)): "longer than the window",
    ("none", "."): "no alternative",
    ("same", base("one", 151).lower()): "equal to REF",
    ("breakend", f"{base('one', 152)}[two:3["): "breakend",
    ("alone", "C"): "without other bases in the sequence",
}


def read_rows(folder: Path) -> list[dict[str, Any]]:
    files = parts.list_parts(folder)[1]
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def plain_score(model: Model, text: str) -> float:
    """Score a text by its logits, alone and unpadded."""
    ids = torch.tensor([list(text.encode())])
    with torch.no_grad():
        log_probs = model(ids[:, :-1]).double().log_softmax(-1)
    return float(log_probs.gather(2, ids[:, 1:, None]).sum())


def oracle(model: Model, row: dict[str, Any], *, dna: bool, both: bool) -> tuple[float, float]:
    """Score the alleles of an output's row from the sequences, without headrace's windows."""
    bases, at = SEQUENCES[row["chrom"]], row["pos"] - 1
    end = at + len(row["ref"])
    longest = max(len(row["ref"]), len(row["alt"]))
    before = (WINDOW - longest) // 2
    first, last = max(0, at - before), min(len(bases), end + WINDOW - longest - before)
    assert (row["start"], row["end"]) == (first + 1, last)
    alt = row["alt"].lower() if bases.islower() else row["alt"]
    texts = [bases[first:last], bases[first:at] + alt + bases[end:last]]
    opposite = str.maketrans("ACGTacgt", "TGCAtgca")
    scores = []
    for text in texts:
        shown = text.upper() if dna else text
        strands = [shown, *[shown.translate(opposite)[::-1]] * both]
        scores.append(sum(plain_score(model, strand) for strand in strands) / len(strands))
    return scores[0], scores[1]


@pytest.mark.slow
@pytest.mark.parametrize(("dna", "both"), [(True, True), (False, False)])
def test_scores_are_those_of_the_plain_model(dna: bool, both: bool, tmp_path: Path) -> None:
    model = Model(load_model_config(str(CONFIGS / "tiny.yaml"), ["vocab_size=257"]))
    model.init_weights(1)
    model.eval()
    file = write_variants(tmp_path, RECORDS, packed=both)
    scoring = Variants(
        str(file),
        Genome(str(write_genome(tmp_path, packed=dna))),
        ByteTokenizer(ByteConfig(dna=dna)),
        WINDOW,
        both,
        batch_tokens=5 * WINDOW,
    )
    survey = scoring.survey()
    assert survey.alleles == 13 and sum(survey.skipped.values()) == len(SKIPPED)
    assert survey.longest == WINDOW
    team = Team({SCORE: partial(score_batch, model)})
    scoring.score(team, PartWriter(tmp_path, 0), survey.alleles)
    rows = read_rows(tmp_path)
    assert [(row["id"], row["alt"]) for row in rows] == [
        (record[2], alt) for record in RECORDS for alt in record[4].split(",")
    ]
    for row in rows:
        assert row["skipped"] == SKIPPED.get((row["id"], row["alt"]))
        if row["skipped"]:
            assert row["delta"] is None and row["ref_score"] is None and row["start"] is None
            continue
        ref, alt = oracle(model, row, dna=dna, both=both)
        assert row["ref_score"] == pytest.approx(ref, rel=1e-6)
        assert row["alt_score"] == pytest.approx(alt, rel=1e-6)
        assert row["delta"] == row["alt_score"] - row["ref_score"]
        length = row["end"] - row["start"]  # bases after the first
        longer = len(row["alt"]) - len(row["ref"])
        assert row["ref_mean"] == pytest.approx(ref / length, rel=1e-6)
        assert row["delta_mean"] == pytest.approx(alt / (length + longer) - ref / length, abs=1e-6)


def bigram_model(log_probs: dict[str, dict[str, float]]) -> Model:
    """Set weights so that a base depends on the base before it alone."""
    words = ["vocab_size=257", "width=272", "tie_embeddings=false"]
    model = Model(load_model_config("tiny-transformer", words))
    model.init_weights(1)
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.zero_()  # every branch adds nothing to the stream
        model.embedding.weight.copy_(1000 * torch.eye(257, 272))  # eps of the norm is nothing
        assert model.head is not None
        model.head.weight.fill_(-1e4)
        for before, following in log_probs.items():
            for letter, value in following.items():
                # The norm scales a vector with a single 1 by √width.
                model.head.weight[ord(letter), ord(before)] = value / math.sqrt(272)
    return model.eval()


def test_a_variant_that_breaks_a_planted_constraint_scores_lower(tmp_path: Path) -> None:
    """After A comes C, as far as the model knows; all other pairs are equally frequent."""
    rare, usual = math.log(0.01), math.log(0.25)
    log_probs = {first: dict.fromkeys("ACGT", usual) for first in "CGT"}
    log_probs["A"] = {"A": rare, "C": math.log(0.97), "G": rare, "T": rare}
    (tmp_path / "genome.fa").write_text(">g\nTGTGACGGTTGG\n")
    records = [("g", 6, "constrained", "C", "T"), ("g", 9, "neutral", "T", "C")]
    scoring = Variants(
        str(write_variants(tmp_path, records, packed=False)),
        Genome(str(tmp_path / "genome.fa")),
        ByteTokenizer(ByteConfig(dna=True)),
        12,
        both_strands=False,
        batch_tokens=64,
    )
    team = Team({SCORE: partial(score_batch, bigram_model(log_probs))})
    scoring.score(team, PartWriter(tmp_path, 0), 2)
    constrained, neutral = [row["delta"] for row in read_rows(tmp_path)]
    assert constrained == pytest.approx(math.log(0.01 / 0.97), abs=1e-4)
    assert neutral == pytest.approx(0, abs=1e-4)


# The command


@pytest.fixture
def run(checkpoint_of: Callable[..., RunFolder], tmp_path: Path) -> RunFolder:
    (tmp_path / "text.fa").write_text(f">a\n{BASES}\n")
    words = ["build", str(tmp_path / "text.fa"), "--tokenizer", "byte", "--dna"]
    built = CliRunner().invoke(tokenize, [*words, "--out", str(tmp_path / "data")])
    assert built.exit_code == 0, built.output
    model = Model(load_model_config("tiny-transformer", ["vocab_size=257"]))
    model.init_weights(1)
    write_genome(tmp_path)
    write_variants(tmp_path, RECORDS, packed=False)
    return checkpoint_of(model)


def words_for(run: RunFolder, out: str, *words: str) -> list[str]:
    folder = run.root.parent
    files = [str(folder / "calls.vcf"), "--reference", str(folder / "genome.fa")]
    options = ["--data", str(folder / "data"), "--window", str(WINDOW), "--batch-tokens", "64"]
    return ["variants", str(run.root), *files, *options, "--out", str(folder / out), *words]


def ask(run: RunFolder, out: str, *words: str) -> Result:
    return CliRunner().invoke(main, words_for(run, out, *words))


def test_the_command_writes_parquet_and_tsv(run: RunFolder) -> None:
    folder = run.root.parent
    tried = ask(run, "scores.parquet", "--dry-run", "--json")
    assert tried.exit_code == 0 and not (folder / "scores.parquet").exists()
    assert json.loads(tried.stdout)["skipped"]["symbolic"] == 1
    assert "memory:" in tried.stderr and "of 32 tokens on 1 rank" in tried.stderr
    done = ask(run, "scores.parquet", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["alleles"] == 13
    assert "13 alleles, 7 skipped: 1 symbolic" in done.stderr
    rows = pq.read_table(folder / "scores.parquet").to_pylist()
    assert ask(run, "scores.tsv").exit_code == 0
    lines = read_lines(folder / "scores.tsv")
    assert [list(line) for line in lines] == [list(row) for row in rows]
    for line, row in zip(lines, rows, strict=True):
        assert line["alt"] == row["alt"] and line["skipped"] == (row["skipped"] or "")
        assert line["delta"] == "" if row["delta"] is None else float(line["delta"]) == row["delta"]
    assert sorted(path.name for path in folder.glob("scores*")) == ["scores.parquet", "scores.tsv"]
    again = ask(run, "scores.tsv")
    assert again.exit_code == 1 and "scores.tsv exists" in again.output


PLUGIN = """
import os, signal
from headrace.trainer.inference import parts, variants
from headrace.trainer.placement import team
parts.SHORTEST = parts.SHARE = 0.0
score_chunk, chunks = variants.Variants._score_chunk, []
team.ROUND = 1
def die_at_the_fifth(self, team, chunk):
    chunks.append(chunk)
    if len(chunks) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return score_chunk(self, team, chunk)
variants.Variants._score_chunk = die_at_the_fifth
"""


@pytest.mark.slow
def test_a_command_killed_on_two_ranks_goes_on_alone(run: RunFolder) -> None:
    folder = run.root.parent
    assert ask(run, "whole.tsv").exit_code == 0
    (folder / "plugin.py").write_text(PLUGIN)
    words = words_for(run, "scores.tsv", "--cp", "2", "--shard", "2")
    command = [sys.executable, "-m", "headrace.trainer.cli", *words]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports())}
    ranks = [
        forked.Command(command, plugin=folder / "plugin.py", env={**os.environ, **world, "RANK": n})
        for n in "01"
    ]
    killed, lonely = [rank.wait() for rank in ranks]
    assert killed.returncode == -9 and not (folder / "scores.tsv").exists(), killed.stderr
    assert lonely.returncode == 1 and "lost its connection" in lonely.stderr
    finished = parts.list_parts(folder / "scores.tsv.parts")[0]
    assert finished == 4
    (folder / "scores.tsv.parts/.part-04-05.0-of-1.parquet.tmp").touch()
    (folder / "scores.tsv.parts/part-9-10.0-of-1.parquet").touch()  # what is before it is missing
    for option, value, message in (
        ("--strand", "both", "strand: the folder has forward"),
        ("--precision", "bf16", "dtype: the folder has float32"),
    ):
        refused = ask(run, "scores.tsv", option, value)
        assert refused.exit_code == 1 and message in refused.output
    done = ask(run, "scores.tsv")
    assert done.exit_code == 0 and "4 alleles were scored before" in done.stderr
    rows, expected = (list(read_lines(folder / f"{name}.tsv")) for name in ("scores", "whole"))
    assert rows[4:] == expected[4:]
    for row, alone in zip(rows[:4], expected[:4], strict=True):
        scores = [column for column, text in alone.items() if "score" in column and text]
        assert [float(row[column]) for column in scores] == pytest.approx(
            [float(alone[column]) for column in scores], rel=1e-6
        )
    assert not (folder / "scores.tsv.parts").exists()


def read_lines(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return list(csv.DictReader(lines, delimiter="\t"))


def test_the_precision_is_that_of_the_run(run: RunFolder) -> None:
    assert choose_precision(find(str(run.root)), None, "cpu").name == "fp32"  # the device's
    run.run.write_text("precision: bf16\n")
    weights = find(str(run.root))
    assert choose_precision(weights, None, "cpu") == PRECISIONS["bf16"]
    assert choose_precision(weights, "fp32", "cpu") == PRECISIONS["fp32"]
    run.run.write_text("precision: fp8\nfp8: {smallest: 16, ends: 0}\n")
    settings = Fp8Config(smallest=16, ends=0)
    assert choose_precision(weights, None, "cpu").fp8 == settings
    assert choose_precision(weights, "fp8", "cpu").fp8 == settings
    run.run.write_text("")
    wrong = ask(run, "scores.tsv", "--precision", "fp8")
    assert wrong.exit_code == 1 and "computes no matrix of this model in FP8" in wrong.output


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("one\t100\t.\tNN\tA", "line 3: REF at one:100 is NN, and the genome has"),
        ("chr1\t100\t.\tA\tC", "line 3: {genome} has no sequence 'chr1'"),
        ("one\t0\t.\tA\tC", "line 3: POS is '0'"),
        ("one\tten\t.\tA\tC", "line 3: POS is 'ten'"),
        ("one\t200\t.\tAC\tC", "line 3: REF ends at 201, and 'one' has 200 bases"),
        ("one\t5\t.\t\tC", "line 3: REF is ''"),
        (f"one\t5\t.\t{base('one', 5)}\tC-", "line 3: ALT is 'C-'"),
        ("one 5 . A C", "line 3: 1 columns"),
    ],
)
def test_a_wrong_line_is_named(record: str, message: str, run: RunFolder) -> None:
    folder = run.root.parent
    (folder / "calls.vcf").write_text(f"##fileformat=VCFv4.3\n#CHROM\n{record}\n")
    done = ask(run, "scores.tsv")
    assert done.exit_code == 1
    assert message.format(genome=folder / "genome.fa") in done.output, done.output
    assert not list(folder.glob("scores*"))


def test_wrong_files_and_options_are_named(run: RunFolder) -> None:
    folder = run.root.parent
    assert "neither a .parquet nor a .tsv file" in ask(run, "scores.csv").output
    lonely = ask(run, "scores.tsv", "--cp", "2")
    assert lonely.exit_code == 1 and "torchrun --nproc-per-node 2" in lonely.output
    lonely = ask(run, "scores.tsv", "--tp", "2", "--shard", "3")
    assert lonely.exit_code == 1 and "--tp 2 × --cp 1 does not divide 1 process" in lonely.output
    unfit = ask(run, "scores.tsv", "--tp", "5")
    assert unfit.exit_code == 1 and "tp=5 does not divide its" in unfit.output
    (folder / "calls.vcf").unlink()
    assert "calls.vcf: No such file" in ask(run, "scores.tsv").output
    (folder / "calls.vcf").write_bytes(gzip.compress(b"one\t5" * 99)[:-9])
    assert "calls.vcf is damaged" in ask(run, "scores.tsv").output
    for content, message in (
        ("", "is empty"),
        ("ACGT\n", "does not begin with `>`"),
        (">a\nAC\n>a\nGT\n", "two sequences with the name 'a'"),
        (">a\nACGT\nAC\nACGT\n", "the lines of 'a' have different lengths"),
    ):
        (folder / "genome.fa").write_text(content)
        assert message in ask(run, "scores.tsv").output


@pytest.mark.parametrize("width", [1, 7, 60, 1000])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_genome_returns_the_letters_of_its_file(
    width: int, end: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.trainer.inference.files.genome.BLOCK", 50)
    genome = Genome(str(write_genome(tmp_path, width=width, end=end, packed=packed)))
    assert {name: place.length for name, place in genome.sequences.items()} == {
        name: len(bases) for name, bases in SEQUENCES.items()
    }
    for name, bases in SEQUENCES.items():
        for start in range(0, len(bases), 13):
            for stop in range(start, len(bases) + 1, 17):
                assert genome.fetch(name, start, stop) == bases[start:stop]


def test_the_other_strand_keeps_case_and_codes() -> None:
    assert reverse_complement("AACgtnRYSW-") == "-WSRYnacGTT"
    assert reverse_complement(reverse_complement(BASES.lower())) == BASES.lower()
