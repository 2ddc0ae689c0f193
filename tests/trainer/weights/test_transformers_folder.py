"""An exported folder is one of transformers: model, tokenizer, chat template and lengths."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
from click.testing import CliRunner
from hypothesis import assume, given
from hypothesis import strategies as st
from support.data.corpora import read_dataset
from support.ranks import forked
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from headrace.models.config.config import ModelConfig
from headrace.tokenize.cli import main as tokenize
from headrace.trainer.cli import main as trainer
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.run.request import RunRequest
from headrace.trainer.run.resolve import resolve
from headrace.trainer.weights.chat_template import find_template, set_variables
from headrace.trainer.weights.source import Checkpoint, ModelFolder
from headrace.trainer.weights.trained_length import set_trained_length, trained_length

TURNS = [
    {"role": "user", "content": "How much is 2 + 2?"},
    {"role": "assistant", "content": "4, naïve one."},
]
MODEL = """
vocab_size: 320
width: 16
pattern: "[attention]"
mlp: glu
operators: {attention: {kind: attention, heads: 2}, glu: {kind: glu, hidden: 32}}
"""
MIXTURE = """
sources: {chats: {data: chats, max_epochs: 9}, plain: {data: plain, max_epochs: 9}}
phases: {first: {tokens: 128, seq_len: 32, batch: 64, weights: {chats: 0.5, plain: 0.5}}}
"""
AFTER = """
after: {run: run}
phases: {next: {tokens: 128, seq_len: 16, batch: 64, weights: {first: 1}}}
"""


def invoke(command: Any, *words: str) -> Any:
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture(scope="module", params=["bpe", "byte"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets of one tokenizer, a run of two steps, and its export `hf`."""
    root: Path = tmp_path_factory.mktemp(request.param)
    here = Path.cwd()
    os.chdir(root)
    try:
        answer = {"messages": TURNS}
        Path("chats.jsonl").write_text(f"{json.dumps(answer)}\n" * 9)
        Path("plain.jsonl").write_text(f"{json.dumps({'text': 'How much? Naïve.'})}\n" * 9)
        kind = request.param
        if kind == "bpe":
            special = [
                ("--special", name) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
            ]
            kind = "bpe.json"
            words = ["train", "plain.jsonl", "--vocab-size", "270", "--out", kind]
            invoke(tokenize, *words, *(word for pair in special for word in pair))
        build = ["--tokenizer", kind, "--out"]
        invoke(tokenize, "build", "chats.jsonl", "--chat", "chatml", *build, "chats")
        invoke(tokenize, "build", "plain.jsonl", *build, "plain")
        for name, text in (("model", MODEL), ("mixture", MIXTURE), ("after", AFTER)):
            Path(f"{name}.yaml").write_text(text)
        words = ["--mixture", "mixture.yaml", "--model", "model.yaml", "--out", "run"]
        small = ["engine.kind=fsdp2", "threads=1", "watch.tensorboard=false"]
        command = [sys.executable, "-m", "headrace.trainer.cli", "run", *words, *small]
        assert forked.run(command).returncode == 0
        said = invoke(trainer, "export", "run", "hf").stderr
        assert "the chat template is that of chats\n" in said
    finally:
        os.chdir(here)
    return root


@pytest.fixture
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(folder)
    yield folder


def test_the_usual_three_lines_generate(inside: Path) -> None:
    tok = AutoTokenizer.from_pretrained("hf")
    m = AutoModelForCausalLM.from_pretrained("hf")
    ids = m.generate(**tok("How", return_tensors="pt"), max_new_tokens=2)
    assert tok.decode(ids[0]).startswith("How")
    several = tok(["How", "How much?"], padding=True, return_tensors="pt")
    assert several["attention_mask"].sum(dim=1)[0] < several["attention_mask"].shape[1]
    assert m.generate(**several, max_new_tokens=2).shape[0] == 2
    assert m.generation_config.pad_token_id == tok.pad_token_id is not None
    assert m.config.max_position_embeddings == tok.model_max_length == 32


def test_a_conversation_has_the_ids_of_the_dataset(inside: Path) -> None:
    tok = AutoTokenizer.from_pretrained("hf")
    _, _, document = read_dataset("chats")[0]
    assert document == [*tok.apply_chat_template(TURNS, return_dict=False), tok.eos_token_id]


def test_a_turn_of_the_assistant_ends_generation(inside: Path) -> None:
    ends = json.loads(Path("hf/generation_config.json").read_text())["eos_token_id"]
    tok = AutoTokenizer.from_pretrained("hf")
    if "<|im_end|>" in tok.get_vocab():
        assert ends == [tok.eos_token_id, tok.convert_tokens_to_ids("<|im_end|>")]
    else:
        assert ends == tok.eos_token_id == 256


def test_the_longest_row_of_all_runs_counts(inside: Path, tmp_path: Path) -> None:
    words = {"model": "model.yaml", "mixture": "after.yaml", "out": str(tmp_path / "next")}
    job = resolve(RunRequest(**words))
    job.folder.prepare()
    job.save()
    source = Checkpoint("next/checkpoints/step-00000004", job.folder)
    assert {phase.seq_len for phase in job.plan.phases} == {16}
    assert trained_length(source) == 32
    assert trained_length(ModelFolder("hf")) == 32
    run = job.folder.run
    run.write_text(run.read_text() + "init_from: {path: nowhere}\n")
    assert trained_length(source) is None, "what trained them first is not known"
    assert set_trained_length(source) == source.model


def test_scaled_positions_keep_their_length(inside: Path) -> None:
    """Their frequencies were computed from it."""
    source = Checkpoint("run/checkpoints/step-00000002", RunFolder("run"))
    assert _rope(set_trained_length(source)).original_length == 32
    scaled = Scaled(source.where, source.run)
    assert _rope(set_trained_length(scaled)) == _rope(scaled.model)


class Scaled(Checkpoint):
    @property
    def model(self) -> ModelConfig:
        model = super().model
        attention: Any = model.operators["attention"]
        rope = replace(attention.rope, scaling="yarn", factor=2.0)
        return replace(
            model, operators={**model.operators, "attention": replace(attention, rope=rope)}
        )


def _rope(model: ModelConfig) -> Any:
    return model.operators["attention"].rope  # type: ignore[attr-defined]


def test_of_several_templates_that_of_most_tokens_is_taken(inside: Path, tmp_path: Path) -> None:
    kind = "bpe.json" if Path("bpe.json").exists() else "byte"
    words = ["--chat", "zephyr", "--chat-set", "eos_token=</s>", "--tokenizer", kind]
    invoke(tokenize, "build", "chats.jsonl", *words, "--out", str(tmp_path / "zephyr"))
    mixture = MIXTURE.replace("data: plain", f"data: {tmp_path / 'zephyr'}")
    Path("both.yaml").write_text(
        mixture.replace("chats: 0.5, plain: 0.5", "chats: 0.25, plain: 0.75")
    )
    job = resolve(RunRequest(model="model.yaml", mixture="both.yaml", out=str(tmp_path / "both")))
    job.folder.prepare()
    job.save()
    template = find_template(Checkpoint("both/checkpoints/step-00000002", job.folder))
    assert template is not None and (template.source, template.different) == ("plain", ("chats",))
    tok = AutoTokenizer.from_pretrained("hf")
    ids = tok.apply_chat_template(TURNS, chat_template=template.jinja, return_dict=False)
    assert "</s>" in tok.decode(ids), "transformers names another eos_token"
    _, _, document = read_dataset(tmp_path / "zephyr")[0]
    assert document[:-1] == ids


def test_variables_of_a_template_can_be_given_again() -> None:
    template = set_variables("{{ date }} {{ eos_token }}", {"date": "a'b", "eos_token": "</s>"})
    render = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template).render
    assert render(eos_token="<|endoftext|>") == "a'b </s>" and render(date="today") == "today </s>"


@given(st.text("abzAZé日 \n🙂<|") | st.text(), st.booleans())
def test_the_library_reads_bytes_alike(text: str, dna: bool) -> None:
    assume("<|b|>" not in text)
    ours = ByteTokenizer(ByteConfig(dna=dna, special_tokens=("<|endoftext|>", "<|b|>")))
    library = Tokenizer.from_str(ours.library_file().decode())
    assert library.encode(text).ids == ours.encode([text]).tokens[:-1].tolist()
    assert dna or library.decode(library.encode(text).ids) == text
    assert library.get_vocab_size() == ours.info.vocab_size
