"""The command `trainer plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..console import command

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..console.errors import PlanError
    from ..dataplane.order.timeline import PhaseRows
    from ..trainer.run.config import RunConfig
    from ..trainer.run.layout_plan import LayoutPlan
    from .modules.model import TracedModules
    from .search.make import PhaseSearch, PlanRequest, Plans
    from .search.outcome import Candidate
    from .simulation.outlook import PlanOutlook

REQUIRED = ("hardware", "gpus")


@click.group("plan", cls=command.CommandGroup, invoke_without_command=True)
@click.option("--model", metavar="NAME|FILE", help="A shipped model or a YAML.")
@click.option(
    "--module",
    metavar="PACKAGE:FUNCTION",
    help="Torch modules that are not ours, instead of a model; trainer run cannot execute them.",
)
@click.option("--batch-rows", type=click.IntRange(1), help="Rows of a step, with --module.")
@click.option("--mixture", metavar="FILE", help="A mixture, whose phases are planned.")
@click.option("--seq-len", type=click.IntRange(1), help="Tokens of a row, without a mixture.")
@click.option("--batch-tokens", metavar="SIZE", help="Tokens of a step, such as 4Mi.")
@click.option(
    "--hardware", metavar="NAME|FILE", help="A shipped cluster (h100) or a file of figures."
)
@click.option("--gpus", type=click.IntRange(1), help="Devices of the run.")
@click.option(
    "--memory",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    help="Fraction of a device's usable memory that a plan may take.",
)
@click.option("--run", "run_file", metavar="FILE", help="A run's YAML: optimizer and precision.")
@click.option("--out", metavar="FILE", help="Write the best plan.")
@click.option(
    "--explain", metavar="pp=1,tp=8", help="Compare the best plan that has these settings."
)
@click.option(
    "--simulate",
    is_flag=True,
    help="Also try what cannot be executed: tensor ranks that work as context ranks in some "
    "layers.",
)
@click.option(
    "--roofline",
    is_flag=True,
    help="Price kernels without a measured rate by their bytes and operations.",
)
@click.option(
    "--html", metavar="PAGE", help="Draw the simulated step, slow parts and failures as a page."
)
@click.option(
    "--slow",
    multiple=True,
    metavar="PART=RANK:FACTOR",
    help="Simulate a slow rank (rank=17:1.3) or link of a rank (node=17:2, network=17:2).",
)
@click.option(
    "--failures",
    metavar="mtbf=50000,save=5,…",
    help="Find the best checkpoint interval: hours between failures of a device (mtbf), seconds "
    "that a checkpoint blocks (save) and is written (write), seconds of a restart (restart), "
    "steps between checkpoints to compare (every).",
)
@command.json_option
@click.pass_context
def plan(context: click.Context, /, as_json: bool, **options: Any) -> None:
    """Search the layout with the shortest step that fits into memory.

    All layouts that `trainer run` can execute are searched: data, tensor, context, expert and
    pipeline parallelism, engines, micro-batches, stages, and what each layer recomputes. Times
    follow from the figures of the hardware file.

    \b
    Examples:
      trainer plan --model llama2-7b --seq-len 4096 --batch-tokens 4Mi --hardware h100 --gpus 64
      trainer plan --model zamba2-7b --mixture m.yaml --hardware h100 --gpus 64 --html page.html
      trainer plan --module mine.vit:modules --batch-rows 4096 --hardware h100 --gpus 64
      trainer plan show plan.yaml

    More: docs/planner.md
    """
    if context.invoked_subcommand is not None:
        return
    missing = [f"--{name}" for name in REQUIRED if options[name] is None]
    if options["model"] is not None and options["module"] is not None:
        raise click.UsageError("give --model or --module, not both")
    if options["model"] is None and options["module"] is None:
        missing.insert(0, "--model or --module")
    if missing:
        raise click.UsageError(f"missing {', '.join(missing)}")
    from .search.make import explain, make_plans, parse_settings
    from .show import compared, explained_as_json, lines_of

    wanted = parse_settings(options["explain"]) if options["explain"] else None
    simulates = _simulated(options)
    plans = make_plans(_question(options))
    explained = explain(plans, wanted) if wanted else []
    outlooks = simulates(plans, explained)
    if options["out"] is not None:
        _write(plans, options["out"])
    if options["html"] is not None:
        _write_page(plans, outlooks, options)
    if as_json:
        found = _as_json(plans) | {"explained": explained_as_json(explained, wanted)}
        command.emit(found | {"simulated": {o.title: o.dump() for o in outlooks}})
    from .modules.costs import ModuleCosts, describe_kinds

    if isinstance(costs := plans.phases[0].costs, ModuleCosts):
        command.say("\n".join(describe_kinds(costs)))
    command.say("\n".join(lines_of(plans)))
    for own, other in explained:
        name = f"{options['explain']} in phase {own.costs.phase.name}"
        text = [str(other)] if isinstance(other, Exception) else compared(own.best, other)
        command.say("\n".join([f"{name}:", *text]))
    for outlook in outlooks:
        command.say("\n".join([f"{outlook.title}:", *outlook.lines()]))


@plan.command("show")
@click.argument("file", metavar="PLAN.yaml")
@click.option("--html", metavar="PAGE", help="Draw the memory over a step, by part and by layer.")
@click.option(
    "--model", metavar="NAME|FILE", help="The plan's model, for --html; not for a plan of modules."
)
@click.option("--run", "run_file", metavar="FILE", help="A run's YAML, for --html.")
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    show_default=True,
    help="Kind of device that is drawn.",
)
@command.json_option
def show(
    file: str, html: str | None, model: str | None, run_file: str | None, device: str, as_json: bool
) -> None:
    """Print a plan's file: layout, layers, time and memory by part.

    \b
    Examples:
      trainer plan show plan.yaml
      trainer plan show plan.yaml --model llama2-7b --html memory.html
      trainer plan show modules.yaml --html memory.html

    More: docs/planner.md
    """
    from ..console.config import plain
    from ..trainer.run.layout_plan import load_plan
    from .show import plan_lines

    stored = load_plan(file)
    module = stored.planned.module
    if module is not None and model is not None:
        raise click.UsageError(f"{file} plans the modules of {module}: leave --model out")
    if module is None and (html is None) != (model is None):
        raise click.UsageError("--html and --model need each other")
    if html is not None:
        _write_memory(stored, html, model, run_file, device)
    if as_json:
        command.emit(plain(stored))
    command.say("\n".join(plan_lines(stored)))


def _write_memory(
    plan: LayoutPlan, html: str, model: str | None, run_file: str | None, device: str
) -> None:
    """Draw the phase of a plan that needs most memory. The plan names modules that are not ours."""
    from pathlib import Path

    from ..dataplane.storage.atomic import replacing
    from ..models.config.config import load_model_config
    from .search.assemble import peak_timeline
    from .simulation.memory_page import memory_page, plan_timelines

    run, phases, modules = _run_on(run_file, device), plan.planned.phases, None
    if model is None:
        modules = _traced(str(plan.planned.module), run)
        config, names = modules.config, modules.names
        title, batches = modules.model.module, [f"{p.batch_tokens:,} rows a step" for p in phases]
    else:
        config = load_model_config(model)
        title, names = Path(model).stem, list(map(str, config.layers))
        batches = [f"{p.seq_len:,} tokens a row, {p.batch_tokens:,} a step" for p in phases]
    found = [plan_timelines(plan, phase, config, run, device, modules) for phase in phases]
    sizes = [peak_timeline(timelines).highest for timelines in found]
    own = sizes.index(max(sizes))
    text = memory_page(title, batches[own], names, found[own])
    with replacing(Path(html)) as file:
        file.write(text.encode())
    command.say(f"wrote {html}")


def _run_on(file: str | None, device: str) -> RunConfig:
    """Return the run of a file with the precision of a kind of device."""
    from dataclasses import replace

    from ..trainer.run import config as run_config

    run = run_config.load(file)
    if run.precision == "auto":
        run = replace(run, precision="bf16" if device == "cuda" else "fp32")
    return run


Explained = list[tuple["PhaseSearch", "Candidate | PlanError"]]


def _simulated(options: dict[str, Any]) -> Callable[[Plans, Explained], list[PlanOutlook]]:
    """Check the options of the simulation; return the function that simulates the best plan of
    each phase, the one that serves all phases, and the explained ones, if one of the options is
    given."""
    from .search.make import plans_to_simulate
    from .simulation.failures import parse_failures
    from .simulation.outlook import PlanOutlook
    from .simulation.slow import parse_slowdown
    from .simulation.step import Simulation

    slow = [parse_slowdown(text, options["gpus"]) for text in options["slow"]]
    failures = parse_failures(options["failures"] or "")
    asked = bool(slow) or any(options[name] is not None for name in ("html", "failures"))

    def simulate(plans: Plans, explained: Explained) -> list[PlanOutlook]:
        if not asked:
            return []
        budget = plans.request.budget
        return [
            PlanOutlook(title, Simulation(own.costs, made, budget), slow, failures)
            for title, own, made in plans_to_simulate(plans, explained, options["explain"])
        ]

    return simulate


def _write_page(plans: Plans, outlooks: list[PlanOutlook], options: dict[str, Any]) -> None:
    from pathlib import Path

    from ..dataplane.storage.atomic import replacing
    from .simulation.page import simulation_page

    question = plans.request
    cluster = f"{question.gpus:,} × {question.hardware.file.device.name}"
    text = simulation_page(options["module"] or Path(options["model"]).stem, cluster, outlooks)
    with replacing(Path(options["html"])) as file:
        file.write(text.encode())
    command.say(f"wrote {options['html']}")


def _question(options: dict[str, Any]) -> PlanRequest:
    from ..models.config.config import load_model_config
    from .hardware import Hardware
    from .search.make import PlanRequest

    hardware = Hardware.load(options["hardware"])
    run = _run_on(options["run_file"], hardware.file.device.kind)
    traced = None if options["module"] is None else _traced(options["module"], run)
    return PlanRequest(
        model=load_model_config(options["model"]) if traced is None else traced.config,
        modules=traced,
        run=run,
        hardware=hardware,
        gpus=options["gpus"],
        phases=_phases(options),
        memory=options["memory"],
        roofline=options["roofline"],
        simulate=options["simulate"],
    )


def _traced(module: str, run: RunConfig) -> TracedModules:
    """Trace the modules of `package:function` in the run's precision."""
    from ..models.config.options.precision import PRECISIONS
    from .modules.trace import trace_modules

    return trace_modules(module, PRECISIONS[run.precision])


def _phases(options: dict[str, Any]) -> list[PhaseRows]:
    from ..console.yaml_text import value
    from .search.make import uniform_phase

    plain = options["seq_len"], options["batch_tokens"]
    if (options["module"] is None) != (options["batch_rows"] is None):
        raise click.UsageError("--module and --batch-rows need each other")
    if options["module"] is not None:
        if any((*plain, options["mixture"])):
            raise click.UsageError("modules have rows: no --mixture, --seq-len, --batch-tokens")
        return [uniform_phase(1, options["batch_rows"])]
    if options["mixture"] is not None:
        if any(plain):
            raise click.UsageError("a mixture has the lengths and batches of its phases")
        from ..mixtures.planning.resolve_mixture import resolve_file

        return list(resolve_file(options["mixture"]).phases)
    if not all(plain):
        raise click.UsageError("give --mixture, or --seq-len and --batch-tokens")
    length, tokens = options["seq_len"], value(options["batch_tokens"])
    if not isinstance(tokens, int) or tokens < length or tokens % length:
        raise click.UsageError(
            f"--batch-tokens {options['batch_tokens']} is not a multiple of --seq-len {length}"
        )
    return [uniform_phase(length, tokens // length)]


def _write(plans: Plans, out: str) -> None:
    from pathlib import Path

    from ..console.config import dump
    from ..console.errors import PlanError
    from ..dataplane.storage.atomic import replacing

    if plans.best is None:
        raise PlanError(
            f"no plan serves all phases, so {out} was not written",
            hint="plan each phase by itself with --seq-len and --batch-tokens",
        )
    with replacing(Path(out)) as file:
        file.write(dump(plans.best).encode())


def _as_json(plans: Plans) -> dict[str, Any]:
    from ..console.config import plain

    return {
        "plan": plain(plans.best) if plans.best is not None else None,
        "phases": [
            {
                "phase": own.costs.phase.name,
                "plan": plain(each),
                "layouts": own.outcome.grids,
                "best": [
                    {**candidate.grid.settings(), "seconds": candidate.solution.price}
                    for candidate in own.outcome.candidates
                ],
            }
            for own, each in zip(plans.phases, plans.by_phase, strict=True)
        ],
    }
