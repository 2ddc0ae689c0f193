"""Shares decided while a run goes on, killed at each moment of a decision: the run is the same."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.configs import CONFIGS
from support.ranks import forked

from headrace.console.errors import IntegrityError
from headrace.dataplane.runlog import decisions, ledger, writer
from headrace.mixtures.audit.auditor import Auditor
from headrace.mixtures.planning.open_plan import OpenedPlan, open_plan
from headrace.mixtures.proof.proof import prove_document
from headrace.mixtures.proof.verify import verify_proof
from headrace.mixtures.steering.request import NAME, find_request, write_request
from headrace.trainer.cli import main as trainer

REQUESTED = {"web": 0.125, "code": 0.875}
KILL = """
import os, signal
from headrace.dataplane.runlog import decisions
from headrace.dataplane.runlog.writer import encode_line
from headrace.trainer.loop.mixing import pilot
from headrace.trainer.loop.mixing.decided_plan import DecidedPlan

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def after(holder, name):
    function = getattr(holder, name)
    def call(*words, **more):
        result = function(*words, **more)
        if result is not False:
            kill()
        return result
    setattr(holder, name, call)

def half_a_line(file, decision):
    line = encode_line(vars(decision))
    with open(file, "ab") as opened:
        opened.write(line[:60])
    kill()
"""
AHEAD = """
from headrace.trainer.loop.loop import Loop
begin = Loop.__init__

def begin_ahead(self, *words, **more):
    begin(self, *words, **more)
    self.runs_ahead = True

Loop.__init__ = begin_ahead
"""
"""Launches a step before the one before it is read, as on a GPU."""
MOMENTS = {
    "before the line": "decisions.append = kill",
    "within the line": "decisions.append = half_a_line",
    "after the line": "after(decisions, 'append')",
    "after the request": "after(pilot, 'remove_request')",
    "at the message": "DecidedPlan.add = kill",
    "at the row": "after(DecidedPlan, 'has_changed')",
}


@dataclass
class Run:
    """A run of two sources that has taken two steps of ten, and copies of it."""

    folder: Path

    def command(self, out: Path, *words: str, plugin: str | None = None, code: int = 0) -> str:
        file = None
        if plugin is not None:
            file = out.parent / f"plugin_{len(list(out.parent.glob('plugin_*')))}.py"
            file.write_text(plugin)
        command = [sys.executable, "-m", "headrace.trainer.cli", *words]
        done = forked.Command(command, plugin=file).wait()
        assert done.returncode == code, done.stderr
        return done.stderr

    def copy(self, name: str) -> Path:
        out = self.folder.parent / name
        shutil.copytree(self.folder, out)
        return out

    def resume(self, out: Path, *words: str, plugin: str | None = None, code: int = 0) -> str:
        return self.command(out, "resume", str(out), "threads=1", *words, plugin=plugin, code=code)


@pytest.fixture
def start(dataset: Callable[..., str], tmp_path: Path) -> Callable[..., Run]:
    """Start a run that stops after two steps."""

    def begin(*words: str, phase: dict[str, Any] | None = None) -> Run:
        sources = {
            name: {"data": dataset(name, count=80), "max_epochs": 5} for name in ("web", "code")
        }
        phases = {
            "main": {
                "tokens": 960,
                "seq_len": 16,
                "batch": 64,
                "weights": {"web": 0.5, "code": 0.5},
            }
            | (phase or {}),
            "end": {"tokens": 256, "weights": {"code": 1}},
        }
        mixture = tmp_path / "mixture.yaml"
        mixture.write_text(json.dumps({"sources": sources, "phases": phases}))
        run = Run(tmp_path / "run")
        small = ["engine.kind=fsdp2", "optimizer.lr=1e-2", "checkpoints.every=3", "threads=1"]
        run.command(
            run.folder, "run", "--mixture", str(mixture), "--model", str(CONFIGS / "tiny.yaml"),
            "--out", str(run.folder), *small, "watch.tensorboard=false", "--stop-after", "2",
            "model.vocab_size=512", *words, code=85,
        )  # fmt: skip
        return run

    return begin


def lines(run: Path, name: str = ledger.NAME) -> list[dict[str, Any]]:
    return list(writer.read(run / name))


def check_undisturbed(run: Run, steered: Path) -> None:
    """Compare a run with one that has its decisions from the start, and is not disturbed."""
    undisturbed = run.copy("undisturbed")
    shutil.copy(steered / decisions.NAME, undisturbed)
    run.resume(undisturbed)
    assert lines(steered) == lines(undisturbed)
    assert not (steered / NAME).exists()


def killed_and_resumed(run: Run, moment: str, ranks: int = 2) -> Path:
    out = run.copy("steered")
    request = write_request(out, REQUESTED, None)
    run.resume(out, f"processes={ranks}", plugin=KILL + MOMENTS[moment], code=1)
    result = decisions.read(out / decisions.NAME, open_plan(str(run.folder)).plan.hash)
    assert len(result) == (moment not in ("before the line", "within the line"))
    waits = moment not in ("after the request", "at the message", "at the row")
    assert (find_request(out) == request) == waits
    run.resume(out, "processes=1", plugin=AHEAD)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["after the line"])
def test_a_killed_decision_gives_the_same_run(start: Callable[..., Run], moment: str) -> None:
    """On two ranks, resumed on one; the ledger proves each step, and names the decision once."""
    run = start()
    steered = killed_and_resumed(run, moment)
    [result] = lines(steered, decisions.NAME)
    assert result["shares"] == REQUESTED
    assert [(line["step"], line["decision"]) for line in lines(steered) if "decision" in line] == [
        (result["step"], result["digest"])
    ]
    check_undisturbed(run, steered)
    opened = open_plan(str(steered))
    assert all(Auditor(opened).step(step)[1] for step in range(opened.plan.end_step))
    check_proofs(opened, steered)
    rows = opened.stream.counts(opened.plan.phases[0].end_row) - opened.stream.counts(result["row"])
    assert rows[1] >= 0.875 * (opened.plan.phases[0].end_row - result["row"]) - 2
    state = json.loads((steered / "checkpoints/step-00000019/state.json").read_text())
    assert state["mixing"] == {"decisions": 1}
    unsteered = json.loads((run.folder / "checkpoints/step-00000002/state.json").read_text())
    assert "mixing" not in unsteered


def check_proofs(opened: OpenedPlan, steered: Path) -> None:
    """Find a document where it stands, prove it, and verify it with the decisions alone."""
    auditor = Auditor(opened)
    row = opened.plan.end_row - 1
    [audited] = auditor.rows(range(row, row + 1))
    number = audited.documents[0].document
    proof = prove_document(str(steered), f"number:{number}", audited.source)
    assert row in [exposure["row"] for exposure in proof.answer["exposures"]]
    there = steered.parent / "there"
    there.mkdir()
    for name in (decisions.PLAN, decisions.NAME, ledger.NAME):
        shutil.copy(steered / name, there)
    verify_proof(proof, run=str(there))
    (there / decisions.NAME).unlink()
    with pytest.raises(IntegrityError, match="lacks the decision"):
        verify_proof(proof, run=str(there))


def test_a_schedule_by_held_out_loss_needs_one(dataset: Callable[..., str], tmp_path: Path) -> None:
    control = {"kind": "held-out", "stages": [{"code": 1}]}
    sources = {name: {"data": dataset(name, count=80)} for name in ("web", "code")}
    phase = {"tokens": 960, "seq_len": 16, "batch": 64, "weights": {"web": 0.5, "code": 0.5}}
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text(
        json.dumps({"sources": sources, "phases": {"main": {**phase, "control": control}}})
    )
    words = ["run", "--mixture", str(mixture), "--model", str(CONFIGS / "tiny.yaml"), "--dry-run"]
    done = CliRunner().invoke(
        trainer, [*words, "model.vocab_size=512", "--out", str(tmp_path / "r")]
    )
    assert done.exit_code == 1
    assert "the controller held-out of phase main needs `evaluate`" in done.output


@pytest.mark.long
@pytest.mark.parametrize("moment", MOMENTS)
def test_each_moment_of_a_decision_may_be_the_last(start: Callable[..., Run], moment: str) -> None:
    run = start()
    check_undisturbed(run, killed_and_resumed(run, moment))
