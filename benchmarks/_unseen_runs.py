"""Published runs that no figure was fitted to, predicted by the shipped hardware files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.planner.hardware import Hardware
from headrace.planner.hardware.file import Attained

from ._published_fit import TRAFFIC, Prediction, constant_error
from ._published_layouts import CLUSTERS, Figures, PublishedLayout
from ._published_runs import UNSEEN, runs

SIZES = {"below 10B": 1e10, "10B to 100B": 1e11, "above 100B": float("inf")}
"""Upper bounds of parameters, by name."""


@dataclass(frozen=True)
class UnseenPrediction(Prediction):
    first: float
    """Error when the run was first predicted."""

    @property
    def size(self) -> str:
        """Name of the model's size: parameters that a token uses, where experts share tokens."""
        parameters = self.run.model_flops / 6
        return next(name for name, bound in SIZES.items() if parameters < bound)


def predict_unseen() -> list[UnseenPrediction]:
    fitted = runs()
    predictions = []
    for run in runs(UNSEEN):
        file = Hardware.load(CLUSTERS[run.device]).file
        attained = file.attained or Attained(source=file.device.source)
        figures = Figures(attained, TRAFFIC[run.family])
        error = PublishedLayout(run, figures).step(figures) / run.seconds - 1
        known_runs = [known_run for known_run in fitted if known_run.family == run.family]
        assert run.first is not None, "an unseen run stores its first error"
        constant = constant_error(run, known_runs)
        predictions.append(UnseenPrediction(run, error, constant, run.first))
    return predictions


def describe_errors(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"{sum(sizes) / len(sizes):.1%}, worst {max(errors, key=abs):+.1%}"


def print_unseen() -> None:
    """Print the runs with both errors, and the errors by source, kind and size."""
    predictions = predict_unseen()
    print(f"\n{'runs that no figure was fitted to':<53} {'published':>9} {'first':>8} {'now':>8}")
    groups: Sequence[Callable[[UnseenPrediction], str]] = (
        lambda p: p.run.group,
        lambda p: p.run.kind,
        lambda p: p.size,
    )
    for number, find_group in enumerate(groups):
        for group in sorted({find_group(p) for p in predictions}):
            members = [p for p in predictions if find_group(p) == group]
            for p in members if number == 0 else ():
                print(f"{p.run.name:<53} {p.run.seconds:7.2f} s {p.first:+8.1%} {p.error:+8.1%}")
            print_errors(group, members)
    print_errors("all", predictions)


def print_errors(name: str, predictions: Sequence[UnseenPrediction]) -> None:
    first = describe_errors([p.first for p in predictions])
    now = describe_errors([p.error for p in predictions])
    constant = describe_errors([p.constant for p in predictions])
    print(f"  {name}, {len(predictions)}: first {first}; now {now}; constant {constant}")
