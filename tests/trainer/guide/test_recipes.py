"""Shipped recipes: each fits its GPUs, and every file of them is used."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from formats.samples import pin_keys

from headrace.console import config
from headrace.console.progress import format_bytes
from headrace.mixtures.mixture_file.check import check_mixture
from headrace.mixtures.mixture_file.mixture import Mixture
from headrace.mixtures.mixture_file.tolerant_read import read
from headrace.models.accounting.count import build_meta
from headrace.models.accounting.state import device_bytes
from headrace.planner.hardware import Hardware
from headrace.trainer.accounting.describe import describe, lines
from headrace.trainer.accounting.memory import timelines
from headrace.trainer.cli import main as trainer
from headrace.trainer.guide import recipes as shipped
from headrace.trainer.run import config as run_config

RECIPES = shipped.load_recipes()
QUICK = ("hybrid-1b", "fine-tuning")
"""Recipes that the quick tests count; `long` counts them all."""
OTHERS = {"demo", "cluster", "hybrids"}
"""Runs of no recipe: the demo, the example of all keys of a cluster, and `compare-hybrids`."""


def fits(name: str) -> None:
    """Check that the memory of every stage's ranks fits a GPU of 80 GB."""
    job = shipped.resolve_job(RECIPES[name])
    usable = Hardware.load("h100").usable_memory
    for stage in range(job.run.layout.pp):
        peak = max(device_bytes(timeline.parts) for timeline in timelines(job, stage))
        assert peak < 0.9 * usable, f"{name}: {format_bytes(peak)}"


@pytest.mark.parametrize("name", QUICK)
def test_a_recipe_fits_its_gpus(name: str) -> None:
    fits(name)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(RECIPES) - set(QUICK)))
def test_every_recipe_fits_its_gpus(name: str) -> None:
    fits(name)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_dry_runs_on_its_processes(name: str) -> None:
    """Without activations, whose trace takes minutes for the largest."""
    shown = "\n".join(lines(describe(shipped.resolve_job(RECIPES[name]), activations=False)))
    assert re.search(rf"^layout .*, {RECIPES[name].gpus} × cuda = ", shown, re.MULTILINE)
    assert re.search(r"^memory +\S+ \w?B on each rank", shown, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gdn-hybrid-1b", "olmo-hybrid-7b"])
def test_a_recipe_is_planned(name: str) -> None:
    plan(name)


@pytest.mark.long
def test_a_recipe_of_many_ranks_is_planned() -> None:
    plan("nemotron-3-nano-30b")


def plan(name: str) -> None:
    """Check that `trainer plan` finds a layout of the recipe's GPUs that fits them, and that the
    recipe's own layout needs no more memory than a GPU has."""
    recipe = RECIPES[name]
    seq_len, batch = shipped.longest_rows(recipe)
    words = ["plan", "--model", recipe.model, "--hardware", "h100", "--gpus", str(recipe.gpus)]
    words += ["--seq-len", str(seq_len), "--batch-tokens", str(batch), "--roofline"]
    done = CliRunner().invoke(trainer, [*words, "--run", str(recipe.run_file), "--json"])
    assert done.exit_code == 0, done.output
    best = json.loads(done.stdout)["plan"]["predicted"]
    assert best["memory"] < 0.9 * Hardware.load("h100").usable_memory
    fits(name)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipes_files_are_right(name: str) -> None:
    """The batch job has the recipe's GPUs, and the mixture no problem but its datasets."""
    recipe = RECIPES[name]
    run = run_config.load(recipe.run_file)
    if recipe.gpus > shipped.NODE:
        assert run.slurm.world == recipe.gpus and run.checkpoints.url is not None
    else:
        assert run.slurm.gpus is None
    draft = read(recipe.mixture_file)
    assert not draft.problems
    if draft.mixture.after is None:
        assert not list(check_mixture(draft.mixture, None))
    seq_len, batch = shipped.longest_rows(recipe)
    layout = run.layout
    assert seq_len % (layout.cp * layout.tp) == 0
    assert batch // seq_len % layout.data_parallel(recipe.gpus) == 0, "no rank waits"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_evaluates_names_datasets_with_held_out_documents(name: str) -> None:
    """`evaluate` reads `val` beside `train`, which `tokenize build --split val=…` makes."""
    if run_config.load(RECIPES[name].run_file).evaluate is not None:
        mixture = read(RECIPES[name].mixture_file).mixture
        assert [source.data.rpartition("/")[2] for source in mixture.sources.values()] == [
            "train"
        ] * len(mixture.sources)


PARENTS = {
    name: parent
    for name, recipe in RECIPES.items()
    if (after := read(recipe.mixture_file).mixture.after) is not None
    and (parent := after.run.removeprefix("runs/")) in RECIPES
}


def test_some_recipes_go_on_from_others() -> None:
    assert PARENTS == {"context-extension": "evo2-7b", "evo2-40b-1m": "evo2-40b"}


@pytest.mark.parametrize(("name", "parent"), PARENTS.items())
def test_a_recipe_takes_the_weights_and_sources_of_its_parent(name: str, parent: str) -> None:
    ours, theirs = (
        {parameter_name: parameter.shape for parameter_name, parameter in model.named_parameters()}
        for model in (
            build_meta(shipped.resolve_job(RECIPES[item]).model) for item in (name, parent)
        )
    )
    assert ours == theirs
    mixture, before = (read(RECIPES[item].mixture_file).mixture for item in (name, parent))
    known = mixture.sources.keys() | before.sources.keys() | before.phases.keys()
    for phase_name, phase in mixture.phases.items():
        assert set(phase.weights) <= known
        known |= {phase_name}


def test_every_shipped_run_and_mixture_is_used() -> None:
    folder = RECIPES["hybrid-1b"].run_file.parents[1]
    runs = {file.stem for file in (folder / "runs").glob("*.yaml")}
    assert runs == {recipe.run for recipe in RECIPES.values()} | OTHERS
    used = {recipe.mixture for recipe in RECIPES.values()}
    assert used <= {file.stem for file in (folder / "mixtures").glob("*.yaml")}


def test_a_recipe_is_listed_and_copied(tmp_path: Path) -> None:
    listed = CliRunner().invoke(shipped.main, [])
    assert all(name in listed.output for name in RECIPES) and shipped.UNTRIED in listed.output
    out = tmp_path / "mine"
    done = CliRunner().invoke(shipped.main, ["fine-tuning", "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.output)
    pin_keys("recipe", result)
    assert result["command"] == (
        f"trainer run {out}/run.yaml --model llama3.2-1b --mixture {out}/mixture.yaml "
        "--out runs/fine-tuning --processes 1"
    )
    assert config.load(Mixture, out / "mixture.yaml").phases and result["memory"]["masters"]
    assert shipped.UNTRIED in CliRunner().invoke(shipped.main, ["fine-tuning"]).output
    again = CliRunner().invoke(shipped.main, ["fine-tuning", "--out", str(out)])
    assert "already exists" in str(again.exception)
    unknown = CliRunner().invoke(shipped.main, ["llama3-8"])
    assert "there is no recipe llama3-8" in str(unknown.exception)
