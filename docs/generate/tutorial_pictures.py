"""The pictures of the tutorials, from the runs of their pages: `make pictures`.

    python -m docs.generate.tutorial_pictures runs/tutorials

A page whose folder is not there is run first, as tests/test_tutorials.py runs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.pages.tutorial_pages import Page

from .figure import COLOURS, Figure

OUT = Path(__file__).parents[1] / "pictures"
LEFT, RIGHT, TOP, FLOOR = 40, 466, 36, 216
"""Edges of a plot."""

Points = list[tuple[float, float]]


def main(folder: Path) -> None:
    for name, draw in (("spike", spike), ("anneal", anneal)):
        if not (folder / name).exists():
            run_page(name, folder / name)
        (OUT / f"{name}.svg").write_text(draw(folder / name / "runs"))
        print(OUT / f"{name}.svg")


def run_page(name: str, folder: Path) -> None:
    page = Page((OUT.parent / "tutorials" / f"{name}.md").read_text())
    folder.mkdir(parents=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-c", page.script()], cwd=folder, env={**os.environ, "PATH": path}, check=True
    )


def spike(runs: Path) -> str:
    """Return the losses of both runs of the page: one with the spike, one that skips it."""
    first, second = (lines(runs / name / "metrics.jsonl") for name in ("spiky", "guarded"))
    applied = [entry for entry in second if not entry.get("skipped")]
    curves = {
        "runs/spiky": [(entry["step"], entry["loss"]) for entry in first],
        "runs/guarded, from step 60": [(entry["step"], entry["loss"]) for entry in applied],
    }
    return plot("Loss by step", curves, {"step 88": 88})


def anneal(runs: Path) -> str:
    """Return the held-out losses of the sources, over the phases of the page's run."""
    entries = lines(runs / "main" / "evaluations.jsonl")
    curves = {
        name: [(entry["step"], entry["sources"][name]["loss"]) for entry in entries]
        for name in entries[0]["sources"]
    }
    steps = lines(runs / "main" / "metrics.jsonl")
    begins = {entry["phase"]: entry["step"] for entry in reversed(steps)}
    return plot("Loss on held-out rows, by step", curves, begins)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def plot(title: str, curves: dict[str, Points], marks: dict[str, float]) -> str:
    """Return a plot of curves, with named marks on the x-axis."""
    figure = Figure(title, FLOOR + 56)
    most_x, most_y = (
        max(point[axis] for curve in curves.values() for point in curve) for axis in (0, 1)
    )

    def placed(points: Sequence[tuple[float, float]]) -> Points:
        wide, high = (RIGHT - LEFT) / most_x, (FLOOR - TOP) / most_y
        return [(LEFT + wide * x, FLOOR - high * y) for x, y in points]

    figure.text(LEFT, 22, title, "strong")
    for y in range(0, int(most_y) + 1, 2):
        height = placed([(0, y)])[0][1]
        figure.path(f"M{LEFT} {height:.1f}H{RIGHT}", 'opacity="0.4"')
        figure.text(LEFT - 8, height + 4, str(y), "small quiet", "end")
    for name, x in marks.items():
        across = placed([(x, 0)])[0][0]
        figure.path(f"M{across:.1f} {TOP}V{FLOOR + 6}", 'stroke-dasharray="3 3"')
        figure.text(across + 4, FLOOR + 20, name, "small quiet")
    for number, (name, points) in enumerate(curves.items()):
        figure.line(placed(points), COLOURS[number])
        x = LEFT + 130 * number
        figure.box((x, FLOOR + 37), (12, 5), COLOURS[number])
        figure.text(x + 18, FLOOR + 44, name, "small")
    return figure.svg()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
