"""Vortex folders, for StripedHyena 2: a YAML file, and tensors in a `.pt` file.

Differences from our tensors:

    projections, short filter     rows of q, k and v alternate, channel by channel
    attention's Wqkv              q, k and v alternate, head by head
    short and SE filters          the current token comes last
    MR filters                    multiplied by their decay
    LI filters                    `log_poles` (minus the rate) and `residues`

Rotary frequencies and the tied embedding are stored too: Vortex rejects files without the first,
older versions also those without the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ...console import config as reader
from ...console.errors import CheckpointError, ConfigError, ConfigProblem
from ..config.config import ModelConfig
from ..config.options.attention import AttentionOptions
from ..config.options.base import OperatorOptions
from ..config.options.hyena_li import HyenaLIOptions
from ..config.options.hyena_mr import HyenaMROptions
from ..config.options.hyena_se import HyenaSEOptions
from ..config.options.mlp import GLUOptions
from ..operators.hyena_li import plain_rates
from ..operators.hyena_mr import apply_decay
from ..weights import Weights
from .family import Published, Unsuitable, settings_errors
from .files import read_torch
from .rules import (
    Rule,
    Tensors,
    export_tensors,
    import_tensors,
    map_interleaved,
    map_reshaped,
    map_rows,
    map_same,
    map_taps,
)
from .vortex_config import read_config, write_config

PUBLISHED = Published(
    family="StripedHyena 2",
    models="Evo 2: 1B, 7B, 20B, 40B",
    operators=("hyena-se", "hyena-mr", "hyena-li", "attention", "glu"),
    files="config.yml, model.pt",
    writes=True,
    tested_with="Vortex's forward pass, written out",
)
CONFIG, WEIGHTS = "config.yml", "model.pt"
INV_FREQ = "inner_mha_cls.rotary_emb.inv_freq"

DOWNLOAD_HINT = "use the .pt file of an Evo 2 checkpoint; if it is one, download it again"


def read(folder: Path) -> tuple[ModelConfig, Weights]:
    """Return a model's configuration and its tensors, by our names."""
    settings, _ = reader.read_yaml(folder / CONFIG)
    with settings_errors(folder / CONFIG, settings):
        config = read_config(settings)

    def is_ignored(name: str) -> bool:
        # Derived tensors, and statistics of FP8.
        tied = config.tie_embeddings and name == "unembed.weight"
        return tied or name.endswith((INV_FREQ, "_extra_state", "filter.t"))

    theirs = Weights.wrap(read_torch(folder / WEIGHTS, hint=DOWNLOAD_HINT))
    check_frequencies(config, theirs, folder)
    return config, import_tensors(
        rules(config), theirs, config, source=str(folder), is_ignored=is_ignored
    )


def write(config: ModelConfig, tensors: Tensors, folder: Path) -> str:
    """Write a folder that Vortex loads.

    MR filters are stored with their decay and LI rates as poles, so a model read back may have
    another configuration with the same function.
    """
    import yaml

    try:
        settings = write_config(config)
    except Unsuitable as error:
        raise CheckpointError(
            f"Vortex cannot represent this model: {error}", hint="use --format headrace"
        ) from None
    theirs = dict(export_tensors(rules(config), tensors))
    torch.save(theirs | derive_tensors(config, theirs), folder / WEIGHTS)
    (folder / CONFIG).write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return "StripedHyena 2"


def derive_tensors(config: ModelConfig, theirs: Tensors) -> dict[str, Tensor]:
    """Return derived tensors that Vortex requires."""
    result = {f"blocks.{number}.{INV_FREQ}": speed for number, speed in iterate_frequencies(config)}
    if config.tie_embeddings:
        result["unembed.weight"] = theirs["embedding_layer.weight"]
    return result


def iterate_frequencies(config: ModelConfig) -> Iterator[tuple[int, Tensor]]:
    """Yield each attention layer's rotary frequencies; Vortex scales positions, not these."""
    for number, layer in enumerate(config.layers):
        options = config.operators[layer.mixer]
        if isinstance(options, AttentionOptions) and options.rope is not None:
            dim = options.dim(config.width)
            exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
            yield number, options.rope.base**-exponent


def check_frequencies(config: ModelConfig, theirs: Weights, folder: Path) -> None:
    """Raise if the settings contradict the stored frequencies, which Vortex computes with.

    The `config.yml` first published with the 1M-context models had another base.
    """
    for number, expected in iterate_frequencies(config):
        name = f"blocks.{number}.{INV_FREQ}"
        if name not in theirs:
            continue
        stored = theirs[name].float()
        if stored.shape != expected.shape:
            message = f"heads have {2 * len(expected)} channels; {name} is for {2 * len(stored)}"
            raise ConfigError(str(folder / CONFIG), [ConfigProblem("num_attention_heads", message)])
        if ((stored - expected).abs() > 2**-7 * expected).any():  # they may be in bf16
            base = float(stored[-1]) ** (-len(stored) / (len(stored) - 1))
            message = f"{name} in {WEIGHTS} has the frequencies of a base of about {base:.3g}"
            problem = ConfigProblem("rotary_emb_base", message)
            raise ConfigError(str(folder / CONFIG), [problem], hint="correct the base")


def rules(config: ModelConfig) -> list[Rule]:
    result = [
        map_same("embedding.weight", "embedding_layer.weight"),
        map_same("norm.weight", "norm.scale"),
    ]
    if not config.tie_embeddings:
        result.append(map_same("head.weight", "unembed.weight"))
    for number, layer in enumerate(config.layers):
        ours, theirs = f"blocks.{number}", f"blocks.{number}"
        options = config.operators[layer.mixer]
        glu = config.operators[layer.mlp or ""]
        assert isinstance(glu, GLUOptions)
        gate_up = {f"{theirs}.mlp.{name}.weight": glu.hidden for name in ("l1", "l2")}
        result += [
            map_same(f"{ours}.mixer.norm.weight", f"{theirs}.pre_norm.scale"),
            map_same(f"{ours}.mlp.norm.weight", f"{theirs}.post_norm.scale"),
            map_rows(f"{ours}.mlp.operator.gate_up.weight", gate_up),
            map_same(f"{ours}.mlp.operator.down.weight", f"{theirs}.mlp.l3.weight"),
        ]
        ours += ".mixer.operator"
        if isinstance(options, AttentionOptions):
            result += attention_rules(ours, f"{theirs}.inner_mha_cls", options)
        else:
            result += hyena_rules(ours, theirs, options)
    return result


def attention_rules(ours: str, theirs: str, options: AttentionOptions) -> list[Rule]:
    heads = options.heads

    def interleave_heads(t: Tensor) -> Tensor:
        split: Tensor = t.unflatten(0, (3, heads, -1))
        return split.transpose(0, 1).flatten(0, 2)

    def group_parts(t: Tensor) -> Tensor:
        split: Tensor = t.unflatten(0, (heads, 3, -1))
        return split.transpose(0, 1).flatten(0, 2)

    result = []
    for kind in ("weight", "bias") if options.qkv_bias else ("weight",):
        result.append(
            map_reshaped(
                f"{ours}.qkv.{kind}", f"{theirs}.Wqkv.{kind}", interleave_heads, group_parts
            )
        )
    for kind in ("weight", "bias") if options.output_bias else ("weight",):
        result.append(map_same(f"{ours}.out.{kind}", f"{theirs}.out_proj.{kind}"))
    return result


def hyena_rules(ours: str, theirs: str, options: OperatorOptions) -> list[Rule]:
    assert isinstance(options, (HyenaSEOptions, HyenaMROptions, HyenaLIOptions))
    result = []
    for kind in ("weight", "bias") if options.qkv_bias else ("weight",):
        result.append(map_interleaved(f"{ours}.qkv.{kind}", f"{theirs}.projections.{kind}", 3))
    for kind in ("weight", "bias") if options.output_bias else ("weight",):
        result.append(map_same(f"{ours}.output.{kind}", f"{theirs}.out_filter_dense.{kind}"))
    interleaving = map_interleaved("", "", 3)
    result.append(
        map_reshaped(
            f"{ours}.featurizer.taps",
            f"{theirs}.filter.short_filter_weight",
            lambda t: interleaving.export(t)[0].flip(-1).unsqueeze(1),
            lambda t: interleaving.restore([t]).squeeze(1).flip(-1),
        )
    )
    if isinstance(options, HyenaSEOptions):
        result.append(map_taps(f"{ours}.taps", f"{theirs}.filter.h"))
        return result
    result.append(map_same(f"{ours}.skip", f"{theirs}.filter.D"))
    if isinstance(options, HyenaMROptions):
        result.append(
            map_reshaped(
                f"{ours}.taps",
                f"{theirs}.filter.h",
                lambda t: apply_decay(t, options).to(t.dtype).unsqueeze(1),
                lambda t: t.squeeze(1),
            )
        )
        return result
    result.append(
        map_reshaped(
            f"{ours}.rates",
            f"{theirs}.filter.log_poles",
            lambda t: -plain_rates(t, options).unsqueeze(-1),
            lambda t: -t.squeeze(-1),
        )
    )
    result.append(map_same(f"{ours}.residues", f"{theirs}.filter.residues"))
    return result
