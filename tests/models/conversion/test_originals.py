"""Folders as their authors publish them: of mamba_ssm and BlackMamba, in torch's `.bin` files, and
those that transformers saves itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.console.errors import CheckpointError, ConfigError, StorageError
from headrace.models.conversion.files import write_safetensors
from headrace.models.conversion.folders import convert, read_model
from headrace.models.model.model import Model

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

from transformers.models.mamba.modeling_mamba import MambaMixer  # noqa: E402
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated  # noqa: E402

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
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
    "num_hidden_layers": 13,
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
    "num_mem_blocks": 2,
    "n_mamba_heads": 8,
    "chunk_size": 64,
    "adapter_rank": 3,
    "time_step_min": 1e-30,
}
MAMBA = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
MAMBA2 = {**MAMBA, "head_dim": 8, "num_heads": 8, "chunk_size": 8, "n_groups": 4}


def theirs_of(kind: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(kind, **settings)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(("A_log", "dt_bias", "dt_proj.bias", "dt_proj_bias")):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def ours_of(folder: Path) -> Model:
    config, tensors = read_model(folder)
    model = Model(config)
    model.load_state_dict(tensors)
    return model.eval()


def max_difference(ours: Model, theirs: Callable[[Tensor], Tensor]) -> float:
    """Return the greatest difference of the logits, relative to the largest."""
    ids = torch.randint(0, 37, (2, 29), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        expected = theirs(ids)
        return float((ours(ids) - expected).abs().max() / expected.abs().max().clamp(min=1))


def logits_of(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda ids: model(ids, use_cache=False).logits


def test_a_zamba_that_transformers_saved_is_read(tmp_path: Path) -> None:
    """It keeps the shared weights under one call, not the first."""
    theirs = theirs_of("zamba", ZAMBA1)
    theirs.save_pretrained(tmp_path)
    assert max_difference(ours_of(tmp_path), logits_of(theirs)) < 1e-5


def test_a_zamba2_that_transformers_saved_is_read(tmp_path: Path) -> None:
    """transformers 4.57 can save it as `.bin` files alone, with the weights under every call."""
    if (5, 0) <= VERSION < (5, 24):
        pytest.skip("corrections stand in the wrong shared block")
    theirs = theirs_of("zamba2", ZAMBA2)
    theirs.save_pretrained(tmp_path / "whole", safe_serialization=False)
    assert max_difference(ours_of(tmp_path / "whole"), logits_of(theirs)) < 1e-5
    theirs.save_pretrained(tmp_path / "cut", safe_serialization=False, max_shard_size="40KB")
    assert len([*(tmp_path / "cut").glob("*.bin"), *(tmp_path / "cut").glob("*.safetensors")]) > 2
    assert max_difference(ours_of(tmp_path / "cut"), logits_of(theirs)) < 1e-5


def test_copies_of_a_shared_weight_that_differ_are_refused(tmp_path: Path) -> None:
    theirs = theirs_of("zamba", ZAMBA1)
    theirs.config.save_pretrained(tmp_path)
    tied = ("lm_head.weight",)
    state = {n: t.clone() for n, t in theirs.state_dict().items() if n not in tied}
    write_safetensors(tmp_path, state.items())
    assert max_difference(ours_of(tmp_path), logits_of(theirs)) < 1e-5
    changed = "model.layers.4.shared_transf.feed_forward.down_proj.weight"
    state[changed][0, 0] += 1
    write_safetensors(tmp_path, state.items())
    with pytest.raises(CheckpointError, match=r"layers\.2\..* and .*layers\.4\..*differ"):
        ours_of(tmp_path)


def as_mamba_ssm(model: Any, folder: Path, **ssm: Any) -> None:
    """Write a folder as mamba_ssm's `save_pretrained` does."""
    settings = {
        "d_model": 32,
        "n_layer": 2,
        "vocab_size": 37,
        "ssm_cfg": ssm,
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
        "tie_embeddings": True,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    names = {
        n: n.replace("backbone.embeddings.", "backbone.embedding.") for n in model.state_dict()
    }
    torch.save({names[n]: t for n, t in model.state_dict().items()}, folder / "pytorch_model.bin")


def test_folders_of_mamba_ssm_are_read(tmp_path: Path) -> None:
    mamba = theirs_of("mamba", MAMBA)
    as_mamba_ssm(mamba, tmp_path / "mamba", d_state=8)
    assert max_difference(ours_of(tmp_path / "mamba"), logits_of(mamba)) < 1e-5
    plain = {**MAMBA2, "n_groups": 1, "tie_word_embeddings": True}
    mamba2 = theirs_of("mamba2", plain)
    as_mamba_ssm(mamba2, tmp_path / "mamba2", layer="Mamba2", d_state=8, headdim=8)
    assert max_difference(ours_of(tmp_path / "mamba2"), logits_of(mamba2)) < 1e-5
    convert(tmp_path / "mamba2", tmp_path / "again", format="huggingface")
    assert max_difference(ours_of(tmp_path / "again"), logits_of(mamba2)) < 1e-5

    def refused(**ssm: Any) -> str:
        file = tmp_path / "mamba2" / "config.json"
        settings = json.loads(file.read_text())
        file.write_text(json.dumps({**settings, "ssm_cfg": {"layer": "Mamba2", **ssm}}))
        with pytest.raises(ConfigError) as raised:
            read_model(tmp_path / "mamba2")
        return str(raised.value)

    assert "ssm_cfg.d_stat: is not supported" in refused(d_stat=8)
    assert "norm_before_gate" in refused(norm_before_gate=True)


def test_several_groups_of_mamba2_have_a_grouped_norm(tmp_path: Path) -> None:
    """As mamba_ssm trains them. transformers' Mamba-2 has one group before version 5.23; its Zamba2
    has the grouped norm, which is the oracle here."""
    theirs = theirs_of("mamba2", {**MAMBA2, "tie_word_embeddings": True})
    theirs.config.save_pretrained(tmp_path / "hf")
    state = {n: t for n, t in theirs.state_dict().items() if n != "lm_head.weight"}
    write_safetensors(tmp_path / "hf", state.items())
    as_mamba_ssm(theirs, tmp_path / "ssm", layer="Mamba2", d_state=8, headdim=8, ngroups=4)
    convert(tmp_path / "ssm", tmp_path / "written", format="huggingface")
    for layer in theirs.backbone.layers:
        grouped = Zamba2RMSNormGated(64, group_size=16, eps=1e-5)
        grouped.weight = layer.mixer.norm.weight
        layer.mixer.norm = grouped
    for name in ("hf", "ssm", "written"):
        assert max_difference(ours_of(tmp_path / name), logits_of(theirs)) < 1e-5
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "norm_groups": 1}))
    assert max_difference(ours_of(tmp_path / "hf"), logits_of(theirs)) > 1e-3, "a negative control"
    with pytest.raises(CheckpointError, match="mamba2: its gated norm has not 4 groups"):
        convert(tmp_path / "hf", tmp_path / "out", format="huggingface")


class Experts(nn.Module):
    """BlackMamba's MLP, or its router and experts, at evaluation."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        if experts > 1:
            self.router = nn.Linear(32, experts)
            self.local_experts = nn.ModuleList(Experts(1) for _ in range(experts))
        else:
            self.linear_fc1 = nn.Linear(32, 40, bias=False)
            self.linear_fc2 = nn.Linear(20, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "router"):
            gate, up = self.linear_fc1(x).chunk(2, dim=-1)
            y: Tensor = self.linear_fc2(F.gelu(gate) * up)
            return y
        best, index = self.router(x).sigmoid().max(dim=-1)
        every = torch.stack([expert(x) for expert in self.local_experts], dim=-2)
        chosen = every.gather(-2, index[..., None, None].expand(*index.shape, 1, 32)).squeeze(-2)
        return chosen * best.unsqueeze(-1)


class Layer(nn.Module):
    """A layer of BlackMamba; `r8` and `r1` have Mamba and MLP side by side, each with its norm."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        mamba = transformers.MambaConfig(hidden_size=32, state_size=4, use_cache=False)
        self.norm = nn.RMSNorm(32, eps=1e-5)
        self.mixer = MambaMixer(mamba, 0) if kind[0] == "r" else Experts(int(kind))
        if kind[0] == "r" and len(kind) == 2:
            self.norm_moe = nn.RMSNorm(32, eps=1e-5)
            self.moe = Experts(int(kind[1]))

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        y: Tensor = self.mixer(normal)
        return x + (y + self.moe(self.norm_moe(x)) if hasattr(self, "moe") else y)


class Published(nn.Module):
    """BlackMamba with the names of its published tensors."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.embedding = nn.ModuleDict({"word_embeddings": nn.Embedding(37, 32)})
        layers = nn.ModuleList(map(Layer, kinds))
        last = nn.LayerNorm(32, eps=1e-5)
        self.decoder = nn.ModuleDict({"layers": layers, "final_layernorm": last})

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding["word_embeddings"](ids)
        for layer in self.decoder["layers"].children():
            x = layer(x)
        return self.decoder["final_layernorm"](x) @ self.embedding["word_embeddings"].weight.T


BLACKMAMBA = {
    "hidden_size": 32,
    "state_size": 4,
    "conv_dimension": 4,
    "vocab_size": 37,
    "expansion_factor": 2,
    "ffn_hidden_size": 20,
    "add_bias_linear": False,
    "swiglu": True,
    "max_sequence_length": 64,
}


def as_blackmamba(folder: Path, kinds: list[str], **changes: Any) -> Published:
    torch.manual_seed(2)
    model = Published(kinds).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    settings = {**BLACKMAMBA, "num_layers": len(kinds), "mamba_moe_layers": kinds, **changes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    torch.save({"model": model.state_dict(), "step": 7}, folder / "pytorch_model.bin")
    return model


def test_blackmambas_layers_are_read(tmp_path: Path) -> None:
    """Mamba, an MLP, experts, and Mamba with either beside it."""
    theirs = as_blackmamba(tmp_path / "all", ["r", "4", "r1", "1", "r4"])
    ours = ours_of(tmp_path / "all")
    assert [str(layer) for layer in ours.config.layers] == [
        *("mamba", "moe4", "mamba&mlp", "mlp", "mamba&moe4")
    ]
    assert max_difference(ours, theirs) < 1e-5
    convert(tmp_path / "all", tmp_path / "again", format="headrace")
    assert max_difference(ours_of(tmp_path / "again"), theirs) < 1e-5
    with pytest.raises(CheckpointError, match="no family of transformers"):
        convert(tmp_path / "all", tmp_path / "out", format="huggingface")


def test_an_mlp_after_the_mixer_is_another_function(tmp_path: Path) -> None:
    """Negative control of parallel layers."""
    theirs = as_blackmamba(tmp_path / "all", ["r4"])
    parallel_blocks = ours_of(tmp_path / "all")
    assert max_difference(parallel_blocks, theirs) < 1e-5
    for block in parallel_blocks.typed_blocks():
        object.__setattr__(block.layer, "parallel", False)
    assert max_difference(parallel_blocks, theirs) > 1e-3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mamba_moe_layers": ["r", "16"]}, "`16` is not a layer"),
        ({"num_layers": 3}, "names 2 layers, and num_layers is 3"),
        ({"add_bias_linear": True}, "add_bias_linear"),
        ({"swiglu": False}, "swiglu"),
    ],
)
def test_unfit_blackmambas_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    as_blackmamba(tmp_path / "all", ["r", "4"], **changes)
    with pytest.raises(ConfigError, match=words):
        read_model(tmp_path / "all")


def test_folders_without_weights_or_without_a_known_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 32}))
    with pytest.raises(ConfigError, match="model_type: is missing, and so is `mamba_moe_layers`"):
        read_model(tmp_path)
    theirs_of("mamba", MAMBA).config.save_pretrained(tmp_path)
    with pytest.raises(StorageError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        read_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"rubbish")
    with pytest.raises(StorageError, match=r"pytorch_model\.bin is damaged"):
        read_model(tmp_path)
