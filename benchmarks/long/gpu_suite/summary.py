"""The last screen: goals, what failed, predictions and peers beside what was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.long._gpu_lines import lines
from benchmarks.long._gpu_peers import PEERS
from benchmarks.long._tasks import Report, Task, failed, unfinished

PREDICTIONS = "predictions.json"
SHOWN = 12
"""Failures that the screen lists."""


@dataclass(frozen=True)
class Goal:
    """What a line of gpu_step should reach on an H100."""

    mfu: float
    reference: str


GOALS = {
    "hybrid-1b": Goal(0.52, "none published"),
    "transformer-1b": Goal(0.52, "by hand 0.503"),
    "transformer-1b, one document": Goal(0.54, "Megatron 0.47 to 0.48"),
    "mamba2-1.3b": Goal(0.42, "mamba_ssm's kernels"),
    "llama2-7b, 18 layers, one document, 2 x 4,096 tokens": Goal(0.55, "fms-fsdp 0.46, 96 GPUs"),
    "evo2-7b, 18 layers, one document, 1 x 8,192 tokens": Goal(0.50, "Savanna 0.34, 40B"),
}
MAX_IDLE, MAX_ENGINE = 2.0, 7.0
"""Percent of a step of the packed models."""


@dataclass(frozen=True)
class Figures:
    """Figures of a line."""

    rate: float
    mfu: float | None
    allocated: float | None
    shares: dict[str, float]

    @classmethod
    def read(cls, text: str | None) -> Figures | None:
        rate = re.match(r"([\d,.]+) tokens/s", text or "")
        if rate is None or text is None:
            return None
        mfu = re.search(r"MFU ([\d.]+)", text)
        memory = re.search(r"([\d.]+) GiB allocated", text)
        shares = re.findall(r"(\w+) ([\d.]+)%", text)
        return cls(
            float(rate[1].replace(",", "")),
            float(mfu[1]) if mfu else None,
            float(memory[1]) if memory else None,
            {name: float(share) for name, share in shares},
        )


def summarize(report: Report, tasks: Sequence[Task], bundle: Path) -> Iterator[str]:
    """Yield the lines of the screen."""
    figures = {
        name: Figures.read(report.result(name))
        for name in (*(line.name for line in lines()), *PEERS)
    }
    measured = {name: figure for name, figure in figures.items() if figure is not None}
    yield from _show_goals(measured)
    yield from _show_predictions(measured, json.loads((bundle / PREDICTIONS).read_text()))
    for name, base in _pairs():
        if name in measured and base in measured:
            ratio = measured[name].rate / measured[base].rate
            yield f"{name} at {ratio:.2f}x the tokens/s of {base}"
    wrong, missing = failed(tasks, report), unfinished(tasks, report)
    yield f"{len(wrong)} results failed, {len(missing)} are missing"
    for name in wrong[:SHOWN]:
        yield f"  failed: {name}: {(report.result(name) or '')[:160]}"
    if missing:
        yield f"  missing: {', '.join(missing)}"[:600]


def _show_goals(measured: dict[str, Figures]) -> Iterator[str]:
    for name, goal in GOALS.items():
        figure = measured.get(name)
        text = "not measured"
        if figure is not None and figure.mfu is not None:
            text = f"{figure.mfu:.3f}, {'reached' if figure.mfu >= goal.mfu else 'missed'}"
        yield f"MFU of {name}: goal {goal.mfu:.2f} ({goal.reference}): {text}"
        if figure is None or name.count(","):
            continue
        idle, engine = (figure.shares.get(kind) for kind in ("idle", "engine"))
        if idle is not None and engine is not None:
            reached = idle <= MAX_IDLE and engine <= MAX_ENGINE
            yield (
                f"  idle {idle:.1f}% (goal {MAX_IDLE:g}), engine {engine:.1f}% (goal "
                f"{MAX_ENGINE:g}): {'reached' if reached else 'missed'}"
            )


def _show_predictions(measured: dict[str, Figures], predictions: Any) -> Iterator[str]:
    for name, predicted in predictions.items():
        figure = measured.get(name)
        if figure is None or "tokens_per_second" not in predicted:
            continue
        ratio = figure.rate / predicted["tokens_per_second"]
        memory = predicted["memory"] / 2**30
        seen = f", {figure.allocated:.1f} seen" if figure.allocated is not None else ""
        yield (
            f"{name}: {ratio:.2f}x the tokens/s that `trainer plan` predicts; {memory:.1f} GiB "
            f"predicted{seen}"
        )


def _pairs() -> Iterator[tuple[str, str]]:
    """Yield pairs of lines to compare."""
    for peer in PEERS:
        yield f"{peer.split(',')[0].removeprefix('peer of ')}, one document", peer
    for line in lines():
        if line.precision != "bf16" or line.compiled:
            yield line.name, line.model
