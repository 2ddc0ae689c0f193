from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result
from support.pages.written_runs import make_run

from headrace.dataplane.runlog import writer as lines
from headrace.trainer.checkpoints import store
from headrace.trainer.cli import main
from headrace.trainer.folders.folder import RunFolder


def run_with(root: Path, *steps: int) -> RunFolder:
    folder = make_run(root, [2.0] * 8)
    for step in steps:
        (folder.checkpoints / store.name(step)).mkdir()
    (folder.checkpoints / f"{store.ABANDONED}{store.name(5)}").mkdir()
    (folder.checkpoints / f".{store.name(6)}.token.tmp").mkdir()
    return folder


def clean(*words: str) -> Result:
    return CliRunner().invoke(main, ["clean", *words])


def names(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.checkpoints.iterdir())


def test_options_replace_the_values_of_the_runs_policy(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 1, 2, 3, 4, 6, 8)
    before = names(folder)
    words = (str(tmp_path), "--keep-last", "1", "--keep-every", "3", "--keep-abandoned", "0")
    tried = clean(*words, "--dry-run")
    assert tried.exit_code == 0 and names(folder) == before
    done = clean(*words)
    assert done.exit_code == 0, done.output
    assert names(folder) == [store.name(step) for step in (3, 6, 8)]
    assert tried.output.count("would delete") == done.output.count("deleted ") == 4


def test_the_ends_of_phases_are_kept(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 7, 8, 9)  # the phase ends at 8
    done = clean(str(tmp_path), "--keep-last", "1")
    assert done.exit_code == 0 and done.output.endswith("\n1 checkpoint, 0 bytes\n")
    assert store.name(8) in names(folder) and store.name(7) not in names(folder)


def test_tails_of_records_are_deleted(tmp_path: Path) -> None:
    """A start after a kill leaves them; a ledger that was set aside is no tail."""
    folder = run_with(tmp_path)
    for step in (6, 4):
        lines.cut(folder.ledger, step)
        lines.cut(folder.metrics, step)
    folder.ledger.with_suffix(".old.jsonl").touch()
    before = {path.name for path in tmp_path.iterdir()}
    tried = clean(str(tmp_path), "--dry-run")
    assert {path.name for path in tmp_path.iterdir()} == before
    done = clean(str(tmp_path), "--json")
    gone = {f"{name}.after-{step}.jsonl" for name in ("ledger", "metrics") for step in (6, 4)}
    assert before - {path.name for path in tmp_path.iterdir()} == gone
    assert all(f"would delete {tmp_path / name} (" in tried.output for name in gone)
    assert "0 checkpoints, 4 record tails, " in tried.output
    deleted = json.loads(done.stdout)
    assert {(item["kind"], item["path"]) for item in deleted} == {
        ("tail", str(tmp_path / name)) for name in gone
    }


def test_a_run_that_is_going_is_not_cleaned(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 1, 2, 3, 4)
    with folder.locked():
        refused = clean(str(tmp_path), "--keep-last", "1")
        tried = clean(str(tmp_path), "--keep-last", "1", "--dry-run")
    assert refused.exit_code == 1 and "is in use by" in refused.output
    assert tried.exit_code == 0 and store.name(1) in names(folder)
