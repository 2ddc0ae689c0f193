"""Savanna's configurations become models, mixtures and runs; every key has a fate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.models.savanna_configs import DATA, FREEFORM, SHORT_MLP, STRIPED

from docs.generate.other_programs import other_programs_page
from headrace.console import config as reader
from headrace.models.accounting.count import build_meta
from headrace.models.cli import main
from headrace.models.config.config import ModelConfig, load_model_config
from headrace.models.config.options.hyena_li import HyenaLIOptions
from headrace.models.conversion.savanna.keys import ELSEWHERE, USED
from headrace.models.conversion.savanna.limits import MISSING, REFUSED
from headrace.models.conversion.savanna.settings import read_settings


def convert(folder: Path, *texts: str, dp: int | None = 2, code: int = 0) -> Result:
    files = []
    for number, text in enumerate(texts):
        files.append(folder / f"{number}.yml")
        files[-1].write_text(text)
    words = [*map(str, files), str(folder / "out"), "--format", "headrace"]
    more = ["--dp", str(dp)] if dp else []
    result = CliRunner().invoke(main, ["convert", *words, *more])
    assert result.exit_code == code, result.output
    return result


def yaml(folder: Path, name: str) -> dict[str, Any]:
    return reader.read_yaml(folder / "out" / name)[0]


def model(folder: Path) -> ModelConfig:
    return load_model_config(folder / "out" / "model.yaml")


def test_a_production_model_is_expressed(tmp_path: Path) -> None:
    said = convert(tmp_path, STRIPED, DATA).output
    result = model(tmp_path)
    assert [str(layer) for layer in result.layers] == ["se", "mr", "li", "attention", "se", "li"]
    # The first long filter sets the activation of its own layer's MLP and of all later ones.
    operators: dict[str, Any] = dict(result.operators)
    activations = [operators[layer.mlp or ""].activation for layer in result.layers]
    assert activations == ["gelu"] + ["identity"] * 5
    assert operators["mlp-gelu"].hidden == 256  # 8/3 of the width, rounded up to 128s
    li, mr = operators["li"], operators["mr"]
    assert isinstance(li, HyenaLIOptions) and li.rates == "product"
    assert (mr.decay, mr.decay_repeats, mr.filter_horizon) == ("weak", 2, 128)
    assert (result.vocab_size, result.norm, result.norm_eps) == (512, "rms-eps-outside", 1e-6)
    assert (result.init.weights, result.init.output) == ("small", "wang")
    build_meta(result)
    run, mixture = yaml(tmp_path, "run.yaml"), yaml(tmp_path, "mixture.yaml")
    assert run["optimizer"] == {
        "kind": "adamw",
        "lr": 2e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "decay": "savanna",
        "clip": 1.0,
    }
    assert run["engine"]["zero"] == 1 and run["recompute"] == "block"
    assert run["checkpoints"] == {"every": 200, "keep_last": 10, "keep_every": 400}
    assert "layout" not in run
    assert run["micro_batch_tokens"] == 8 * 128 and run["precision"] == "bf16"
    (phase,) = mixture["phases"].values()
    assert (phase["batch"], phase["tokens"]) == (16 * 128, 400 * 16 * 128)
    assert phase["lr"] == {
        "warmup": 6 * 16 * 128,
        "shape": "savanna",
        "style": "cosine",
        "end": pytest.approx(0.1),
    }
    assert list(phase["weights"].values()) == [pytest.approx(0.75), pytest.approx(0.25)]
    # The keys that it cannot express, and no other.
    lines = [line for line in said.splitlines() if line.startswith("not expressible: ")]
    assert [line.split(": ")[1] for line in lines] == ["eod_mask_loss", "use_fp8_mlp_projections"]


def test_short_filters_as_mlps_and_old_names_are_expressed(tmp_path: Path) -> None:
    convert(tmp_path, SHORT_MLP, dp=3)
    result = model(tmp_path)
    assert [str(layer) for layer in result.layers] == ["se", "mr", "li", "li"]
    assert result.operators["li"].kind == "hyena-li-factored"
    short: Any = result.operators[result.mlp or ""]
    assert (short.kind, short.hidden, short.groups) == ("hyena-mlp", 96, 96)
    se: Any = result.operators["se"]
    assert (se.taps, se.pregate, se.postgate) == (7, False, True)
    (phase,) = yaml(tmp_path, "mixture.yaml")["phases"].values()
    assert phase["batch"] == 4 * 2 * 3 * 64 and phase["lr"]["period"] == 200 * phase["batch"]


def test_free_form_filters_start_as_there(tmp_path: Path) -> None:
    convert(tmp_path, FREEFORM, dp=None)
    li: Any = model(tmp_path).operators["li"]
    assert (li.kind, li.features, li.inner_layers) == ("hyena-li-freeform", 9, 1)
    assert (li.frequency, li.learned_decay, li.last_start) == (14.0, True, "xavier")
    (phase,) = yaml(tmp_path, "mixture.yaml")["phases"].values()
    assert phase["lr"]["style"] == "linear" and phase["batch"] == 8 * 64


@pytest.mark.parametrize(
    "kind",
    [
        "implicit_modal",
        "implicit_complex_modal",
        "implicit_real_modal",
        "implicit_freeform",
        "explicit_single_decay",
    ],
)
def test_slow_heads_and_shared_long_filters_are_expressed(tmp_path: Path, kind: str) -> None:
    text = STRIPED.replace("use_slow_heads: false", "use_slow_heads: true")
    text = text.replace("num_groups_hyena: 64", "num_groups_hyena: 16")
    convert(tmp_path, text.replace("filter_cls: implicit_modal", f"filter_cls: {kind}"))
    result = model(tmp_path)
    operators: dict[str, Any] = dict(result.operators)
    li, mr, se = (operators[name] for name in ("li", "mr", "se"))
    assert (li.groups, li.slow_heads) == (16, True)
    assert (mr.groups, mr.slow_heads) == (8, True)
    assert not hasattr(se, "slow_heads"), "Savanna's short filters have no heads"
    shapes = {name: tuple(p.shape) for name, p in build_meta(result).named_parameters()}
    assert shapes["blocks.1.mixer.operator.skip"] == (8,)
    assert shapes["blocks.2.mixer.operator.skip"] == (16,)


@pytest.mark.parametrize("text", [STRIPED, SHORT_MLP, FREEFORM])
def test_every_key_has_one_fate(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.yml"
    file.write_text(text)
    settings = read_settings([file])
    keys = [key for key, _, _ in settings.fates()]
    assert sorted(set(keys)) == sorted(keys)
    assert set(settings.values_by_key) <= set(keys)
    convert(tmp_path, text)
    head = (tmp_path / "out" / "run.yaml").read_text()
    for key, fate, _ in settings.fates():
        assert fate == "used" or f"#   {key}: " in head, key


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("use_fast_heads: true", "use_fast_heads: True is not expressible"),
        ("num_groups_hyena: 7", "groups (7) does not divide"),
        ("pos_emb: alibi", "pos_emb: 'alibi' is not expressible"),
        ("pre_mlp_norm: false", "pre_mlp_norm: False is not expressible"),
        ("hyena_medium_filter_cls: implicit_real_modal", "hyena_medium_filter_cls"),
        ("init_method: orthogonal", "init_method: 'orthogonal'"),
        ("operator-config: [[[hyena_outer], 6]]", "no operator for `hyena_outer`"),
        ("operator-config: [[[hyena], 5]]", "names 5 layers"),
        ("tokenizer_type: HFTokenizer", "vocabulary of HFTokenizer"),
        ("hyena_se_lenn: 7", "did you mean `hyena_se_len`?"),
        ("num_groups_hyena_short: 7", "groups (7) does not divide"),
    ],
)
def test_another_model_is_refused_by_name(tmp_path: Path, change: str, named: str) -> None:
    key = change.partition(":")[0]
    kept = [line for line in STRIPED.splitlines() if not line.startswith(key + ":")]
    if key == "operator-config":
        kept = [line for line in kept if not line.startswith("  - ")]
    assert named in convert(tmp_path, "\n".join([*kept, change]), code=1).output
    assert not (tmp_path / "out").exists()


def test_plain_mlps_keep_their_activation_of_fused_kernels(tmp_path: Path) -> None:
    plain = FREEFORM.replace("mlp_type: llama", "mlp_type: regular")
    plain = plain.replace('[[["hyena", "flash_v2"], all]]', '[[["flash_v2"], all]]')
    for name, fused, activation in (("a", "false", "gelu"), ("b", "true", "gelu-tanh")):
        folder = tmp_path / name
        folder.mkdir()
        convert(folder, plain.replace("bias-gelu-fusion: false", f"bias-gelu-fusion: {fused}"))
        result = model(folder)
        mlp: Any = result.operators[result.mlp or ""]
        assert (mlp.kind, mlp.activation, mlp.bias) == ("mlp", activation, True)


def test_two_files_cannot_set_one_key(tmp_path: Path) -> None:
    said = convert(tmp_path, STRIPED, "seq-length: 64\n", code=1).output
    assert "seq-length: is set in" in said
    said = convert(tmp_path, STRIPED, dp=None, code=1).output
    assert "train_batch_size: is missing" in said and "--dp" in said


def test_training_settings_that_are_missing_are_named(tmp_path: Path) -> None:
    text = STRIPED.replace("type: Adam,", "type: Sophia,")
    text = text.replace("precision: bfloat16", "precision: fp16")
    text = text.replace("hidden-dropout: 0.0\n", "")
    assert "precision: 'fp16'" in convert(tmp_path, text).output
    (tmp_path / "out").rename(tmp_path / "before")
    text = text.replace("precision: fp16\n", "fp16: {enabled: true}\n")
    said = convert(tmp_path, text + "use_mup: true\n").output
    for named in ("optimizer: Sophia", "precision: 'fp16'", "use_mup: True"):
        assert f"not expressible: {named}" in said
    assert "hidden_dropout: 0.1 (Savanna's default)" in said


def test_the_reference_shows_every_key() -> None:
    shown = {
        (key, place)
        for line in other_programs_page().splitlines()
        if line.startswith("| `")
        for keys, place in [line.strip("| ").split(" | ", 1)]
        for key in keys.replace("`", "").split(", ")
    }
    tables = [{key: ours for key, (_, ours) in USED.items()}, ELSEWHERE]
    tables += [{key: why for key, (_, _, why) in table.items()} for table in (MISSING, REFUSED)]
    assert {entry for table in tables for entry in table.items()} <= shown
