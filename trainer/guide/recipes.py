"""`headrace recipes`: models, runs and mixtures that fit together, and the GPUs they are for."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...console import command

if TYPE_CHECKING:
    from ..run.job import Job

FILE = "recipes.yaml"
NODE = 8
"""GPUs in a machine."""
UNTRIED = "untried: none has run on such GPUs; memory is counted, speed is not known"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    about: str
    """Its purpose, in a line."""
    gpus: int
    """GPUs that it is meant for, one rank for each."""
    model: str
    """Name of a shipped model."""
    run: str
    """Name of a run's YAML in `configs/runs/`."""
    mixture: str
    """Name of a mixture in `configs/mixtures/`."""
    overrides: tuple[str, ...] = ()
    """Values that it changes, as words of `trainer run`."""

    @property
    def run_file(self) -> Path:
        return _configs() / "runs" / f"{self.run}.yaml"

    @property
    def mixture_file(self) -> Path:
        return _configs() / "mixtures" / f"{self.mixture}.yaml"


@click.command(cls=command.Command)
@click.argument("name", required=False)
@click.option(
    "--out",
    metavar="FOLDER",
    callback=command.local_path,
    help="Write the run and the mixture there, to edit.",
)
@command.json_option
def main(name: str | None, out: str | None, as_json: bool) -> None:
    """List recipes: a model, a run and a mixture that fit together. With NAME, show one.

    NAME shows the command, and the memory that each GPU needs. FOLDER gets the YAMLs of the run
    and the mixture; set the mixture's datasets to your own.

    \b
    Examples:
      headrace recipes
      headrace recipes llama3-8b --out mine

    More: docs/trainer.md
    """
    recipes = load_recipes()
    if name is None:
        if out is not None:
            raise click.UsageError("--out FOLDER needs the NAME of a recipe")
        if as_json:
            command.emit({key: vars(recipe) for key, recipe in recipes.items()})
            return
        width = max(map(len, recipes))
        for key, recipe in recipes.items():
            unit = "GPU " if recipe.gpus == 1 else "GPUs"
            click.echo(f"{key:<{width}}  {recipe.gpus:>5,} {unit}  {recipe.about}")
        command.say(UNTRIED)
        return
    recipe = _find(name, recipes)
    folder = _write(recipe, Path(out)) if out is not None else None
    if as_json:
        command.emit(_describe(name, recipe, folder))
    else:
        click.echo("\n".join(_lines(name, recipe, folder)))
        command.say(UNTRIED)


def load_recipes() -> dict[str, Recipe]:
    """Return the shipped recipes by name."""
    from ...console import config

    file = _configs() / FILE
    data, lines = config.read_yaml(file)
    return {
        name: config.build(Recipe, recipe, source=f"{file}: {name}", lines=lines)
        for name, recipe in data.items()
    }


def resolve_job(recipe: Recipe) -> Job:
    """Resolve the recipe's run on its GPUs, with synthetic rows like the mixture's longest."""
    from ..run.request import RunRequest
    from ..run.resolve import resolve

    seq_len, batch_tokens = longest_rows(recipe)
    words = ["device=cuda", "precision=bf16", f"processes={recipe.gpus}"]
    words += ["init_from=null", "evaluate=null", "checkpoints.url=null", "synthetic.steps=1"]
    words += [f"synthetic.seq_len={seq_len}", f"synthetic.batch_rows={batch_tokens // seq_len}"]
    words += recipe.overrides
    return resolve(
        RunRequest(run=str(recipe.run_file), model=recipe.model, overrides=words, dry_run=True)
    )


def longest_rows(recipe: Recipe) -> tuple[int, int]:
    """Return the tokens in a row and in a step, for the phase with the longest rows."""
    from ...console import config
    from ...mixtures.mixture_file.mixture import Mixture, sized_phases

    mixture = config.load(Mixture, recipe.mixture_file)
    sizes = [
        (phase.seq_len, phase.batch)
        for phase in sized_phases(mixture, None, None)
        if phase.seq_len and phase.batch
    ]
    return max(sizes)


def _configs() -> Path:
    return Path(str(resources.files("headrace.configs")))


def _find(name: str, recipes: Mapping[str, Recipe]) -> Recipe:
    from ...console.errors import MisuseError
    from ...console.explain import nearest

    if name not in recipes:
        near = nearest(name, recipes)
        raise MisuseError(
            f"there is no recipe {name}",
            hint=f"did you mean {near}?" if near else "`headrace recipes` lists them",
        )
    return recipes[name]


def _write(recipe: Recipe, folder: Path) -> Path:
    """Copy the run and the mixture into a folder, and return it."""
    from ...console.errors import StorageError
    from ...dataplane.storage import storage

    for file, name in ((recipe.run_file, "run.yaml"), (recipe.mixture_file, "mixture.yaml")):
        if (folder / name).exists():
            raise StorageError(f"{folder / name} already exists", hint="choose another --out")
        storage.write(str(folder / name), file.read_bytes())
    return folder


def _command(name: str, recipe: Recipe, folder: Path | None) -> str:
    """Return the command line that starts the recipe."""
    run, mixture = (
        (recipe.run_file, recipe.mixture_file)
        if folder is None
        else (folder / "run.yaml", folder / "mixture.yaml")
    )
    words = ["trainer", "run", str(run), "--model", recipe.model, "--mixture", str(mixture)]
    words += ["--out", f"runs/{name}"]
    words += recipe.overrides
    words += ["--slurm"] if recipe.gpus > NODE else ["--processes", str(recipe.gpus)]
    return shlex.join(words)


def _describe(name: str, recipe: Recipe, folder: Path | None) -> dict[str, Any]:
    from ..accounting.describe import describe

    description = describe(resolve_job(recipe), activations=True)
    return {
        **vars(recipe),
        "files": [str(recipe.run_file), str(recipe.mixture_file)],
        "command": _command(name, recipe, folder),
        "layout": description["layout"],
        "batch": description["batch"],
        "memory": description["memory"],
    }


def _lines(name: str, recipe: Recipe, folder: Path | None) -> list[str]:
    from ..accounting.describe import describe, lines

    labels = ("model", "layout", "phase", "stage", "memory", "warning")
    description = lines(describe(resolve_job(recipe), activations=True))
    return [
        f"{name}: {recipe.about}",
        f"run          {recipe.run_file}",
        f"mixture      {recipe.mixture_file}",
        *(line for line in description if line.startswith(labels)),
        f"start        {_command(name, recipe, folder)}",
    ]
