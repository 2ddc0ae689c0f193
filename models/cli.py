"""`headrace models`: the shipped models, what each is made of, and models of other libraries."""

from __future__ import annotations

from typing import Literal

import click

from ..console import command


@command.group("models")
def main() -> None:
    """Hybrid models: what is shipped, exact counts of any model, conversion."""


@main.command("list")
@command.json_option
def list_models(as_json: bool) -> None:
    """List the shipped models."""
    from collections import Counter

    from .accounting.count import build_meta, parameters
    from .config import load_model_config, shipped_models

    configs = {name: load_model_config(name) for name in shipped_models()}
    sizes = {name: parameters(build_meta(config)) for name, config in configs.items()}
    if as_json:
        command.emit([{"name": name, "parameters": size} for name, size in sizes.items()])
        return
    for name, config in configs.items():
        counts = Counter(str(layer) for layer in config.layers)
        layers = "  ".join(f"{layer} ×{count}" for layer, count in counts.items())
        click.echo(f"{name:<20} {sizes[name]:>16,}   {layers}")


@main.command("show")
@click.argument("name_or_file")
@command.overrides_argument
@click.option("--seq-len", default=4096, show_default=True, type=click.IntRange(1))
@click.option("--rows", default=1, show_default=True, type=click.IntRange(1), help="At once.")
@click.option("--precision", default="bf16", show_default=True, type=click.Choice(["bf16", "fp32"]))
@click.option("--zero", default=0, show_default=True, type=click.IntRange(0, 3))
@click.option("--dp", default=1, show_default=True, type=click.IntRange(1))
@click.option("--tp", default=1, show_default=True, type=click.IntRange(1))
@click.option("--cp", default=1, show_default=True, type=click.IntRange(1))
@command.json_option
def show_model(
    name_or_file: str,
    overrides: tuple[str, ...],
    seq_len: int,
    rows: int,
    precision: Literal["bf16", "fp32"],
    zero: int,
    dp: int,
    tp: int,
    cp: int,
    as_json: bool,
) -> None:
    """Show a model: its layers, and exact parameters, operations and memory.

    NAME_OR_FILE is a shipped model (`headrace models list`) or a YAML file.
    """
    from .accounting.memory import Layout
    from .accounting.show import describe, render
    from .config import load_model_config

    config = load_model_config(name_or_file, overrides)
    layout = Layout(zero=zero, dp=dp, tp=tp, cp=cp)
    summary = describe(config, seq_len, rows=rows, precision=precision, layout=layout)
    if as_json:
        command.emit(summary)
    else:
        click.echo(render(summary))


@main.command("convert")
@click.argument("source", type=click.Path())
@click.argument("out", type=click.Path())
@click.option(
    "--format",
    required=True,
    type=click.Choice(["headrace", "huggingface", "vortex"]),
    help="Of OUT.",
)
@click.option("--tokenizer", type=click.Path(), help="Folder with a tokenizer, if not in SOURCE.")
def convert_model(
    source: str,
    out: str,
    format: Literal["headrace", "huggingface", "vortex"],
    tokenizer: str | None,
) -> None:
    """Convert the model in the folder SOURCE, of any format, to another in the new folder OUT.

    \b
    headrace      model.yaml  and safetensors
    huggingface   config.json and safetensors, which transformers loads
    vortex        config.yml  and model.pt (StripedHyena 2)

    Tensors are only renamed and reordered; a tokenizer in SOURCE goes along.
    """
    from .conversion.folders import convert

    written = convert(source, out, format=format, tokenizer=tokenizer)
    command.say(f"{out}: {written}")


if __name__ == "__main__":
    main()
