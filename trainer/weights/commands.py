"""The commands of `trainer` that take a run's weights: `export` and `sample`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ...console import command
from ...console.errors import UserError

if TYPE_CHECKING:
    from ..layout.devices import DeviceKind

SOURCE = "RUN|CHECKPOINT"
step_option = click.option(
    "--step", type=click.IntRange(0), metavar="STEP", help="Which checkpoint of the run [newest]."
)
data_option = click.option(
    "--data", metavar="URL", help="A dataset with the tokenizer [that of the run's datasets]."
)


@click.command()
@click.argument("source", metavar=SOURCE)
@click.argument("out", metavar="OUT")
@click.option(
    "--format",
    type=click.Choice(["huggingface", "vortex", "headrace"]),
    default="huggingface",
    show_default=True,
)
@step_option
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32", show_default=True
)
@data_option
@command.json_option
def export(
    source: str,
    out: str,
    format: str,
    step: int | None,
    dtype: str,
    data: str | None,
    as_json: bool,
) -> None:
    """Write weights for transformers or Vortex.

    RUN is a run's folder; CHECKPOINT is the folder of one of its checkpoints, or its s3:// URL.
    """
    from . import export as exports
    from . import source as origins
    from . import tokenizer as vocabulary

    origin = origins.find(source, step)
    tokenizer, without = None, ""
    try:
        tokenizer = vocabulary.of(origin, data)
    except UserError as error:
        if data is not None:
            raise
        without = f"; without a tokenizer: {error.what}"
    done = exports.export(origin, out, format, dtype=dtype, tokenizer=tokenizer)
    if as_json:
        command.emit(done)
    else:
        command.say(f"{done['from']} → {out}: {done['family']}, {dtype}{without}")


@click.command()
@click.argument("source", metavar=SOURCE)
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="May be repeated.")
@click.option("--tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=1.0, show_default=True)
@click.option("--top-k", type=click.IntRange(1))
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True))
@click.option("--seed", type=int, default=0, show_default=True)
@step_option
@data_option
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
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
    data: str | None,
    device: DeviceKind,
    as_json: bool,
) -> None:
    """Let the model go on from prompts.

    Without --prompt, each line of stdin is one. A temperature of 0 takes the likeliest token. The
    same seed says the same.
    """
    from ...models.generate import Sampling
    from . import sample as samples
    from . import source as origins
    from . import tokenizer as vocabulary

    origin = origins.find(source, step)
    tokenizer = vocabulary.of(origin, data)
    asked = list(prompts) or [line.rstrip("\n") for line in sys.stdin]
    if not asked:
        raise click.UsageError("no prompt: give --prompt TEXT, or lines on stdin")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    found = samples.sample(origin, tokenizer, asked, tokens, sampling=sampling, device=device)
    if as_json:
        command.emit({"from": origin.where, "samples": [vars(each) for each in found]})
        return
    for each in found:
        click.echo(f"{each.prompt}{each.text}")
        if len(found) > 1:
            click.echo("─" * 40)
