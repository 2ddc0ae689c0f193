"""The pictures of the front page, from a real run: `make pictures`.

    python -m docs.generate.pictures RUN --step 24

The data's path is drawn from the run's plan and audit. The report is a screenshot in headless
Chromium, which must be installed (apt-get install chromium chromium-driver).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from chromium import Chromium

OUT = Path(__file__).parents[1] / "pictures"
COLOURS = ("#2e7da6", "#d98a2b", "#55a26b", "#a855a2", "#8a8f98")
INK = {"light": ("#1f2937", "#6b7280", "#ffffff"), "dark": ("#e5e7eb", "#9ca3af", "#111827")}
"""Text, quiet text and background of both forms."""

WIDTH, LEFT = 960, 330
LINE = 20
"""Height of a row of the step, in pixels."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, default=24)
    arguments = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    facts = Facts(arguments.run, arguments.step)
    for form in INK:
        (OUT / f"data-path-{form}.svg").write_text(data_path(facts, form))
    with Chromium() as browser:
        for form in INK:
            browser.device(1200, 690, dark=form == "dark")
            browser.open((arguments.run / "report.html").resolve().as_uri())
            browser.run("document.documentElement.style.overflow = 'hidden'")  # no scroll bar
            browser.screenshot(OUT / f"report-{form}.png")
    for file in sorted(OUT.iterdir()):
        print(f"{file}  {file.stat().st_size / 1000:.0f} kB")


class Facts:
    """The rows and datasets of a run, as the commands print them."""

    def __init__(self, run: Path, step: int) -> None:
        folder = run.parent  # a plan's relative paths start there
        self.step = step
        self.plan = json.loads(_headrace(folder, "mixtures", "plan", f"{run.name}/mixture.yaml"))
        sources = json.loads((run / "plan.json").read_text())["sources"]
        self.names = [source["name"] for source in sources]
        self.datasets = [
            json.loads(_headrace(folder, "tokenize", "inspect", source["url"]))
            for source in sources
        ]
        every = _headrace(folder, "mixtures", "audit", run.name, "--rows", f"0:{self.plan['rows']}")
        self.rows = [json.loads(line) for line in every.splitlines()]
        self.of_step = _headrace(folder, "mixtures", "audit", run.name, "--step", str(step))
        self.step_rows = [json.loads(line) for line in self.of_step.splitlines()]

    def colour(self, row: dict[str, Any]) -> str:
        return COLOURS[self.names.index(row["source"]) % len(COLOURS)]


def _headrace(folder: Path, *words: str) -> str:
    """Return what a command prints as JSON; a step that the ledger does not prove is an error."""
    command = [sys.executable, "-m", "headrace.console.headrace", *words, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def data_path(facts: Facts, form: str) -> str:
    """Return the drawing: datasets, the rows of the plan in their order, the rows of a step."""
    ink, quiet, ground = INK[form]
    height = 150 + LINE * len(facts.step_rows) + 14
    shapes = [f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{ground}"/>']

    def text(x: float, y: float, words: str, colour: str = ink, more: str = "") -> None:
        shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" {more}>{escape(words)}</text>'
        )

    def bar(x: float, y: float, width: float, high: float, colour: str) -> None:
        size = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{high}"'
        shapes.append(f'<rect {size} fill="{colour}"/>')

    text(20, 30, "Datasets", more='font-weight="600"')
    for place, (name, dataset) in enumerate(zip(facts.names, facts.datasets, strict=True)):
        y = 54 + 22 * place
        bar(20, y - 10, 11, 11, COLOURS[place % len(COLOURS)])
        text(38, y, name)
        text(95, y, f"{dataset['documents']:,} documents, {dataset['tokens']:,} tokens", quiet)

    wide = (WIDTH - LEFT - 20) / len(facts.rows)
    text(LEFT, 30, "The plan: every row of the run, in its order", more='font-weight="600"')
    for row in facts.rows:
        bar(LEFT + row["row"] * wide, 42, wide * 0.9, 46, facts.colour(row))
    for phase in facts.plan["phases"]:
        x = LEFT + phase["first_row"] * wide
        bar(x, 40, 1.5, 56, ink)
        text(x + 6, 104, f"{phase['phase']}: {phase['tokens']:,} tokens", quiet)

    first, last = facts.step_rows[0]["row"], facts.step_rows[-1]["row"] + 1
    top = 138
    corners = (
        f"{LEFT + first * wide:.1f},90 {LEFT + last * wide:.1f},90 {WIDTH - 20},{top} {LEFT},{top}"
    )
    shapes.append(f'<polygon points="{corners}" fill="{quiet}" opacity="0.18"/>')
    text(20, top + 16, f"Step {facts.step}, after the run", more='font-weight="600"')
    text(20, top + 38, f"mixtures audit RUN --step {facts.step}", quiet, 'font-family="monospace"')
    text(20, top + 60, f"{len(facts.step_rows)} rows, proved by the ledger", quiet)
    for place, row in enumerate(facts.step_rows):
        y = top + LINE * place
        bar(LEFT, y + 1, 5, LINE - 2, facts.colour(row))
        text(LEFT + 14, y + 15, f"row {row['row']}", quiet)
        text(LEFT + 84, y + 15, row["source"])
        text(LEFT + 144, y + 15, _documents(row["documents"]))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
    style = 'font-family="system-ui, sans-serif" font-size="13"'
    return f"{head} {style}>\n" + "\n".join(shapes) + "\n</svg>\n"


def _documents(documents: list[dict[str, Any]]) -> str:
    first = documents[0]
    words = f"{Path(first['file']).name}, token {first['first']:,}"
    more = len(documents) - 1
    return f"{words}, and {more} more" if more else words


if __name__ == "__main__":
    main()
