from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from headrace.models.config import load_model_config
from headrace.models.model import Model
from headrace.tokenize.cli import main as tokenize
from headrace.trainer.cli import main
from headrace.trainer.folder import RunFolder
from headrace.trainer.scores import harness
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
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT] * 3,
        trainers.BpeTrainer(
            vocab_size=290, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"]
        ),
    )
    made.save(str(folder / "bpe.json"))
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
    own = {
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
        "tiny_generate": {
            "output_type": "generate_until",
            "doc_to_text": "Q {{question}}",
            "doc_to_target": "{{text}}",
            "generation_kwargs": {"until": ["e"], "max_gen_toks": 7},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, task in own.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **task}))
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
    run: RunFolder, folder: Path, tmp_path: Path
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
    assert json.loads(run.scores.read_text())["tasks"] == ours["tasks"]

    # Answers, not only their means: log-likelihoods of each choice and text, and generated texts.
    found = sources.find(exported)  # the exported folder is scored as the checkpoint is
    model = harness.HarnessModel(
        sample.load(found, "cpu"), find_tokenizer(found, data), max_length=LENGTH, batch_tokens=500
    )
    answers = evaluated(model, folder)
    for task in TASKS:
        mine, other = responses(answers, task), responses(expected, task)
        assert len(mine) == len(documents()) * (3 if task == "tiny_choice" else 1)
        if task == "tiny_generate":
            assert mine == other and len(set(mine)) > 3
        else:
            assert mine == [pytest.approx(each, rel=1e-4) for each in other]


def evaluated(model: Any, folder: Path) -> dict[str, Any]:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(model=model, tasks=list(TASKS), task_manager=manager, log_samples=True)
    assert found is not None
    return dict(found)


def responses(found: dict[str, Any], task: str) -> list[Any]:
    samples: Sequence[dict[str, Any]] = found["samples"][task]
    return [each[0] for sample in samples for each in sample["resps"]]


def test_other_weights_have_other_scores(run: RunFolder, folder: Path) -> None:
    """The negative control of the test above."""
    found = sources.find(str(run.root))
    tokenizer = find_tokenizer(found, str(folder / "data"))
    model = sample.load(found, "cpu")
    scores = []
    for _ in range(2):
        ours = harness.HarnessModel(model, tokenizer, max_length=LENGTH, batch_tokens=500)
        scores.append(responses(evaluated(ours, folder), "tiny_rolling"))
        with torch.no_grad():
            model.embedding.weight[5:] *= 0.9
    assert not any(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(*scores, strict=True))


def test_mistakes_are_named(run: RunFolder, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = partial(TaskManager, include_defaults=False)  # the harness's index takes seconds
    monkeypatch.setattr(harness, "TaskManager", own)
    words = [run.root, "--data", folder / "data", "--include-path", folder]
    unknown = ask(*words, "--tasks", "tiny_choise")
    assert unknown.exit_code == 1 and "did you mean tiny_choice?" in unknown.output
    assert ask(*words, "--tasks", ",").exit_code == 2
    without = ask(run.root, "--tasks", "tiny_choice")
    assert without.exit_code == 1 and "--data URL" in without.output
    short = ask(*words, "--tasks", "tiny_generate", "--max-length", "7")
    assert short.exit_code == 1 and "raise --max-length" in short.output
    assert not run.scores.exists()
