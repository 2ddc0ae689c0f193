"""`trainer sample`: text that a checkpoint writes after prompts."""

from __future__ import annotations

import sys

import click

from ...console import command
from ...console.errors import MisuseError
from ..cluster.commands import RankCommand
from ..placement.options import PlacementOptions, placement_options
from ..weights.commands import SOURCE, data_option, ema_option, step_option


@click.command(cls=RankCommand)
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
@placement_options(shares_rows=False)
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
    placement: PlacementOptions,
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
    from ..placement.ranks import joined_row_ranks
    from ..weights import source as sources
    from ..weights.sample import sample as complete_prompts
    from ..weights.tokenizer import find_tokenizer

    weights = sources.find(source, step, average=ema)
    tokenizer = find_tokenizer(weights, data)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)

    def read_prompts() -> list[str]:
        texts = list(prompts) or [
            line.decode(errors="surrogateescape").rstrip("\r\n")  # as arguments are decoded
            for line in sys.stdin.buffer
        ]
        if not texts:
            raise MisuseError("no prompt", hint="give --prompt TEXT, or lines on stdin")
        for number, text in enumerate(texts, start=1):
            if any("\ud800" <= letter <= "\udfff" for letter in text):
                raise MisuseError(
                    f"prompt {number} is not UTF-8", hint="iconv -t UTF-8 converts text"
                )
        return texts

    with joined_row_ranks(placement.place(weights, as_trained=False)) as ranks:
        completions = complete_prompts(
            ranks.load(weights),
            tokenizer,
            ranks.broadcast(read_prompts),
            tokens,
            sampling=sampling,
            agree=ranks.broadcast_ids,
        )
        if not ranks.is_first:
            return
    if as_json:
        command.emit({"from": weights.where, "samples": [vars(text) for text in completions]})
        return
    for completion in completions:
        click.echo(f"{completion.prompt}{completion.text}")
        if len(completions) > 1:
            click.echo("─" * 40)
