"""Comparison of runs: names, phases, and the unit of losses of different tokenizers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.data.corpora import ONE, texts, write_jsonl
from support.pages.written_runs import check_page, drawn_data, make_run, rewrite

from headrace.console import config as reader
from headrace.mixtures.planning.resolve_mixture import resolve_file
from headrace.reports.board.byte_sizes import measure
from headrace.reports.board.runs import shortest_names
from headrace.tokenize.builder.build import BuildConfig, build
from headrace.tokenize.sources.format import SourceConfig
from headrace.tokenize.train import TrainConfig, train
from headrace.trainer.cli import main
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.run.stored import read_run

LOSSES = [4.0, 3.0, 2.0, 1.0]


def compare(*roots: object, code: int = 0) -> tuple[dict[str, Any], str]:
    words = ["report", *map(str, roots), "--compare", "--json"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == code, done.output
    if code:
        return {}, done.stderr
    summary = json.loads(done.stdout)
    page = Path(summary["report"]).read_text()
    check_page(page)
    return summary, page


def test_names_are_the_shortest_that_differ(tmp_path: Path) -> None:
    roots = [tmp_path / place for place in ("one/run", "two/run", "a")]
    for root in roots:
        make_run(root, LOSSES)
    assert "<h1>one/run · two/run · a</h1>" in compare(*roots)[1]
    assert shortest_names([Path("/x/run"), Path("/run"), Path("/y/x/run")]) == [
        *("/x/run", "/run", "y/x/run")
    ]
    assert "named twice" in compare(roots[0], f"{roots[0]}/", code=2)[1]


def set_phases(folder: RunFolder, steps: int) -> None:
    """Give a run another number of planned steps."""
    text = folder.run.read_text()
    folder.run.write_text(text.replace("  steps: 4\n", f"  steps: {steps}\n"))


def test_each_run_has_its_own_phases(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, LOSSES).root for name in "ab"]
    set_phases(RunFolder(folders[1]), 8)
    _, page = compare(*folders)
    assert "<td>synthetic 256</td><td>synthetic 512</td>" in page
    runs = drawn_data(page)["runs"]
    assert [[phase["name"] for phase in run["phases"]] for run in runs] == [["synthetic"]] * 2


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same text with two tokenizers."""
    folder = tmp_path_factory.mktemp("data")
    corpus = write_jsonl(folder / "corpus.jsonl", texts(200))
    train(TrainConfig(inputs=(str(corpus),), out=str(folder / "bpe.json"), vocab_size=300))
    for name, tokenizer in (("byte", "byte"), ("bpe", str(folder / "bpe.json"))):
        build(
            BuildConfig(
                inputs=(str(corpus),),
                out=str(folder / name),
                tokenizer=tokenizer,
                source=SourceConfig(),
                engine=ONE,
            )
        )
    return folder


def run_on(data: str, root: Path) -> RunFolder:
    """Write a run of four steps on a dataset."""
    folder = make_run(root, LOSSES)
    mixture = root / "mixture.yaml"
    spec = {
        "sources": {"web": {"data": data}},
        "phases": {"main": {"tokens": 256, "seq_len": 16, "batch": 64, "weights": {"web": 1}}},
    }
    mixture.write_text(reader.dump(spec))
    resolve_file(mixture).save(folder.plan)
    run = folder.run.read_text()
    folder.run.write_text(run[: run.index("synthetic:")])

    def rename(entry: dict[str, Any]) -> None:
        entry.update(phase="main", sources={"web": entry["sources"]["synthetic"]})

    rewrite(folder.metrics, rename)
    assert read_run(folder).plan.tokens == 256
    return folder


def test_bytes_per_token_are_those_of_the_text(datasets: Path) -> None:
    size = sum(len(text.encode()) for text in texts(200))
    for name in ("byte", "bpe"):
        shown = json.loads((datasets / name / "manifest.json").read_text())["generations"][0]
        assert measure(str(datasets / name)) == pytest.approx(size / shown["tokens"], rel=1e-12)


def test_losses_of_different_tokenizers_are_compared_in_bits_per_byte(
    datasets: Path, tmp_path: Path
) -> None:
    runs = [run_on(str(datasets / name), tmp_path / name) for name in ("byte", "bpe")]
    summary, page = compare(*(run.root for run in runs))
    assert summary["loss_unit"] == "bits per byte" and "bits per byte" in page
    for name, run in zip(("byte", "bpe"), summary["runs"], strict=True):
        expected = LOSSES[-1] / math.log(2) / measure(str(datasets / name))
        assert run["loss"] == pytest.approx(expected)
    assert "Loss minus the loss of byte" in page


def test_losses_are_not_subtracted_where_a_dataset_is_missing(
    datasets: Path, tmp_path: Path
) -> None:
    run = run_on(str(datasets / "byte"), tmp_path / "byte")
    synthetic = make_run(tmp_path / "synthetic", LOSSES)
    summary, page = compare(run.root, synthetic.root)
    assert summary["loss_unit"] is None and "cannot be compared" in summary["note"]
    assert "Loss minus" not in page and "cannot be compared" in page


def test_losses_of_one_tokenizer_stay_in_nats(datasets: Path, tmp_path: Path) -> None:
    runs = [run_on(str(datasets / "bpe"), tmp_path / name) for name in "ab"]
    summary, page = compare(*(run.root for run in runs))
    assert summary["loss_unit"] == "nats per token" and summary["note"] is None
    assert summary["runs"][0]["loss"] == LOSSES[-1] and "Loss minus the loss of a" in page
