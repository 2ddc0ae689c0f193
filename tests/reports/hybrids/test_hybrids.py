"""`headrace compare-hybrids`: models on equal rows, in rounds, on one page."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from formats.samples import pin_keys

from headrace.console.errors import IntegrityError, PlanError
from headrace.console.headrace import main
from headrace.dataplane.runlog import ledger
from headrace.dataplane.runlog.writer import LineWriter
from headrace.models.accounting.count import build_meta, count_parameters
from headrace.models.config.config import load_model_config
from headrace.reports.hybrids import train
from headrace.reports.hybrids.page import noise_sentence
from headrace.reports.hybrids.prepare import SHIPPED, check_equal
from headrace.reports.hybrids.results import Comparison, Result, check_equal_rows

WORDS = ("run.yaml", "--mixture", "mixture.yaml", "--model", "plain.yaml", "--model", "gdn.yaml")
RECALL = ("--lengths", 64, "--examples", 2)


def compare(*words: object) -> Any:
    return CliRunner().invoke(main, ["compare-hybrids", *map(str, words)])


@pytest.mark.slow
def test_models_are_trained_in_rounds_on_equal_rows_and_drawn(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_trainer = train.run_trainer
    started: list[tuple[str, str]] = []

    def record(arguments: Sequence[str]) -> int:
        if arguments[0] == "run":
            started.append((Path(arguments[arguments.index("--out") + 1]).name, arguments[-1]))
        return run_trainer(arguments)

    monkeypatch.setattr(train, "run_trainer", record)
    words = (*WORDS, *RECALL, "--slice", "512", "--seeds", 2, "--out", "both", "--json")
    done = compare(*words, "--tokens", "1Ki")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    names = ["plain-seed-1", "gdn-seed-1", "plain-seed-2"]
    assert started == [(name, end) for end in "12" for name in names]
    assert [run["name"] for run in result["runs"]] == names
    assert (result["step"], result["tokens"]) == (2, 1024) and result["noise"] > 0
    plain, _, second = result["runs"]
    assert plain["tokens"] == [512, 1024] and len({run["bits"][-1] for run in result["runs"]}) == 3
    assert plain["bits"] != second["bits"], "the seed changes the weights"
    for run in result["runs"]:
        last = ledger.read_last(Path("both/runs", run["name"], ledger.NAME))
        assert last is not None and last.hash == result["ledger"] == run["ledger"]
        assert [score["length"] for score in run["recall"]["mqar"]] == [64]
        assert set(run["recall"]) == {"mqar", "needle"}
    assert result["state"]["bytes"]["plain"][1] > 2 * result["state"]["bytes"]["gdn"][1]
    pin_keys("compare-hybrids", result)
    pin_keys("hybrids-request", json.loads(Path("both/hybrids.json").read_text()))
    assert "All 3 ledgers have the hash" in done.stderr and "standard deviation" in done.stderr
    page = Path(result["page"]).read_text()
    assert all(part in page for part in (result["ledger"], "gdn-seed-1", "Recall", "State"))

    # More tokens go on from there; as the runs stand, nothing is started.
    started.clear()
    longer = json.loads(compare(*words, "--tokens", "1536").stdout)
    assert started == [(name, "3") for name in names]
    assert longer["runs"][0]["bits"][:2] == plain["bits"] and longer["step"] == 3
    monkeypatch.setattr(train, "run_trainer", pytest.fail)
    assert json.loads(compare(*words).stdout)["runs"] == longer["runs"]
    changed = compare(*words, "optimizer.lr=2e-2")
    assert changed.exit_code == 1 and "configuration.optimizer.lr: the folder has" in changed.output

    # A peer that has read other rows is refused; one with equal rows is a curve.
    peer, run = Path("both/peers/plain-loop"), Path("both/runs/gdn-seed-1")
    peer.mkdir(parents=True)
    for name in ("ledger.jsonl", "evaluations.jsonl", "metrics.jsonl"):
        shutil.copy(run / name, peer / name)
    assert json.loads(compare(*words).stdout)["runs"][-1]["bits"] == longer["runs"][1]["bits"]
    (peer / "ledger.jsonl").unlink()
    write_ledger(peer, ["a", "b", "c"])
    refused = compare(*words)
    assert refused.exit_code == 1 and "plain-loop: from step 0" in refused.output


def write_ledger(folder: Path, rows: Sequence[str]) -> None:
    """Write a ledger whose step n has read the row `rows[n]`."""
    folder.mkdir(exist_ok=True)
    writer, digest = LineWriter(folder / ledger.NAME), "00" * ledger.DIGEST_BYTES
    for step, row in enumerate(rows):
        digest = ledger.roll(digest, hashlib.blake2b(row.encode(), digest_size=16).digest())
        writer.write({"step": step, "first_row": step, "rows": 1, "hash": digest})
    writer.close()


def test_one_other_row_is_found(tmp_path: Path) -> None:
    rows = [f"row {number}" for number in range(9)]
    folders = {name: tmp_path / name for name in ("a", "b", "c")}
    for name, folder in folders.items():
        write_ledger(folder, rows[: 7 if name == "c" else 9])
    steps, digest = check_equal_rows(folders)
    assert steps == 7 and digest == ledger.read_last(folders["c"] / ledger.NAME).hash  # type: ignore[union-attr]
    shutil.rmtree(folders["b"])
    write_ledger(folders["b"], [*rows[:4], "another row", *rows[5:]])
    with pytest.raises(IntegrityError, match="the rows of a") as raised:
        check_equal_rows(folders)
    assert "b: from step 4" in str(raised.value) and "c:" not in str(raised.value)


def test_requests_that_compare_nothing_are_refused(inside: Path) -> None:
    wide = compare("--mixture", "mixture.yaml", "--model", "plain.yaml", "--model", "wide.yaml")
    assert wide.exit_code == 1 and "differ by more than 2% in parameters: plain 6," in wide.output
    assert "two models are called plain" in compare(*WORDS, "--model", "plain.yaml").output
    assert "each run has a model of its own" in compare(*WORDS, "model.width=32").output
    long = compare(*WORDS, "--tokens", "1M", "--out", "long")
    assert long.exit_code == 1 and "the mixture has 4,096 tokens, fewer than 1,0" in long.output
    assert compare(*WORDS, "--tokens", "some").exit_code == 2
    none = compare(*WORDS, "--out", "none")
    assert none.exit_code == 1 and "has begun" in none.output


def test_shipped_models_have_equal_parameters() -> None:
    counts = {name: count_parameters(build_meta(load_model_config(name))) for name in SHIPPED}
    check_equal(counts)
    assert max(counts.values()) < 1.01 * min(counts.values())
    with pytest.raises(PlanError, match="a 100, b 103"):
        check_equal({"a": 100, "b": 103})


def test_a_difference_counts_beyond_the_noise_of_seeds() -> None:
    """Seeds 2.00 and 2.02: sd 0.0141, so a difference above 0.0346 is beyond two deviations."""
    result = Result(
        name="", model="plain", seed=1, root=Path(), ledger="", tokens=[9], bits=[2.0],
        by_source={}, tokens_per_second=1.0,
    )  # fmt: skip
    results = [
        result,
        replace(result, model="near", bits=[2.044]),
        replace(result, model="far", bits=[1.97]),
        replace(result, seed=2, bits=[2.02]),
        replace(result, model="loop", seed=None, bits=[2.05]),
    ]
    parameters = {"plain": 1, "near": 1, "far": 1}
    comparison = Comparison(1, 9, "", "", results, parameters, {})
    assert comparison.noise == pytest.approx(0.02 / 2**0.5)
    sentence = noise_sentence(comparison)
    assert "far (-0.0400), loop (+0.0400)" in sentence and "near" not in sentence
    alone = replace(comparison, results=results[:3])
    assert alone.noise is None and "the noise is not known" in noise_sentence(alone)
