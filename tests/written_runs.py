"""Run folders written without training, and checks of the HTML report."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from headrace.trainer.folder import RunFolder
from headrace.trainer.run import resolve
from headrace.trainer.run.request import Request

TINY = str(Path(__file__).parent / "trainer" / "tiny.yaml")
VOID = {"meta", "link", "br", "hr", "img", "input"}


def make_run(root: Path, losses: Sequence[float | None]) -> RunFolder:
    words = [f"synthetic.steps={len(losses)}", "synthetic.seq_len=16", "synthetic.batch_rows=4"]
    job = resolve.resolve(Request(model=TINY, out=str(root), overrides=words))
    job.folder.prepare()
    job.save()
    with job.folder.metrics.open("w") as metrics, job.folder.ledger.open("w") as ledger:
        for step, loss in enumerate(losses):
            entry: dict[str, Any] = {
                "step": step,
                "row": 4 * (step + 1),
                "tokens": 64 * (step + 1),
                "phase": "synthetic",
                "loss": loss,
                "lr": 1e-3,
                "grad_norm": 1.0,
                "tokens_per_second": 640.0,
                "memory": 0,
                "mfu": None,
                "data_wait": 0.25,
                "seconds": 0.1,
                "sources": {"synthetic": {"loss": loss, "weight": 64.0, "rows": 4}},
            }
            metrics.write(json.dumps(entry) + "\n")
            ledger.write(json.dumps({"step": step, "hash": f"ledger{step}"}) + "\n")
    layout = {"engine": "FSDP2", "processes": 1, "device": "cpu"}
    events = [
        {"time": 1.0, "event": "start", "step": 0, "layout": layout, "seconds": 1.0},
        {"time": 2.0, "event": "resume", "step": 2, "layout": layout, "seconds": 1.0},
        {"time": 3.0, "event": "finish", "step": len(losses), "ledger": "ledger"},
    ]
    job.folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    return job.folder


class Balanced(HTMLParser):
    """Check that every element is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag


def check_page(text: str) -> None:
    parser = Balanced()
    parser.feed(text)
    assert parser.open == [] and "svg" in parser.tags
    assert not parser.tags & {"script", "img", "link", "iframe"}
    assert not re.search(r"(?:src|href)=|url\(|@import", text), "the page loads other files"


def rewrite(file: Path, change: Any) -> None:
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    for entry in entries:
        change(entry)
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
