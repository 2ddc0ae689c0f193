"""StripedHyena 2 in the layout of Vortex: a YAML file, and the tensors of a `.pt` file.

Where theirs differs from ours:

    projections, short filter     the rows of q, k and v by turns, for each channel
    attention's Wqkv              q, k and v by turns, for each head
    short and SE filters          the present token comes last
    MR filters                    with their decay in them
    LI filters                    `log_poles` (minus the rate) and `residues`
    activations                   `evo2_style_activations`: an identity in every layer but the first
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...console import config as reader
from ...console.errors import CheckpointError, ConfigError, Problem, StorageError
from ..config import ModelConfig
from ..count import build_meta
from ..initialise import InitConfig
from ..operators import Options
from ..operators.attention import AttentionOptions
from ..operators.hyena_li import HyenaLIOptions
from ..operators.hyena_mr import HyenaMROptions, decayed
from ..operators.hyena_se import HyenaSEOptions
from ..operators.mlp import GLUOptions
from ..rope import Rope
from .family import Settings, Unsuitable, expect, require
from .rules import Rule, Tensors, interleaved, rows, same, shaped, to_ours, to_theirs

CONFIG, WEIGHTS = "config.yml", "model.pt"
SORTS = {"hcs": "se", "hcm": "mr", "hcl": "li", "attn": "attention"}
"""Their names of layers, and the names that we give."""


def read_vortex(folder: str | Path) -> tuple[ModelConfig, Tensors]:
    """A model's configuration and its tensors, by our names."""
    folder = Path(folder)
    settings, _ = reader.read_yaml(folder / CONFIG)
    try:
        config = read_config(settings)
    except KeyError as error:
        problem = Problem(str(error.args[0]), "is required")
        raise ConfigError(str(folder / CONFIG), [problem]) from None
    except ValueError as error:
        raise ConfigError(str(folder / CONFIG), [Problem("", str(error))]) from None
    return config, from_vortex(config, read_weights(folder / WEIGHTS), source=str(folder))


def write_vortex(
    config: ModelConfig, tensors: Mapping[str, Tensor], folder: str | Path
) -> ModelConfig:
    """Write what Vortex loads, and return the configuration that reading it gives.

    That is another where MR filters have their decay taken in, or LI their rates computed.
    """
    import yaml

    folder = Path(folder)
    try:
        settings = write_config(config)
    except Unsuitable as error:
        raise CheckpointError(f"Vortex cannot say this model: {error}") from None
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(to_theirs(rules(config), tensors), folder / WEIGHTS)
    (folder / CONFIG).write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return read_config(settings)


def from_vortex(config: ModelConfig, tensors: Mapping[str, Tensor], *, source: str) -> Tensors:
    shapes = {name: tensor.shape for name, tensor in build_meta(config).named_parameters()}

    def ignored(name: str) -> bool:
        # Computed ones, the second name of the tied embedding, and FP8 statistics.
        tied = config.tie_embeddings and name == "unembed.weight"
        return tied or name.endswith(("inv_freq", "_extra_state", "filter.t"))

    return to_ours(rules(config), tensors, shapes, ignored=ignored, source=source)


def read_weights(file: Path) -> Tensors:
    import pickle
    import zipfile

    if file.exists() and not zipfile.is_zipfile(file):
        raise StorageError(f"{file} is not a file that torch.save has written, or is damaged")
    try:
        with torch.serialization.safe_globals([io.BytesIO]):
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise StorageError(f"cannot read {file}: {error}") from None
    return {name: tensor for name, tensor in loaded.items() if isinstance(tensor, Tensor)}


def read_config(settings: Mapping[str, Any]) -> ModelConfig:
    expect(
        settings,
        column_split_hyena=False,
        hyena_flip_x1x2=False,
        interleave=True,
        column_split=True,
        proj_groups=1,
        final_norm=True,
        short_filter_bias=False,
    )
    width, groups = settings["hidden_size"], settings["hcm_filter_groups"]
    interpolated = settings.get("use_interpolated_rotary_pos_emb", False)
    factor = float(settings.get("rotary_emb_scaling_factor", 1.0)) if interpolated else 1.0
    rope = Rope(
        base=float(settings["rotary_emb_base"]),
        scaling="linear" if factor != 1 else "none",
        factor=factor,
    )
    common: dict[str, Any] = {
        "featurizer": settings["short_filter_length"],
        "qkv_bias": settings["qkv_proj_bias"],
        "output_bias": settings["hyena_out_proj_bias"],
    }
    operators: dict[str, Options] = {
        "se": HyenaSEOptions(
            groups=settings["hcs_filter_groups"], taps=settings["hcs_filter_length"], **common
        ),
        "mr": HyenaMROptions(
            groups=groups, taps=settings["hcm_filter_length"], decay="none", **common
        ),
        "li": HyenaLIOptions(state_size=settings["state_size"], rates="plain", **common),
        "attention": AttentionOptions(
            heads=settings["num_attention_heads"],
            rope=rope,
            qkv_bias=settings["qkv_proj_bias"],
            output_bias=settings["mha_out_proj_bias"],
        ),
        "glu": GLUOptions(hidden=settings["inner_mlp_size"], activation=settings["mlp_activation"]),
    }
    names = layer_names(settings)
    if settings.get("evo2_style_activations", False):
        operators["identity"] = GLUOptions(hidden=settings["inner_mlp_size"], activation="identity")
        names = [names[0] + "/glu", *names[1:]]
    return ModelConfig(
        vocab_size=settings["vocab_size"],
        width=width,
        pattern=f"[{', '.join(names)}]",
        mlp="identity" if "identity" in operators else "glu",
        operators=operators,
        norm="rms-eps-outside",
        norm_eps=float(settings["eps"]),
        tie_embeddings=settings["tie_embeddings"],
        init=InitConfig(weights="small", output="wang"),
    )


def layer_names(settings: Mapping[str, Any]) -> list[str]:
    places = {
        int(number): ours
        for theirs, ours in SORTS.items()
        for number in settings.get(f"{theirs}_layer_idxs") or ()
    }
    count = settings["num_layers"]
    missing = [number for number in range(count) if number not in places]
    if missing or len(places) != count:
        raise ValueError(f"layers without a sort: {missing}; layers named: {sorted(places)}")
    return [places[number] for number in range(count)]


def write_config(config: ModelConfig) -> Settings:
    require(config.norm == "rms-eps-outside", f"its norm is `{config.norm}`")
    require(config.learned_positions is None, "it has learned positions")
    kinds: dict[type[Options], Any] = {}
    sorts: dict[str, list[int]] = {name: [] for name in SORTS}
    wanted = {
        HyenaSEOptions: "hcs",
        HyenaMROptions: "hcm",
        HyenaLIOptions: "hcl",
        AttentionOptions: "attn",
    }
    activations, hidden = [], set()
    for number, layer in enumerate(config.layers):
        options = config.operators[layer.mixer]
        require(type(options) in wanted, f"layer {number} is of kind {options.kind}")
        require(layer.shared is None, "it has shared blocks")
        first = kinds.setdefault(type(options), options)
        require(first == options, f"`{layer.mixer}` differs from another {options.kind}")
        sorts[wanted[type(options)]].append(number)
        glu = config.operators[layer.mlp] if layer.mlp else None
        require(isinstance(glu, GLUOptions) and not glu.bias, f"layer {number} has no plain GLU")
        assert isinstance(glu, GLUOptions)
        activations.append(glu.activation)
        hidden.add(glu.hidden)
    require(len(hidden) == 1, "its MLPs differ in width")
    for kind, name in wanted.items():
        require(kind in kinds, f"it has no layer of Vortex's sort {name}")
    se, mr, li, attention = (kinds[kind] for kind in wanted)
    for hyena in (se, mr, li):
        require(not hyena.featurizer_bias, "its short filters have biases")
        require(hyena.qkv_bias == attention.qkv_bias, "only some of its projections have biases")
        require(hyena.output_bias == li.output_bias, "only some of its outputs have biases")
        require(hyena.featurizer == li.featurizer, "its short filters differ in length")
    # From 128 taps on, Vortex takes a filter as one of convolution order with a skip.
    require(mr.taps >= 128 > se.taps, "Vortex's MR filters have 128 taps or more, SE's less")
    require(li.poles == "real", "its poles are complex")
    require(attention.kv_heads in (None, attention.heads), "its attention shares keys")
    require(attention.head_dim is None, "its heads have a width of their own")
    require(attention.window is None and not attention.qk_norm, "its attention is no plain one")
    rope = attention.rope
    require(rope is not None and rope.channels is None, "its attention does not turn all channels")
    require(rope is not None and rope.scaling in ("none", "linear"), "its RoPE is scaled otherwise")
    first, rest = activations[0], set(activations[1:])
    require(first in ("gelu", "silu"), f"the first activation is {first}")
    require(rest in ({"identity"}, {first}, set()), f"activations after the first: {sorted(rest)}")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_filters": config.width,
        **{f"{name}_layer_idxs": numbers for name, numbers in sorts.items()},
        "hcs_filter_length": se.taps,
        "hcs_filter_groups": se.groups,
        "hcm_filter_length": mr.taps,
        "hcm_filter_groups": mr.groups,
        "hcl_filter_groups": config.width,
        "num_layers": len(config.layers),
        "short_filter_length": li.featurizer,
        "short_filter_bias": False,
        "num_attention_heads": attention.heads,
        "eps": config.norm_eps,
        "state_size": li.state_size,
        "rotary_emb_base": rope.base,
        "use_interpolated_rotary_pos_emb": rope.scaling == "linear",
        "rotary_emb_scaling_factor": rope.factor,
        "inner_mlp_size": hidden.pop(),
        "mlp_activation": first,
        "evo2_style_activations": rest == {"identity"},
        "tie_embeddings": config.tie_embeddings,
        "qkv_proj_bias": attention.qkv_bias,
        "mha_out_proj_bias": attention.output_bias,
        "hyena_out_proj_bias": li.output_bias,
        "hyena_filter_groups": 1,
        "proj_groups": 1,
        "model_parallel_size": 1,
        "pipe_parallel_size": 1,
        "column_split": True,
        "column_split_hyena": False,
        "interleave": True,
        "hyena_flip_x1x2": False,
        "final_norm": True,
        "max_seqlen": mr.filter_horizon,
        "prefill_style": "fft",
        "inference_mode": True,
    }


def rules(config: ModelConfig) -> list[Rule]:
    result = [same("embedding.weight", "embedding_layer.weight"), same("norm.weight", "norm.scale")]
    if not config.tie_embeddings:
        result.append(same("head.weight", "unembed.weight"))
    for number, layer in enumerate(config.layers):
        ours, theirs = f"blocks.{number}", f"blocks.{number}"
        options = config.operators[layer.mixer]
        glu = config.operators[layer.mlp or ""]
        assert isinstance(glu, GLUOptions)
        gate_up = {f"{theirs}.mlp.{name}.weight": glu.hidden for name in ("l1", "l2")}
        result += [
            same(f"{ours}.mixer.norm.weight", f"{theirs}.pre_norm.scale"),
            same(f"{ours}.mlp.norm.weight", f"{theirs}.post_norm.scale"),
            rows(f"{ours}.mlp.operator.gate_up.weight", gate_up),
            same(f"{ours}.mlp.operator.down.weight", f"{theirs}.mlp.l3.weight"),
        ]
        ours += ".mixer.operator"
        if isinstance(options, AttentionOptions):
            result += attention_rules(ours, f"{theirs}.inner_mha_cls", options)
        else:
            result += hyena_rules(ours, theirs, options)
    return result


def attention_rules(ours: str, theirs: str, options: AttentionOptions) -> list[Rule]:
    heads = options.heads

    def by_head(t: Tensor) -> Tensor:
        parts: Tensor = t.unflatten(0, (3, heads, -1))
        return parts.transpose(0, 1).flatten(0, 2)

    def by_part(t: Tensor) -> Tensor:
        parts: Tensor = t.unflatten(0, (heads, 3, -1))
        return parts.transpose(0, 1).flatten(0, 2)

    result = []
    for kind in ("weight", "bias") if options.qkv_bias else ("weight",):
        result.append(shaped(f"{ours}.qkv.{kind}", f"{theirs}.Wqkv.{kind}", by_head, by_part))
    for kind in ("weight", "bias") if options.output_bias else ("weight",):
        result.append(same(f"{ours}.out.{kind}", f"{theirs}.out_proj.{kind}"))
    return result


def hyena_rules(ours: str, theirs: str, options: Options) -> list[Rule]:
    assert isinstance(options, (HyenaSEOptions, HyenaMROptions, HyenaLIOptions))
    result = []
    for kind in ("weight", "bias") if options.qkv_bias else ("weight",):
        result.append(interleaved(f"{ours}.qkv.{kind}", f"{theirs}.projections.{kind}", 3))
    for kind in ("weight", "bias") if options.output_bias else ("weight",):
        result.append(same(f"{ours}.output.{kind}", f"{theirs}.out_filter_dense.{kind}"))
    turns = interleaved("", "", 3)
    result.append(
        shaped(
            f"{ours}.featurizer.taps",
            f"{theirs}.filter.short_filter_weight",
            lambda t: turns.there(t)[0].flip(-1).unsqueeze(1),
            lambda t: turns.back([t]).squeeze(1).flip(-1),
        )
    )
    if isinstance(options, HyenaSEOptions):
        taps = f"{theirs}.filter.h"
        result.append(
            shaped(
                f"{ours}.taps",
                taps,
                lambda t: t.flip(-1).unsqueeze(1),
                lambda t: t.squeeze(1).flip(-1),
            )
        )
        return result
    result.append(same(f"{ours}.skip", f"{theirs}.filter.D"))
    if isinstance(options, HyenaMROptions):
        result.append(
            shaped(
                f"{ours}.taps",
                f"{theirs}.filter.h",
                lambda t: decayed(t, options).to(t.dtype).unsqueeze(1),
                lambda t: t.squeeze(1),
            )
        )
        return result
    logarithmic = options.rates == "log"
    result.append(
        shaped(
            f"{ours}.rates",
            f"{theirs}.filter.log_poles",
            lambda t: -(torch.exp(t) if logarithmic else t).unsqueeze(-1),
            lambda t: -t.squeeze(-1),
        )
    )
    result.append(same(f"{ours}.residues", f"{theirs}.filter.residues"))
    return result
