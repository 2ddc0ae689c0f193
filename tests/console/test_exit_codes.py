"""Exit codes of all commands: 2 if the command line itself is wrong, 1 for every other failure."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.console.headrace import main

BUILD = "tokenize build a.txt --tokenizer byte --out o"
RUN = "trainer run synthetic.steps=3 synthetic.seq_len=8 synthetic.batch_rows=2 --dry-run"

MISUSE = [
    "nothing",
    "tokenize build a.txt",
    "tokenize build a.txt --tokenizer byte",
    f"{BUILD} --format zip",
    f"{BUILD} --input-format zip",
    f"{BUILD} --shard-size lots",
    f"{BUILD} --shard-size 64B",
    f"{BUILD} --masked-weight 0.5",
    f"{BUILD} --split val",
    f"{BUILD} --workers 0",
    f"{BUILD} --text-field title",
    "tokenize train a.txt --out t.json --vocab-size 3",
    "tokenize index d --end-id x",
    "tokenize count a.txt --tokenizer byte --sample 2",
    "tokenize inspect d --documents -1",
    "mixtures audit x.yaml",
    "mixtures audit x.yaml --rows 5:5",
    "mixtures plan x.yaml seed",
    "mixtures plan p.json seed=1",
    "mixtures plot x.yaml --out x.gif",
    "models show tiny-hybrid width=abc",
    "models show tiny-hybrid wdith=64",
    "models show tiny-hybrid --tp 0",
    "models convert a b",
    "models convert a b --format zip",
    "trainer run --dry-run",
    "trainer run a.yaml b.yaml",
    f"{RUN} --mixture x.yaml",
    f"{RUN} mixture.seed=1",
    f"{RUN} --lr 1e-3",
    f"{RUN} optimizer.lr 1e-3",
    f"{RUN} optimizer.learning_rate=1e-3",
    f"{RUN} optimizer.lr=high",
    f"{RUN} processes=0",
    f"{RUN} model.width=abc",
    f"{RUN} --profile 5",
    f"{RUN} --profile 100:200",
    f"{RUN} --slurm --processes 7",
    "trainer resume",
    "trainer report a --compare",
    "trainer report a b --out x.html",
    "trainer export a b --dtype int4",
    "trainer sample a --top-p 2",
]

FAILURES = [
    "tokenize build nowhere.txt --tokenizer byte --out o",
    "tokenize build a.txt --tokenizer nowhere.json --out o",
    "tokenize build a.txt --tokenizer byte --out a.txt/o",
    "tokenize inspect nowhere",
    "tokenize verify nowhere",
    "tokenize index nowhere",
    "mixtures new nowhere",
    "mixtures check nowhere.yaml",
    "mixtures plan nowhere.json",
    "mixtures audit nowhere --rows 1",
    "models show nowhere",
    "models show wrong.yaml",
    "models convert nowhere out --format headrace",
    "trainer run nowhere.yaml",
    "trainer run wrong.yaml",
    "trainer run wrong.yaml optimizer.learning_rate=1e-3",
    "trainer run --mixture nowhere.yaml",
    f"{RUN} --out a.txt/run",
    f"{RUN} watch.wandb=project",
    "trainer resume nowhere",
    "trainer report nowhere",
    "trainer export nowhere out",
    "trainer sample nowhere --prompt a",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exit")
    (folder / "a.txt").write_text("water\n")
    (folder / "p.json").write_text("{}")
    (folder / "x.yaml").write_text("seed: 1\n")
    (folder / "wrong.yaml").write_text("sed: 1\n")
    return folder


def run(folder: Path, line: str, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(main, line.split())
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.output
    assert result.stdout == "" and result.stderr


@pytest.mark.parametrize("line", MISUSE)
def test_a_wrong_command_line_exits_with_2(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(folder, line, monkeypatch, 2)


@pytest.mark.parametrize("line", FAILURES)
def test_every_other_failure_exits_with_1(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(folder, line, monkeypatch, 1)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (f"{RUN} --lr 1e-3", "Did you mean the key optimizer.lr=VALUE?"),
        (f"{RUN} --learning-rate 1e-3", "Did you mean the key optimizer.lr=VALUE?"),
        (f"{RUN} --vocab-size 300", "Did you mean the key model.vocab_size=VALUE?"),
        (f"{RUN} --mixtur x.yaml", "Did you mean '--mixture'"),
        (f"{RUN} optimizer.lr 1e-3", "write optimizer.lr=1e-3"),
        ("trainer resume run optimizer.lr 1e-3", "write optimizer.lr=1e-3"),
        (f"{RUN} optimizer.learning_rate=1e-3", "did you mean `lr`?"),
        (f"{RUN} optimizer.wd=0.1", "did you mean `weight_decay`?"),
        ("models show tiny-hybrid --width 64", "Did you mean the key width=VALUE?"),
        ("mixtures plan x.yaml --window 4", "Did you mean the key window=VALUE?"),
        ("mixtures plan y.yaml", "did you mean x.yaml?"),
        ("trainer run worng.yaml", "did you mean wrong.yaml?"),
        ("tokenize build b.txt --tokenizer byte --out o", "did you mean a.txt?"),
        ("tokenize build a.txt --tokenizer q.json --out o", "did you mean p.json?"),
    ],
)
def test_errors_name_the_nearest_key_or_path(
    line: str, hint: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert hint in CliRunner().invoke(main, line.split()).stderr
