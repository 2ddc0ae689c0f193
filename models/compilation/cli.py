"""`headrace kernels`: compile the fused kernels of a model."""

from __future__ import annotations

from typing import Any

import click

from ...console import command


@command.group("kernels")
def main() -> None:
    """Compile the programs of a model's fused kernels before a run needs them.

    \b
    Example:
      headrace kernels compile hybrid-1b --arch sm_90 --out CACHE

    More: docs/gpu.md
    """


def _precisions() -> Any:
    from ..config.options.precision import PRECISIONS

    return PRECISIONS


@main.command("compile")
@click.argument("name_or_file", metavar="MODEL")
@command.overrides_argument
@click.option("--arch", default="sm_90", show_default=True, help="Compute capability of the GPUs.")
@click.option(
    "--out",
    required=True,
    metavar="CACHE",
    callback=command.local_path,
    help="Folder of the cache: TRITON_CACHE_DIR of the run.",
)
@command.positive_option("--seq-len", 4096, "Tokens of a row.")
@command.positive_option("--rows", 4, "Rows of a micro-batch.")
@click.option(
    "--precision",
    default="bf16",
    show_default=True,
    metavar="NAME",
    callback=command.name_check(_precisions),
    help="Precision of the run.",
)
@click.option(
    "--z-loss",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Weight of the z-loss.",
)
@command.positive_option("--tp", 1, "Ranks that divide the channels.")
@command.positive_option("--cp", 1, "Ranks that divide the tokens.")
@command.positive_option("--ep", 1, "Ranks that divide the experts.")
@click.option(
    "--no-attestation",
    is_flag=True,
    help="Leave out the programs that a run compares with plain torch at its start.",
)
@click.option("--processes", type=click.IntRange(1), help="Compilers at a time [cores].")
@command.json_option
def compile_command(
    name_or_file: str,
    overrides: tuple[str, ...],
    arch: str,
    out: str,
    seq_len: int,
    rows: int,
    precision: str,
    z_loss: float,
    tp: int,
    cp: int,
    ep: int,
    no_attestation: bool,
    processes: int | None,
    as_json: bool,
) -> None:
    """Compile the programs of a training step of MODEL, packed and not, without a GPU.

    \b
    Example:
      headrace kernels compile hybrid-1b --arch sm_90 --out CACHE --seq-len 16384 --rows 1

    More: docs/gpu.md
    """
    from dataclasses import asdict

    from ..accounting.shape import Shape
    from ..accounting.state import Degrees
    from ..config.config import load_model_config
    from .by_hand import compile_model, parse_arch, render

    number = parse_arch(arch)
    shape = Shape(
        rows=rows,
        seq_len=seq_len,
        precision=_precisions()[precision],
        device="cuda",
        degrees=Degrees(tp=tp, cp=cp, ep=ep),
    )
    compilation = compile_model(
        load_model_config(name_or_file, overrides),
        shape,
        arch=number,
        out=out,
        z_loss=z_loss,
        attested=not no_attestation,
        processes=processes,
    )
    if as_json:
        command.emit({"arch": f"sm_{number}", **asdict(compilation)})
    else:
        click.echo("\n".join(render(compilation, number)))
