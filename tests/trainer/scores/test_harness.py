from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from formats.samples import pin_keys
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from support.ranks import forked
from support.ranks.ports import free_ports

from headrace.dataplane.tokenizers import Tokenizer
from headrace.models.config.config import load_model_config
from headrace.models.model.generate import generate
from headrace.models.model.model import Model
from headrace.tokenize.cli import main as tokenize
from headrace.trainer.cli import main
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.layout.groups import Parallel
from headrace.trainer.placement.team import Team
from headrace.trainer.scores import answers, harness
from headrace.trainer.scores.answers import batch_functions
from headrace.trainer.scores.at_checkpoints import CheckpointScores
from headrace.trainer.scores.config import ScoresConfig
from headrace.trainer.weights import sample
from headrace.trainer.weights import source as sources
from headrace.trainer.weights.tokenizer import find_tokenizer

LENGTH = 48
TASKS = ("tiny_choice", "tiny_rolling", "tiny_generate")
TEXT = "the river carries water to the wheel and the wheel turns the old stone of the mill"
WORDS = TEXT.split(" ")


def documents() -> list[dict[str, Any]]:
    """Questions of many lengths, one of them empty; the last text is longer than the context."""
    return [
        {
            "question": " ".join(WORDS[n % 5 : n % 5 + n * 2]),
            "choices": [" mill", " stone and wheel", f" water{n}"],
            "answer": n % 3,
            "text": " ".join(WORDS * (1 + n)),
        }
        for n in range(8)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with three tasks, and a dataset built with a small BPE tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("tasks")
    result = Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    result.train_from_iterator(
        [TEXT] * 3,
        trainers.BpeTrainer(
            vocab_size=290, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"]
        ),
    )
    result.save(str(folder / "bpe.json"))
    (folder / "corpus.txt").write_text(TEXT)
    words = ["build", folder / "corpus.txt", "--tokenizer", folder / "bpe.json"]
    built = CliRunner().invoke(tokenize, [*map(str, words), "--out", str(folder / "data")])
    assert built.exit_code == 0, built.output
    lines = "".join(json.dumps(document) + "\n" for document in documents())
    (folder / "questions.jsonl").write_text(lines)
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}},
        "test_split": "test",
    }
    tasks = {
        "tiny_choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "tiny_rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "tiny_broken": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "process_results": "!function broken.fail",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
        "tiny_generate": {
            "output_type": "generate_until",
            "doc_to_text": "Q {{question}}",
            "doc_to_target": "{{text}}",
            "generation_kwargs": {"until": ["ee", "the", "dldl"], "max_gen_toks": 20},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, task in tasks.items():
        text = yaml.safe_dump({"task": name, **common, **task}).replace("'!function", "!function")
        (folder / f"{name}.yaml").write_text(text.replace("broken.fail'", "broken.fail"))
    (folder / "broken.py").write_text("def fail(document, results):\n    return 1 / 0\n")
    return folder


@pytest.fixture
def run(checkpoint_of: Callable[..., RunFolder], folder: Path) -> RunFolder:
    tokens = find_tokenizer(sources.ModelFolder(""), str(folder / "data")).info.vocab_size
    model = Model(load_model_config("tiny-transformer", [f"vocab_size={tokens}"]))
    model.init_weights(1)
    with torch.no_grad():
        model.embedding.weight *= 30  # at their start all logits are alike
    return checkpoint_of(model)


def ask(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["eval", *map(str, words)])


@pytest.mark.slow  # imports transformers and reads the index of all tasks
def test_scores_are_those_of_the_exported_model_in_the_harness_hf_class(
    run: RunFolder, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, exported = str(folder / "data"), str(tmp_path / "exported")
    tasks = ["--tasks", ",".join(TASKS), "--include-path", folder, "--data", data]
    words = [run.root, *tasks, "--max-length", LENGTH, "--batch-tokens", 100, "--json"]
    scored = ask(*words)
    assert scored.exit_code == 0, scored.output
    ours = json.loads(scored.stdout)
    out = CliRunner().invoke(main, ["export", str(run.root), exported, "--data", data])
    assert out.exit_code == 0, out.output
    theirs = HFLM(exported, max_length=LENGTH, batch_size=3, device="cpu", dtype="float32")
    expected = evaluated(theirs, folder)
    for task in TASKS:
        metrics = ours["tasks"][task]["metrics"]
        assert metrics
        for metric, value in metrics.items():
            assert value == pytest.approx(expected["results"][task][metric], rel=1e-4), metric
    assert ours["tasks"]["tiny_choice"]["samples"] == len(documents())
    assert ours["stored"] == str(run.scores)
    pin_keys("eval", ours)
    assert json.loads(run.scores.read_text())["tasks"] == ours["tasks"]

    # Answers, not only their means: log-likelihoods of each choice and text, and generated texts.
    result = sources.find(exported)  # the exported folder is scored as the checkpoint is
    model = in_the_harness(sample.load(result, "cpu"), find_tokenizer(result, data))
    lengths: list[int] = []

    def measured(*words: Any, **options: Any) -> list[list[int]]:
        rows = generate(*words, **options)
        lengths.extend(map(len, rows))
        return rows

    monkeypatch.setattr(answers, "generate", measured)
    run_results = evaluated(model, folder)
    assert {1, 3, 20} <= set(lengths), "stop sequences of one token and more, and none"
    for task in TASKS:
        mine, their_responses = responses(run_results, task), responses(expected, task)
        assert len(mine) == len(documents()) * (3 if task == "tiny_choice" else 1)
        if task == "tiny_generate":
            assert mine == their_responses and len(set(mine)) > 3
        else:
            assert mine == [pytest.approx(item, rel=1e-4) for item in their_responses]


@pytest.mark.slow
def test_two_ranks_give_the_scores_of_one(
    run: RunFolder, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = own_tasks_alone(tmp_path)
    words = ["eval", str(run.root), "--tasks", ",".join(TASKS), "--include-path", str(folder)]
    words += ["--data", str(folder / "data"), "--batch-tokens", "100", "--json"]
    command = [sys.executable, "-m", "headrace.trainer.cli", *words]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports())}
    both = [
        forked.Command(command, env={**os.environ, **world, "RANK": str(rank)}, plugin=plugin)
        for rank in range(2)
    ]
    first, second = (item.wait() for item in both)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert second.stdout == "", "rank 0 prints"
    (entry,) = run.scores.read_text().splitlines()
    monkeypatch.setattr(harness, "TaskManager", partial(TaskManager, include_defaults=False))
    alone = json.loads(ask(*words[1:]).stdout)["tasks"]
    for results in (json.loads(first.stdout), json.loads(entry)):
        for task, expected in alone.items():
            assert results["tasks"][task]["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)


@pytest.mark.long  # imports torch in four processes, and reads the harness's index of all tasks
def test_torchrun_scores_and_ends_all_ranks_if_one_fails(run: RunFolder, folder: Path) -> None:
    programs = Path(sys.executable).parent

    def start(*words: str) -> subprocess.CompletedProcess[str]:
        arguments = [str(run.root), "--include-path", str(folder), "--data", str(folder / "data")]
        ranks = [programs / "torchrun", "--standalone", "--nproc-per-node", "2"]
        command = [*ranks, programs / "trainer", "eval", *arguments, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=500)

    done = start("--tasks", ",".join(TASKS), "--batch-tokens", "100", "--json")
    assert done.returncode == 0, done.stderr
    words = [run.root, "--include-path", folder, "--data", folder / "data", "--json"]
    alone = json.loads(ask(*words, "--tasks", ",".join(TASKS), "--batch-tokens", 100).stdout)
    for task, expected in alone["tasks"].items():
        result = json.loads(done.stdout)["tasks"][task]["metrics"]
        assert result == pytest.approx(expected["metrics"], rel=1e-6)
    unknown = start("--tasks", "tiny_choise")
    assert unknown.returncode and "did you mean tiny_choice?" in unknown.stderr
    broken = start("--tasks", "tiny_broken")  # rank 0 fails while rank 1 waits for batches
    assert broken.returncode and "ZeroDivisionError" in broken.stderr


def own_tasks_alone(folder: Path) -> Path:
    """Return a file that a command imports first: the harness's index of all tasks takes
    seconds."""
    (folder / "own_tasks.py").write_text(
        "from functools import partial\n"
        "from headrace.trainer.scores import harness\n"
        "harness.TaskManager = partial(harness.TaskManager, include_defaults=False)\n"
    )
    return folder / "own_tasks.py"


def in_the_harness(model: Model, tokenizer: Tokenizer) -> harness.HarnessModel:
    team = Team(batch_functions(lambda: (model, tokenizer)))
    return harness.HarnessModel(team, model.config, tokenizer, max_length=LENGTH, batch_tokens=500)


def evaluated(model: Any, folder: Path) -> dict[str, Any]:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    result = simple_evaluate(model=model, tasks=list(TASKS), task_manager=manager, log_samples=True)
    assert result is not None
    return dict(result)


def responses(results: dict[str, Any], task: str) -> list[Any]:
    samples: Sequence[dict[str, Any]] = results["samples"][task]
    return [item[0] for sample in samples for item in sample["resps"]]


def test_other_weights_have_other_scores(run: RunFolder, folder: Path) -> None:
    """The negative control of the test above."""
    result = sources.find(str(run.root))
    tokenizer = find_tokenizer(result, str(folder / "data"))
    model = sample.load(result, "cpu")
    scores = []
    for _ in range(2):
        ours = in_the_harness(model, tokenizer)
        scores.append(responses(evaluated(ours, folder), "tiny_rolling"))
        with torch.no_grad():
            model.embedding.weight[5:] *= 0.9
    assert not any(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(*scores, strict=True))


def test_mistakes_are_named(run: RunFolder, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task_manager = partial(TaskManager, include_defaults=False)  # the harness's index takes seconds
    monkeypatch.setattr(harness, "TaskManager", task_manager)
    words = [run.root, "--data", folder / "data", "--include-path", folder]
    unknown = ask(*words, "--tasks", "tiny_choise")
    assert unknown.exit_code == 1 and "did you mean tiny_choice?" in unknown.output
    assert ask(*words, "--tasks", ",").exit_code == 2
    without = ask(run.root, "--tasks", "tiny_choice")
    assert without.exit_code == 1 and "--data URL" in without.output
    short = ask(*words, "--tasks", "tiny_generate", "--max-length", "7")
    assert short.exit_code == 1 and "raise --max-length" in short.output
    broken = ask(*words, "--tasks", "tiny_broken")
    assert broken.exit_code == 1, "an error of a task's own code is no bug of ours"
    assert "the harness failed on tiny_broken: ZeroDivisionError" in broken.output
    assert not run.scores.exists()
    none = ask(run.root)
    assert none.exit_code == 2 and "the key scores of the run is not set" in none.output
    partial_run = ask(*words, "--tasks", "tiny_broken,tiny_rolling", "--max-length", LENGTH)
    assert partial_run.exit_code == 1 and "ZeroDivisionError" in partial_run.output, (
        "the other task is scored"
    )
    (line,) = run.scores.read_text().splitlines()
    entry = json.loads(line)
    assert "ZeroDivisionError" in entry["failed"]["tiny_broken"] and [*entry["tasks"]] == [
        "tiny_rolling"
    ]


@pytest.fixture
def scored(trainer: Any, folder: Path, tmp_path: Path) -> Callable[..., str]:
    """Return a function that trains two ranks for four steps on the dataset of the tasks."""
    (tmp_path / "text.txt").write_text(f"{TEXT}\n" * 60)
    words = ["build", tmp_path / "text.txt", "--tokenizer", folder / "bpe.json"]
    built = CliRunner().invoke(tokenize, [*map(str, words), "--out", str(tmp_path / "data")])
    assert built.exit_code == 0, built.output
    (tmp_path / "mixture.yaml").write_text(
        f"sources:\n  text: {{data: {tmp_path / 'data'}}}\n"
        "phases:\n  one: {tokens: 256, seq_len: 16, batch: 64, weights: {text: 1}}\n"
    )
    plugin = own_tasks_alone(tmp_path)

    def run(*more: str, out: Path | None = None, code: int = 0) -> str:
        words = ["--mixture", str(tmp_path / "mixture.yaml"), "synthetic=null"]
        words += ["model.vocab_size=300", "--processes", "2"]
        done = forked.run(trainer.command(*words, *more, out=out), plugin=plugin)
        assert done.returncode == code, done.stderr
        return done.stderr

    return run


@pytest.mark.slow
def test_scores_during_training_are_those_of_the_checkpoints(
    scored: Callable[..., str], trainer: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks; the run stops at a step that is due, and scores it when it goes on."""
    tasks = [f"scores.include_path={folder}", "scores.tasks=[tiny_broken,tiny_rolling]"]
    tasks += ["scores.every=2", "scores.max_length=48"]
    scored(out=trainer.folder / "whole")
    scored(*tasks, "--stop-after", "2", code=85)
    assert not (trainer.out / "scores.jsonl").exists()
    scored(*tasks)
    assert trainer.losses() == trainer.losses(trainer.folder / "whole"), "equal to the bit"
    entries = trainer.lines("scores.jsonl")
    assert [entry["step"] for entry in entries] == [2, 4]
    assert all("ZeroDivisionError" in entry["failed"]["tiny_broken"] for entry in entries)
    monkeypatch.setattr(harness, "TaskManager", partial(TaskManager, include_defaults=False))
    for entry in entries:
        words = [trainer.out, "--step", entry["step"], "--tasks", "tiny_rolling", "--json"]
        alone = ask(*words, "--include-path", folder, "--max-length", LENGTH)
        expected = json.loads(alone.stdout)["tasks"]["tiny_rolling"]
        assert entry["tasks"]["tiny_rolling"]["metrics"] == pytest.approx(expected["metrics"])
    first, last = (entry["tasks"]["tiny_rolling"]["metrics"] for entry in entries)
    assert first["bits_per_byte,none"] != pytest.approx(last["bits_per_byte,none"], rel=1e-3)
    report = (trainer.out / "report.html").read_text()
    assert "tiny_rolling" in report
    assert "The scores of tiny_broken at step 4 failed: the harness failed on" in report

    # As if it had been killed while it scored its last checkpoint: it is not finished.
    def status() -> str:
        listed = CliRunner().invoke(main, ["list", str(trainer.out), "--json"])
        (result,) = json.loads(listed.stdout)
        assert f"`trainer eval {trainer.out} --step 4`" in result["problem"]
        return str(result["status"])

    assert status() == "finished", "a task that failed is not tried for ever"
    (trainer.out / "scores.jsonl").write_text(json.dumps(entries[0]) + "\n")
    assert status() == "unscored"
    said = scored(*tasks)
    assert "scored step 4" in said and "already taken all" not in said
    assert trainer.lines("scores.jsonl")[1]["tasks"] == entries[1]["tasks"]
    assert len(trainer.losses()) == 4, "no step was taken again"
    assert status() == "finished"
    assert "already taken all of its 4 steps" in scored(*tasks)

    # On request, with the settings of the run.
    (folder / "broken.py").write_text("def fail(document, results):\n    return {}\n")
    again = ask(trainer.out, "--step", "4", "--limit", "2", "--json")
    result = json.loads(again.stdout)
    assert (result["asked"], result["failed"]) == (["tiny_broken", "tiny_rolling"], {})
    assert (result["limit"], result["max_length"]) == (2, LENGTH)


@pytest.mark.slow
def test_tasks_are_checked_before_the_run_starts(scored: Callable[..., str], folder: Path) -> None:
    words = [f"scores.include_path={folder}", "scores.tasks=[tiny_choise]", "scores.every=4"]
    assert "did you mean tiny_choice?" in scored(*words, code=1)


def test_scores_that_fail_later_do_not_end_the_run(
    run: RunFolder, parallel: Parallel, caplog: pytest.LogCaptureFixture
) -> None:
    """This run has no plan, so its tokenizer is not known. The failure is recorded, and the task is
    not tried again."""
    config, beats = ScoresConfig(tasks=("tiny_choice",), every=3), list[str]()
    scores = CheckpointScores(config, run, 3, "cpu", parallel.control, beats.append)
    assert [step for step in range(5) if scores.due(step)] == [3]
    with caplog.at_level(logging.WARNING):
        scores.score_resumed(3)
    assert "no scores of step 3: there is no tokenizer" in caplog.text
    assert f"`trainer eval {run.root} --step 3` tries again" in caplog.text
    assert set(beats) == {"scores of step 3"}
    (entry,) = map(json.loads, run.scores.read_text().splitlines())
    assert entry["failed"]["tiny_choice"].startswith("there is no tokenizer")
    caplog.clear()
    scores.score_resumed(3)
    assert not caplog.text
