"""The command `mixtures search`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...console import command
from ...console.progress import exact_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...dataplane.arrays import Float64
    from .measured import MeasuredMixtures
    from .propose import Proposal
    from .regression import Regression


@click.command(cls=command.Command)
@click.argument("anneals", nargs=-1, required=True, metavar="ANNEAL|SCORES.json...")
@click.option(
    "--propose",
    "count",
    type=click.IntRange(0),
    default=4,
    show_default=True,
    help="Mixtures to measure next.",
)
@click.option(
    "--max", "limits", multiple=True, metavar="SOURCE=SHARE", help="Largest share to propose."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the search.")
@click.option(
    "--mixture", metavar="FILE", help="Mixture with one phase, whose weights proposals replace."
)
@click.option("--out", metavar="FOLDER", help="Write the proposals there, as mixtures.")
@command.json_option
def search(
    anneals: tuple[str, ...],
    count: int,
    limits: tuple[str, ...],
    seed: int,
    mixture: str | None,
    out: str | None,
    as_json: bool,
) -> None:
    """Fit the scores of `trainer anneal` on the shares of the sources, and propose mixtures.

    A proposal is where the fit expects the most improvement on the best measured mixture. The fit
    says how sure it is: its error for each mixture when it is left out, and the standard deviation
    of each prediction.

    \b
    Examples:
      mixtures search runs/main-anneal --propose 4
      mixtures search runs/main-anneal --mixture a.yaml --out next --max math=0.4
      trainer anneal runs/main --mixtures next/*.yaml

    More: docs/anneal.md
    """
    import numpy as np

    from .measured import load_scores
    from .propose import find_expected_best, propose
    from .regression import Regression

    if (mixture is None) != (out is None):
        raise click.UsageError("--mixture FILE and --out FOLDER need each other")
    measured = load_scores(anneals)
    limits_by_source = _parse_limits(limits, measured.sources)
    max_shares = np.array([limits_by_source.get(source, 1.0) for source in measured.sources])
    regression = Regression(measured.shares, measured.scores, measured.error)
    best_score = float(regression.predict(measured.shares)[0].min())
    proposals = propose(regression, best_score, count, max_shares, seed)
    expected = find_expected_best(regression, best_score, max_shares, seed)
    files = _write_proposals(mixture, out, measured, proposals) if mixture and out else []
    if as_json:
        command.emit(_json_summary(measured, regression, proposals, expected, files))
    command.say("\n".join(_summary_lines(measured, regression, proposals, expected)))
    if len(proposals) < count:
        command.say(f"--max allows only {len(proposals)} mixtures that differ from those measured")
    for file in files:
        command.say(f"wrote {file}")


def _parse_limits(words: tuple[str, ...], sources: Sequence[str]) -> dict[str, float]:
    """Parse the --max options into the largest share by source."""
    from ...console.errors import MisuseError

    form = "SOURCE=SHARE, with a share from 0 to 1"
    max_shares = command.named_numbers(words, "--max", form, maximum=1.0)
    if unknown := [source for source in max_shares if source not in sources]:
        raise MisuseError(
            f"--max names {', '.join(unknown)}, which no measured mixture has",
            hint=f"the sources are {', '.join(sources)}",
        )
    if sum(max_shares.get(source, 1.0) for source in sources) < 1:
        raise MisuseError("the shares of --max sum to less than 1", hint="allow larger shares")
    return max_shares


def _write_proposals(
    mixture: str, out: str, measured: MeasuredMixtures, proposals: Sequence[Proposal]
) -> list[Path]:
    """Write the mixture once per proposal, with the proposal's shares as weights."""
    from dataclasses import replace

    from ...console import config
    from ...console.errors import ConfigError, ConfigProblem, StorageError
    from ...dataplane.storage import storage
    from ..mixture_file.mixture import Weight
    from ..mixture_file.tolerant_read import read

    draft = read(mixture)
    draft.refuse()
    if len(draft.mixture.phases) != 1:
        message = f"there are {len(draft.mixture.phases)}; a proposal has the shares of one phase"
        raise ConfigError(draft.source, [ConfigProblem("phases", message)])
    [(phase_name, phase)] = draft.mixture.phases.items()
    files = [Path(out) / f"proposal-{number}.yaml" for number in range(1, len(proposals) + 1)]
    if existing := [file for file in files if file.exists()]:
        raise StorageError(f"{existing[0]} already exists", hint="choose another --out")
    for file, proposal in zip(files, proposals, strict=True):
        weights: dict[str, Weight] = {
            source: float(share)
            for source, share in zip(measured.sources, proposal.shares, strict=True)
            if share
        }
        phases = {phase_name: replace(phase, weights=weights)}
        storage.write(str(file), config.dump(replace(draft.mixture, phases=phases)).encode())
    return files


def _json_summary(
    measured: MeasuredMixtures,
    regression: Regression,
    proposals: Sequence[Proposal],
    expected: Proposal,
    files: Sequence[Path],
) -> dict[str, Any]:
    from .propose import estimate_effects

    def summarize(proposal: Proposal) -> dict[str, Any]:
        return {
            "shares": dict(zip(measured.sources, map(float, proposal.shares), strict=True)),
            "score": proposal.score,
            "error": proposal.error,
            "better": proposal.improvement_probability,
        }

    effects = estimate_effects(regression, measured.shares[measured.best])
    return {
        "measured": len(measured.names),
        "best": {"name": measured.names[measured.best], "score": measured.scores.min()},
        "fit": dict(
            zip(("error", "error_of_the_mean"), _left_out_errors(measured, regression), strict=True)
        ),
        "effects": {
            source: {"change": change, "error": error}
            for source, (change, error) in zip(measured.sources, effects, strict=True)
        },
        "expected_best": summarize(expected),
        "proposals": [summarize(proposal) for proposal in proposals],
        "files": list(map(str, files)),
    }


def _left_out_errors(measured: MeasuredMixtures, regression: Regression) -> tuple[float, float]:
    """Compute the leave-one-out root mean square errors: by the regression, and by the mean."""
    import numpy as np

    def root_mean_square_error(predictions: Float64) -> float:
        return float(np.sqrt(np.mean((predictions - scores) ** 2)))

    scores = measured.scores
    means = (scores.sum() - scores) / (len(scores) - 1)
    return root_mean_square_error(regression.predict_left_out()), root_mean_square_error(means)


def _summary_lines(
    measured: MeasuredMixtures,
    regression: Regression,
    proposals: Sequence[Proposal],
    expected: Proposal,
) -> list[str]:
    from .propose import estimate_effects

    error, mean_error = _left_out_errors(measured, regression)
    best = measured.best
    verdict = (
        "" if error < mean_error else ": no better, so the shares do not explain the scores yet"
    )
    lines = [
        f"measured    {exact_count(len(measured.names), 'mixtures')}; the best "
        f"is {measured.names[best]}, "
        f"{measured.scores[best]:.4f} bits per byte",
        f"fit         off by {error:.4f} for a mixture that is left out; the mean of the others by "
        f"{mean_error:.4f}{verdict}",
        "1% more     "
        + ", ".join(
            f"{source} {change:+.4f} ± {deviation:.4f}"
            for source, (change, deviation) in zip(
                measured.sources, estimate_effects(regression, measured.shares[best]), strict=True
            )
        ),
        f"{'':<12}predicted    error  better  " + "  ".join(measured.sources),
    ]
    rows = [("expected", expected), *((f"proposal {n}", p) for n, p in enumerate(proposals, 1))]
    for title, proposal in rows:
        shares = "  ".join(
            f"{share:>{max(6, len(source))}.1%}"
            for source, share in zip(measured.sources, proposal.shares, strict=True)
        )
        lines.append(
            f"{title:<12}{proposal.score:>9.4f}  {proposal.error:>7.4f}  "
            f"{proposal.improvement_probability:>6.1%}  {shares}"
        )
    return lines
