"""Families of hybrids beside transformers: logits, every gradient, a step, generation, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from packaging.version import Version
from support.models.families import CASES
from support.models.peers import load_theirs, without_fla
from torch import Tensor

from headrace.console import config as reader
from headrace.console.errors import CheckpointError, ConfigError
from headrace.models.cli import main
from headrace.models.config.config import ModelConfig
from headrace.models.conversion import FAMILIES, ORIGINALS
from headrace.models.conversion.family import TRANSFORMERS, settings_errors
from headrace.models.conversion.files import read_json, read_safetensors, write_safetensors
from headrace.models.conversion.folders import convert, read_model, write_model
from headrace.models.conversion.huggingface import choose_family
from headrace.models.conversion.published import list_published
from headrace.models.model.generate import Sampling, generate
from headrace.models.model.model import Model

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Iterator[str]:
    """Let classes of transformers compute in plain torch."""
    name: str = request.param
    with without_fla():
        yield name


each_case = pytest.mark.parametrize("case", CASES, indirect=True)


def build_config(kind: str, settings: dict[str, Any]) -> Any:
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    return transformers.AutoConfig.for_model(kind, **settings)


def build_theirs(case: str) -> Any:
    torch.manual_seed(5)
    config = build_config(*CASES[case])
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.dim() > 1 else 0.1
            if not name.endswith(("A_log", "dt_bias")):
                parameter.add_(scale * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    return model.eval()


def load_ours(folder: Path) -> Model:
    config, tensors = read_model(folder)
    model = Model(config)
    model.load_state_dict(tensors)
    return model.eval()


def draw_tokens(length: int) -> Tensor:
    return torch.randint(0, 37, (2, length), generator=torch.Generator().manual_seed(6))


def backward(model: Any, logits: Tensor) -> None:
    probe = torch.randn(logits.shape, generator=torch.Generator().manual_seed(7))
    model.zero_grad()
    (logits * probe).sum().backward()


@each_case
def test_logits_gradients_and_a_step_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs = build_theirs(case)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_ours(tmp_path / "theirs")
    for length in (1, 29):
        ids = draw_tokens(length)
        logits, expected = ours(ids), theirs(ids, use_cache=False).logits
        assert (logits - expected).abs().max() < 1e-5 * max(1.0, float(expected.detach().max()))
    backward(ours, logits)
    backward(theirs, expected)
    # Gradients take the way of weights into their names.
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in ours.named_parameters()
    }
    write_model(
        ours.config,
        gradients,
        tmp_path / "gradients",
        format="huggingface",
        family=CASES[case][0],
    )
    loaded = load_theirs(tmp_path / "gradients")
    for name, parameter in theirs.named_parameters():
        bound = 5e-5 * max(1.0, float(parameter.grad.abs().max()))
        assert (loaded.get_parameter(name) - parameter.grad).abs().max() < bound, name
    for model in (ours, theirs):
        torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.1).step()
    stepped = theirs(ids, use_cache=False).logits
    assert (stepped - expected).abs().max() > 0.01, "a negative control"
    assert (ours(ids) - stepped).abs().max() < 1e-4 * max(1.0, float(stepped.detach().max()))


@each_case
def test_the_way_back_keeps_every_bit_and_generates(case: str, tmp_path: Path) -> None:
    theirs = build_theirs(case)
    theirs.save_pretrained(tmp_path / "theirs")
    config, tensors = read_model(tmp_path / "theirs")
    ours = write_model(
        config, tensors, tmp_path / "ours", format="huggingface", family=CASES[case][0]
    )
    assert ours == CASES[case][0]
    loaded = load_theirs(tmp_path / "ours")
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name
    ropes = [getattr(options, "rope", None) for options in config.operators.values()]
    if any(ropes):
        longest = "max_position_embeddings"
        assert getattr(loaded.config, longest) == getattr(theirs.config, longest)
    again, same_tensors = read_model(tmp_path / "ours")
    assert again == config
    assert all(torch.equal(tensors[name], same_tensors[name]) for name in tensors)
    ids = draw_tokens(9)
    continued = loaded.generate(ids, max_new_tokens=6, do_sample=False)
    greedy = Sampling(temperature=0)
    model = load_ours(tmp_path / "ours")
    assert continued[:, 9:].tolist() == generate(model, ids.tolist(), 6, sampling=greedy)


class Recorded(dict[str, Any]):
    """Settings that record the keys that are read."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.keys_read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.keys_read.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("a family reads the keys that it knows")


WITHOUT_EFFECT = {
    *("model_type", "architectures", "dtype", "transformers_version", "initializer_range"),
    *("linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor"),
    *("linear_dt_max", "linear_dt_min", "max_position_embeddings"),
    *(
        "output_router_logits",
        "use_cache",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "attention_dropout",
    ),
    *("mamba_ssm_cache_dtype", "num_logits_to_keep", "use_mamba_kernels"),
    *("time_step_min", "time_step_max", "time_step_floor", "residual_in_fp32", "hidden_dropout"),
    *("rescale_prenorm_residual", "chunk_size", "mamba_chunk_size", "mtp_layers_block_type"),
    *("num_nextn_predict_layers", "model_max_length"),
    *("moe_shared_expert_overlap", "expand", "n_shared_experts"),
}
"""Keys that change neither logits nor gradients in evaluation."""
SAID_BY_ANOTHER = {"max_window_layers", "full_attn_idxs", "mamba_n_heads", "mamba_proj_bias"}
SAID_BY_ANOTHER |= {"head_dim", "qk_head_dim", "mamba_d_ssm", "mamba_expand"}


@pytest.mark.parametrize("kind", dict.fromkeys(kind for kind, _ in CASES.values()))
def test_every_key_of_the_class_is_read(kind: str, tmp_path: Path) -> None:
    """A key that we do not know could change what a model computes."""
    keys, keys_read = set(), set()
    for _, options in (case for case in CASES.values() if case[0] == kind):
        build_config(kind, options).save_pretrained(tmp_path)
        settings = Recorded(read_json(tmp_path / "config.json"))
        FAMILIES[kind].read(settings)
        keys |= settings.keys()
        keys_read |= settings.keys_read
    assert not keys - keys_read - WITHOUT_EFFECT - SAID_BY_ANOTHER


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("qwen3", {"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ("qwen3-windows", {"layer_types": ["chunked_attention"] * 2}, ["layer_types", "chunked"]),
        ("qwen3-windows", {"layer_types": ["full_attention"]}, ["layer_types", "names 1 layer,"]),
        ("lfm2", {"conv_bias": True}, ["conv_bias", "True"]),
        ("lfm2", {"num_attention_heads": None}, ["num_attention_heads", "is required"]),
    ],
    indirect=["case"],
)
def test_settings_that_we_lack_are_refused_by_name(
    case: str, changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    settings = {"model_type": CASES[case][0], **CASES[case][1], **changes}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError) as raised:
        read_model(tmp_path)
    assert not [word for word in words if word not in str(raised.value)]


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        (
            "lfm2",
            ["operators.attention.softmax_scale=3"],
            "lfm2: operators.attention.softmax_scale is 3.0, not",
        ),
        ("lfm2", ["operators.conv.groups=8"], "lfm2: operators.conv.groups is 8, not 32"),
        (
            "lfm2",
            ["operators.attention.qk_norm_eps=1"],
            "`norm_eps` has one value for all layers, not 1.0",
        ),
        ("qwen3", ["norm=layer"], "qwen3: norm is 'layer', not 'rms'"),
        ("nemotron_h", ["tie_embeddings=true"], "nemotron_h: tie_embeddings is True, not False"),
        (
            "gpt_oss",
            ["operators.attention.softmax_scale=3"],
            "nemotron_h: it has no layer like `attention/moe`",
        ),
        ("qwen3", ["pattern='[attention/none]'"], "qwen3: it has no layer like `glu`"),
        ("qwen3", ["operators.glu.bias=true"], "qwen3: operators.glu.bias is True, not False"),
    ],
)
def test_what_a_family_cannot_say_is_named(case: str, changes: list[str], reason: str) -> None:
    kind, settings = CASES[case]
    config = FAMILIES[kind].read({**settings, "model_type": kind})
    data = reader.apply_overrides(reader.plain(config), changes)
    if "none" in changes[0]:
        del data["operators"]["glu"]
    changed = reader.build(ModelConfig, data, source="a test")
    with pytest.raises(CheckpointError) as raised:
        choose_family(changed)
    assert reason in str(raised.value)
    assert choose_family(config)[0] == kind


def test_a_family_can_be_named(tmp_path: Path) -> None:
    """Several can say a model; a folder stays of its own."""
    config = FAMILIES["qwen3_5_moe_text"].read(CASES["qwen3_5_moe"][1])
    model = Model(config)
    model.init_weights(1)
    write_model(config, model.state_dict(), tmp_path / "ours", format="headrace")

    def convert(source: str, out: str, *words: str, code: int = 0) -> str:
        folders = [str(tmp_path / source), str(tmp_path / out)]
        done = CliRunner().invoke(main, ["convert", *folders, *words])
        assert done.exit_code == code, done.output
        return done.stderr

    huggingface = ("--format", "huggingface")
    assert "a: qwen3_next" in convert("ours", "a", *huggingface)
    named = (*huggingface, "--family", "qwen3_5_moe_text")
    assert "b: qwen3_5_moe_text" in convert("ours", "b", *named)
    assert "c: qwen3_5_moe_text" in convert("b", "c", *huggingface)
    refused = convert("ours", "d", *huggingface, "--family", "llama", code=1)
    assert "llama: operators.delta is of kind delta" in refused and "gpt2" not in refused
    vortex = convert("ours", "d", "--format", "vortex", "--family", "llama", code=1)
    assert "the format vortex has no families" in vortex


def test_heads_for_further_tokens_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = FAMILIES["qwen3_next"].read(CASES["qwen3_next"][1])
    model = Model(config)
    model.init_weights(1)
    write_model(config, model.state_dict(), tmp_path / "out", format="huggingface")
    tensors = dict(read_safetensors(tmp_path / "out"))
    assert read_model(tmp_path / "out") and not caplog.text
    write_safetensors(tmp_path / "out", [*tensors.items(), ("mtp.fc.weight", torch.ones(2))])
    assert read_model(tmp_path / "out")[1].keys() == model.state_dict().keys()
    assert "what predicts tokens after the next is left out (1 tensors)" in caplog.text
    write_safetensors(tmp_path / "out", [*tensors.items(), ("other.weight", torch.ones(2))])
    with pytest.raises(CheckpointError, match=r"other\.weight is not part of this model"):
        read_model(tmp_path / "out")


def test_the_table_has_each_family() -> None:
    rows = {row.family: row for row in list_published()}
    assert len(rows) == len(FAMILIES) + len(ORIGINALS) + 2
    assert rows["Lfm2"].operators == ("hyena-mlp", "attention", "glu")
    assert rows["Zamba2"].writes and not rows["BlackMamba"].writes
    assert Version(transformers.__version__) <= Version(TRANSFORMERS.split()[1]), "renew it"


def build_multimodal(case: str) -> Any:
    """Build a small model for images and text whose text model is that of the case."""
    kind, settings = CASES[case]
    vision = {
        "depth": 1,
        "hidden_size": 8,
        "num_heads": 2,
        "intermediate_size": 12,
        "patch_size": 2,
        "num_position_embeddings": 4,
        "out_hidden_size": settings["hidden_size"],
    }
    torch.manual_seed(5)
    tied = settings.get("tie_word_embeddings", False)
    config = build_config(
        kind.removesuffix("_text"),
        {
            "text_config": {**settings, "model_type": kind},
            "vision_config": vision,
            "tie_word_embeddings": tied,
        },
    )
    config._attn_implementation = "eager"
    return transformers.AutoModelForImageTextToText.from_config(config).eval()


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_moe"], indirect=True)
def test_the_text_model_of_a_multimodal_folder_is_read(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = build_multimodal(case)
    theirs.save_pretrained(tmp_path / "theirs")
    ids = draw_tokens(9)
    logits = load_ours(tmp_path / "theirs")(ids)
    expected = theirs(input_ids=ids, use_cache=False).logits
    assert (logits - expected).abs().max() < 1e-5
    assert "model.visual (" in caplog.text and "not model.visual" in caplog.text
    convert(tmp_path / "theirs", tmp_path / "ours", format="huggingface")
    assert read_json(tmp_path / "ours" / "config.json")["model_type"] == CASES[case][0]
    assert (load_theirs(tmp_path / "ours")(ids).logits - expected).abs().max() < 1e-5


def test_layers_for_further_tokens_are_left_out(tmp_path: Path) -> None:
    config = FAMILIES["deepseek_v3"].read(CASES["deepseek_v3"][1])
    model = Model(config)
    model.init_weights(1)
    write_model(config, model.state_dict(), tmp_path / "out", format="huggingface")
    tensors = dict(read_safetensors(tmp_path / "out"))
    extra = ("model.layers.3.eh_proj.weight", torch.ones(2))
    write_safetensors(tmp_path / "out", [*tensors.items(), extra])
    with pytest.raises(CheckpointError, match=r"layers\.3\.eh_proj\.weight is not part"):
        read_model(tmp_path / "out")
    settings = read_json(tmp_path / "out" / "config.json")
    settings["num_nextn_predict_layers"] = 1
    (tmp_path / "out" / "config.json").write_text(json.dumps(settings))
    assert read_model(tmp_path / "out")[1].keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("qwen3_5", "attn_output_gate", False),
        ("qwen3_5_moe", "output_gate_type", "sigmoid"),
        ("falcon_h1", "mamba_use_mlp", False),
        ("granite", "normalization_function", "layernorm"),
        ("lfm2", "use_pos_enc", False),
        ("kimi", "attn_res_block_size", 12),
        ("kimi", "linear_attn_config", {"num_heads": 3, "gate_lower_bound": -5.0}),
    ],
)
def test_keys_of_other_code_are_refused_by_name(case: str, key: str, value: Any) -> None:
    """Published files have keys that classes of transformers overlook."""
    kind, settings = CASES[case]
    with pytest.raises(ConfigError, match=key), settings_errors(Path("config.json"), settings):
        FAMILIES[kind].read({**settings, key: value})
