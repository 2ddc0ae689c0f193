"""Random models of every family beside transformers: exact in every use, or refused by name."""

from __future__ import annotations

import copy
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.drawn import FAMILIES, draw_settings
from support.models.peers import load_theirs, without_fla
from torch import Tensor

from headrace.console.errors import UserError
from headrace.models.conversion.files import read_json
from headrace.models.conversion.folders import convert, read_model, write_model
from headrace.models.conversion.function import differences
from headrace.models.documents import Documents
from headrace.models.model.generate import Sampling, generate
from headrace.models.model.model import Model

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

LENGTH, CUTS = 29, (0, 1, 12, 29)
BOUND, GRADIENTS = 2e-4, 5e-3
"""Of logits and of gradients, whose rounding in fp32 small norms enlarge; faults are above 1e-2."""


def build_theirs(kind: str, settings: dict[str, Any], seed: int = 1) -> Any:
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **copy.deepcopy(settings))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(("A_log", "dt_bias")):
                noise = torch.randn_like(parameter) / max(1, parameter.shape[-1]) ** 0.5
                parameter.add_((0.5 if parameter.dim() > 1 else 0.2) * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    return model.eval()


def difference(ours: Tensor, theirs: Tensor) -> float:
    scale = max(1.0, float(theirs.detach().abs().max()))
    return float((ours - theirs).detach().abs().max()) / scale


def continue_greedily(model: Any, prompt: list[int], count: int) -> list[int]:
    """Continue without a cache, which some classes of transformers use wrongly."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def find_faults(kind: str, settings: dict[str, Any], folder: Path) -> list[str] | None:
    """Return in which uses our model differs from theirs; None where one of both refuses the
    settings."""
    try:
        theirs = build_theirs(kind, settings)
        ids = torch.randint(0, 37, (2, LENGTH), generator=torch.Generator().manual_seed(2))
        expected = theirs(ids, use_cache=False).logits
    except Exception:  # transformers refuses settings by errors of many classes
        return None
    theirs.save_pretrained(folder / "theirs")
    try:
        config, tensors = read_model(folder / "theirs")
        write_model(config, tensors, folder / "ours", format="huggingface", family=kind)
    except UserError as error:
        stored = read_json(folder / "theirs" / "config.json") | settings
        keys = re.findall(r"'(\w+)':", repr(stored))
        named = any(key in str(error) for key in (*keys, "has no layer like"))
        return None if named else [str(error)]
    ours = Model(config)
    ours.load_state_dict(tensors)
    logits = ours.eval()(ids)
    faults = ["logits"] if difference(logits, expected) > BOUND else []

    probe = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    for outputs in (logits, expected):
        (outputs * probe).sum().backward()
    parameters = ours.named_parameters()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters}
    all_gradients = {**tensors, **gradients}
    write_model(config, all_gradients, folder / "grads", format="huggingface", family=kind)
    back, returned = load_theirs(folder / "ours"), load_theirs(folder / "grads")
    for name, parameter in theirs.named_parameters():
        expected_grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if difference(returned.get_parameter(name), expected_grad) > GRADIENTS:
            faults.append(f"gradient of {name}")
    stored = back.state_dict()
    faults += [n for n, tensor in theirs.state_dict().items() if not torch.equal(stored[n], tensor)]
    faults += differences(read_model(folder / "ours")[0], config)

    with torch.no_grad():
        if difference(back(ids, use_cache=False).logits, expected) > 1e-5:
            faults.append("logits of the exported model")
        prompts = [ids[0, :9].tolist(), ids[1, :4].tolist()]  # the second is padded
        continued = generate(ours, prompts, 8, sampling=Sampling(temperature=0))
        if continued != [continue_greedily(theirs, prompt, 8) for prompt in prompts]:
            faults.append("generation")
        packed = ours(ids[:1], Documents.build(torch.tensor(CUTS), (1, LENGTH)))
        for start, end in pairwise(CUTS):
            alone = theirs(ids[:1, start:end], use_cache=False).logits
            if difference(packed[:, start:end], alone) > BOUND:
                faults.append(f"the document {start} to {end}")
    return faults


@pytest.mark.parametrize("kind", random.Random(1).sample(sorted(FAMILIES), 4))
def test_a_drawn_model_is_exact_or_refused(kind: str, tmp_path: Path) -> None:
    with without_fla():
        faults = (find_faults(kind, draw_settings(kind, n), tmp_path / f"{n}") for n in range(9))
        assert next(fault for fault in faults if fault is not None) == []


@pytest.mark.long
@pytest.mark.parametrize("kind", FAMILIES)
def test_drawn_models_are_exact_or_refused(kind: str, tmp_path: Path) -> None:
    exact = 0
    with without_fla():
        for seed in range(100, 140):
            faults = find_faults(kind, draw_settings(kind, seed), tmp_path / f"{seed}")
            assert not faults, (seed, draw_settings(kind, seed))
            exact += faults is not None
    assert exact >= 4


def test_faults_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: another base of the positions; a key that nobody names."""
    settings = draw_settings("olmo2", 0) | {"rope_parameters": None}
    monkeypatch.setattr("headrace.models.layers.rope.yarn_amplitude", lambda rope: 2.0)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    faults = find_faults("olmo2", settings | {"rope_parameters": yarn}, tmp_path / "yarn")
    assert faults is not None and "logits" in faults and "generation" in faults
    assert find_faults("olmo2", settings, tmp_path / "plain") == []


YARN = {"rope_type": "yarn", "rope_theta": 30.0, "factor": 3.7}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2", {"rope_parameters": {**YARN, "original_max_position_embeddings": 8}}),
        ("qwen2", {"head_dim": 6, "hidden_size": 20}),
        (
            "lfm3",
            {
                "layer_types": ["sliding_attention", "conv", "full_attention"],
                "num_hidden_layers": 3,
                "attention_bias": False,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
                    "full_attention": {**YARN, "original_max_position_embeddings": 16},
                },
            },
        ),
        (
            "granitemoehybrid",
            {"layer_types": ["attention"], "num_hidden_layers": 1, "mamba_conv_bias": True},
        ),
    ],
    ids=["yarn of few tokens", "a key beside the class", "positions of two lengths", "no Mamba-2"],
)
def test_what_was_wrong_or_refused(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Settings that were computed otherwise, or not said back."""
    settings = draw_settings(kind, 3) | changes
    with without_fla():
        assert find_faults(kind, settings, tmp_path) == []


def test_special_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    """Classes have the published ids as defaults: at one, generation ends; another's embedding is
    not trained."""
    settings = draw_settings("lfm2", 4) | {"conv_bias": False, "eos_token_id": 5}
    build_theirs("lfm2", settings).save_pretrained(tmp_path / "theirs")
    write_model(*read_model(tmp_path / "theirs"), tmp_path / "ours", format="huggingface")
    config = load_theirs(tmp_path / "ours").config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (None, None, None)
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    convert(tmp_path / "theirs", tmp_path / "second", format="huggingface")
    assert load_theirs(tmp_path / "second").config.eos_token_id == 5
