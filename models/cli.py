"""`headrace models`: the shipped models, what each is made of, and models of other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import click

from ..console import command

if TYPE_CHECKING:
    from .accounting.state import FindEngineState


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
@click.option("--zero", type=click.IntRange(0, 3), help="Short for --run engine.zero=N.")
@click.option(
    "--run",
    "run",
    multiple=True,
    metavar="KEY=VALUE",
    help="An engine or optimizer key of a run, such as engine.kind=fsdp2; repeatable.",
)
@click.option("--dp", default=1, show_default=True, type=click.IntRange(1))
@click.option("--tp", default=1, show_default=True, type=click.IntRange(1))
@click.option("--cp", default=1, show_default=True, type=click.IntRange(1))
@command.json_option
@click.pass_obj
def show_model(
    find_engine_state: FindEngineState | None,
    name_or_file: str,
    overrides: tuple[str, ...],
    seq_len: int,
    rows: int,
    precision: str,
    zero: int | None,
    run: tuple[str, ...],
    dp: int,
    tp: int,
    cp: int,
    as_json: bool,
) -> None:
    """Show a model: its layers, exact parameters, operations and memory on one rank.

    NAME_OR_FILE is a shipped model (`headrace models list`) or a YAML file. Memory is that of the
    trainer's engine, as `trainer run --dry-run` counts it. See docs/models.md.

    \b
    headrace models show evo2-40b-8k --zero 3 --dp 8 --tp 8
    headrace models show evo2-40b-8k --run engine.kind=fsdp2 --dp 64
    """
    from .accounting.count import build_meta
    from .accounting.show import describe, render
    from .accounting.state import Degrees
    from .config import load_model_config
    from .precision import PRECISIONS

    if find_engine_state is None:
        raise click.UsageError("run it as `headrace models show`, which knows the engines")
    config = load_model_config(name_or_file, overrides)
    degrees, number_format = Degrees(dp=dp, tp=tp, cp=cp), PRECISIONS[precision]
    words = [*run, *([] if zero is None else [f"engine.zero={zero}"])]
    engine = find_engine_state(words, build_meta(config), number_format, degrees)
    summary = describe(config, seq_len, engine, rows=rows, precision=number_format, degrees=degrees)
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
