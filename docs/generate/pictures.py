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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.pages.chromium import Chromium

from .figure import COLOURS, Figure

OUT = Path(__file__).parents[1] / "pictures"
WIDTH, LEFT = 838, 20
LINE = 20
"""Height of a row of the step, in pixels; the width is that of a README on GitHub."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, default=24)
    arguments = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    facts = Facts(arguments.run, arguments.step)
    (OUT / "data-path.svg").write_text(data_path(facts))
    with Chromium() as browser:
        for form in ("light", "dark"):
            browser.device(880, 740, dark=form == "dark")
            browser.open((arguments.run / "report.html").resolve().as_uri())
            browser.until("return document.body.dataset.drawn")
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


def data_path(facts: Facts) -> str:
    """Return the drawing: datasets, the rows of the plan in their order, the rows of a step."""
    top, half = 206, -(-len(facts.step_rows) // 2)
    figure = Figure(
        f"The datasets, all rows of a plan in their order, and the documents of step {facts.step}",
        top + LINE * half + 12,
        WIDTH,
    )
    figure.text(LEFT, 26, "Datasets", "strong")
    for place, (name, dataset) in enumerate(zip(facts.names, facts.datasets, strict=True)):
        x = LEFT + place * (WIDTH - 2 * LEFT) / len(facts.names)
        figure.box((x, 38), (12, 12), COLOURS[place % len(COLOURS)])
        figure.text(x + 19, 49, name)
        size = f"{dataset['documents']:,} documents, {dataset['tokens'] / 1e6:.2f}M tokens"
        figure.text(x + 62, 49, size, "quiet")

    figure.text(LEFT, 80, "The plan: every row of the run, in its order", "strong")
    wide = (WIDTH - 2 * LEFT) / len(facts.rows)
    for row in facts.rows:
        figure.box((LEFT + row["row"] * wide, 89), (wide * 0.9, 32), facts.colour(row))
    for phase in facts.plan["phases"]:
        x = LEFT + phase["first_row"] * wide
        figure.path(f"M{x:.1f} 87v48", 'stroke-width="2"')
        figure.text(x + 6, 135, f"{phase['phase']}: {phase['tokens']:,} tokens", "quiet")

    first, last = facts.step_rows[0]["row"], facts.step_rows[-1]["row"] + 1
    left, right = LEFT + first * wide, LEFT + last * wide
    way = f"M{left:.1f} 123L{LEFT} {top - 34}M{right:.1f} 123L{WIDTH - LEFT} {top - 34}"
    figure.path(way, 'stroke-dasharray="3 3"')
    proof = f"Step {facts.step}, after the run: {len(facts.step_rows)} rows, proved by the ledger"
    figure.text(LEFT, top - 14, proof, "strong")
    for place, row in enumerate(facts.step_rows):
        x, y = LEFT + place // half * (WIDTH / 2), top + LINE * (place % half)
        figure.box((x, y + 1), (5, LINE - 2), facts.colour(row))
        figure.text(x + 14, y + 15, f"row {row['row']}", "quiet")
        figure.text(x + 74, y + 15, row["source"])
        figure.text(x + 122, y + 15, _documents(row["documents"]))
    return figure.svg()


def _documents(documents: list[dict[str, Any]]) -> str:
    first = documents[0]
    words = f"{Path(first['file']).name}, token {first['first']:,}"
    more = len(documents) - 1
    return f"{words}, and {more} more" if more else words


if __name__ == "__main__":
    main()
