from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.console.errors import CheckpointError, StorageError
from headrace.dataplane.tokenizers.bpe import BpeConfig, BpeTokenizer
from headrace.models.config.config import load_model_config
from headrace.models.conversion.folders import read_model
from headrace.models.model.model import Model
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.weights import source as sources
from headrace.trainer.weights.export import export
from headrace.trainer.weights.tokenizer_files import render_tokenizer_files

Save = Callable[..., RunFolder]


def small(name: str, *overrides: str) -> Model:
    model = Model(load_model_config(name, overrides))
    model.init_weights(3)
    return model.eval()


def test_transformers_computes_the_same_logits(checkpoint_of: Save, tmp_path: Path) -> None:
    model = small("tiny-transformer", "vocab_size=64")
    run = checkpoint_of(model)
    done = export(
        sources.find(str(run.root)),
        str(tmp_path / "out"),
        "huggingface",
        dtype="fp32",
        tokenizer=None,
    )
    assert done["family"] == "llama" and done["from"].endswith("step-00000003")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    hidden, _ = model.hidden(ids, None)
    assert torch.allclose(theirs(ids).logits, model.logits(hidden), atol=2e-5)


def test_exported_weights_are_read_back_unchanged_in_each_dtype(
    checkpoint_of: Save, tmp_path: Path
) -> None:
    model = small("tiny-zamba", "pattern='[mamba] + [a>mamba] + [b>mamba]'")
    result = sources.find(str(checkpoint_of(model).root))
    for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        out = tmp_path / dtype
        export(result, str(out), "headrace", dtype=dtype, tokenizer=None)
        _, tensors = read_model(out)
        for name, parameter in model.named_parameters():
            assert torch.equal(tensors[name], parameter.detach().to(kind)), name


def test_a_model_that_a_format_cannot_hold_is_refused_before_writing(
    checkpoint_of: Save, tmp_path: Path
) -> None:
    result = sources.find(str(checkpoint_of(small("tiny-hybrid")).root))
    for format in ("huggingface", "vortex"):
        with pytest.raises(CheckpointError, match="can"):
            export(result, str(tmp_path / "out"), format, dtype="fp32", tokenizer=None)
        assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "cat.jpg").touch()
    with pytest.raises(StorageError, match="exists already"):
        export(result, str(tmp_path / "out"), "headrace", dtype="fp32", tokenizer=None)


def test_the_tokenizer_is_exported(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {letter: n for n, letter in enumerate("abcde")} | {"<|endoftext|>": 5}
    theirs = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.add_special_tokens(["<|endoftext|>"])
    ours = BpeTokenizer(theirs.to_str().encode(), BpeConfig(), source="a test's")
    for name, data in render_tokenizer_files(ours).items():
        (tmp_path / name).write_bytes(data)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("abcde")["input_ids"] == [0, 1, 2, 3, 4] and loaded.eos_token_id == 5
    assert render_tokenizer_files(None) == {}
