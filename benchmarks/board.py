"""The live page of eight runs of a million steps, beside its limits.

    python -m benchmarks.board [--steps 1000000] [--runs 8]

A run has 20 curves. One is written and read; the others are links to its files. In Chromium, if it
is installed: the time from the request of the page until the curves in sight are drawn, and from a
drag until the curves of the new window are drawn. Without it: the time of the same requests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.pages.chromium import Chromium, installed

from headrace.reports.board.runs import BoardRun

from ._written_runs import write

FIRST_SECONDS, ZOOM_SECONDS, SERVER_BYTES = 1.0, 0.150, 300e6
ZOOMS = 9


@contextmanager
def served(root: Path) -> Iterator[tuple[str, int]]:
    """Serve the runs below a folder; yield the URL and the server's process."""
    command = [sys.executable, "-m", "headrace.trainer.cli", "board", str(root), "--port", "0"]
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        head = "".join(line for line in iter(process.stdout.readline, "}\n"))
        yield json.loads(head + "}")["url"], process.pid
    finally:
        process.terminate()
        process.wait()


def prepare(root: Path, runs: int, steps: int) -> None:
    first = write(root / "run-0", steps)
    run = BoardRun(str(first))
    cpu, clock = time.process_time(), time.perf_counter()
    for _ in run.refresh():
        pass
    assert run.problem is None and run.metrics.index.entries == steps
    cpu, clock = time.process_time() - cpu, time.perf_counter() - clock
    size = (first / "metrics.jsonl").stat().st_size
    levels = sum(file.stat().st_size for file in (first / "board").rglob("*") if file.is_file())
    print(
        f"board, levels of {steps:,} steps: {levels / size:.2f}x the bytes of metrics.jsonl, "
        f"{cpu:.1f} s of CPU once ({clock:.1f} s of wall time)",
        flush=True,
    )
    for number in range(1, runs):
        copied_run = root / f"run-{number}"
        shutil.copytree(first, copied_run, copy_function=os.link)
        (copied_run / "run.yaml").unlink()
        text = (first / "run.yaml").read_text()
        (copied_run / "run.yaml").write_text(text.replace("0.001", f"0.00{number + 1}"))


def in_chromium(url: str) -> tuple[float, list[float]]:
    """Return the seconds to the first curves, and those of each zoom."""
    with Chromium(1600, 1000) as browser:
        browser.open(url)
        first = float(browser.until("return document.body.dataset.first", seconds=120))
        place = (
            "const box = document.querySelector('[data-panel=Loss] canvas')"
            ".getBoundingClientRect(); return [box.left, box.top, box.width, box.height]"
        )
        left, top, width, height = browser.run(place)
        zooms = []
        for number in range(ZOOMS):
            browser.run("delete document.body.dataset.took; zoom(null, null)")
            browser.until("return document.body.dataset.took", seconds=120)
            browser.run("delete document.body.dataset.took")
            a, y = left + width * (0.1 + 0.08 * number), top + height / 2
            browser.mouse(("move", a, y), ("down", 0, 0), ("move", a + width / 8, y), ("up", 0, 0))
            took = browser.until("return document.body.dataset.took", seconds=120)
            zooms.append(float(took) / 1000)
        return first / 1000, zooms


def by_requests(url: str) -> tuple[float, list[float]]:
    """Return the seconds of the requests of a first page and of zooms."""

    def ask(path: str, **words: Any) -> bytes:
        with urllib.request.urlopen(f"{url}{path}?{urlencode(words, doseq=True)}") as answer:
            data: bytes = answer.read()
            return data

    begin = time.perf_counter()
    runs = json.loads(ask("api/runs"))["runs"]
    ask("api/settings")
    asked = {"run": [run["id"] for run in runs], "curve": runs[0]["series"], "width": 800}
    ask("api/curves", **asked)
    first, last = time.perf_counter() - begin, runs[0]["range"]["step"][1]
    zooms = []
    for number in range(ZOOMS):
        begin, low = time.perf_counter(), last * (0.1 + 0.08 * number)
        ask("api/curves", **asked, low=low, high=low + last / 8)
        zooms.append(time.perf_counter() - begin)
    return first, zooms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), options.runs, options.steps)
        with served(Path(folder)) as (url, process):
            by_requests(url)
            first, zooms = in_chromium(url) if installed() else by_requests(url)
            status = Path(f"/proc/{process}/status").read_text()
            peak = 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])  # type: ignore[index]
    where = "in Chromium" if installed() else "its requests alone"
    name = f"board, {options.runs} runs of {options.steps:,} steps"
    zoom = statistics.median(zooms)
    print(
        f"{name}, first curves, {where}: {first:.3f} s, {first / FIRST_SECONDS:.2f} of the limit\n"
        f"{name}, zoom, {where}: median {1e3 * zoom:.0f} ms, worst {1e3 * max(zooms):.0f} ms, "
        f"{zoom / ZOOM_SECONDS:.2f} of the limit\n"
        f"{name}, server: {peak / 1e6:.0f} MB at most, {peak / SERVER_BYTES:.2f} of the limit"
    )


if __name__ == "__main__":
    main()
