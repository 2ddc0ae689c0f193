"""Every key of every family: with another value, or without it, our logits are those of
transformers, or an error names the key."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.families import CASES
from support.models.peers import without_fla

from headrace.console.errors import UserError
from headrace.models.conversion import FAMILIES
from headrace.models.conversion.family import settings_errors
from headrace.models.conversion.files import read_json
from headrace.models.conversion.folders import read_model
from headrace.models.conversion.function import differences
from headrace.models.model.model import Model

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

FILE = "config.json"
UNRELATED = {"model_type", "architectures", "transformers_version", "dtype", "vocab_size"}
WORDS = {
    "hidden_act": ["gelu", "relu"],
    "mlp_hidden_act": ["silu", "gelu"],
    "mamba_hidden_act": ["gelu"],
    "position_embedding_type": ["rope", "nope"],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    YARN,
    {**YARN, "factor": None},
    {**YARN, "truncate": False},
    {**YARN, "attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1},
    {**YARN, "mscale_all_dim": 1.1},
    {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {**YARN, "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
]
TYPED = {"full_attention": ROPES[0], "sliding_attention": ROPES[2]}


def other_values(key: str, value: Any) -> Iterator[Any]:
    """Yield values of the same type, and null."""
    if key == "rope_parameters":
        yield from ({**rope, "rope_theta": 77.0} for rope in ROPES)
        yield {kind: {**rope, "rope_theta": 77.0} for kind, rope in TYPED.items()}
    elif key in WORDS:
        yield from (word for word in WORDS[key] if word != value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, 2 * value, 0)
    elif isinstance(value, float):
        yield from (1.7 * value + 0.01, 0.0)
    elif isinstance(value, list) and value and isinstance(value[0], str):
        yield from (value[::-1], [*value[1:], value[0]], [value[0]] * len(value))
    elif isinstance(value, list) and value:
        yield [1.5 * number + 0.1 for number in value]
    elif value is None:
        yield from (2, 0.5, True)
    if value is not None:
        yield None


def build_theirs(kind: str, values: dict[str, Any]) -> Any:
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(kind, **copy.deepcopy(values))
    config._attn_implementation = "eager"
    with without_fla():
        model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if not name.endswith(("A_log", "dt_bias")):
            noise = torch.randn_like(parameter) / max(1, parameter.shape[-1]) ** 0.5
            parameter.data += 0.3 * noise
    return model.eval()


@cache
def read_settings(case: str) -> dict[str, Any]:
    """Return what the class writes for a case."""
    kind, values = CASES[case]
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    with tempfile.TemporaryDirectory() as folder:
        build_theirs(kind, values).save_pretrained(folder)
        return read_json(Path(folder) / FILE)


def read_ours(kind: str, values: dict[str, Any]) -> Any:
    """Return our configuration; raise UserError."""
    with settings_errors(Path(FILE), values):
        return FAMILIES[kind].read(copy.deepcopy(values))


def find_fault(case: str, key: str, value: Any) -> str | None:
    """Return what is wrong if a key has this value: no error that names it, and other logits."""
    kind, values = CASES[case]
    ids = torch.randint(0, 37, (2, 29), generator=torch.Generator().manual_seed(6))
    try:
        theirs = build_theirs(kind, {**values, key: value})
        with torch.no_grad():
            expected = theirs(ids, use_cache=False).logits
    except Exception:  # transformers has no such model: of any class
        return None
    try:
        read_ours(kind, {**read_settings(case), key: value})
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            config, tensors = read_model(folder)
            ours = Model(config)
            ours.load_state_dict(tensors)
    except UserError as error:
        words = [key, *(value if isinstance(value, dict) else ()), "rope_scaling"]
        return None if any(word in str(error) for word in words) else str(error)
    with torch.no_grad():
        error_size = float((ours.eval()(ids) - expected).abs().max())
    bound = 1e-4 * max(1.0, float(expected.abs().max()))
    return None if error_size < bound else f"logits differ by {error_size:.2g}"


def changes_of(case: str) -> list[tuple[str, Any]]:
    return [
        (key, value)
        for key, stored in read_settings(case).items()
        if key not in UNRELATED
        for value in other_values(key, stored)
    ]


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_another_value_is_computed_or_refused_by_name(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(list(CASES)))
    key, value = data.draw(st.sampled_from(changes_of(case)))
    assert find_fault(case, key, value) is None


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_every_other_value_is_computed_or_refused_by_name(case: str) -> None:
    faults = {
        f"{key}={value!r}": fault
        for key, value in changes_of(case)
        if (fault := find_fault(case, key, value)) is not None
    }
    assert not faults


@pytest.mark.parametrize("case", CASES)
def test_a_missing_key_has_the_default_of_the_class(case: str) -> None:
    kind, stored = CASES[case][0], read_settings(case)
    faults = []
    for key in stored.keys() - UNRELATED:
        rest = {name: value for name, value in stored.items() if name != key}
        given_values = {name: rest[name] for name in rest.keys() - UNRELATED}
        try:
            config = transformers.AutoConfig.for_model(kind, **copy.deepcopy(given_values))
        except Exception:  # the class needs the key, or refuses the rest without it
            continue
        with tempfile.TemporaryDirectory() as folder:
            config.to_json_file(Path(folder) / FILE, use_diff=False)
            written = read_json(Path(folder) / FILE)
        try:
            ours = read_ours(kind, rest)
        except UserError:
            continue
        expected = read_ours(kind, {**written, "vocab_size": stored["vocab_size"]})
        faults += [f"{key}: {difference}" for difference in differences(ours, expected)]
    assert not faults


def test_faults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: a family that misses a key."""
    family = FAMILIES["qwen3"]

    class Deaf:
        def read(self, values: dict[str, Any]) -> Any:
            return family.read({**values, "rms_norm_eps": 1e-6})

        def rules(self, config: Any) -> Any:
            return family.rules(config)

    monkeypatch.setitem(FAMILIES, "qwen3", Deaf())
    assert "logits differ" in str(find_fault("qwen3", "rms_norm_eps", 0.3))
    assert find_fault("qwen3", "hidden_act", "gelu") is None
