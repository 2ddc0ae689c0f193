"""The commands `headrace bench` and `trainer profile`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...console import command
from ...console.yaml_text import size

if TYPE_CHECKING:
    from .collectives import World

device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Device to measure; `auto` is a GPU if there is one.",
)
processes_option = click.option(
    "--processes",
    type=click.IntRange(1),
    help="Ranks on this machine, without torchrun [the GPUs; 2 on a CPU].",
)


def count_option(name: str, **options: Any) -> Callable[[Any], Any]:
    """Return an option for a number of at least 1."""
    return click.option(name, type=click.IntRange(1), **options)


def bytes_option(name: str, default: str, help: str) -> Callable[[Any], Any]:
    """Return an option for a number of bytes, such as 64MiB."""

    def parse(context: click.Context, parameter: click.Parameter, value: str) -> int:
        try:
            num_bytes = size(value)
        except ValueError as error:
            raise click.BadParameter(f"{error}.") from None
        if num_bytes < 1:
            raise click.BadParameter(f"{value} is not at least 1 byte.")
        return num_bytes

    return click.option(name, default=default, show_default=True, callback=parse, help=help)


@command.group("bench")
def main() -> None:
    """Measure blocks of hybrid models and collectives on this machine.

    \b
    Examples:
      headrace bench blocks --plot blocks.svg
      headrace bench collectives

    More: docs/bench.md
    """


@main.command()
@click.argument("blocks", nargs=-1, metavar="[BLOCK]...")
@count_option("--width", multiple=True, help="Channels; repeatable.")
@count_option("--length", multiple=True, help="Tokens of a row; repeatable.")
@count_option("--tokens", help="Tokens of a micro-batch, at least a row [the longest row].")
@click.option(
    "--precision", type=click.Choice(["bf16", "fp16", "fp32"]), help="[bf16; fp32 on a CPU]"
)
@click.option(
    "--seconds", type=click.FloatRange(0), default=0.5, show_default=True, help="Of a measurement."
)
@device_option
@click.option("--csv", "csv_file", metavar="FILE", help="Write the table as CSV.")
@click.option("--plot", metavar="FILE", help="Draw rates by length: .svg.")
@command.json_option
def blocks(
    blocks: tuple[str, ...],
    width: tuple[int, ...],
    length: tuple[int, ...],
    tokens: int | None,
    precision: str | None,
    seconds: float,
    device: Any,
    csv_file: str | None,
    plot: str | None,
    as_json: bool,
) -> None:
    """Time blocks, forward and backward: milliseconds, TFLOP/s and GB/s by width and length.

    Blocks: attention, mamba1, mamba2, se, mr, li, mlp, moe, zamba (the shared block).

    \b
    Example:
      headrace bench blocks attention mamba2 --width 4096 --length 8192 --csv blocks.csv

    More: docs/bench.md
    """
    from ...trainer.layout.devices import local_device
    from . import tables
    from .blocks import BLOCKS, build_block, measure_block
    from .clock import Clock

    tables.check_outputs(csv_file, drawing=plot)
    kind = _choose_device(device)
    on_gpu = kind == "cuda"
    widths = width or ((2048, 4096) if on_gpu else (128, 256))
    lengths = length or ((2048, 8192, 32768) if on_gpu else (256, 1024))
    cases = list(product(blocks or BLOCKS, widths, lengths))
    for block, block_width, _ in cases:
        build_block(block, block_width)  # reports mistakes before anything is measured
    clock = Clock(local_device(kind), seconds)
    dtype = precision or ("bf16" if on_gpu else "fp32")
    rows = []
    for block, block_width, seq_len in cases:
        batch = max((tokens or max(lengths)) // seq_len, 1)
        rows.append(measure_block(block, block_width, seq_len, batch, dtype, clock).row)
        command.say(f"{len(rows)} of {len(cases)}: {block}, width {block_width}, length {seq_len}")
    if csv_file is not None:
        tables.write_csv(rows, csv_file)
    if plot is not None:
        shown = ("forward TFLOP/s", "backward TFLOP/s", "forward GB/s", "backward GB/s")
        tables.draw(rows, plot, line="block", panel="width", across="length", shown=shown)
    if as_json:
        command.emit(rows)
        return
    click.echo(tables.format_table(rows))


@main.command()
@click.argument("names", nargs=-1, metavar="[COLLECTIVE]...")
@bytes_option("--begin", "4KiB", "Smallest size.")
@bytes_option("--end", "64MiB", "Largest size.")
@click.option(
    "--factor", type=click.IntRange(2), default=4, show_default=True, help="Between two sizes."
)
@click.option(
    "--seconds", type=click.FloatRange(0), default=0.5, show_default=True, help="Of a measurement."
)
@processes_option
@device_option
@click.option("--csv", "csv_file", metavar="FILE", help="Write the table as CSV.")
@click.option("--plot", metavar="FILE", help="Draw bus bandwidth by size: .svg.")
@command.json_option
def collectives(
    names: tuple[str, ...],
    begin: int,
    end: int,
    factor: int,
    seconds: float,
    processes: int | None,
    device: Any,
    csv_file: str | None,
    plot: str | None,
    as_json: bool,
) -> None:
    """Print the bandwidth of collectives by size, in the columns of nccl-tests.

    Collectives: all-reduce, all-gather, reduce-scatter, all-to-all, p2p (each rank sends to the
    next). All ranks form one group: those of torchrun, or new processes on this machine. NCCL on
    GPUs, gloo on CPUs.

    \b
    Examples:
      headrace bench collectives all-reduce --end 1GiB
      torchrun --nproc-per-node 8 -m headrace.console.headrace bench collectives

    More: docs/bench.md
    """
    from ..hardware.links import COLLECTIVES

    unknown = [name for name in names if name not in COLLECTIVES]
    if unknown:
        raise click.UsageError(f"no collective {unknown[0]}; choose among {', '.join(COLLECTIVES)}")
    if begin > end:
        raise click.UsageError(f"--begin {begin} is above --end {end}")
    from . import local, tables

    tables.check_outputs(csv_file, drawing=plot)
    kind = _choose_device(device)
    sizes = [begin]
    while sizes[-1] * factor <= end:
        sizes.append(sizes[-1] * factor)
    num_ranks = local.count_processes(kind, processes)
    outputs = {"csv_file": csv_file, "plot": plot, "as_json": as_json}
    local.run(print_collectives, kind, num_ranks, names, sizes, seconds, outputs)


def print_collectives(
    world: World, names: tuple[str, ...], sizes: list[int], seconds: float, outputs: dict[str, Any]
) -> None:
    """Measure on all ranks; rank 0 prints lines as they come."""
    from . import tables
    from .clock import Clock
    from .collectives import HEADER, GroupShape, open_group, select_collectives, sweep

    prints = world.rank == 0
    rows: list[dict[str, Any]] = []
    as_json = outputs["as_json"]
    with open_group(world, GroupShape(world.per_node, world.nodes)) as group:
        for collective in select_collectives(names):
            if prints and not as_json:
                click.echo(f"# {collective}, {_describe_world(world)}")
                click.echo("\n".join(HEADER))
            for time in sweep(world, group, collective, sizes, Clock(world.device, seconds)):
                rows.append(time.row)
                if prints and not as_json:
                    click.echo(time.line())
    if not prints:
        return
    if as_json:
        command.emit(rows)
    if outputs["csv_file"] is not None:
        tables.write_csv(rows, outputs["csv_file"])
    if outputs["plot"] is not None:
        shown = ("busbw GB/s", "us")
        tables.draw(
            rows, outputs["plot"], line="collective", panel="ranks", across="bytes", shown=shown
        )


@click.command(cls=command.Command)
@click.option("--out", required=True, metavar="FILE", help="The hardware YAML; it may exist.")
@click.option("--name", metavar="NAME", help="Name of the cluster [the file's].")
@click.option("--quick", is_flag=True, help="Few sizes, short measurements.")
@click.option("--links", is_flag=True, help="Measure collectives and overlap, not the device.")
@processes_option
@device_option
def profile(
    out: str, name: str | None, quick: bool, links: bool, processes: int | None, device: Any
) -> None:
    """Measure this machine into a hardware YAML for `trainer plan`.

    Without --links: one device's products, copies, attention and kernels. With --links:
    collectives between the ranks of torchrun (or of new processes on this machine), and how
    communication and computation slow each other down. Both add to the same file. Rows that the
    file has are not measured again, so that an interrupted profile continues.

    \b
    Examples:
      trainer profile --out h100.yaml
      trainer profile --links --processes 8 --out h100.yaml

    More: docs/bench.md
    """
    from ...trainer.cluster.ranks import is_rank
    from . import local, tables
    from .profile import SIZES, measure_device, open_profile

    tables.check_outputs(out)
    kind = _choose_device(device)
    num_ranks = local.count_processes(kind, processes)
    if links:
        local.run(profile_links, kind, num_ranks, out, name, quick)
        return
    if is_rank():
        raise click.UsageError(
            "several ranks measure links alone: add --links, or start it without a launcher"
        )
    import torch

    from ...trainer.cluster.ranks import threads_per_rank
    from ...trainer.layout.devices import local_device
    from .clock import Clock

    if kind == "cpu":
        torch.set_num_threads(threads_per_rank(num_ranks))
    sizes, measured = SIZES[kind, quick], local_device(kind)
    opened = open_profile(Path(out), name, measured, num_ranks, "quick" if quick else "full")
    new = measure_device(opened, sizes, Clock(measured, sizes.budget, busy=True))
    command.say(f"{out}: {new} measurements" if new else f"{out} has these figures already")


def profile_links(world: World, out: str, name: str | None, quick: bool) -> None:
    """Measure collectives on all ranks; rank 0 writes them."""
    from .clock import Clock
    from .profile import SIZES, measure_links, open_profile

    sizes = SIZES[world.device.type, quick]
    opened = None
    if world.rank == 0:
        mode = "quick-links" if quick else "links"
        opened = open_profile(Path(out), name, world.device, world.per_node, mode)
    measure_links(opened, world, sizes, Clock(world.device, sizes.budget, busy=True))
    if world.rank == 0:
        command.say(f"{out}: {_describe_world(world)}")


def _choose_device(device: Any) -> Any:
    """Choose the device type, and say if it is no GPU."""
    from ...trainer.cluster.ranks import is_first
    from ...trainer.layout.devices import choose_device

    kind = choose_device(device)
    if kind == "cpu" and device == "auto" and is_first():
        command.say("no GPU: measuring the CPU")
    return kind


def _describe_world(world: World) -> str:
    import torch

    from ...console.progress import format_count

    backend = "NCCL" if world.device.type == "cuda" else "gloo"
    return (
        f"{world.size} ranks on {format_count(world.nodes, 'nodes')}, {backend},"
        f" {world.device.type}, fp32, torch {torch.__version__}"
    )
