"""The command `trainer tune`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...console import command

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig
    from ...trainer.run.config import RunConfig
    from ..hardware.file import Device

logger = logging.getLogger(__name__)


@click.command(cls=command.Command)
@click.argument("plan", metavar="PLAN.yaml")
@command.overrides_argument
@click.option("--model", required=True, metavar="NAME|FILE", help="The model of the plan.")
@click.option(
    "--hardware",
    required=True,
    metavar="NAME|FILE",
    help="The figures that the plan was made with.",
)
@click.option(
    "--out",
    metavar="FOLDER",
    callback=command.local_path,
    help="Folder of the trials [tune/PLAN].",
)
@click.option("--run", "run_file", metavar="FILE", help="A run's YAML: optimizer and precision.")
@click.option(
    "--trials",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Layouts of the first round: the plan, and the best others by prediction.",
)
@click.option(
    "--steps",
    type=click.IntRange(4),
    default=12,
    show_default=True,
    help="Steps of a trial in the first round; the first two do not count.",
)
@click.option(
    "--memory",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    help="Fraction of a device's usable memory that a layout may take.",
)
@click.option(
    "--roofline",
    is_flag=True,
    help="Price kernels without a measured rate by their bytes and operations.",
)
@command.json_option
def tune(plan: str, overrides: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Measure the best layouts by prediction in short trials on this machine.

    Each round doubles the steps and keeps the better half. A trial that runs out of memory is a
    result. FOLDER gets the best plan and a corrected hardware file. The same command continues a
    tune that was killed.

    \b
    Example:
      trainer tune plan.yaml --model llama2-7b --hardware h100.yaml --trials 8 --steps 12

    More: docs/planner.md
    """
    from ...trainer.layout.devices import choose_device, count_gpus
    from ...trainer.run.layout_plan import check_overrides, load_plan
    from ..hardware import Hardware
    from . import tune as work
    from .folder import TuneFolder
    from .prices import PlanPricer
    from .trial import ProcessRunner

    check_overrides(overrides, plan)
    hardware = Hardware.load(options["hardware"])
    device = hardware.file.device
    overrides = add_threads(options["run_file"], overrides, device)
    model, run = _model_and_run(options, overrides, device.kind)
    run_file = [options["run_file"]] if options["run_file"] is not None else []
    request = work.TuneRequest(
        plan=load_plan(plan),
        plan_file=plan,
        pricer=PlanPricer(model, run, options["roofline"]),
        hardware=hardware,
        memory=options["memory"],
        trials=options["trials"],
        steps=options["steps"],
        words=[*run_file, "--model", options["model"], *overrides],
    )
    work.check_request(request, None if device.kind == "cpu" else count_gpus())
    choose_device(device.kind)  # raises if the figures are those of a GPU, and there is none
    folder = TuneFolder(options["out"] or f"tune/{Path(plan).stem}")
    outcome = work.tune(request, folder, ProcessRunner(request.words))
    if as_json:
        command.emit(work.render_json(outcome))
    command.say("\n".join(work.format_lines(outcome)))


def _model_and_run(
    options: dict[str, Any], overrides: tuple[str, ...], kind: str
) -> tuple[ModelConfig, RunConfig]:
    """Return the trials' model and run, as the planner takes them."""
    from dataclasses import replace

    from ...models.config.config import load_model_config
    from ...trainer.run import config as run_config
    from ...trainer.run.request import RunRequest

    request = RunRequest(overrides=overrides)
    model = load_model_config(options["model"], request.select_overrides("model"))
    run = run_config.load(options["run_file"], request.run_overrides)
    if run.precision == "auto":
        run = replace(run, precision="bf16" if kind == "cuda" else "fp32")
    return model, run


def add_threads(
    run_file: str | None, overrides: tuple[str, ...], device: Device
) -> tuple[str, ...]:
    """Add the threads that the hardware's figures hold for, unless the run sets threads.

    More threads would take less time than any prediction.
    """
    from ...trainer.run import config as run_config
    from ...trainer.run.request import RunRequest

    threads = run_config.load(run_file, RunRequest(overrides=overrides).run_overrides).threads
    if device.threads is None or threads == device.threads:
        return overrides
    if threads is None:
        return (*overrides, f"threads={device.threads}")
    logger.warning(
        "a rank of the trials has %s threads, and the figures are those of %s: predictions are of "
        "another machine (hint: leave `threads` out)",
        threads,
        device.threads,
    )
    return overrides
