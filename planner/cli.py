"""The command `trainer plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..console import command
from .price import parse_phases, price

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..console.errors import PlanError
    from ..trainer.run.config import RunConfig
    from ..trainer.run.layout_plan import LayoutPlan
    from .modules.model import TracedModules
    from .search.make import PhaseSearch, PlanRequest, Plans
    from .search.outcome import Candidate
    from .simulation.outlook import PlanOutlook

REQUIRED = ("hardware", "gpus")


ONE_PLAN = ("out", "explain", "html", "slow", "failures")
"""Options that need a single number of devices."""


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
@click.option(
    "--gpus",
    metavar="N,…",
    help="Devices of the run; several numbers (64,128,256) are compared in a table.",
)
@click.option(
    "--tokens", metavar="SIZE", help="Tokens of the run: what days and GPU-hours it takes."
)
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
      trainer plan --model llama2-7b --seq-len 4096 --batch-tokens 4Mi --hardware h100 \\
          --gpus 64,128,256 --tokens 2T
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
    from .lengths import average_explained, store_means
    from .measure.tables import check_outputs
    from .scaling import describe_scales, dump_scale, parse_counts, parse_tokens, summarize
    from .search.make import explain, make_plans, parse_settings
    from .show import compare_candidates, dump_explained
    from .table import describe_plans

    check_outputs(options["out"], options["html"])
    options["gpus"], tokens = parse_counts(options["gpus"]), parse_tokens(options)
    if len(options["gpus"]) > 1:
        _compare_counts(options, tokens, as_json)
        return
    settings = parse_settings(options["explain"]) if options["explain"] else None
    simulate = _parse_simulation(options)
    plans = store_means(make_plans(_build_request(options)))
    explained = explain(plans, settings) if settings else []
    outlooks = simulate(plans, explained)
    scales = [] if tokens is None else [summarize(plans, plans.phases[0], tokens)]
    if as_json:
        command.emit(
            {
                **_dump_plans(plans),
                "explained": dump_explained(explained, settings),
                "simulated": {outlook.title: outlook.dump() for outlook in outlooks},
                "scales": [dump_scale(scale) for scale in scales],
            }
        )
    from .modules.costs import ModuleCosts, describe_kinds

    if isinstance(costs := plans.phases[0].costs, ModuleCosts):
        command.say("\n".join(describe_kinds(costs)))
    command.say("\n".join([*describe_plans(plans), *describe_scales(scales)]))
    for phase_search, answer in explained:
        if isinstance(answer, Exception):
            lines = [str(answer)]
        else:
            lines = compare_candidates(phase_search.best, answer)
        title = f"{options['explain']} in phase {phase_search.costs.phase.name}:"
        command.say("\n".join([title, *lines]))
    for mean in average_explained(plans, explained):
        command.say(f"{options['explain']} in phase {mean.describe()}")
    for outlook in outlooks:
        command.say("\n".join([f"{outlook.title}:", *outlook.lines()]))
    if options["out"] is not None:
        _write_plan(plans, options["out"])
    if options["html"] is not None:
        _write_page(plans, outlooks, options)


def _compare_counts(options: dict[str, Any], tokens: int | None, as_json: bool) -> None:
    """Print a table of the best plans on several numbers of devices."""
    from .scaling import describe_scales, dump_scale, plan_scales

    if unused := [f"--{name}" for name in ONE_PLAN if options[name]]:
        raise click.UsageError(f"{', '.join(unused)}: give one number of devices (--gpus)")
    scales = plan_scales(_build_request(options), options["gpus"], tokens)
    if as_json:
        command.emit([dump_scale(scale) for scale in scales])
    command.say("\n".join(describe_scales(scales)))


plan.add_command(price)


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
    help="Kind of device that is drawn [the plan's].",
)
@command.json_option
def show(
    file: str,
    html: str | None,
    model: str | None,
    run_file: str | None,
    device: str | None,
    as_json: bool,
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
    from .measure.tables import check_outputs
    from .show import describe_plan

    check_outputs(html)
    stored = load_plan(file)
    module = stored.planned.module
    if module is not None and model is not None:
        raise click.UsageError(f"{file} plans the modules of {module}: leave --model out")
    if module is None and (html is None) != (model is None):
        raise click.UsageError("--html and --model need each other")
    if html is not None:
        _write_memory_page(stored, html, model, run_file, device or stored.planned.device or "cuda")
    if as_json:
        command.emit(plain(stored))
    command.say("\n".join(describe_plan(stored)))


def _write_memory_page(
    plan: LayoutPlan, html: str, model: str | None, run_file: str | None, device: str
) -> None:
    """Draw the phase that needs most memory. Without `model`, the plan names foreign modules."""
    from pathlib import Path

    from ..dataplane.storage.atomic import replacing
    from ..models.config.config import load_model_config
    from .search.assemble import peak_timeline
    from .simulation.memory_page import memory_page, plan_timelines

    run, phases, modules = _load_run(run_file, device), plan.planned.phases, None
    if model is None:
        modules = _trace_modules(str(plan.planned.module), run)
        config, names = modules.config, modules.names
        title, batches = modules.model.module, [f"{p.batch_tokens:,} rows a step" for p in phases]
    else:
        config = load_model_config(model)
        title, names = Path(model).stem, list(map(str, config.layers))
        batches = [f"{p.seq_len:,} tokens a row, {p.batch_tokens:,} a step" for p in phases]
    timelines = [plan_timelines(plan, phase, config, run, device, modules) for phase in phases]
    peaks = [peak_timeline(stages).highest for stages in timelines]
    largest = peaks.index(max(peaks))
    text = memory_page(title, batches[largest], names, timelines[largest])
    with replacing(Path(html)) as file:
        file.write(text.encode())
    command.say(f"wrote {html}")


def _load_run(file: str | None, device: str) -> RunConfig:
    """Load a run, with the device type's precision if it names none."""
    from dataclasses import replace

    from ..trainer.run import config as run_config

    run = run_config.load(file)
    if run.precision == "auto":
        run = replace(run, precision="bf16" if device == "cuda" else "fp32")
    return run


Explained = list[tuple["PhaseSearch", "Candidate | PlanError"]]


def _parse_simulation(options: dict[str, Any]) -> Callable[[Plans, Explained], list[PlanOutlook]]:
    """Check the simulation's options before the search.

    Return a function that simulates every phase's best plan, the plan that serves all phases, and
    the explained ones; without one of the options, none.
    """
    from .search.make import plans_to_simulate
    from .simulation.failures import parse_failures
    from .simulation.outlook import PlanOutlook
    from .simulation.slow import parse_slowdown
    from .simulation.step import Simulation

    slow = [parse_slowdown(text, options["gpus"][0]) for text in options["slow"]]
    failures = parse_failures(options["failures"] or "")
    needed = bool(slow) or any(options[name] is not None for name in ("html", "failures"))

    def simulate(plans: Plans, explained: Explained) -> list[PlanOutlook]:
        if not needed:
            return []
        budget = plans.request.budget
        return [
            PlanOutlook(title, Simulation(phase.costs, plan, budget), slow, failures)
            for title, phase, plan in plans_to_simulate(plans, explained, options["explain"])
        ]

    return simulate


def _write_page(plans: Plans, outlooks: list[PlanOutlook], options: dict[str, Any]) -> None:
    from pathlib import Path

    from ..dataplane.storage.atomic import replacing
    from .simulation.page import simulation_page

    request = plans.request
    cluster = f"{request.gpus:,} × {request.hardware.file.device.name}"
    text = simulation_page(options["module"] or Path(options["model"]).stem, cluster, outlooks)
    with replacing(Path(options["html"])) as file:
        file.write(text.encode())
    command.say(f"wrote {options['html']}")


def _build_request(options: dict[str, Any]) -> PlanRequest:
    from ..models.config.config import load_model_config
    from .hardware import Hardware
    from .search.make import PlanRequest

    hardware = Hardware.load(options["hardware"])
    run = _load_run(options["run_file"], hardware.file.device.kind)
    modules = None if options["module"] is None else _trace_modules(options["module"], run)
    return PlanRequest(
        model=load_model_config(options["model"]) if modules is None else modules.config,
        modules=modules,
        run=run,
        hardware=hardware,
        gpus=options["gpus"][0],
        phases=parse_phases(options),
        memory=options["memory"],
        roofline=options["roofline"],
        simulate=options["simulate"],
    )


def _trace_modules(module: str, run: RunConfig) -> TracedModules:
    """Trace the modules from `package:function` in the run's precision."""
    from ..models.config.options.precision import PRECISIONS
    from .modules.trace import trace_modules

    return trace_modules(module, PRECISIONS[run.precision])


def _write_plan(plans: Plans, out: str) -> None:
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


def _dump_plans(plans: Plans) -> dict[str, Any]:
    from ..console.config import plain
    from .lengths import average_plans
    from .table import dump_ideas

    means = [mean.dump() for mean in average_plans(plans)]
    return {
        **({"means": means} if means else {}),
        "plan": plain(plans.best) if plans.best is not None else None,
        "phases": [
            {
                "phase": phase.costs.phase.name,
                "plan": plain(best),
                "layouts": phase.outcome.grids,
                "best": [
                    {**candidate.grid.settings(), "seconds": candidate.solution.price}
                    for candidate in phase.outcome.candidates
                ],
                "ideas": dump_ideas(plans.request, phase),
            }
            for phase, best in zip(plans.phases, plans.by_phase, strict=True)
        ],
    }
