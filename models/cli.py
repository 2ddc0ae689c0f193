"""`headrace models`: list the shipped models, show counts and memory of any, convert formats."""

from __future__ import annotations

from typing import Literal

import click

from ..console import command


@command.group("models")
def main() -> None:
    """Hybrid models: list, exact counts and memory, conversion. More: docs/models.md."""


@main.command("list")
@command.json_option
def list_models(as_json: bool) -> None:
    """List the shipped models with their exact parameter counts and layers.

    \b
    Example:
      headrace models list

    More: docs/models.md
    """
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
@click.option(
    "--seq-len",
    default=4096,
    show_default=True,
    type=click.IntRange(1),
    help="Tokens of a row.",
)
@click.option(
    "--rows",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Rows of a micro-batch.",
)
@click.option(
    "--precision",
    default="bf16",
    show_default=True,
    type=click.Choice(["bf16", "fp32"]),
    help="Precision of weights and activations.",
)
@click.option("--zero", default=0, show_default=True, type=click.IntRange(0, 3), help="ZeRO stage.")
@click.option(
    "--dp", default=1, show_default=True, type=click.IntRange(1), help="Data-parallel ranks."
)
@click.option(
    "--tp", default=1, show_default=True, type=click.IntRange(1), help="Tensor-parallel ranks."
)
@click.option(
    "--cp", default=1, show_default=True, type=click.IntRange(1), help="Context-parallel ranks."
)
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
    """Show a model: its layers, exact parameters and operations, and memory per device.

    NAME_OR_FILE is a shipped model (`headrace models list`) or a YAML file.

    \b
    Examples:
      headrace models show evo2-7b-8k --seq-len 8192
      headrace models show evo2-40b-8k --zero 3 --dp 8 --tp 8
      headrace models show mine.yaml width=512 --json

    More: docs/models.md
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
    help="Format of OUT.",
)
@click.option("--tokenizer", type=click.Path(), help="Folder with a tokenizer, if SOURCE has none.")
def convert_model(
    source: str,
    out: str,
    format: Literal["headrace", "huggingface", "vortex"],
    tokenizer: str | None,
) -> None:
    """Convert the model in folder SOURCE, of any format, into the new folder OUT.

    \b
    Formats:
      headrace      model.yaml  and safetensors
      huggingface   config.json and safetensors, which transformers loads
      vortex        config.yml  and model.pt (StripedHyena 2)

    Tensors are only renamed and reordered. A tokenizer in SOURCE is copied.

    \b
    Examples:
      headrace models convert llama-folder ours --format headrace
      headrace models convert exported evo2 --format vortex

    More: docs/models.md (Other libraries)
    """
    from .conversion.folders import convert

    written = convert(source, out, format=format, tokenizer=tokenizer)
    command.say(f"{out}: {written}")


if __name__ == "__main__":
    main()
