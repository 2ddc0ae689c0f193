"""Commands and functions of all folders, by name; their modules are imported at the call.

Only this file names modules of every folder. A folder takes from here what stands above it: its
command's subcommands, and functions that it calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from .command import LazyCommand

HEADRACE = {
    "tokenize": ("..tokenize.cli:main", "Build token datasets from corpora."),
    "mixtures": (
        "..mixtures.cli:main",
        "Plan the data of a run: phases, weights; audit it.",
    ),
    "trainer": ("..trainer.cli:main", "Start, resume and report runs."),
    "models": ("..models.cli:main", "Show, count and convert models."),
    "kernels": ("..models.compilation.cli:main", "Compile fused kernels before a run."),
    "bench": ("..planner.measure.cli:main", "Measure blocks and collectives on this machine."),
    "doctor": (".doctor:main", "Check this machine: versions, devices, missing packages."),
    "config": ("..trainer.guide.config_key:main", "Explain a key of a run, a mixture or a model."),
    "recipes": (
        "..trainer.guide.recipes:main",
        "List models, runs and mixtures that fit together.",
    ),
    "compare-hybrids": (
        "..reports.hybrids.cli:compare_hybrids",
        "Compare models of equal size, trained on the same rows.",
    ),
    "completion": (".completion:main", "Complete commands, options and paths in the shell."),
    "start": (
        "..trainer.guide.start:main",
        "Train on a folder of documents in a given time.",
    ),
    "demo": (
        "..trainer.guide.demo:main",
        "Run the whole pipeline, from corpus to model, small.",
    ),
}
"""Subcommands of `headrace`."""

TRAINER = {
    "report": (
        "..reports.report.commands:report",
        "Draw the report of a run, or compare several runs.",
    ),
    "board": (
        "..reports.board.command:board",
        "Serve a live page of all runs in and below folders or URLs [runs], on this machine alone.",
    ),
    "documents": (
        "..reports.documents.command:documents",
        "Rank the documents of a run by loss, beside that of their source at that time.",
    ),
    "list": (
        "..reports.report.commands:list_command",
        "List the runs in and below folders [runs]: status, step, loss, speed, last checkpoint.",
    ),
    "plan": (
        "..planner.cli:plan",
        "Search the layout with the shortest step that fits into memory.",
    ),
    "profile": (
        "..planner.measure.cli:profile",
        "Measure this machine into a hardware YAML for `trainer plan`.",
    ),
    "tune": (
        "..planner.tune.cli:tune",
        "Measure the best layouts by prediction in short trials on this machine.",
    ),
    "anneal": (
        "..reports.anneal.cli:anneal",
        "Compare mixtures: train each from one checkpoint of RUN, and rank them.",
    ),
}
"""Subcommands of `trainer` that stand above it."""


def lazy(table: dict[str, tuple[str, str]], *names: str) -> Iterator[LazyCommand]:
    """Yield a table's commands with these names, or all."""
    for name in names or table:
        target, summary = table[name]
        yield LazyCommand(name, target, summary)


def find_engine_state(*arguments: Any) -> Any:
    """Return an engine's state for `headrace models show`: models/ cannot import engines."""
    return import_module("..trainer.accounting.parameters", __package__).find_engine_state(
        *arguments
    )


def write_report(run: str) -> Path:
    """Write a run's report when `trainer run` ends, and return its path."""
    path: Path = import_module("..reports.report.write", __package__).write_report([run])[0]
    return path


def read_row_table(plan: Any, rows: range) -> Any:
    """Return the documents of a plan's rows as an Arrow table."""
    return import_module("..mixtures.audit.export", __package__).read_table(plan, rows)


def open_plan(name: str, overrides: Sequence[str] = ()) -> Any:
    """Return the plan of a mixture, a saved plan or a run, for a loop of a user's own."""
    return (
        import_module("..mixtures.planning.open_plan", __package__).open_plan(name, overrides).plan
    )


def survey_corpus(folder: str, max_documents: int, **settings: Any) -> Any:
    """Return what a folder of documents holds, for `headrace start`."""
    config = import_module("..tokenize.sources.format", __package__).SourceConfig(**settings)
    module = import_module("..tokenize.corpus.survey", __package__)
    return module.survey_corpus([folder], config, max_documents)
