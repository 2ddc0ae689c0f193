"""The command `mixtures steer`."""

from __future__ import annotations

from pathlib import Path

import click

from ...console import command


@click.command(cls=command.Command)
@click.argument("run", metavar="RUN", type=click.Path())
@click.option(
    "--weights",
    required=True,
    metavar="SOURCE=SHARE,...",
    help="Shares of the sources; they sum to 1, and sources without one get nothing.",
)
@click.option(
    "--step",
    type=click.IntRange(min=0),
    help="First step with these shares. Default: two steps after the next one.",
)
@command.json_option
def steer(run: str, weights: str, step: int | None, as_json: bool) -> None:
    """Change the shares of a run's sources while it goes on, or before its next start.

    The run takes the request between two steps, records its decision, and follows it from a later
    step on. A resume repeats it exactly; later phases keep their own shares.

    \b
    Example:
      mixtures steer runs/first --weights web=0.7,code=0.3

    More: docs/mixtures.md, section Steer
    """
    from .ask import ask_run

    request = ask_run(Path(run), _parse(weights), step)
    if as_json:
        command.emit({"run": run, **vars(request)})
    else:
        command.say(
            f"{run} takes the request at its next step; `mixtures audit {run} --decisions` then "
            "shows the decision"
        )


def _parse(text: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, equals, share = part.strip().partition("=")
        try:
            value = float(share)
        except ValueError:
            equals = ""
        if not equals or name in shares:
            raise click.UsageError(f"--weights must be SOURCE=SHARE,…, not {text}")
        shares[name] = value
    return shares
