from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.console.errors import InputError
from headrace.dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from headrace.models.config.config import load_model_config
from headrace.models.model.generate import Sampling
from headrace.models.model.model import Model
from headrace.tokenize.cli import main as tokenize
from headrace.trainer.cli import main
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.weights import sample
from headrace.trainer.weights import source as sources

TOKENIZER = ByteTokenizer(ByteConfig())


@pytest.fixture
def run(checkpoint_of: Callable[..., RunFolder]) -> RunFolder:
    model = Model(load_model_config("tiny-transformer", ["vocab_size=300"]))
    model.init_weights(1)
    return checkpoint_of(model)


def test_a_seed_decides_the_text_and_only_ids_of_the_tokenizer_appear(run: RunFolder) -> None:
    result = sources.find(str(run.root))
    prompts = ["one", "", "three hundred"]
    said = [
        sample.sample(sample.load(result), TOKENIZER, prompts, 8, sampling=Sampling(seed=seed))
        for seed in (1, 1, 2)
    ]
    assert said[0] == said[1] != said[2]
    assert [item.prompt for item in said[0]] == prompts
    assert all(0 < item.tokens <= 8 for item in said[0])
    for generated in said[0]:
        assert generated.ended or generated.tokens == 8
        assert "<|endoftext|>" not in generated.text


def test_temperature_0_takes_the_most_likely_token(run: RunFolder) -> None:
    result = sources.find(str(run.root))
    (said,) = sample.sample(
        sample.load(result), TOKENIZER, ["abc"], 1, sampling=Sampling(temperature=0)
    )
    import torch

    model = sample.load(result, "cpu")
    hidden, _ = model.hidden(torch.tensor([list(b"abc")]), None)
    likeliest = int(model.logits(hidden)[0, -1, :257].argmax())
    assert said.ended if likeliest == 256 else said.text == TOKENIZER.decode([likeliest])


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(run: RunFolder) -> None:
    model = sample.load(sources.find(str(run.root)))
    large = ByteTokenizer(ByteConfig(special_tokens=tuple(f"<{n}>" for n in range(100))))
    with pytest.raises(InputError, match="356 ids, the model embeds 300"):
        sample.sample(model, large, ["a"], 1, sampling=Sampling())


def test_prompts_are_options_or_lines_of_stdin(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a few words")
    data = str(tmp_path / "data")
    words = ["build", str(tmp_path / "text.txt"), "--tokenizer", "byte", "--out", data]
    built = CliRunner().invoke(tokenize, words)
    assert built.exit_code == 0, built.output
    words = ["sample", str(run.root), "--tokens", "3"]
    refused = CliRunner().invoke(main, [*words, "--prompt", "a"])
    assert refused.exit_code == 1 and "--data" in refused.output
    words += ["--data", data, "--json"]
    asked = CliRunner().invoke(main, [*words, "--prompt", "a", "--prompt", "bc"])
    piped = CliRunner().invoke(main, words, input="a\nbc\n")
    assert json.loads(asked.stdout) == json.loads(piped.stdout)
    assert [item["prompt"] for item in json.loads(asked.stdout)["samples"]] == ["a", "bc"]
    assert CliRunner().invoke(main, words, input="").exit_code == 2
    for invalid in (
        CliRunner().invoke(main, words, input=b"a\nb\xff\n"),
        CliRunner().invoke(main, [*words, "--prompt", "a", "--prompt", "b\udcff"]),
    ):
        assert invalid.exit_code == 2
        assert "prompt 2 is not UTF-8" in invalid.stderr
