"""`trainer export` and `trainer sample`: commands that read a run's weights."""

from __future__ import annotations

import sys
from collections.abc import Collection

import click

from ...console import command
from ...console.errors import UserError
from ..layout.devices import DEVICES, DeviceKind


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


@click.command()
@click.argument("source", metavar=SOURCE)
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="May be repeated.")
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Most tokens to generate for a prompt.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=1.0,
    show_default=True,
    help="0 takes the most likely token.",
)
@click.option("--top-k", type=click.IntRange(1), help="Sample among the K most likely tokens.")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Sample among the most likely tokens of this total probability.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="The same seed gives the same text."
)
@step_option
@ema_option
@data_option
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    default="auto",
    show_default=True,
    help="auto takes a GPU if there is one.",
)
@command.json_option
def sample(
    source: str,
    prompts: tuple[str, ...],
    tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    step: int | None,
    ema: bool,
    data: str | None,
    device: DeviceKind,
    as_json: bool,
) -> None:
    """Generate text from prompts with a checkpoint's weights.

    Without --prompt, each line of stdin is a prompt.

    \b
    Example:
      trainer sample runs/anneal --prompt def --temperature 0.7 --top-p 0.9

    More: docs/trainer.md
    """
    from ...models.model.generate import Sampling
    from . import source as sources
    from .sample import sample as complete_prompts
    from .tokenizer import find_tokenizer

    weights = sources.find(source, step, average=ema)
    tokenizer = find_tokenizer(weights, data)
    texts = list(prompts) or [line.rstrip("\n") for line in sys.stdin]
    if not texts:
        raise click.UsageError("no prompt: give --prompt TEXT, or lines on stdin")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    completions = complete_prompts(
        weights, tokenizer, texts, tokens, sampling=sampling, device=device
    )
    if as_json:
        command.emit({"from": weights.where, "samples": [vars(text) for text in completions]})
        return
    for completion in completions:
        click.echo(f"{completion.prompt}{completion.text}")
        if len(completions) > 1:
            click.echo("─" * 40)
