"""Goodput of a run with failures: the fraction of time that trains, and the best interval.

Devices fail independently; the time between two failures of the job is exponential. A failure ends
all ranks, at any time: also while a checkpoint is written or the job restarts. As in
trainer/checkpoints/saver.py, a save blocks the step for a copy, then a thread writes it, one at a
time; until it is written, the checkpoint before it is the newest. Work since the newest is lost.

    │ train │ save │ train │ save │ …         period = max(train, write) + save
                   └ write ┘→ durable

With the job's failure rate λ, `a` seconds without a failure take an expected
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
    """Failures and checkpoints, in hours and seconds."""

    mtbf: float = 50_000.0
    """Mean hours between failures of a single device. By default as in Llama 3's training: 419
    unexpected interruptions on 16,384 GPUs in 54 days (arXiv:2407.21783)."""
    save: float = 5.0
    """Seconds that a checkpoint blocks training."""
    write: float = 60.0
    """Seconds in which it is written in the background."""
    restart: float = 600.0
    """Seconds from a failure to the first step after it."""
    every: int | None = None
    """Steps between two checkpoints, to compare with the best interval."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_positive = name in ("mtbf", "every")
            if value is not None and not (0 <= value < math.inf and (value or not is_positive)):
                limit = "above 0" if is_positive else "at least 0"
                raise MisuseError(f"--failures {name}={value:g} must be {limit} and finite")

    def mean_seconds(self, gpus: int) -> float:
        """Return the mean seconds between failures of a job on `gpus` devices."""
        return self.mtbf * HOUR / gpus


def parse_failures(text: str) -> Failures:
    """Parse settings such as `mtbf=50000,save=5,restart=600`."""
    known = {field.name for field in fields(Failures)}
    settings: dict[str, float | int] = {}
    for word in text.split(",") if text else ():
        name, _, value = word.strip().partition("=")
        try:
            if name not in known:
                raise ValueError
            settings[name] = int(value) if name == "every" else float(value)
        except ValueError:
            raise MisuseError(
                f"--failures {text}: `{word}` is not SETTING=NUMBER",
                hint="settings are mtbf (hours of a device), save, write, restart (seconds) and "
                "every (steps)",
            ) from None
    return Failures(**settings)  # type: ignore[arg-type]


def goodput(failures: Failures, mean: float, step: float, every: int) -> float:
    """Return the fraction of time that trains.

    A step takes `step` seconds, a checkpoint follows `every` steps, and `mean` seconds lie between
    failures.
    """
    train, rate = step * every, 1 / mean
    period = max(train, failures.write) + failures.save
    recovery = train + failures.save + failures.write + failures.restart
    try:
        return train * rate / (-math.expm1(-rate * period) * math.exp(rate * recovery))
    except OverflowError:  # the job never lives long enough
        return 0.0


def best_interval(failures: Failures, mean: float, step: float) -> int:
    """Return the number of steps between checkpoints with the highest goodput.

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
    """True if a longer interval than `train` seconds has more goodput."""
    if train < failures.write:  # the period is as long as the write
        return train < mean
    exponent = (train + failures.save) / mean
    excess = 1 / math.expm1(exponent) if exponent < 700 else 0.0
    return mean / train > 1 + excess


def young_interval(failures: Failures, mean: float) -> float:
    """Return Young's interval in seconds (1974)."""
    return math.sqrt(2 * failures.save * mean)


def daly_interval(failures: Failures, mean: float) -> float:
    """Return Daly's interval in seconds (2006)."""
    save = failures.save
    if save >= 2 * mean:
        return mean
    ratio = save / (2 * mean)
    return math.sqrt(2 * save * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save
