"""Failures of a run: the fraction of its time that trains, and the best checkpoint interval.

Devices fail independently; the time between two failures of the job is exponential. A failure ends
all ranks, at any time: also while a checkpoint is written or the job restarts. As in
trainer/checkpoints/saver.py, a save blocks the step for a copy, then a thread writes it, one at a
time; until it is written, the checkpoint before it is the newest. Work since the newest is lost.

    │ train │ save │ train │ save │ …         period = max(train, write) + save
                   └ write ┘→ durable

With the rate λ of failures of the job, `a` seconds without a failure take an expected
(e^(λa) - 1) e^(λ·restart) / λ seconds, with a restart after each failure. After a restart the next
checkpoint is durable after a = train + save + write seconds, otherwise after a period. So a period
takes, with its failures, (1 - e^(-λ·period)) e^(λ(a + restart)) / λ seconds. Where the write ends
before the next save, that is (e^(λ·period) - 1) e^(λ(write + restart)) / λ: the write is like a
longer restart, and does not move the best interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ...console.errors import MisuseError

HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Failures and checkpoints. Hours and seconds; `every` counts steps."""

    mtbf: float = 50_000.0
    """Hours between two failures of one device. The default is that of Llama 3's training: 419
    unexpected interruptions of 16,384 GPUs in 54 days (arXiv:2407.21783)."""
    save: float = 5.0
    """Seconds that a checkpoint blocks training."""
    write: float = 60.0
    """Seconds in which it is written in the background."""
    restart: float = 600.0
    """Seconds from a failure to the first step after it."""
    every: int | None = None
    """Steps between two checkpoints, to compare with the best interval."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            low = each.name in ("mtbf", "every")
            if value is not None and not (0 <= value < math.inf and (value or not low)):
                limit = "above 0" if low else "at least 0"
                raise MisuseError(f"--failures {each.name}={value:g} must be {limit} and finite")

    def mean(self, gpus: int) -> float:
        """Return the mean seconds between two failures of the job."""
        return self.mtbf * HOUR / gpus


def parse_failures(text: str) -> Failures:
    """Return the settings of `mtbf=50000,save=5,restart=600`."""
    known = {each.name for each in fields(Failures)}
    found: dict[str, float | int] = {}
    for word in text.split(",") if text else ():
        name, _, value = word.strip().partition("=")
        try:
            if name not in known:
                raise ValueError
            found[name] = int(value) if name == "every" else float(value)
        except ValueError:
            raise MisuseError(
                f"--failures {text}: `{word}` is not SETTING=NUMBER",
                hint="settings are mtbf (hours of a device), save, write, restart (seconds) and "
                "every (steps)",
            ) from None
    return Failures(**found)  # type: ignore[arg-type]


def goodput(failures: Failures, mean: float, step: float, every: int) -> float:
    """Return the fraction of time that trains, with a checkpoint after `every` steps of `step`
    seconds and `mean` seconds between two failures."""
    train, rate = step * every, 1 / mean
    period = max(train, failures.write) + failures.save
    again = train + failures.save + failures.write + failures.restart
    try:
        return train * rate / (-math.expm1(-rate * period) * math.exp(rate * again))
    except OverflowError:  # the job never lives long enough
        return 0.0


def best_interval(failures: Failures, mean: float, step: float) -> int:
    """Return the steps between two checkpoints with the highest goodput.

    Goodput has one maximum, and training longer than `mean + write` never pays. Neighbouring
    intervals may differ by less than a float can show, so the slope decides where it rises.
    """
    low, high = 0, max(1, math.ceil((mean + failures.write) / step))
    while high > low:  # the last interval at which goodput rises
        middle = (low + high + 1) // 2
        if _rises(failures, mean, step * middle):
            low = middle
        else:
            high = middle - 1
    return max(max(low, 1), low + 1, key=lambda every: goodput(failures, mean, step, every))


def _rises(failures: Failures, mean: float, train: float) -> bool:
    """True if a longer interval has more goodput."""
    if train < failures.write:  # the period is as long as the write
        return train < mean
    exponent = (train + failures.save) / mean
    again = 1 / math.expm1(exponent) if exponent < 700 else 0.0
    return mean / train > 1 + again


def young(failures: Failures, mean: float) -> float:
    """Return Young's interval in seconds (1974)."""
    return math.sqrt(2 * failures.save * mean)


def daly(failures: Failures, mean: float) -> float:
    """Return Daly's interval in seconds (2006)."""
    save = failures.save
    if save >= 2 * mean:
        return mean
    ratio = save / (2 * mean)
    return math.sqrt(2 * save * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save
