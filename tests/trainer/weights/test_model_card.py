"""The model card of an exported folder says where the weights come from."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from formats.samples import SAMPLES

from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.stream import Stream
from headrace.dataplane.runlog.ledger import commit, read_last
from headrace.dataplane.runlog.writer import encode_line
from headrace.trainer.cli import main
from headrace.trainer.folders.folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    shutil.copytree(SAMPLES / "world" / "main", tmp_path / "main")
    return RunFolder(tmp_path / "main")


def export(run: RunFolder, out: Path, *words: str) -> str:
    command = ["export", str(run.root), str(out), "--format", "headrace", *words]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    return (out / "README.md").read_text()


def count_by_source(stream: Stream, end_row: int) -> list[int]:
    """Count tokens row by row."""
    plan = stream.plan
    tokens = [0] * len(plan.sources)
    for row in range(plan.first_row, end_row):
        (source,) = stream.locate(np.array([row])).sources
        tokens[source] += plan.phase_at(row).seq_len
    return tokens


def test_tokens_of_sources_are_those_of_the_rows() -> None:
    for name in ("plan.json", "changing.json"):
        stream = Stream(Plan.load(SAMPLES / "world" / name))
        rows = stream.plan.rows
        for end in {0, 1, rows // 3, rows - 1, rows}:
            end_row = stream.plan.first_row + end
            assert stream.tokens(end_row) == count_by_source(stream, end_row)


def test_a_card_has_the_hashes_tokens_and_mixture(run: RunFolder, tmp_path: Path) -> None:
    card = export(run, tmp_path / "out")
    plan, entry = Plan.load(run.plan), read_last(run.root / "ledger.jsonl")
    assert entry is not None and f"| `{entry.hash}` |" in card and f"| `{plan.hash}` |" in card
    tokens = count_by_source(Stream(plan), entry.end_row)
    for source, count in zip(plan.sources, tokens, strict=True):
        assert re.search(rf"\| {source.name} \| {count:,} \| .*`{source.dataset}`", card)
    commitment = commit(run.root / "ledger.jsonl", plan.learnt_hash, entry.step)
    assert f"| plan and ledger | `{commitment}` |" in card
    assert f"\n## Training data of plan {plan.hash[:16]}\n" in card
    assert run.mixture.read_text().rstrip() in card
    assert "no start attested a fused kernel" in card and str(tmp_path) not in card
    moving = export(run, tmp_path / "average", "--ema")
    assert "moving average of the weights of step 8" in moving


def test_a_card_names_the_attested_kernels_of_its_steps(run: RunFolder, tmp_path: Path) -> None:
    """A start after the checkpoint computed nothing of it."""
    on = "kernels attested on NVIDIA H100"
    events = [(0, "aa", ["ssd"], []), (2, "aa", ["ssd"], []), (4, "bb", [], ["ssd"])]
    with run.events.open("ab") as file:
        for step, digest, kernels, failed in [*events, (9, "cc", ["rope"], [])]:
            event = {"event": "kernels", "step": step, "what": on, "digest": digest}
            file.write(encode_line({**event, "kernels": kernels, "failed": failed, "seconds": 0}))
    lines = [line for line in export(run, tmp_path / "out").splitlines() if on in line]
    assert lines == [f"| {on} | `aa`: ssd |", f"| {on} | `bb`: plain torch for ssd |"]
