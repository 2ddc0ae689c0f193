"""Comparison with transformers: logits, every gradient, and folders in both directions."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.console.errors import CheckpointError, ConfigError, StorageError
from headrace.models.config.config import load_model_config
from headrace.models.conversion import FAMILIES
from headrace.models.conversion.family import Unsuitable
from headrace.models.conversion.files import read_safetensors, write_safetensors
from headrace.models.conversion.folders import read_model, write_model
from headrace.models.conversion.rules import export_tensors
from headrace.models.model.model import Model

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

LLAMA = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MIXTRAL = {**LLAMA, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA2 = {
    "vocab_size": 37,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 8,
    "head_dim": 8,
    "num_heads": 8,
    "chunk_size": 8,
    "n_groups": 1,
    "tie_word_embeddings": True,
}
BAMBA = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_layer_indices": [1, 3],
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 4,
    "mamba_chunk_size": 8,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
GPT2 = {
    "vocab_size": 37,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
ZAMBA = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "pad_token_id": None,
    "mamba_d_state": 4,
}
ZAMBA1 = {
    **ZAMBA,
    "num_hidden_layers": 10,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_key_value_heads": 4,
    "n_mamba_heads": 2,
    "use_mamba_kernels": False,
}
ZAMBA2 = {
    **ZAMBA,
    "num_hidden_layers": 7,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba", "hybrid"],
    "n_mamba_heads": 8,
    # With several chunks, transformers' path without kernels sums the decays between them over the
    # wrong axis (its Mamba-2 does not), so one chunk holds the row.
    "chunk_size": 64,
    "adapter_rank": 3,
    "time_step_min": 1e-30,  # a bound of dt on the path without kernels only
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama-gqa-tied": (
        "llama",
        {**LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "llama-head-dim": ("llama", {**LLAMA, "head_dim": 6, "rope_theta": 500.0}),
    "llama-linear": ("llama", {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-llama3": ("llama", {**LLAMA, "rope_scaling": LLAMA3_ROPE}),
    "llama-yarn": ("llama", {**LLAMA, "rope_scaling": YARN}),
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral-window": ("mixtral", {**MIXTRAL, "sliding_window": 7}),
    "mamba": ("mamba", {"vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 2}),
    "mamba-untied": (
        "mamba",
        {
            "vocab_size": 37,
            "hidden_size": 20,
            "num_hidden_layers": 2,
            "state_size": 5,
            "tie_word_embeddings": False,
        },
    ),
    "mamba2": ("mamba2", MAMBA2),
    "mamba2-groups": ("mamba2", {**MAMBA2, "n_groups": 4, "use_bias": True}),
    "bamba": ("bamba", BAMBA),
    "bamba-tied": (
        "bamba",
        {**BAMBA, "mamba_n_groups": 2, "tie_word_embeddings": True, "rope_theta": 300.0},
    ),
    "gpt2": ("gpt2", GPT2),
    "zamba": ("zamba", ZAMBA1),
    "zamba2": ("zamba2", {**ZAMBA2, "num_mem_blocks": 2, "use_mem_rope": True}),
    "zamba2-groups": (
        "zamba2",
        {**ZAMBA2, "mamba_ngroups": 2, "use_shared_attention_adapter": True},
    ),
}

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))


def find_defect(case: str) -> str:
    """Return how an older transformers differs from the code that trains these models, or ""."""
    if case in ("mamba2-groups", "bamba-tied") and VERSION < (5, 23):
        return "all groups of the gated norm are one"
    if case.startswith("bamba") and (5, 0) <= VERSION < (5, 16):
        return "RoPE turns all channels, not half of them"
    if case == "zamba2" and (5, 0) <= VERSION < (5, 24):
        return "corrections stand in the wrong shared block"
    return ""


def theirs_of(case: str) -> Any:
    kind, settings = CASES[case]
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(kind, **settings)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.dim() > 1 else 0.1
            if not name.endswith(("A_log", "dt_bias", "dt_proj.bias", "dt_proj_bias")):
                parameter.add_(scale * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model.eval()


def save(model: Any, folder: Path) -> None:
    """Save as `save_pretrained`, which rejects a Mamba-2 with tied embeddings before version 5."""
    if VERSION >= (5, 0):
        model.save_pretrained(folder)
        return
    model.config.save_pretrained(folder)
    tied = model.config.tie_word_embeddings
    tensors = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if not (tied and name == "lm_head.weight")
    }
    write_safetensors(folder, tensors.items())


def in_files(model: Any, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Return tensors by the names and in the shapes that files of the model have. `tensors` has one
    for each parameter: transformers 5 holds experts together and saves them one by one."""
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        parameter.data = tensors[name].clone()
    save(model, folder)
    return dict(read_safetensors(folder))


def ours_of(folder: Path) -> Model:
    config, tensors = read_model(folder)
    model = Model(config)
    model.load_state_dict(tensors)
    return model.eval()


def tokens(length: int) -> Tensor:
    return torch.randint(0, 37, (2, length), generator=torch.Generator().manual_seed(6))


def loss_gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    probe = torch.randn(logits.shape, generator=torch.Generator().manual_seed(7))
    model.zero_grad()
    (logits * probe).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(case: str, tmp_path: Path) -> None:
    if reason := find_defect(case):
        pytest.skip(reason)
    theirs = theirs_of(case)
    save(theirs, tmp_path / "model")
    ours = ours_of(tmp_path / "model")
    for length in (1, 8, 29):
        ids = tokens(length)
        expected = theirs(ids, use_cache=False).logits
        logits = ours(ids)
        largest = float(expected.detach().abs().max())
        assert (logits - expected).abs().max() < 1e-5 * max(1.0, largest)
    ours_gradients = loss_gradients(ours, logits)
    assert ours_gradients.keys() == {name for name, _ in ours.named_parameters()}
    gradients = dict(export_tensors(FAMILIES[CASES[case][0]].rules(ours.config), ours_gradients))
    expected_gradients = in_files(theirs, loss_gradients(theirs, expected), tmp_path / "gradients")
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        bound = 5e-5 * max(1.0, float(gradient.abs().max()))
        assert (gradients[name] - gradient).abs().max() < bound, name


@pytest.mark.parametrize("case", CASES)
def test_a_round_trip_keeps_every_bit(case: str, tmp_path: Path) -> None:
    if case == "zamba2" and (reason := find_defect(case)):
        pytest.skip(reason)
    theirs = theirs_of(case)
    save(theirs, tmp_path / "theirs")
    config, tensors = read_model(tmp_path / "theirs")
    assert write_model(config, tensors, tmp_path / "ours", format="huggingface") == CASES[case][0]
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name
    ropes = [getattr(options, "rope", None) for options in config.operators.values()]
    if any(rope and rope.scaling in ("none", "linear") for rope in ropes):
        longest = "max_position_embeddings"
        assert getattr(loaded.config, longest) == getattr(theirs.config, longest)
    again, same_tensors = read_model(tmp_path / "ours")
    assert again == config
    assert all(torch.equal(tensors[name], same_tensors[name]) for name in tensors)
    ids = tokens(11)
    with torch.no_grad():
        difference = loaded(ids, use_cache=False).logits - theirs(ids, use_cache=False).logits
    assert difference.abs().max() < 1e-6


@pytest.mark.parametrize(
    ("case", "tensor"),
    [
        ("mamba2", "blocks.0.mixer.operator.conv.taps"),
        ("zamba", "blocks.0.mixer.operator.conv.taps"),
    ],
)
def test_a_reversed_filter_changes_the_logits(case: str, tensor: str, tmp_path: Path) -> None:
    theirs = theirs_of(case)
    save(theirs, tmp_path)
    ours = ours_of(tmp_path)
    taps = ours.get_parameter(tensor)
    taps.data = taps.data.flip(-1)
    ids = tokens(29)
    assert (ours(ids) - theirs(ids, use_cache=False).logits).abs().max() > 1e-4


def test_swapped_gates_change_the_logits(tmp_path: Path) -> None:
    theirs = theirs_of("llama")
    save(theirs, tmp_path)
    ours = ours_of(tmp_path)
    gate_up = ours.get_parameter("blocks.0.mlp.operator.gate_up.weight")
    gate_up.data = gate_up.data.roll(48, dims=0)
    ids = tokens(29)
    assert (ours(ids) - theirs(ids).logits).abs().max() > 1e-3


def test_sharded_folders_are_read(tmp_path: Path) -> None:
    theirs = theirs_of("llama")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    config, tensors = read_model(tmp_path / "theirs")
    write_model(config, tensors, tmp_path / "ours", format="huggingface")
    names = export_tensors(FAMILIES["llama"].rules(config), tensors)
    (tmp_path / "ours" / "model.safetensors").unlink()
    write_safetensors(tmp_path / "ours", names, file_bytes=5000)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name


def edited(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    settings = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in settings.items() if v != "REMOVED"}))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"intermediate_size": 50}, CheckpointError, ["gate_proj", "(100, 32)", "(96, 32)"]),
        ({"num_hidden_layers": 3}, CheckpointError, ["model.layers.2.", "is missing"]),
        ({"num_hidden_layers": 1}, CheckpointError, ["model.layers.1.", "not part of"]),
        ({"hidden_act": "relu"}, ConfigError, ["hidden_act", "relu", "silu"]),
        ({"model_type": "bert"}, ConfigError, ["bert", "llama", "zamba2"]),
        ({"vocab_size": "REMOVED"}, ConfigError, ["vocab_size", "is required"]),
        ({"hidden_size": "32"}, ConfigError, ["hidden_size", "a number, not the text '32'"]),
        ({"rope_scaling": 5}, ConfigError, ["wrong type"]),
        ({"num_key_value_heads": 3}, ConfigError, ["kv_heads (3)", "heads (4)", "layers 0, 1"]),
        ({"partial_rotary_factor": 0.5}, ConfigError, ["partial_rotary_factor", "0.5", "1.0"]),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            ConfigError,
            ["rope_scaling", "dynamic"],
        ),
    ],
)
def test_unfit_folders_are_refused(
    changes: dict[str, Any], error: type[Exception], words: list[str], tmp_path: Path
) -> None:
    save(theirs_of("llama"), tmp_path)
    edited(tmp_path, **changes)
    with pytest.raises(error) as raised:
        read_model(tmp_path)
    for word in words:
        assert word in str(raised.value)


def test_rotary_settings_of_newer_versions_are_read(tmp_path: Path) -> None:
    save(theirs_of("llama-llama3"), tmp_path)
    together = {**LLAMA3_ROPE, "rope_theta": 5e5}
    edited(tmp_path, rope_parameters=together, rope_theta="REMOVED", rope_scaling="REMOVED")
    (attention,) = {read_model(tmp_path)[0].operators["attention"]}
    assert attention.rope.base == 5e5 and attention.rope.scaling == "llama3"  # type: ignore[attr-defined]
    edited(tmp_path, rope_parameters={**together, "partial_rotary_factor": 0.25})
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        read_model(tmp_path)


def test_limited_time_steps_are_refused(tmp_path: Path) -> None:
    save(theirs_of("mamba2"), tmp_path)
    edited(tmp_path, time_step_limit=[0.01, 0.1])
    with pytest.raises(ConfigError, match="time_step_limit"):
        read_model(tmp_path)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    save(theirs_of("llama"), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(StorageError, match=r"model\.safetensors") as raised:
        read_model(tmp_path)
    assert raised.value.hint is not None and "every .safetensors file" in raised.value.hint


def test_a_model_of_no_family_is_refused(tmp_path: Path) -> None:
    config = load_model_config("tiny-hybrid")
    with pytest.raises(CheckpointError) as raised:
        write_model(config, Model(config).state_dict(), tmp_path / "out", format="huggingface")
    for family in FAMILIES:
        assert f"{family}: " in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_bamba_of_attention_alone_is_refused_with_the_reason() -> None:
    layers = list(range(BAMBA["num_hidden_layers"]))
    config = FAMILIES["bamba"].read(
        transformers.BambaConfig(**{**BAMBA, "attn_layer_indices": layers}).to_dict()
    )
    with pytest.raises(Unsuitable, match="`mamba`, and transformers counts the tokens"):
        FAMILIES["bamba"].write(config)
