"""Published runs: step times that the planner predicts beside published ones, and a constant rate.

    python -m benchmarks.published_runs

Each run of `published_runs.yaml` (with its source) is priced by the planner as `trainer plan price`
does it: traces, costs, schedules by events. Each figure has one origin:

    published   attention, links, memory, the best product: the shipped hardware file
    fitted      what whole programs attain of it: at most five figures of a family of devices
    assumed     EAGER in _published_layouts.py

A run is predicted by the figures of the others; then by those of runs of other kinds, and of other
programs. Blackwell has a fit of its own, and rows that the planner refuses, by name. The constant
model has two figures for each family: operations by seconds, in bf16 and in FP8. The last table has
steps that one H100 took here, which the fit does not know.

The runs of `unseen_runs.yaml` were written down before anybody predicted them. `first` is the error
of their first prediction, which counts as blind; since then we know them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ._measured_steps import STEPS
from ._measured_steps import predict as predict_step
from ._published_fit import FIGURES, Fit, Prediction
from ._published_runs import load_rows, runs
from ._unseen_runs import print_unseen


def mean(values: Iterable[float]) -> float:
    sizes = [abs(value) for value in values]
    return sum(sizes) / len(sizes)


def summarize(predictions: Sequence[Prediction]) -> str:
    """Return both models' mean errors, and our worst."""
    error = mean(p.error for p in predictions)
    worst = max((p.error for p in predictions), key=abs)
    constant = mean(p.constant for p in predictions)
    return f"{error:.1%}, worst {worst:+.1%}; constant {constant:.1%}"


def report(families: str, fits: Sequence[Fit]) -> None:
    """Print the runs of some families of devices, and how far they are off without their kind and
    without their program."""
    alone = [p for fit in fits for p in fit.predict(lambda run, known_run: known_run is not run)]
    print(f"{'run':<46} {'published':>10}  {'predicted':>9} {'constant':>9}")
    for group in dict.fromkeys(p.run.group for p in alone):
        predictions = [p for p in alone if p.run.group == group]
        for p in predictions:
            print(f"{p.run.name:<46} {p.run.seconds:8.2f} s  {p.error:+9.1%} {p.constant:+9.1%}")
        print(f"  {group}: {summarize(predictions)}")
    print(f"\n{families}, {len(alone)} runs, each by the others: {summarize(alone)}")
    print_kinds(alone)
    print("without all runs of their kind")
    print_kinds([p for fit in fits for p in fit.predict(lambda a, b: a.kind != b.kind)])
    foreign = [p for fit in fits for p in fit.predict(lambda a, b: a.group != b.group)]
    if foreign:
        print(f"without all runs of their program, {len(foreign)}: {summarize(foreign)}")
    for fit in fits:
        attained = ", ".join(f"{name} {value:.3f}" for name, value in fit.fitted.items())
        print(f"{fit.family}, fitted to all its {len(fit.runs)}: {attained}")


def print_kinds(predictions: Sequence[Prediction]) -> None:
    for kind in dict.fromkeys(p.run.kind for p in predictions):
        group = [p for p in predictions if p.run.kind == kind]
        print(f"  {kind}, {len(group)}: {summarize(group)}")


def print_refused() -> None:
    """Print the published runs that the planner cannot say, by reason."""
    rows = [row for row in load_rows() if "refused" in row]
    for reason in dict.fromkeys(row["refused"] for row in rows):
        print(f"refused, {reason}:")
        for row in rows:
            if row["refused"] == reason:
                print(f"  {row['run']:<44} {row['value']:8,} {row['unit']}")


def main() -> None:
    fits = {family: Fit(family, runs()) for family in FIGURES}
    blackwell = fits.pop("Blackwell")
    report(" and ".join(fits), [*fits.values()])
    print()
    report("Blackwell", [blackwell])
    print_refused()
    print("\nsteps of one H100 by the shipped file        seconds     bytes")
    for step in STEPS:
        seconds, size = predict_step(step)
        name = f"{step.model} {step.attention}".strip()
        print(f"{name:<30} {step.milliseconds:8.1f} ms  {seconds:+9.1%} {size:+9.1%}")
    print_unseen()


if __name__ == "__main__":
    main()
