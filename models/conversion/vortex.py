"""StripedHyena 2 folders of Vortex: a YAML file, and the tensors of a `.pt` file.

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
from ...console.errors import CheckpointError, ConfigError, Problem
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
from .family import Unsuitable, settings_errors
from .files import read_torch
from .rules import Rule, Tensors, interleaved, rows, same, shaped, taps, to_ours, to_theirs
from .vortex_config import read_config, write_config

CONFIG, WEIGHTS = "config.yml", "model.pt"
INV_FREQ = "inner_mha_cls.rotary_emb.inv_freq"

AGAIN = "use the .pt file of an Evo 2 checkpoint; if it is one, download it again"


def read(folder: Path) -> tuple[ModelConfig, Weights]:
    """Return a model's configuration and its tensors, by our names."""
    settings, _ = reader.read_yaml(folder / CONFIG)
    with settings_errors(folder / CONFIG, settings):
        config = read_config(settings)

    def ignored(name: str) -> bool:
        # Derived tensors, and statistics of FP8.
        tied = config.tie_embeddings and name == "unembed.weight"
        return tied or name.endswith((INV_FREQ, "_extra_state", "filter.t"))

    theirs = Weights.held(read_torch(folder / WEIGHTS, hint=AGAIN))
    check_frequencies(config, theirs, folder)
    return config, to_ours(rules(config), theirs, config, source=str(folder), ignored=ignored)


def write(config: ModelConfig, tensors: Tensors, folder: Path) -> str:
    """Write a folder that Vortex loads.

    The decay of MR filters and the rates of LI are computed, so a model read back may have another
    configuration of the same function.
    """
    import yaml

    try:
        settings = write_config(config)
    except Unsuitable as error:
        raise CheckpointError(
            f"Vortex cannot represent this model: {error}", hint="use --format headrace"
        ) from None
    theirs = dict(to_theirs(rules(config), tensors))
    torch.save(theirs | repeated(config, theirs), folder / WEIGHTS)
    (folder / CONFIG).write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return "StripedHyena 2"


def repeated(config: ModelConfig, theirs: Tensors) -> dict[str, Tensor]:
    """Return derived tensors that Vortex requires."""
    result = {f"blocks.{number}.{INV_FREQ}": speed for number, speed in frequencies(config)}
    if config.tie_embeddings:
        result["unembed.weight"] = theirs["embedding_layer.weight"]
    return result


def frequencies(config: ModelConfig) -> Iterator[tuple[int, Tensor]]:
    """Yield the rotary frequencies of each attention layer; Vortex scales positions, not these."""
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
    for number, expected in frequencies(config):
        name = f"blocks.{number}.{INV_FREQ}"
        if name not in theirs:
            continue
        kept = theirs[name].float()
        if kept.shape != expected.shape:
            what = f"heads have {2 * len(expected)} channels; {name} is for {2 * len(kept)}"
            raise ConfigError(str(folder / CONFIG), [Problem("num_attention_heads", what)])
        if ((kept - expected).abs() > 2**-7 * expected).any():  # they may be in bf16
            base = float(kept[-1]) ** (-len(kept) / (len(kept) - 1))
            what = f"{name} in {WEIGHTS} has the frequencies of a base of about {base:.3g}"
            problem = Problem("rotary_emb_base", what)
            raise ConfigError(str(folder / CONFIG), [problem], hint="correct the base")


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


def hyena_rules(ours: str, theirs: str, options: OperatorOptions) -> list[Rule]:
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
        result.append(taps(f"{ours}.taps", f"{theirs}.filter.h"))
        return result
    result.append(same(f"{ours}.skip", f"{theirs}.filter.D"))
    if isinstance(options, HyenaMROptions):
        result.append(
            shaped(
                f"{ours}.taps",
                f"{theirs}.filter.h",
                lambda t: apply_decay(t, options).to(t.dtype).unsqueeze(1),
                lambda t: t.squeeze(1),
            )
        )
        return result
    result.append(
        shaped(
            f"{ours}.rates",
            f"{theirs}.filter.log_poles",
            lambda t: -plain_rates(t, options).unsqueeze(-1),
            lambda t: -t.squeeze(-1),
        )
    )
    result.append(same(f"{ours}.residues", f"{theirs}.filter.residues"))
    return result
