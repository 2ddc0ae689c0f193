"""Configuration errors name the layer and the numbers, and are reported all at once."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

from headrace.console.config import build, dump
from headrace.console.errors import ConfigError
from headrace.models.config.config import ModelConfig, list_shipped_models, load_model_config
from headrace.models.config.options import OPTIONS
from headrace.models.config.options.rope import Rope
from headrace.models.config.options.zamba import ZambaBlockOptions
from headrace.models.operators import OPERATORS, SharedOperator

GLU = {"kind": "glu", "hidden": 24}


def config(operator: dict[str, Any], width: int = 16, **more: Any) -> ModelConfig:
    data = {
        "vocab_size": 23,
        "width": width,
        "pattern": "[glu/none, mixer]",
        "operators": {"mixer": operator, "glu": GLU},
        **more,
    }
    return build(ModelConfig, data, source="model.yaml")


@pytest.mark.parametrize(
    ("operator", "words"),
    [
        ({"kind": "attention", "heads": 3}, ["heads (3)", "the width (16)"]),
        ({"kind": "attention", "heads": 0}, ["heads (0)"]),
        (
            {"kind": "attention", "heads": 4, "kv_heads": 3},
            ["kv_heads (3) does not divide heads (4)"],
        ),
        ({"kind": "attention", "heads": 16}, ["even number", "1"]),
        ({"kind": "attention", "heads": 4, "rope": {"channels": 0}}, ["even number", "up to 4: 0"]),
        (
            {"kind": "attention", "heads": 8, "rope": {"scaling": "ntk", "factor": 2.0}},
            ["at least 4 channels"],
        ),
        ({"kind": "attention", "heads": 4, "window": 0}, ["window", "0"]),
        ({"kind": "attention", "heads": 4, "rope": {"factor": 2.0}}, ["factor 2.0", "scaling"]),
        (
            {"kind": "attention", "heads": 4, "rope": {"scaling": "linear", "factor": 0.5}},
            ["factor must be at least 1", "0.5"],
        ),
        ({"kind": "mamba1", "heads": 5}, ["heads (5)", "expand · width (32)"]),
        ({"kind": "mamba2", "head_dim": 5}, ["head_dim (5)", "expand · width (32)"]),
        ({"kind": "mamba2", "head_dim": 8, "groups": 3}, ["groups (3)", "the heads (4)"]),
        ({"kind": "mamba2", "head_dim": 8, "chunk": 0}, ["chunk", "0"]),
        ({"kind": "mamba2", "kernel": "next"}, ["`next`", "the run", "`kernels.NAME: next`"]),
        ({"kind": "hyena-se", "groups": 5}, ["groups (5)", "the width (16)"]),
        ({"kind": "hyena-se", "groups": 4, "taps": 17}, ["1 to 16 taps, not 17"]),
        (
            {"kind": "hyena-mr", "groups": 4, "taps": 128, "filter_horizon": 64},
            ["taps (128)", "filter_horizon (64)"],
        ),
        ({"kind": "hyena-li", "state_size": 0}, ["state_size", "0"]),
        ({"kind": "hyena-li-freeform", "filter_horizon": 1}, ["filter_horizon (1)"]),
        ({"kind": "hyena-mlp", "hidden": 10, "groups": 3}, ["groups (3)", "hidden (10)"]),
        (
            {"kind": "moe", "experts": 2, "top_k": 3, "hidden": 8},
            ["top_k (3)", "experts (2)"],
        ),
        (
            {
                "kind": "moe",
                "experts": 2,
                "hidden": 8,
                "router": "sigmoid",
                "sinkhorn": True,
                "balance_loss": 0.1,
            },
            ["Sinkhorn balances", "balance_loss"],
        ),
        ({"kind": "attention", "heads": 4, "rope": {"base": 0.0}}, ["base", "above 1", "0.0"]),
        ({"kind": "attention", "heads": 4, "rope": {"original_length": 0}}, ["original_length"]),
        (
            {"kind": "attention", "heads": 4, "rope": {"scaling": "yarn", "beta_fast": 0.5}},
            ["beta_fast (0.5) and beta_slow (1.0)"],
        ),
        (
            {"kind": "attention", "heads": 4, "rope": {"low_freq_factor": 4.0}},
            ["high_freq_factor (4.0) and low_freq_factor (4.0)"],
        ),
        ({"kind": "mamba1", "dt_rank": 0}, ["dt_rank", "0"]),
        ({"kind": "mamba2", "head_dim": 8, "expand": 0}, ["expand", "0"]),
        ({"kind": "mamba2", "head_dim": 8, "norm_eps": 0.0}, ["norm_eps", "0.0"]),
        ({"kind": "hyena-se", "groups": 4, "featurizer": 0}, ["featurizer", "0"]),
        ({"kind": "hyena-li", "featurizer": -1}, ["featurizer", "-1"]),
        ({"kind": "moe", "experts": 2, "hidden": 8, "z_loss": -0.1}, ["z_loss", "-0.1"]),
        ({"kind": "glu", "hidden": 0}, ["hidden", "0"]),
        ({"kind": "mlp", "hidden": -1}, ["hidden", "-1"]),
        ({"kind": "attention", "heads": 4, "softmax_scale": 0.0}, ["softmax_scale", "0.0"]),
        ({"kind": "mamba2", "head_dim": 8, "heads": 0}, ["heads (0)"]),
        ({"kind": "mamba2", "head_dim": 8, "heads": 3, "groups": 2}, ["groups (2)", "heads (3)"]),
    ],
)
def test_options_that_do_not_fit(operator: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        config(operator)
    assert "mixer" in str(raised.value)
    for word in words:
        assert word in str(raised.value)
    if not {"rope", "kernel"} & set(operator):
        assert "layers 1" in str(raised.value)


@pytest.mark.parametrize("kind", OPTIONS)
def test_an_option_declared_without_default_is_required(kind: str) -> None:
    """A dataclass gives a field that is declared again the default of the base."""
    options = OPTIONS[kind]
    for field in dataclasses.fields(options):
        declaring = next(c for c in options.__mro__ if field.name in inspect.get_annotations(c))
        if field.name not in vars(declaring):
            assert field.default is dataclasses.MISSING, field.name


def test_a_missing_option_is_named() -> None:
    with pytest.raises(ConfigError, match=r"operators\.mixer\.groups: is required"):
        config({"kind": "hyena-mr"})


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        config(
            {"kind": "attention", "heads": 3, "kv_heads": 2},
            pattern="[mixr, mixer/glou, glu>mixer]",
        )
    text = str(raised.value)
    assert "layer 0 names the operator `mixr`" in text and "did you mean `mixer`?" in text
    assert "layer 1 names the operator `glou`" in text and "did you mean `glu`?" in text
    assert "layer 2: `glu` is of kind glu, which cannot be shared" in text
    assert "heads (3)" in text and "kv_heads (2)" in text


def test_each_problem_has_its_path() -> None:
    with pytest.raises(ConfigError) as raised:
        config({"kind": "attention", "heads": 3, "kv_heads": 2}, pattern="[mixr]")
    paths = [problem.path for problem in raised.value.problems]
    assert paths[0] == "pattern" and set(paths[1:]) == {"operators.mixer", "operators.glu"}
    assert len(paths) > 3
    assert f"{len(paths)} problems" in str(raised.value)


def test_an_operator_that_no_layer_uses(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    text = """\
vocab_size: 64
width: 16
pattern: "[li, attn]"
operators:
  li: {kind: hyena-li}
  attention: {kind: attention, heads: 4}
  glu: {kind: glu, hidden: 8}
"""
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_model_config(file)
    assert "line 3: pattern: layer 1 names the operator `attn`" in str(raised.value)
    said = "operators.attention: no layer uses it; is it the `attn` of the pattern?"
    assert f"line 6: {said}" in str(raised.value)
    assert "line 7: operators.glu: no layer uses it" in str(raised.value)
    file.write_text(text.replace("attn", "attention").replace("]", "/glu]"))
    # A pattern on the command line removes the operators it no longer names, and nothing else.
    assert list(load_model_config(file, ["pattern='[li] * 3'"]).operators) == ["li"]
    with pytest.raises(ConfigError, match=r"names the operator `lli`.* did you mean `li`"):
        load_model_config(file, ["pattern='[lli] * 3'"])
    with pytest.raises(ConfigError, match=r"operators\.attention: no layer uses it"):
        load_model_config(file, ["pattern='[li] * 3'", "operators.attention.heads=2"])


@pytest.mark.parametrize(
    ("word", "message"),
    [("pattern=[se, li]", r"pattern: should be text, not \['se', 'li'\]"), ("mlp=[glu]", "mlp: ")],
)
def test_a_list_in_place_of_text_is_reported(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model_config("tiny-hybrid", [word])


def test_a_shared_block_only_feeds_layers() -> None:
    block = {"kind": "zamba-block", "heads": 4, "hidden": 8}
    [problem] = ZambaBlockOptions(heads=8, hidden=8, rope=Rope()).problems(4)
    assert problem == "rope turns an even number of channels, up to 1: 1"
    with pytest.raises(ConfigError, match=r"layer 1: `mixer` is of kind zamba-block"):
        config(block)
    with pytest.raises(ConfigError, match=r"heads \(3\) does not divide twice the width \(32\)"):
        config({**block, "heads": 3}, pattern="[mixer>glu]")
    with pytest.raises(ConfigError, match="lora_rank"):
        config({**block, "attention_lora": True}, pattern="[mixer>glu]")
    with pytest.raises(ConfigError, match="a shared block has norms of its own"):
        config({**block, "norm_placement": "post"}, pattern="[mixer>glu]")


def test_mixers_side_by_side_share_a_norm() -> None:
    li = {"kind": "hyena-li", "output_multiplier": 0.5}
    assert config(li, pattern="[mixer|glu]").residual_branches == 1
    with pytest.raises(ConfigError, match="layer 0: `mixer` shares a norm, so norm_placement"):
        config({**li, "norm_placement": "both"}, pattern="[mixer|glu]")
    with pytest.raises(ConfigError, match="layer 0: `mixer` has experts"):
        config({"kind": "moe", "experts": 2, "hidden": 8}, pattern="[mixer|glu]")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"vocab_size": 0}, "vocab_size: must be at least 1"),
        ({"width": 0}, "width: must be at least 1"),
        ({"learned_positions": 0}, "learned_positions: must be at least 1"),
        ({"norm_eps": 0.0}, "norm_eps: must be above 0"),
        ({"pattern": "[mixer"}, "syntax error in the pattern"),
        ({"norms": "rms"}, "did you mean `norm`"),
        ({"norm": "rmss"}, "did you mean `rms`"),
        ({"init": {"std": -1.0}}, "std must be above 0"),
    ],
)
def test_other_mistakes(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config({"kind": "hyena-li"}, **{"width": 16, **more})


def test_an_unknown_kind() -> None:
    with pytest.raises(ConfigError) as raised:
        config({"kind": "hyena-sr", "groups": 4})
    assert "did you mean `hyena-se`" in str(raised.value)


def test_shipped_models_by_name() -> None:
    config = load_model_config("llama2-7b", ["pattern='[attention] * 2'", "width=512"])
    assert (len(config.layers), config.width) == (2, 512)
    assert config.operators["attention"].heads == 32  # type: ignore[attr-defined]


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError) as raised:
        load_model_config("lama2-7b")
    assert "llama2-7b" in str(raised.value)


@pytest.mark.parametrize("name", sorted(list_shipped_models()))
def test_shipped_models_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    file = tmp_path / "again.yaml"
    file.write_text(dump(load_model_config(name)))
    assert load_model_config(file) == load_model_config(name)


def test_shared_blocks_are_called_at_the_published_layers() -> None:
    calls = {
        "zamba-7b": [2, *range(7, 74, 6)],
        "zamba2-1.2b": [5, 11, 17, 23, 29, 35],
        "zamba2-2.7b": [6, 12, 18, 24, 30, 36, 42, 47, 51],
        "zamba2-7b": [6, *range(11, 78, 6)],
    }
    for name, numbers in calls.items():
        config = load_model_config(name)
        result = [number for number, layer in enumerate(config.layers) if layer.shared]
        assert result == numbers, name
    two = load_model_config("zamba2-7b")
    blocks = [layer.shared for layer in two.layers if layer.shared]
    assert blocks == (["a", "b"] * 7)[:13]


def test_attention_is_at_the_published_layers() -> None:
    for name, numbers in {
        "evo2-1b-8k": [3, 10, 17, 24],
        "evo2-7b-8k": [3, 10, 17, 24, 31],
        "evo2-40b-1m": [3, 10, 17, 24, 31, 35, 42, 49],
        "evo1-7b": [8, 16, 24],
        "mamba-hybrid-9.8b": [9, 18, 27],
        "stripedhyena-7b": list(range(1, 32, 2)),
    }.items():
        assert load_model_config(name).find_layers("attention") == numbers, name
    config = load_model_config("evo2-40b-8k")
    assert [len(config.find_layers(name)) for name in ("se", "mr", "li", "attention")] == [
        14,
        14,
        14,
        8,
    ]
    assert (len(config.layers), config.find_layers("gelu")) == (50, [0])


def test_each_kind_has_its_options_in_both_tables() -> None:
    assert {kind: operator.Options for kind, operator in OPERATORS.items()} == OPTIONS
    for kind, options in OPTIONS.items():
        assert options.kind == kind
        assert options.shared == issubclass(OPERATORS[kind], SharedOperator)
