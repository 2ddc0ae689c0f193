"""The command `trainer plan price`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..console import command

if TYPE_CHECKING:
    from ..dataplane.order.timeline import PhaseRows
    from .search.make import PlanRequest


@click.command("price")
@click.argument("run", metavar="RUN|RUN.yaml")
@command.overrides_argument
@click.option("--model", metavar="NAME|FILE", help="The model, for a YAML.")
@click.option("--mixture", metavar="FILE", help="A mixture, whose phases are priced.")
@click.option("--seq-len", type=click.IntRange(1), help="Tokens of a row, without a mixture.")
@click.option("--batch-tokens", metavar="SIZE", help="Tokens of a step, such as 4Mi.")
@click.option(
    "--hardware",
    required=True,
    metavar="NAME|FILE",
    help="A shipped cluster (h100) or a file of figures.",
)
@click.option("--gpus", type=click.IntRange(1), help="Devices [a run's processes].")
@click.option(
    "--memory",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    help="Fraction of a device's usable memory that a plan may take.",
)
@click.option(
    "--roofline",
    is_flag=True,
    help="Price kernels without a measured rate by their bytes and operations.",
)
@click.option("--no-search", is_flag=True, help="Leave out the best plan.")
@command.json_option
def price(run: str, overrides: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Price the layout that a run has, and say what the best plan does otherwise.

    RUN is a run's folder, which knows model, rows and devices, or its YAML. Overrides ask what
    another setting would change.

    \b
    Examples:
      trainer plan price runs/a --hardware h100.yaml
      trainer plan price run.yaml --model llama2-7b --seq-len 4096 --batch-tokens 1Mi \\
          --hardware h100 --gpus 8
      trainer plan price runs/a --hardware h100.yaml recompute=block

    More: docs/planner.md
    """
    from .lengths import average_priced
    from .search.priced_run import price_phases
    from .show import describe_priced, dump_priced

    request = _build_request(run, overrides, options)
    priced = price_phases(request, searches=not options["no_search"])
    means = average_priced(request.phases, priced)
    if as_json:
        command.emit([*(dump_priced(phase) for phase in priced), *(m.dump() for m in means)])
    command.say("\n\n".join("\n".join(describe_priced(phase)) for phase in priced))
    for mean in means:
        command.say(f"steps        {mean.describe()}")


def _build_request(run: str, overrides: tuple[str, ...], options: dict[str, Any]) -> PlanRequest:
    from ..console import config as reader
    from ..models.config.config import load_model_config
    from ..trainer.run import config as run_config
    from .hardware import Hardware
    from .search.make import PlanRequest
    from .search.priced_run import read_stored_run, replace_imbalance, resolve_run

    hardware = Hardware.load(options["hardware"])
    model_name, gpus = options["model"], options["gpus"]
    named = any(options[name] is not None for name in ("mixture", "seq_len", "batch_tokens"))
    if Path(run).is_dir():
        stored = read_stored_run(run)
        data = reader.plain(stored.run)
        configured = run_config.build(data, overrides, source=run)
        model = stored.model if model_name is None else load_model_config(model_name)
        phases = parse_phases(options) if named else stored.phases
        gpus = gpus or configured.processes
        if stored.expert_load is not None and hardware.file.experts is None:
            hardware = replace_imbalance(hardware, stored.expert_load)
    else:
        configured = run_config.load(run, overrides)
        missing = [f"--{name}" for name in ("model", "gpus") if options[name] is None]
        if missing:
            raise click.UsageError(f"missing {', '.join(missing)}: {run} is a run's YAML")
        model, phases = load_model_config(model_name), parse_phases(options)
    return PlanRequest(
        model=model,
        run=resolve_run(configured, hardware.file.device.kind),
        hardware=hardware,
        gpus=gpus,
        phases=phases,
        memory=options["memory"],
        roofline=options["roofline"],
    )


def parse_phases(options: dict[str, Any]) -> list[PhaseRows]:
    """Return the phases of a mixture, or one with the rows of --seq-len and --batch-tokens."""
    from ..console.yaml_text import value
    from .search.make import uniform_phase

    uniform = options["seq_len"], options["batch_tokens"]
    module, batch_rows = options.get("module"), options.get("batch_rows")
    if (module is None) != (batch_rows is None):
        raise click.UsageError("--module and --batch-rows need each other")
    if module is not None and batch_rows is not None:
        if any((*uniform, options["mixture"])):
            raise click.UsageError("modules have rows: no --mixture, --seq-len, --batch-tokens")
        return [uniform_phase(1, batch_rows)]
    if options["mixture"] is not None:
        if any(uniform):
            raise click.UsageError("a mixture has the lengths and batches of its phases")
        from ..dataplane.order.row_lengths import split_by_length
        from ..mixtures.planning.resolve_mixture import resolve_file

        return split_by_length(resolve_file(options["mixture"]))
    if not all(uniform):
        raise click.UsageError("give --mixture, or --seq-len and --batch-tokens")
    length, tokens = options["seq_len"], value(options["batch_tokens"])
    if not isinstance(tokens, int) or tokens < length or tokens % length:
        raise click.UsageError(
            f"--batch-tokens {options['batch_tokens']} is not a multiple of --seq-len {length}"
        )
    return [uniform_phase(length, tokens // length)]
