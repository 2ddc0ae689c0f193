"""`trainer variants` and `trainer embed`: what a checkpoint says of sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ...console import command
from ..cluster.commands import RankCommand
from ..layout.devices import DeviceKind
from ..scores.commands import batch_option, device_option
from ..weights.commands import SOURCE, data_option, ema_option, step_option

if TYPE_CHECKING:
    from ..weights.source import WeightSource

DEFAULT_WINDOW = 8192
cp_option = click.option(
    "--cp",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Ranks that share each row.",
)
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Read the input and print the memory; compute nothing."
)


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
@cp_option
@batch_option
@step_option
@ema_option
@data_option
@device_option
@dry_run_option
@command.json_option
def variants(
    source: str,
    file: str,
    reference: str,
    out: str,
    window: int | None,
    strand: str,
    cp: int,
    batch_tokens: int,
    step: int | None,
    ema: bool,
    data: str | None,
    device: DeviceKind,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Score variants of a VCF file: log-likelihood with ALT minus that with REF.

    The file has a row for each allele: the log-likelihoods of the window with either allele, their
    differences, and why an allele was skipped. The same command continues one that was killed.

    \b
    Example:
      trainer variants runs/dna calls.vcf.gz --reference genome.fa --out scores.parquet

    More: docs/variants.md
    """
    from ..weights import source as sources
    from ..weights.sample import check_vocabulary
    from ..weights.tokenizer import find_tokenizer
    from .genome import Genome
    from .memory import check_memory
    from .parts import PartWriter
    from .ranks import choose_layout, joined_row_ranks
    from .rows import score_batch
    from .variant_file import VariantFile
    from .variants import SCHEMA, SCORE, Survey, Variants

    target = VariantFile(out)
    weights = sources.find(source, step, average=ema)
    tokenizer = find_tokenizer(weights, data)
    check_vocabulary(tokenizer, weights.model)
    size = window or min(_row_length(weights, DEFAULT_WINDOW), DEFAULT_WINDOW)
    _check_row_length(weights, size, "--window")

    def prepare() -> tuple[Variants, Survey]:
        target.check_free()
        scoring = Variants(file, Genome(reference), tokenizer, size, strand == "both", batch_tokens)
        survey = scoring.survey()
        rows = max(1, batch_tokens // size)
        command.say(_describe_survey(survey))
        command.say(check_memory(weights.model, rows, size, cp, device))
        return scoring, survey

    if dry_run:
        survey = prepare()[1]
        if as_json:
            command.emit({"alleles": survey.alleles, "skipped": survey.skipped, "window": size})
        return

    with joined_row_ranks(choose_layout(weights.model, cp), device) as ranks:
        prepared = ranks.run_on_first(prepare)
        model = ranks.load(weights, device)
        team = ranks.team({SCORE: lambda rows: score_batch(model, rows)})

        def score() -> dict[str, Any]:
            assert prepared is not None
            scoring, survey = prepared
            request = {
                "weights": weights.where,
                "ema": ema,
                "tokenizer": tokenizer.info.fingerprint,
                "variants": file_hash(file),
                "genome": scoring.genome.fingerprint,
                "window": size,
                "strand": strand,
                "dtype": str(model.embedding.weight.dtype).removeprefix("torch."),
            }
            with target.begun(request) as scored:
                if scored:
                    command.say(f"{scored:,} alleles were scored before")
                scoring.score(team, PartWriter(target.folder.root, scored, SCHEMA), survey.alleles)
                target.finish()
            return {**request, "alleles": survey.alleles, "skipped": dict(survey.skipped)}

        result = team.lead(score)
    if result is None:  # rank 0 writes
        return
    if as_json:
        command.emit(result | {"out": out})
    command.say(f"wrote {out}")


def file_hash(path: str) -> str:
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


def _describe_survey(survey: Any) -> str:
    skipped = sum(survey.skipped.values())
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in survey.skipped.items())
    return f"{survey.alleles:,} alleles" + (f", {skipped:,} skipped: {reasons}" * (skipped > 0))
