"""Run folders written without training, and checks of the HTML report."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from support.configs import CONFIGS

from headrace.dataplane.runlog.ledger import LedgerEntry
from headrace.dataplane.runlog.writer import encode_line
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.run import resolve
from headrace.trainer.run.request import RunRequest

TINY = str(CONFIGS / "tiny.yaml")
VOID = {"meta", "link", "br", "hr", "img", "input"}


def make_run(root: Path, losses: Sequence[float | None]) -> RunFolder:
    words = [f"synthetic.steps={len(losses)}", "synthetic.seq_len=16", "synthetic.batch_rows=4"]
    job = resolve.resolve(RunRequest(model=TINY, out=str(root), overrides=words))
    job.folder.prepare()
    job.save()
    with job.folder.metrics.open("wb") as metrics, job.folder.ledger.open("wb") as ledger:
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
            metrics.write(encode_line(entry))
            ledger.write(encode_line(vars(LedgerEntry(step, 4 * step, 4, f"ledger{step}"))))
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
    """Check that a page is well-formed, loads nothing, and runs the one script that it allows."""
    parser = Balanced()
    parser.feed(text)
    assert parser.open == [] and not parser.tags & {"img", "link", "iframe", "object", "base"}
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashed = [b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert all(f"script-src 'sha256-{item}'" in text for item in hashed) and len(scripts) < 2
    assert "default-src 'none'" in text
    bare = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"(?:src|href)=|url\(|@import", bare), "the page loads other files"


def drawn_data(text: str) -> dict[str, Any]:
    """Return the data of a page's curves."""
    result = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert result is not None
    data: dict[str, Any] = json.loads(result[1])
    return data


def curve(part: dict[str, Any], name: str, place: int = 0) -> list[float]:
    """Return the means of a curve, or its least (1) or greatest (2) values."""
    values = part["curves"][name]
    result: list[float] = np.frombuffer(b64decode(values[place % len(values)]), "<f4").tolist()
    return result


def rewrite(file: Path, change: Any) -> None:
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    for entry in entries:
        entry.pop("check", None)
        change(entry)
    file.write_bytes(b"".join(map(encode_line, entries)))
