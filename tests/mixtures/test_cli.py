"""The `mixtures` commands: output, exit codes, help."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from formats.samples import pin_keys

from headrace.dataplane.order.plan import Plan
from headrace.mixtures.cli import main

TEXT = """\
seed: 3
sources:
  web: {{data: {folder}/web}}
  code: {{data: {folder}/code}}
phases:
  stable:
    tokens: 8_192
    seq_len: 64
    batch: 1024
    weights: {{web: 0.75, code: 0.25}}
    lr: {{warmup: 1024}}
  anneal:
    tokens: 2_048
    weights: {{stable: 1}}
    lr: {{shape: linear}}
"""


@pytest.fixture
def mixture(dataset, tmp_path: Path) -> Path:
    dataset("web")
    dataset("code")
    file = tmp_path / "mixture.yaml"
    file.write_text(TEXT.format(folder=tmp_path))
    return file


def run(*words: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def test_new_writes_a_mixture_without_problems(tmp_path, mixture):
    shown = run("new", tmp_path / "web", tmp_path / "code")
    out = tmp_path / "made.yaml"
    written = run("new", tmp_path / "web", tmp_path / "code", "--out", out)
    assert written.stdout == "" and "wrote" in written.stderr
    assert out.read_text() == shown.stdout
    assert "has no problems" in run("check", out).stdout
    refused = run("new", "--out", out, code=1)
    assert "already exists" in refused.stderr and refused.stdout == ""
    run("new", "--out", out, "--force")
    data = json.loads(run("new", tmp_path / "web", "--json").stdout)
    assert data["file"] is None and list(data["mixture"]["sources"]) == ["web"]


def test_check_reports_all_problems(mixture):
    wrong = ("phases.stable.weights.web=-1", "phases.anneal.tokens=0", "sources.web.max_epochs=0")
    result = run("check", mixture, *wrong, code=1)
    assert result.stdout == ""
    assert result.stderr.startswith("error: 3 problems in ")
    assert "Traceback" not in result.stderr
    data = json.loads(run("check", mixture, *wrong, "--json", code=1).stdout)
    assert {problem["path"] for problem in data["problems"]} == {
        word.partition("=")[0] for word in wrong
    }
    assert json.loads(run("check", mixture, "--json").stdout)["ok"] is True
    assert "sed: unknown key" in run("check", mixture, "sed=1", code=1).stderr
    dry = json.loads(run("check", mixture, "phases.stable.tokens=1M", "--json", code=1).stdout)
    assert "runs dry" in dry["problems"][0]["what"]


def test_plan_is_shown_saved_and_overridden(mixture, tmp_path):
    out = tmp_path / "plan.json"
    shown = run("plan", mixture, "phases.anneal.tokens=4_096", "--out", out)
    assert "phase anneal: 4,096 tokens" in shown.stdout
    plan = Plan.load(out)
    assert plan.phases[1].tokens == 4_096 and plan.hash in shown.stdout
    assert run("plan", out).stdout == shown.stdout
    data = json.loads(run("plan", out, "--json", "--tokens-per-second", "1000").stdout)
    assert data["hash"] == plan.hash and data["seconds"] == pytest.approx(plan.tokens / 1_000)
    refused = run("plan", out, "seed=1", code=2)
    assert "a saved plan cannot be overridden" in refused.stderr


def test_plot_draws_every_format(mixture, tmp_path):
    for kind in ("svg", "html"):
        out = tmp_path / f"mixture.{kind}"
        assert run("plot", mixture, "--out", out).stdout == ""
        assert out.stat().st_size > 1_000
    data = json.loads(run("plot", mixture, "--out", out, "--json").stdout)
    pin_keys("plot", data)
    assert data["file"] == str(out) and data["sources"] == ["web", "code"]
    assert "does not end in .svg" in run("plot", mixture, "--out", "x.gif", code=2).stderr
    run("plot", mixture, code=2)


def test_audit_prints_one_json_object_per_row(mixture, tmp_path):
    rows = run("audit", mixture, "--rows", "126:130", "--json").stdout.splitlines()
    assert [json.loads(row)["row"] for row in rows] == [126, 127, 128, 129]
    assert {tuple(json.loads(row)) for row in rows} == {
        ("row", "phase", "source", "epoch", "documents", "tokens_hash")
    }
    step = run("audit", mixture, "--step", "2", "--json").stdout.splitlines()
    assert [json.loads(row)["row"] for row in step] == list(range(32, 48))
    plan = tmp_path / "plan.json"
    run("plan", mixture, "--out", plan)
    assert run("audit", plan, "--rows", "126:130", "--json").stdout.splitlines() == rows
    printed = run("audit", mixture, "--rows", "7").stdout
    assert printed.startswith("row 7 (step 0, phase stable): source ")


def test_audit_of_a_run_proves_steps_by_the_ledger(mixture, tmp_path):
    from headrace.dataplane.runlog import ledger
    from headrace.dataplane.runlog.reader import METRICS

    folder = tmp_path / "run"
    folder.mkdir()
    run("plan", mixture, "--out", folder / "plan.json")
    rows = [
        json.loads(row) for row in run("audit", folder, "--step", 0, "--json").stdout.splitlines()
    ]
    digests = bytes.fromhex("".join(row["tokens_hash"] for row in rows))
    entry = {"step": 0, "first_row": 0, "rows": 16}
    entry["hash"] = ledger.roll(Plan.load(folder / "plan.json").hash, digests)
    (folder / ledger.NAME).write_text(json.dumps(entry) + "\n")
    assert "match their hash in the ledger" in run("audit", folder, "--step", 0).stderr
    metrics = {"step": 0, "loss": 2.5, "grad_norm": None, "lr": 1e-3, "skipped": True}
    metrics |= {"why": "not finite", "sources": {"web": {"rows": 12, "loss": 2.25}}}
    (folder / METRICS).write_text(json.dumps(metrics) + "\n")
    assert run("audit", folder, "--step", 0).stderr.splitlines()[1:] == [
        "loss 2.5, gradient norm not finite, learning rate 0.001; step skipped: not finite",
        "  web   12 rows  loss 2.25",
    ]
    assert "has not reached step 1 yet" in run("audit", folder, "--step", 1).stderr
    (folder / ledger.NAME).write_text(json.dumps({**entry, "step": 1, "first_row": 16}) + "\n")
    assert "the ledger begins after step 0" in run("audit", folder, "--step", 0).stderr
    entry["hash"] = "0" * 32
    (folder / ledger.NAME).write_text(json.dumps(entry) + "\n")
    refused = run("audit", folder, "--step", 0, code=1)
    assert "do not match their hash in the ledger" in refused.stderr and refused.stdout == ""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("check", "nowhere.yaml"), 1),
        (("plan", "nowhere.json"), 1),
        (("plan", "."), 1),
        (("audit", "x.yaml"), 2),
        (("audit", "x.yaml", "--rows", "1", "--step", "2"), 2),
        (("audit", "x.yaml", "--rows", "1:b"), 2),
        (("audit", "x.yaml", "--rows", "5:5"), 2),
        (("audit", "x.yaml", "--rows", "1", "--source", "web"), 2),
        (("plan",), 2),
        (("frobnicate",), 2),
        (("plan", "x.yaml", "--tokens-per-second", "0"), 2),
    ],
)
def test_misuse_exits_with_2_and_failure_with_1(words, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*words, code=code)
    assert result.stdout == ""
    assert result.stderr and "Traceback" not in result.stderr


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from headrace.mixtures.cli import main\n"
        "try: main(['plot', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'torch', 'pyarrow', 'matplotlib', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Draw weights" in done.stdout


def test_a_saved_plan_shows_the_same_as_its_mixture(mixture, tmp_path):
    """With the state that it inherits, as long as the parent run can be read."""
    first = tmp_path / "first"
    (first / "checkpoints" / "step-00000004").mkdir(parents=True)
    run("plan", mixture, "--out", first / "plan.json")
    child = tmp_path / "child.yaml"
    child.write_text(
        f"after: {{run: {first}}}\nphases:\n  more: {{tokens: 2048, weights: {{stable: 1}}}}\n"
    )
    saved = tmp_path / "second" / "plan.json"
    fresh = run("plan", child, "--out", saved)
    assert "overlap" in fresh.stdout and "at step 4 (row 64," in fresh.stdout
    for again in (saved, saved.parent):
        assert run("plan", again).stdout == fresh.stdout
        assert run("plan", again, "--json").stdout == run("plan", child, "--json").stdout
    shutil.rmtree(first)
    alone = run("plan", saved)
    assert "at row 64\n" in alone.stdout and "overlap" not in alone.stdout
    assert "cannot show what the plan inherits" in alone.stderr


def test_a_branch_from_a_step_without_a_checkpoint_is_refused(mixture, tmp_path):
    run("plan", mixture, "--out", tmp_path / "first" / "plan.json")
    child = tmp_path / "child.yaml"
    child.write_text(
        f"after: {{run: {tmp_path / 'first'}, step: 3}}\n"
        "phases:\n  more: {tokens: 2048, weights: {stable: 1}}\n"
    )
    run("plan", child)  # only the plan is at hand
    (tmp_path / "first" / "checkpoints" / "step-00000004").mkdir(parents=True)
    refused = run("plan", child, code=1)
    assert "has no checkpoint of step 3; it has 4" in refused.stderr
    run("plan", child, "after.step=4")


def test_audit_shows_which_tokens_of_each_document_a_row_holds(mixture):
    """The ranges tile the row, and those of a document tile the document."""
    row = json.loads(run("audit", mixture, "--rows", "7", "--json").stdout)
    spans = [(d["at"], d["at"] + d["tokens"]) for d in row["documents"]]
    assert spans[0][0] == 0 and spans[-1][1] == 64
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    assert all(d["first"] == 0 for d in row["documents"][1:]), "a document begins within the row"
    text = run("audit", mixture, "--rows", "7").stdout
    for d in row["documents"]:
        line = (
            f"  tokens {d['at']} to {d['at'] + d['tokens']}: document {d['document']} ({d['id']}), "
            f"its tokens {d['first']} to {d['first'] + d['tokens']}, "
        )
        assert line in text
        words = ("--documents", f"number:{d['document']}", "--source", row["source"], "--json")
        _, answer = run("find", mixture, *words).stdout.splitlines()
        (exposure,) = [entry for entry in json.loads(answer)["exposures"] if entry["row"] == 7]
        assert (exposure["first"], exposure["tokens"], exposure["at"]) == (
            d["first"],
            d["tokens"],
            d["at"],
        )


def test_a_mistyped_dataset_is_named(mixture, tmp_path):
    refused = run("new", tmp_path / "wbe", code=1)
    assert f"did you mean {tmp_path / 'web'}?" in refused.stderr


def test_the_ending_of_a_card_decides(mixture, tmp_path):
    shown = run("card", mixture).stdout
    run("card", mixture, "--out", tmp_path / "card.md")
    assert (tmp_path / "card.md").read_text() == shown
    run("card", mixture, "--out", tmp_path / "card.html")
    result = (tmp_path / "card.html").read_text()
    assert result.startswith("<!doctype html>") and "<th>source</th>" in result
    refused = run("card", mixture, "--out", tmp_path / "card.txt", code=2)
    assert "card.txt does not end in .md or .html" in refused.stderr
