"""The command `trainer anneal`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ...console import command
from ...console.log import get_logger
from ...trainer.launch.options import command_words

if TYPE_CHECKING:
    from .candidates import MixtureCandidate
    from .folder import AnnealFolder
    from .prepare import PreparedAnneal
    from .scores import Ranking

log = get_logger(__name__)

START_OPTIONS = frozenset({"slurm", "dry_run", "report", "task", "as_json", "processes"})
"""Options that concern a start and do not decide the runs."""


@click.command(cls=command.Command)
@click.argument("run", metavar="RUN")
@click.argument("words", nargs=-1, metavar="[MIXTURE.yaml]... [PATH.TO.KEY=VALUE]...")
@click.option("--at", type=click.IntRange(1), help="Step of the checkpoint [the newest one].")
@click.option(
    "--mixtures", multiple=True, metavar="FILE...", help="Mixtures to compare, without `after`."
)
@click.option(
    "--grid",
    multiple=True,
    metavar="SOURCE=SHARE,...",
    help="Shares of a source to try in each mixture; the other shares keep their proportions.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Runs of each candidate, with other orders of the data: the noise of a score.",
)
@click.option(
    "--score",
    multiple=True,
    metavar="SOURCE=WEIGHT",
    help="Weight of a held-out source in the score [all alike].",
)
@click.option(
    "--out", metavar="FOLDER", callback=command.local_path, help="Folder of the runs [RUN-anneal]."
)
@click.option("--processes", type=click.IntRange(1), help="Ranks on this machine [those of RUN].")
@click.option("--slurm", is_flag=True, help="Submit the runs as an array of batch jobs.")
@click.option("--task", type=int, hidden=True, help="Number of a run: a task of the array.")
@click.option("--report", is_flag=True, help="Rank the finished runs; start nothing.")
@click.option("--dry-run", is_flag=True, help="Plan and print all candidates; start nothing.")
@command.json_option
def anneal(run: str, words: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Compare mixtures: train each from one checkpoint of RUN, and rank them.

    Each run continues RUN exactly, in its stream and its weights. The score is the loss on the
    held-out rows of all candidates, in bits per byte. FOLDER gets the runs, the ranking and a page.
    The same command continues after a kill. Overrides set keys of the runs; those that begin with
    `mixture.` set keys of all mixtures.

    \b
    Examples:
      trainer anneal runs/main --at 90000 --mixtures a.yaml b.yaml --seeds 2
      trainer anneal runs/main --mixtures a.yaml --grid math=0.1,0.2,0.4 --slurm

    More: docs/anneal.md
    """
    from ...trainer.loop.evaluate import missing_note
    from .folder import AnnealFolder
    from .scores import check_weights, rank, ranking_json
    from .train import Interrupted, submit, train

    folder = AnnealFolder(options["out"] or f"{run.rstrip('/')}-anneal")
    if options["task"] is not None:
        _become_task(folder, options["task"])
    weights = _weights(options["score"])
    prepared = _prepare(run, words, options)
    assert prepared.run.evaluate is not None
    check_weights(weights, prepared.run.evaluate.sources)
    if prepared.not_scored:
        log.warning("%s", missing_note(prepared.not_scored, prepared.run.evaluate.split))
    if options["dry_run"]:
        _say_candidates(prepared.candidates, as_json)
        return
    with folder.locked():
        entries = folder.begin(prepared)
        if options["slurm"]:
            task_command = command_words(click.get_current_context(), without=START_OPTIONS)
            job = submit(folder, entries, prepared.run, task_command)
            if as_json:
                command.emit({"job": job, "script": str(folder.slurm)})
            command.say(f"submitted as array {job}: {folder.slurm}; rank with --report")
            return
        if not options["report"]:
            try:
                train(folder, entries, options["processes"] or prepared.processes)
            except Interrupted:
                from ...trainer.cluster.ranks import INTERRUPTED

                command.say("a run saved and stopped; the same command goes on")
                sys.exit(INTERRUPTED)
        ranking = rank(folder, entries, weights)
        _write(folder, prepared, ranking)
    if as_json:
        command.emit(ranking_json(ranking, folder))
    command.say("\n".join(_ranking_lines(ranking, folder)))


def _prepare(run: str, words: tuple[str, ...], options: dict[str, Any]) -> PreparedAnneal:
    from .candidates import parse_grid
    from .prepare import AnnealRequest, prepare

    files = [*options["mixtures"], *(word for word in words if "=" not in word)]
    if not files:
        raise click.UsageError("give mixtures: --mixtures a.yaml b.yaml")
    overrides = [word for word in words if "=" in word]
    command.check_overrides(overrides)
    return prepare(
        AnnealRequest(
            run=run,
            step=options["at"],
            mixtures=files,
            grid=parse_grid(options["grid"]),
            num_seeds=options["seeds"],
            overrides=overrides,
        )
    )


def _weights(words: tuple[str, ...]) -> dict[str, float]:
    """Parse the held-out sources' weights in the score."""
    weights = command.named_numbers(words, "--score", "SOURCE=WEIGHT, with a weight of at least 0")
    if weights and not any(weights.values()):
        raise click.UsageError("--score: all weights are 0")
    return weights


def _become_task(folder: AnnealFolder, number: int) -> None:
    """Replace this process, a rank in an array task, by a candidate's `trainer run`."""
    from ...console.errors import RunError
    from .folder import Entry
    from .train import run_arguments

    if not folder.request.exists():
        raise RunError(f"{folder.root} holds no anneal", hint="submit it with --slurm")
    entries = folder.read()["runs"]
    arguments = run_arguments(folder, Entry(**entries[number]), None)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "headrace.trainer.cli", *arguments])


def _say_candidates(candidates: Sequence[MixtureCandidate], as_json: bool) -> None:
    from ...console.progress import format_number
    from .scores import token_shares

    if as_json:
        command.emit(
            [
                {"name": candidate.name, "seed": candidate.seed, "plan": candidate.plan.learnt_hash,
                 "tokens": candidate.plan.end_token - candidate.plan.first_token,
                 "shares": token_shares(candidate.plan)}
                for candidate in candidates
            ]
        )  # fmt: skip
    width = max(len(candidate.name) for candidate in candidates)
    for candidate in candidates:
        plan = candidate.plan
        tokens = format_number(plan.end_token - plan.first_token)
        shares = ", ".join(f"{source} {share:.1%}" for source, share in token_shares(plan).items())
        command.say(
            f"{candidate.name:<{width}}  seed {candidate.seed}  {tokens:>6}  "
            f"{plan.learnt_hash[:8]}  {shares}"
        )


def _write(folder: AnnealFolder, prepared: PreparedAnneal, ranking: Ranking) -> None:
    from ...dataplane.storage.sealed import seal
    from ...trainer.folders.request_folder import write
    from .page import anneal_page
    from .scores import ranking_json

    request = prepared.request
    write(folder.scores, seal(ranking_json(ranking, folder), indent=1).decode())
    write(folder.page, anneal_page(ranking, request["run"], request["step"]))


def _ranking_lines(ranking: Ranking, folder: AnnealFolder) -> list[str]:
    from .page import result_sentence

    width = max(len(candidate.name) for candidate in ranking.candidates)
    lines = [f"{'':<{width}}  bits/byte   ± seeds  behind  " + "  ".join(ranking.weights)]
    for candidate in ranking.candidates:
        error = ranking.standard_error(candidate)
        noise = "–" if error is None else f"{error:.4f}"
        remark = "  within the noise" if ranking.is_within_noise(candidate) else ""
        sources = "  ".join(
            f"{candidate.by_source[source]:>{max(6, len(source))}.4f}" for source in ranking.weights
        )
        lines.append(
            f"{candidate.name:<{width}}  {candidate.score:>9.4f}  {noise:>8}  "
            f"{candidate.score - ranking.best.score:>6.4f}  {sources}{remark}"
        )
    lines += [result_sentence(ranking), f"page: {folder.page}", f"scores: {folder.scores}"]
    return lines
