"""The ledger at a resume: it must lead to the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.pages.written_runs import rewrite

from headrace.console.errors import IntegrityError
from headrace.dataplane.runlog import ledger
from headrace.dataplane.runlog import writer as lines
from headrace.trainer.checkpoints.store import RunState
from headrace.trainer.launch import records
from headrace.trainer.run.job import Job

STEP = 4
"""The step of the checkpoint: the ledger goes on to step 5."""


@pytest.fixture
def job(ask: Any) -> Job:
    result: Job = ask()
    result.folder.root.mkdir()
    for name in (result.folder.ledger, result.folder.metrics):
        writer = lines.LineWriter(name)
        for step in range(6):
            writer.write({"step": step, "first_row": 4 * step, "rows": 4, "hash": f"{step:032x}"})
        writer.close()
    return result


def state(job: Job, step: int = STEP) -> RunState:
    end = f"{step - 1:032x}"
    zero = {"tokens": 0, "plan_hash": job.plan.hash, "updates": 0, "seed": 1}
    return RunState(step=step, row=4 * step, ledger=end, **zero)


def take_up(job: Job, *, new_ledger: bool = False, step: int = STEP) -> None:
    records.truncate_to_checkpoint(
        job.folder, job.plan, state(job, step), new_ledger=new_ledger, keep_tails=2
    )


def steps(path: Path) -> list[int]:
    return [entry["step"] for entry in lines.read(path)]


def cut_off(file: Path) -> None:
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))


def take_out(file: Path) -> None:
    rows = file.read_text().splitlines(keepends=True)
    file.write_text("".join(rows[:1] + rows[2:]))


def alter(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    rewrite(file, lambda entry: change(entry) if entry["step"] == STEP - 1 else None)


def test_kills_leave_a_bounded_number_of_tails(job: Job) -> None:
    """Each record has those of the last two kills."""
    whole = job.folder.ledger.read_bytes()
    for number, step in enumerate((5, 4, 4, 3)):
        job.folder.ledger.write_bytes(whole + b"{}" * number)  # tails of different bytes
        take_up(job, step=step)
    names = [path.name for path in lines.list_tails(job.folder.ledger)]
    assert names == ["ledger.after-4-2.jsonl", "ledger.after-3.jsonl"]
    assert len(lines.list_tails(job.folder.metrics)) == 2


DAMAGES: dict[str, Callable[[Path], None]] = {
    "is missing": Path.unlink,
    "has no steps": lambda file: file.write_text(""),
    "ends at step 2": cut_off,
    "has no line between those of step 0 and step 2": take_out,
    "has an invalid line": lambda file: file.write_text(
        file.read_text().replace("rows", "rowz", 1)
    ),
    "has other rows or another hash at step 3": lambda file: alter(
        file, lambda entry: entry.update(hash="ab" * 16)
    ),
}


def test_a_ledger_that_leads_to_the_checkpoint_is_cut_back_to_it(job: Job) -> None:
    with job.folder.metrics.open("ab") as file:  # as a power cut leaves it
        file.write(b"\0" * 99 + b"\n")
    take_up(job)
    assert steps(job.folder.ledger) == steps(job.folder.metrics) == [0, 1, 2, 3]
    assert (job.folder.root / "ledger.after-4.jsonl").exists()


@pytest.mark.parametrize("why", DAMAGES)
def test_a_ledger_that_does_not_lead_to_the_checkpoint_is_an_error(job: Job, why: str) -> None:
    DAMAGES[why](job.folder.ledger)
    held = {path.name: path.read_bytes() for path in job.folder.root.iterdir()}
    with pytest.raises(IntegrityError, match=f"ledger.jsonl {why}.* up to 3") as caught:
        take_up(job)
    assert "restore the ledger" in str(caught.value.hint)
    assert "--new-ledger" in str(caught.value.hint)
    assert held == {path.name: path.read_bytes() for path in job.folder.root.iterdir()}


def test_other_rows_at_the_checkpoint_are_an_error(job: Job) -> None:
    alter(job.folder.ledger, lambda entry: entry.update(rows=3))
    with pytest.raises(IntegrityError, match="other rows"):
        take_up(job)


def test_a_new_ledger_begins_with_the_last_step_of_the_checkpoint(job: Job) -> None:
    cut_off(job.folder.ledger)
    before = job.folder.ledger.read_bytes()
    take_up(job, new_ledger=True)
    assert (job.folder.root / "ledger.old.jsonl").read_bytes() == before
    (line,) = lines.read(job.folder.ledger)
    assert line == vars(ledger.LedgerEntry(3, 12, 4, f"{3:032x}"))
    take_up(job, new_ledger=True)
    assert not (job.folder.root / "ledger.old-2.jsonl").exists(), "it leads to the checkpoint"


def test_a_run_at_its_first_step_has_nothing_to_prove(job: Job) -> None:
    job.folder.ledger.unlink()
    take_up(job, step=0)
    assert not job.folder.ledger.exists()


def test_later_lines_do_not_count(job: Job) -> None:
    with job.folder.ledger.open("ab") as file:
        file.write(b"\0" * 99 + b"\n")
    take_up(job)
    assert ledger.read_last(job.folder.ledger) == ledger.LedgerEntry(3, 12, 4, f"{3:032x}")
    tail = (job.folder.root / "ledger.after-4.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in tail[:2]] == [4, 5]
