"""`headrace start`: what it refuses, and the commands that it runs.

The commands that build are run, in this process. Those that train are resolved, and leave the
records that a real one would.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from formats.samples import pin_keys

from headrace.console.errors import RunError
from headrace.console.headrace import main
from headrace.trainer.cluster.ranks import INTERRUPTED
from headrace.trainer.guide import sizing
from headrace.trainer.guide.shell import Shell, join
from headrace.trainer.guide.sizing import Candidate
from headrace.trainer.guide.start_run import Start
from headrace.trainer.guide.trials import Trials
from headrace.trainer.run.request import RunRequest
from headrace.trainer.run.resolve import resolve

WORDS = ["river", "wheel", "stone", "water", "turns", "the", "mill", "by", "night", "and", "day"]
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora") / "tales"
    folder.mkdir()
    draw = random.Random(7)
    with (folder / "a.jsonl").open("w") as file:
        for _ in range(300):
            file.write(json.dumps({"text": " ".join(draw.choices(WORDS, k=120))}) + "\n")
    return folder


class Commands:
    """Stands for the shell: builds in this process, and writes what training would leave."""

    def __init__(self) -> None:
        self.lines: list[list[str]] = []
        self.code = 0
        """Exit code of the run."""

    def run(self, shell: Shell, *words: str, expected: object = ()) -> int:
        self.lines.append(list(words))
        if words[0] != "trainer":
            result = CliRunner().invoke(main, words)
            if result.exit_code:
                raise RunError(result.output)
            return 0
        if words[1] == "resume":
            return self.code
        out = Path(words[words.index("--out") + 1])
        is_trial = "--stop-after" in words
        resolve(
            RunRequest(
                mixture=words[words.index("--mixture") + 1],
                model=words[words.index("--model") + 1],
                overrides=[word for word in words[2:] if "=" in word],
            )
        )
        out.mkdir(parents=True, exist_ok=True)
        if is_trial:
            steps = [json.dumps({"step": n, "seconds": 0.5}) for n in range(5)]
            (out / "metrics.jsonl").write_text("\n".join(steps) + "\n")
            return INTERRUPTED
        (out / "run.yaml").touch()
        event = {"event": "stop" if self.code else "finish", "step": 1}
        (out / "events.jsonl").write_text(json.dumps(event) + "\n")
        return self.code

    @contextlib.contextmanager
    def background(self, shell: Shell, *words: str) -> Iterator[None]:
        self.lines.append([*words, "&"])
        yield

    def starting(self, *words: str) -> list[list[str]]:
        return [line for line in self.lines if line[: len(words)] == [*words]]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Commands:
    commands = Commands()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Shell, "run", lambda *words, **more: commands.run(*words, **more))
    monkeypatch.setattr(Shell, "background", lambda *words: commands.background(*words))
    monkeypatch.setattr(Trials, "_fits", lambda *_: True)  # the memory of a model takes long
    monkeypatch.setattr("headrace.trainer.guide.trials.cores", lambda: 2)
    monkeypatch.setattr(sizing, "WIDTHS", sizing.WIDTHS[:2])
    return commands


def start(*words: object) -> Result:
    return CliRunner().invoke(main, ["start", *map(str, words)])


def test_text_becomes_a_run_whose_parts_were_measured(corpus: Path, commands: Commands) -> None:
    result = start(corpus)
    assert result.exit_code == 0, result.output
    kinds = [" ".join(line[:2]) for line in commands.lines]
    assert kinds[:2] == ["tokenize train", "tokenize build"]
    assert kinds[-3:] == ["mixtures new", "trainer board", "trainer run"]
    trials = commands.starting("trainer", "run")[:-1]
    assert [line[line.index("--processes") + 1] for line in trials] == ["1", "2"]
    run = commands.lines[-1]
    assert run[run.index("--processes") + 1] == "2", "the fastest: 2 ranks read twice as much"
    assert "evaluate.rows=32" in run
    keys = [word.partition("=")[0] for word in run if "=" in word]
    assert len(keys) == len(set(keys)), "each key is set once"
    tokens = int(commands.lines[-3][commands.lines[-3].index("--tokens") + 1])
    manifest = json.loads(Path("runs/tales/data/train/manifest.json").read_text())
    available = sum(generation["tokens"] for generation in manifest["generations"])
    assert tokens == 4 * available, "an hour would suffice for more"

    commands.lines.clear()
    assert "done: runs/tales/run/report.html" in start(corpus).stderr
    assert commands.lines == []


def test_a_stopped_run_is_resumed(corpus: Path, commands: Commands) -> None:
    commands.code = INTERRUPTED
    assert start(corpus, "--no-board").exit_code == INTERRUPTED
    assert not commands.starting("trainer", "board")
    commands.lines.clear()
    assert start(corpus, "--no-board").exit_code == INTERRUPTED
    assert commands.lines == [["trainer", "resume", "runs/tales/run"]]
    pin_keys("start-request", json.loads(Path("runs/tales/start.json").read_text()))
    changed = start(corpus, "--no-board", "--hours", 3)
    assert "hours: the folder has 1.0, this start 3.0" in changed.stderr


def test_a_start_that_was_killed_repeats_no_trial(corpus: Path, commands: Commands) -> None:
    assert start(corpus).exit_code == 0
    shutil.rmtree("runs/tales/run")
    commands.lines.clear()
    assert start(corpus).exit_code == 0
    assert len(commands.starting("trainer", "run")) == 1
    assert not commands.starting("tokenize", "train")


def test_genomes_are_read_as_bytes(tmp_path: Path, commands: Commands) -> None:
    draw = random.Random(1)
    (tmp_path / "dna").mkdir()
    (tmp_path / "dna/a.fa").write_text(">x\n" + "".join(draw.choices("ACGTacgt", k=20_000)) + "\n")
    result = start("dna")
    assert result.exit_code == 0, result.output
    [build] = commands.starting("tokenize", "build")
    assert build[3:6] == ["--tokenizer", "byte", "--dna"]
    assert "evaluate.rows=32" not in commands.lines[-1], "one document: none is held out"
    assert "model.vocab_size=257" in commands.lines[-1]


def test_conversations_fine_tune_weights(
    corpus: Path, tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chats").mkdir()
    lines = [json.dumps(CHAT).replace("hello", f"hello {n}") for n in range(400)]
    (tmp_path / "chats/a.jsonl").write_text("\n".join(lines))
    error = start("chats")
    assert error.exit_code == 2
    assert "fine-tune given weights" in error.stderr
    assert start("chats", "--weights", "Llama").exit_code == 1  # no tokenizer
    train = ["tokenize", "train", str(corpus), "--vocab-size", "512"]
    assert CliRunner().invoke(main, [*train, "--out", "Llama/tokenizer.json"]).exit_code == 0
    Path("Llama/config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    # The weights themselves are those of a model that needs no file.
    weights = Candidate("weights", "tiny-transformer", ("model.vocab_size=512",), 10**6)
    monkeypatch.setattr(Start, "_candidates", lambda *_: [weights])
    result = start("chats", "--weights", "Llama")
    assert result.exit_code == 0, result.output
    [build] = commands.starting("tokenize", "build")
    assert build[build.index("--chat") + 1] == "chatml"
    assert build[build.index("--tokenizer") + 1] == "Llama/tokenizer.json"
    assert "runs/chats/data/train/packed-512" in commands.lines[-3]
    assert "optimizer.lr=2e-05" in commands.lines[-1]


def write(name: str, data: bytes) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_bytes(data)


BAD = {
    "nothing": (lambda: None, "there is no x"),
    "empty": (lambda: Path("x").mkdir(), "no files at x"),
    "unknown": (lambda: write("x/a.bin", b"\0\1"), "no files at x"),
    "binary": (lambda: write("x/a.txt", b"\xff\xfe\0"), "invalid UTF-8"),
    "mixed": (lambda: (write("x/a.fa", b">a\nAC\n"), write("x/b.txt", b"b")), "several kinds"),
    "small": (lambda: write("x/a.txt", b"a few words"), "a run needs 10,000"),
    "field": (lambda: write("x/a.jsonl", b'{"story": "a"}\n'), "no field `text`"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_folder_that_cannot_be_read_is_an_error(case: str, commands: Commands) -> None:
    BAD[case][0]()
    result = start("x")
    assert result.exit_code in (1, 2)
    assert BAD[case][1] in result.stderr
    assert "Traceback" not in result.stderr


def test_the_error_of_a_command_is_printed_above(tmp_path: Path) -> None:
    """The commands are real here, as processes."""
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\0")
    words = [sys.executable, "-m", "headrace.console.headrace", "start", "x.txt", "--no-board"]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1
    before, _, after = result.stderr.partition("invalid UTF-8")
    assert "\n$ tokenize train x.txt --vocab-size 1024 --out runs/x/tokenizer.json\n" in before
    assert "the same `headrace start` goes on from here" in after


def test_an_output_folder_inside_the_corpus_is_an_error(corpus: Path) -> None:
    result = start(corpus, "--out", corpus / "run")
    assert result.exit_code == 2
    assert "whose files are the corpus" in result.stderr


def test_a_full_disk_is_named_before_anything_is_written(
    corpus: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    result = start(corpus)
    assert result.exit_code == 1
    assert "runs/tales has 1 KB left" in result.stderr
    assert not Path("runs").exists()


def test_a_printed_line_is_read_by_a_shell_as_the_same_words() -> None:
    words = ["a b", "model.pattern='[se, mr] * 2'", "$HOME 'x'", "plain", "é", ""]
    script = f'for word in {join(words)}; do printf "%s\\n" "$word"; done'
    printed = subprocess.run(["sh", "-c", script], capture_output=True, text=True).stdout
    assert printed.split("\n")[:-1] == words


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_complete_start(corpus: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "headrace.console.headrace", "start", str(corpus)]
    result = subprocess.run(
        [*words, "--hours", "0.02"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    steps = (tmp_path / "runs/tales/run/metrics.jsonl").read_text().splitlines()
    assert json.loads(steps[-1])["loss"] < json.loads(steps[0])["loss"] - 0.5
    assert (tmp_path / "runs/tales/run/report.html").exists()
