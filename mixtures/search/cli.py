"""The command `mixtures search`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...console import command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .measured import Measured
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

    from .measured import load
    from .propose import expected_best, propose
    from .regression import Regression

    if (mixture is None) != (out is None):
        raise click.UsageError("--mixture FILE and --out FOLDER need each other")
    measured = load(anneals)
    largest = _limits(limits, measured.sources)
    most = np.array([largest.get(name, 1.0) for name in measured.sources])
    fit = Regression(measured.shares, measured.scores, measured.error)
    best = float(fit.predict(measured.shares)[0].min())
    proposals = propose(fit, best, count, most, seed)
    expected = expected_best(fit, best, most, seed)
    files = _write(mixture, out, measured, proposals) if mixture and out else []
    if as_json:
        command.emit(_json(measured, fit, proposals, expected, files))
    command.say("\n".join(_lines(measured, fit, proposals, expected)))
    if len(proposals) < count:
        command.say(f"--max allows only {len(proposals)} mixtures that differ from those measured")
    for file in files:
        command.say(f"wrote {file}")


def _limits(words: tuple[str, ...], sources: Sequence[str]) -> dict[str, float]:
    from ...console.errors import MisuseError

    form = "SOURCE=SHARE, with a share from 0 to 1"
    found = command.named_numbers(words, "--max", form, most=1.0)
    if unknown := [name for name in found if name not in sources]:
        raise MisuseError(
            f"--max names {', '.join(unknown)}, which no measured mixture has",
            hint=f"the sources are {', '.join(sources)}",
        )
    if sum(found.get(name, 1.0) for name in sources) < 1:
        raise MisuseError("the shares of --max sum to less than 1", hint="allow larger shares")
    return found


def _write(mixture: str, out: str, measured: Measured, proposals: Sequence[Proposal]) -> list[Path]:
    """Write each proposal as the mixture with other weights."""
    from dataclasses import replace

    from ...console import config
    from ...console.errors import ConfigError, Problem, StorageError
    from ...dataplane.storage import storage
    from ..mixture_file.mixture import Weight
    from ..mixture_file.tolerant_read import read

    draft = read(mixture)
    if draft.problems:
        raise ConfigError(draft.source, draft.problems)
    if len(draft.mixture.phases) != 1:
        what = f"there are {len(draft.mixture.phases)}; a proposal has the shares of one phase"
        raise ConfigError(draft.source, [Problem("phases", what)])
    [(name, phase)] = draft.mixture.phases.items()
    files = [Path(out) / f"proposal-{number}.yaml" for number in range(1, len(proposals) + 1)]
    if there := [file for file in files if file.exists()]:
        raise StorageError(f"{there[0]} already exists", hint="choose another --out")
    for file, each in zip(files, proposals, strict=True):
        weights: dict[str, Weight] = {
            source: float(share)
            for source, share in zip(measured.sources, each.shares, strict=True)
            if share
        }
        made = replace(draft.mixture, phases={name: replace(phase, weights=weights)})
        storage.write(str(file), config.dump(made).encode())
    return files


def _json(
    measured: Measured,
    fit: Regression,
    proposals: Sequence[Proposal],
    expected: Proposal,
    files: Sequence[Path],
) -> dict[str, Any]:
    from .propose import effects

    def one(each: Proposal) -> dict[str, Any]:
        shares = dict(zip(measured.sources, map(float, each.shares), strict=True))
        return {"shares": shares, "score": each.score, "error": each.error, "better": each.better}

    changes = effects(fit, measured.shares[measured.best])
    return {
        "measured": len(measured.names),
        "best": {"name": measured.names[measured.best], "score": measured.scores.min()},
        "fit": dict(zip(("error", "error_of_the_mean"), _left_out(measured, fit), strict=True)),
        "effects": {
            name: {"change": change, "error": error}
            for name, (change, error) in zip(measured.sources, changes, strict=True)
        },
        "expected_best": one(expected),
        "proposals": [one(each) for each in proposals],
        "files": list(map(str, files)),
    }


def _left_out(measured: Measured, fit: Regression) -> tuple[float, float]:
    """Return the root mean square error for mixtures that are left out: of the fit, and of the
    mean of the others."""
    import numpy as np

    scores, count = measured.scores, len(measured.scores)
    others = (scores.sum() - scores) / (count - 1)
    errors = [float(np.sqrt(np.mean((guess - scores) ** 2))) for guess in (fit.left_out(), others)]
    return errors[0], errors[1]


def _lines(
    measured: Measured, fit: Regression, proposals: Sequence[Proposal], expected: Proposal
) -> list[str]:
    from .propose import effects

    error, plain = _left_out(measured, fit)
    best = measured.best
    verdict = "" if error < plain else ": no better, so the shares do not explain the scores yet"
    text = [
        f"measured    {len(measured.names)} mixtures; the best is {measured.names[best]}, "
        f"{measured.scores[best]:.4f} bits per byte",
        f"fit         off by {error:.4f} for a mixture that is left out; the mean of the others by "
        f"{plain:.4f}{verdict}",
        "1% more     "
        + ", ".join(
            f"{name} {change:+.4f} ± {deviation:.4f}"
            for name, (change, deviation) in zip(
                measured.sources, effects(fit, measured.shares[best]), strict=True
            )
        ),
        f"{'':<12}predicted    error  better  " + "  ".join(measured.sources),
    ]
    named = [("expected", expected), *((f"proposal {n}", p) for n, p in enumerate(proposals, 1))]
    for name, each in named:
        shares = "  ".join(
            f"{share:>{max(6, len(source))}.1%}"
            for source, share in zip(measured.sources, each.shares, strict=True)
        )
        text.append(
            f"{name:<12}{each.score:>9.4f}  {each.error:>7.4f}  {each.better:>6.1%}  {shares}"
        )
    return text
