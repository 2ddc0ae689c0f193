"""`trainer export`, and options of all commands that read a run's weights."""

from __future__ import annotations

from collections.abc import Collection

import click

from ...console import command
from ...console.errors import UserError


def folder_formats() -> Collection[str]:
    from ...models.conversion.folders import FORMATS

    return FORMATS


def families() -> Collection[str]:
    from ...models.conversion import FAMILIES

    return FAMILIES


def dtypes() -> Collection[str]:
    from .export import DTYPES

    return DTYPES


SOURCE = "RUN|CHECKPOINT"
step_option = click.option(
    "--step", type=click.IntRange(0), metavar="STEP", help="Checkpoint of this step [newest]."
)
ema_option = click.option(
    "--ema", is_flag=True, help="Take the moving average of the weights (optimizer.ema)."
)
data_option = click.option(
    "--data", metavar="URL", help="Dataset with the tokenizer [one of the run's datasets]."
)


@click.command()
@click.argument("source", metavar=SOURCE)
@click.argument("out", metavar="OUT", callback=command.local_path)
@click.option(
    "--format",
    metavar="NAME",
    callback=command.name_check(folder_formats),
    default="huggingface",
    show_default=True,
    help="Format of the folder, as in `headrace models convert`.",
)
@click.option(
    "--family",
    metavar="NAME",
    callback=command.name_check(families),
    help="model_type to write, if several can say the model [the first].",
)
@step_option
@ema_option
@click.option(
    "--dtype",
    metavar="NAME",
    callback=command.name_check(dtypes),
    default="fp32",
    show_default=True,
    help="Number format of the weights, such as bf16.",
)
@data_option
@click.option(
    "--statement",
    metavar="FILE.yaml",
    help="Add the summary of `mixtures summary` with this statement, as SUMMARY.md.",
)
@command.json_option
def export(
    source: str,
    out: str,
    format: str,
    family: str | None,
    step: int | None,
    ema: bool,
    dtype: str,
    data: str | None,
    statement: str | None,
    as_json: bool,
) -> None:
    """Export weights to a folder for transformers, Vortex or headrace.

    RUN is a run's folder; CHECKPOINT is the folder of one checkpoint, or its s3:// URL. No GPU is
    needed, whatever saved the checkpoint.

    \b
    Example:
      trainer export runs/anneal weights/anneal --dtype bf16

    More: docs/checkpoints.md
    """
    from . import source as sources
    from .export import export as export_weights
    from .tokenizer import find_tokenizer

    weights = sources.find(source, step, average=ema)
    tokenizer, tokenizer_note = None, ""
    try:
        tokenizer = find_tokenizer(weights, data)
    except UserError as error:
        if data is not None:
            raise
        tokenizer_note = f"; without a tokenizer: {error.message}"
    summary = export_weights(
        weights,
        out,
        format,
        dtype=dtype,
        tokenizer=tokenizer,
        family=family,
        statement=statement,
    )
    if as_json:
        command.emit(summary)
        return
    command.say(f"{summary['from']} → {out}: {summary['family']}, {dtype}{tokenizer_note}")
    if (template := summary["chat_template"]) is not None:
        dropped = ", ".join(template["different"])
        dropped_note = f"; different ones are left out: those of {dropped}" if dropped else ""
        command.say(f"the chat template is that of {template['source']}{dropped_note}")
