"""`trainer variants` and `trainer embed`: what a checkpoint says of sequences."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ...console import command
from ...console.progress import exact_count
from ..cluster.commands import RankCommand
from ..weights.commands import SOURCE
from .options import RowOptions, row_options

if TYPE_CHECKING:
    from ..weights.source import WeightSource
    from .variants import Survey

DEFAULT_WINDOW = 8192


@click.command(cls=RankCommand)
@click.argument("source", metavar=SOURCE)
@click.argument("file", metavar="FILE.vcf")
@click.option("--reference", required=True, metavar="FASTA", help="Genome of the variants.")
@click.option(
    "--out",
    required=True,
    metavar="FILE",
    callback=command.local_path,
    help="File to write: .parquet or .tsv.",
)
@click.option(
    "--window",
    metavar="BASES",
    callback=command.token_count,
    help="Bases of a row, the variant in its middle [the run's longest row, 8,192 at most].",
)
@click.option(
    "--strand",
    type=click.Choice(("forward", "both")),
    default="forward",
    show_default=True,
    help="both averages the scores of a window and of its reverse complement.",
)
@row_options
def variants(
    source: str,
    file: str,
    reference: str,
    out: str,
    window: int | None,
    strand: str,
    options: RowOptions,
) -> None:
    """Score variants of a VCF file: log-likelihood with ALT minus that with REF.

    The file has a row for each allele: the log-likelihoods of the window with either allele, their
    differences, and why an allele was skipped. The same command continues one that was killed.

    \b
    Example:
      trainer variants runs/dna calls.vcf.gz --reference genome.fa --out scores.parquet

    More: docs/variants.md
    """
    from ..placement.ranks import joined_row_ranks
    from .files.genome import Genome
    from .memory import check_memory
    from .parts import PartWriter
    from .rows import score_batch
    from .variant_file import VariantFile
    from .variants import SCORE, Variants

    target = VariantFile(out)
    weights, tokenizer, placement = options.find_model(source)
    batch_tokens = options.batch_tokens
    size = window or min(_row_length(weights, DEFAULT_WINDOW), DEFAULT_WINDOW)
    _check_row_length(weights, size, "--window")

    def prepare() -> tuple[Variants, Survey]:
        target.check_free()
        scoring = Variants(file, Genome(reference), tokenizer, size, strand == "both", batch_tokens)
        survey = scoring.survey()
        rows = max(1, batch_tokens // size)
        command.say(_describe_survey(survey))
        command.say(check_memory(weights.model, rows, size, placement))
        return scoring, survey

    if options.dry_run:
        survey = prepare()[1]
        if options.as_json:
            command.emit({"alleles": survey.alleles, "skipped": survey.skipped, "window": size})
        return

    with joined_row_ranks(placement) as ranks:
        prepared = ranks.run_on_first(prepare)
        compute = partial(score_batch, ranks.load(weights))
        team = ranks.team({SCORE: compute}, idle=compute)

        def score() -> dict[str, Any]:
            assert prepared is not None
            scoring, survey = prepared
            request = {
                "weights": weights.where,
                "ema": options.ema,
                "tokenizer": tokenizer.info.fingerprint,
                "variants": _hash_file(file),
                "genome": scoring.genome.fingerprint,
                "window": size,
                "strand": strand,
                **placement.number_format,
            }
            with target.begun(request) as scored:
                if scored:
                    command.say(f"{scored:,} alleles were scored before")
                scoring.score(team, PartWriter(target.folder.root, scored), survey.alleles)
                target.finish()
            return {**request, "alleles": survey.alleles, "skipped": dict(survey.skipped)}

        result = team.lead(score)
    if result is None:  # rank 0 writes
        return
    if options.as_json:
        command.emit(result | {"out": out})
    command.say(f"wrote {out}")


@click.command(cls=RankCommand)
@click.argument("source", metavar=SOURCE)
@click.argument("file", metavar="FILE")
@click.option(
    "--out",
    required=True,
    metavar="FOLDER",
    callback=command.local_path,
    help="Folder for Parquet files.",
)
@click.option(
    "--layers",
    default="norm",
    show_default=True,
    metavar="N,...",
    callback=lambda context, parameter, value: value.split(","),
    help="States after these layers, from 0 on; norm: after the final norm.",
)
@click.option("--by-token", is_flag=True, help="A state for each token [a mean for each sequence].")
@click.option(
    "--max-length",
    metavar="TOKENS",
    callback=command.token_count,
    help="Longest sequence [the run's longest row; 2,048 for weights without a run].",
)
@row_options
def embed(
    source: str,
    file: str,
    out: str,
    layers: list[str],
    by_token: bool,
    max_length: int | None,
    options: RowOptions,
) -> None:
    """Write hidden states of sequences, from a FASTA or JSONL file.

    The Parquet files in FOLDER/parts have a row for each sequence (or token), and for each layer a
    column with a vector. The same command continues one that was killed.

    \b
    Example:
      trainer embed runs/dna genes.fa --layers 2,norm --out embeddings

    More: docs/variants.md
    """
    from ...console.progress import format_count
    from ..folders.request_folder import RequestFolder
    from ..placement.ranks import joined_row_ranks
    from ..scores import records
    from .embed import EMBED, Embedder, Sequences, parse_layers
    from .embed import embed as embed_sequences
    from .memory import check_memory
    from .parts import FOLDER, resume

    weights, tokenizer, placement = options.find_model(source)
    names = parse_layers(layers, len(weights.model.layers))
    length = records.context_length(weights, max_length)
    sequences = Sequences(file, tokenizer, length, options.batch_tokens)
    folder = RequestFolder(out, "embedding", before=(FOLDER,))
    parts = folder.root / FOLDER

    def survey() -> int:
        folder.check_free()
        count, longest, fullest = sequences.survey()
        command.say(
            f"{format_count(count, 'sequences')}, the longest of {exact_count(longest, 'tokens')}"
        )
        rows, kept = max(1, fullest // max(1, longest)), len(names) * by_token
        command.say(check_memory(weights.model, rows, longest, placement, kept))
        return count

    if options.dry_run:
        count = survey()
        if options.as_json:
            command.emit({"sequences": count, "layers": names})
        return

    with joined_row_ranks(placement) as ranks:
        total = ranks.run_on_first(survey)
        embedder = Embedder(ranks.load(weights), names, by_token, parts)
        team = ranks.team({EMBED: embedder}, idle=embedder.discard)

        def compute() -> dict[str, Any]:
            assert total is not None
            request = {
                "weights": weights.where,
                "ema": options.ema,
                "tokenizer": tokenizer.info.fingerprint,
                "sequences": _hash_file(file),
                "layers": list(names),
                "by_token": by_token,
                **placement.number_format,
            }
            with folder.locked():
                if folder.read_stored(request) is None:
                    folder.store(request)
                parts.mkdir(exist_ok=True)
                first = resume(parts)
                if first:
                    command.say(f"{format_count(first, 'sequences')} were embedded before")
                embed_sequences(team, sequences, parts, first, total)
            return {**request, "number": total}

        result = team.lead(compute)
    if result is None:  # rank 0 writes
        return
    if options.as_json:
        command.emit(result | {"out": out})
    command.say(f"wrote {out}")


def _hash_file(path: str) -> str:
    import hashlib
    from pathlib import Path

    with Path(path).open("rb") as file:
        digest: str = hashlib.file_digest(file, "sha256").hexdigest()
    return digest


def _row_length(weights: WeightSource, without_run: int) -> int:
    """Return the longest row of the weights' run, or a default for weights without a run."""
    from ..scores import records
    from ..weights.source import Checkpoint

    if isinstance(weights, Checkpoint) and weights.run is not None and weights.run.plan.exists():
        return records.context_length(weights, None)
    return min(without_run, weights.model.learned_positions or without_run)


def _check_row_length(weights: WeightSource, length: int, option: str) -> None:
    from ..scores import records

    records.check_length(weights, length, option)


def _describe_survey(survey: Survey) -> str:
    skipped = sum(survey.skipped.values())
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in survey.skipped.items())
    return exact_count(survey.alleles, "alleles") + (
        f", {skipped:,} skipped: {reasons}" * (skipped > 0)
    )
