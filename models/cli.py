"""`headrace models`: the shipped models, and what each is made of."""

from __future__ import annotations

import click

from ..console import command


@command.group("models")
def main() -> None:
    """Hybrid models: what is shipped, and exact counts of any model."""


@main.command("list")
@command.json_option
def list_models(as_json: bool) -> None:
    """List the shipped models."""
    from .config import load_model_config, shipped_models
    from .count import build_meta, parameters

    sizes = {name: parameters(build_meta(load_model_config(name))) for name in shipped_models()}
    if as_json:
        command.emit([{"name": name, "parameters": size} for name, size in sizes.items()])
        return
    for name, size in sizes.items():
        click.echo(f"{name:<20} {size:>16,}")


@main.command("show")
@click.argument("name_or_file")
@command.overrides_argument
@click.option("--seq-len", default=4096, show_default=True, help="Tokens of a sequence.")
@command.json_option
def show_model(name_or_file: str, overrides: tuple[str, ...], seq_len: int, as_json: bool) -> None:
    """Show the layers and exact counts of a shipped model or a YAML file."""
    from .config import load_model_config
    from .show import describe, render

    summary = describe(load_model_config(name_or_file, overrides), seq_len)
    if as_json:
        command.emit(summary)
    else:
        click.echo(render(summary))


if __name__ == "__main__":
    main()
