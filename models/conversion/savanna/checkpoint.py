"""Checkpoints of Savanna: `global_step…/` with DeepSpeed's `mp_rank_…_model_states.pt`.

Each model-parallel rank has a file. Tensors stand under `module`, layer by layer in one sequence:

    sequential.0.word_embeddings       the embedding; sequential.1 has no tensors
    sequential.{n + 2}.…               layer n
    sequential.{layers + 2 or 3}.norm  the last norm

Rows of q, k and v alternate as in Vortex; with `interleave_projections: false`, those of Hyena
stand part by part on each rank. Filters are stored as they are trained: those of MR
without their decay and as long as a row, rates of LI as p and γ. The configuration is in
`configs/*.yml`, as Savanna saves it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ....console.errors import CheckpointError, StorageError
from ...config.config import ModelConfig
from ...config.options.attention import AttentionOptions
from ...config.options.hyena_li import HyenaLIOptions
from ...config.options.hyena_mr import HyenaMROptions
from ...config.options.hyena_se import HyenaSEOptions
from ...operators.hyena_mr import apply_decay
from ...weights import Weights
from .. import vortex
from ..family import Published
from ..pickles import read_data
from ..rules import Rule, import_tensors, map_reshaped, map_same, map_taps
from .convert import check_model
from .settings import read_settings

PUBLISHED = Published(
    family="Savanna",
    models="Evo 2: checkpoints of training",
    operators=vortex.PUBLISHED.operators,
    files="mp_rank_*_model_states.pt, configs/*.yml",
    writes=False,
    tested_with="the layout and formulas of Savanna's code, written out",
)
FIRST = "mp_rank_00_model_states.pt"
FILES = "mp_rank_*_model_states.pt"
HINT = "name a folder global_step… that Savanna saved, with a file of each model-parallel rank"

CUT_ROWS = (
    *("word_embeddings.weight", "mixer.dense_projection.weight", "mixer.dense_projection.bias"),
    *("mixer.hyena_proj_conv.short_conv_weight", "mixer.mixer.conv_bias", "mlp.w1.weight"),
    *("mixer.mixer.filter.decay", "mixer.mixer.filter.gamma", "mixer.mixer.filter.h"),
    *("mixer.mixer.filter.p", "mixer.mixer.filter.R", "mlp.w2.weight"),
    "mixer.mixer.short_conv.short_conv_weight",
)
"""Tensors that model parallelism cuts along dimension 0."""
CUT_COLUMNS = ("mixer.dense.weight", "mlp.w3.weight")
"""Tensors that it cuts along dimension 1. Each rank has all others whole."""
UNUSED = (
    *("_extra_state", "inv_freq", "filter.t", "filter.decay"),
    *("post_attention_layernorm.weight", "outer_mlp_layernorm.weight"),
)
"""Derived tensors, and norms that no forward pass of these models calls."""
NAMES = {
    "pre_norm.scale": "input_layernorm.weight",
    "post_norm.scale": "pre_mlp_layernorm.weight",
    "mlp.l1": "mlp.w1",
    "mlp.l2": "mlp.w2",
    "mlp.l3": "mlp.w3",
    "inner_mha_cls.Wqkv": "mixer.dense_projection",
    "inner_mha_cls.out_proj": "mixer.dense",
    "projections": "mixer.dense_projection",
    "out_filter_dense": "mixer.dense",
    "filter.short_filter_weight": "mixer.hyena_proj_conv.short_conv_weight",
    "filter.D": "mixer.mixer.conv_bias",
}
"""Savanna's names by Vortex's."""


def read(folder: Path) -> tuple[ModelConfig, Weights]:
    """Return a model's configuration and its tensors, by our names."""
    files = sorted((folder / "configs").glob("*.yml"))
    if not files:
        raise StorageError(f"{folder} has no configs/*.yml", hint="copy Savanna's YAML files there")
    settings = read_settings(files)
    config = check_model(settings)
    in_parts = set()
    if settings.values_by_key.get("interleave_projections") is False:
        in_parts = list_projections(config)
    ranks = [read_rank(file) for file in sorted(folder.glob(FILES))]
    theirs = join_ranks(ranks, in_parts, folder)
    check_decays(config, theirs, folder)
    weights = import_tensors(
        rules(config, theirs, in_parts),
        theirs,
        config,
        source=str(folder),
        is_ignored=lambda name: name.endswith(UNUSED),
    )
    return config, weights


def read_rank(file: Path) -> dict[str, Tensor]:
    """Return a rank's tensors by name."""
    data = read_data(file, hint=HINT)
    module = data.get("module") if isinstance(data, dict) else None
    if not isinstance(module, dict) or not module:
        raise StorageError(f"{file} has no tensors under `module`: ZeRO-3 keeps them in", hint=HINT)
    names = {name: name.removeprefix("module.") for name in module}
    return {names[name]: value for name, value in module.items() if isinstance(value, Tensor)}


def list_projections(config: ModelConfig) -> set[str]:
    """Return the tensors of Hyena that hold q, k and v."""
    names = ("dense_projection.weight", "dense_projection.bias")
    return {
        f"sequential.{number + 2}.mixer.{name}"
        for number, layer in enumerate(config.layers)
        if not isinstance(config.operators[layer.mixer], AttentionOptions)
        for name in (*names, "hyena_proj_conv.short_conv_weight")
    }


def join_ranks(
    ranks: Sequence[Mapping[str, Tensor]], in_parts: Collection[str], folder: Path
) -> Weights:
    """Return whole tensors, joined when they are read. `in_parts`: of each rank, three parts."""
    first = ranks[0]
    if any(rank.keys() != first.keys() for rank in ranks):
        raise CheckpointError("the ranks have other tensors", where=str(folder))

    def cut(name: str) -> int | None:
        return 0 if name.endswith(CUT_ROWS) else 1 if name.endswith(CUT_COLUMNS) else None

    def shape(name: str) -> Sequence[int]:
        dim, sizes = cut(name), list(first[name].shape)
        if dim is not None:
            sizes[dim] = sum(rank[name].shape[dim] for rank in ranks)
        return sizes

    def read_whole(name: str) -> Tensor:
        dim, parts = cut(name), [rank[name] for rank in ranks]
        if name in in_parts:
            thirds = [part.chunk(3) for part in parts]
            return torch.cat([third for group in zip(*thirds, strict=True) for third in group])
        if dim is not None:
            return torch.cat(parts, dim)
        if any(not torch.allclose(parts[0], part) for part in parts[1:]):
            raise CheckpointError(f"{name} differs between the ranks", where=str(folder))
        return parts[0]

    return Weights({name: shape(name) for name in first}, read_whole)


def rules(config: ModelConfig, theirs: Weights, in_parts: Collection[str] = ()) -> list[Rule]:
    """Return Vortex's rules with Savanna's names and filters."""
    last = len(config.layers) + 2
    if f"sequential.{last}.norm.weight" not in theirs:
        last += 1
    names = {
        "embedding_layer.weight": "sequential.0.word_embeddings.weight",
        "norm.scale": f"sequential.{last}.norm.weight",
    }
    return [rename(rule, names, config, in_parts) for rule in vortex.rules(config)]


def rename(
    rule: Rule, names: Mapping[str, str], config: ModelConfig, in_parts: Collection[str]
) -> Rule:
    if rule.theirs[0] in names:
        return map_same(rule.ours, names[rule.theirs[0]])
    match = re.match(r"blocks\.(\d+)\.(.*)", rule.theirs[0])
    if match is None:
        return rule  # an untied head, which these checkpoints do not have
    number = int(match[1])
    prefix = f"sequential.{number + 2}"
    options = config.operators[config.layers[number].mixer]
    name = rule.ours.rpartition(".")[2]
    if isinstance(options, HyenaSEOptions) and rule.ours.endswith("operator.taps"):
        return map_taps(rule.ours, f"{prefix}.mixer.mixer.short_conv.short_conv_weight")
    if isinstance(options, HyenaMROptions) and rule.ours.endswith("operator.taps"):
        return map_row_long(rule.ours, f"{prefix}.mixer.mixer.filter.h", options.taps)
    if isinstance(options, HyenaLIOptions) and name in ("rates", "residues"):
        shape = (-1, options.state_size)
        if name == "residues":
            return map_shape(rule.ours, f"{prefix}.mixer.mixer.filter.R", shape)
        factors = tuple(f"{prefix}.mixer.mixer.filter.{factor}" for factor in ("p", "gamma"))
        return Rule(
            rule.ours,
            factors,
            lambda t: t.unbind(0),
            lambda ts: torch.stack([t.reshape(shape) for t in ts]),
        )
    theirs = []
    for vortex_name in rule.theirs:
        module = vortex_name.split(".", 2)[2]
        entry = next(key for key in NAMES if module.startswith(key))
        theirs.append(f"{prefix}.{NAMES[entry]}{module.removeprefix(entry)}")
    renamed = replace(rule, theirs=tuple(theirs))
    if theirs[0] in in_parts:
        if not theirs[0].endswith("short_conv_weight"):
            return map_same(rule.ours, theirs[0])
        return map_reshaped(rule.ours, theirs[0], lambda t: t.flip(-1), lambda t: t.flip(-1))
    if theirs[0].endswith("short_conv_weight"):  # without Vortex's dimension of one channel
        return replace(
            renamed,
            export=lambda t: [rule.export(t)[0].squeeze(1)],
            restore=lambda ts: rule.restore([ts[0].unsqueeze(1)]),
        )
    return renamed


def map_row_long(ours: str, theirs: str, taps: int) -> Rule:
    """Map filters to the first taps of filters as long as a row."""
    return Rule(ours, (theirs,), lambda t: [t], lambda ts: ts[0][:, :taps])


def map_shape(ours: str, theirs: str, shape: tuple[int, ...]) -> Rule:
    return Rule(ours, (theirs,), lambda t: [t], lambda ts: ts[0].reshape(shape))


def check_decays(config: ModelConfig, theirs: Weights, folder: Path) -> None:
    """Raise if the stored decays of an MR filter are not those of the configuration."""
    for number, layer in enumerate(config.layers):
        options = config.operators[layer.mixer]
        name = f"sequential.{number + 2}.mixer.mixer.filter.decay"
        if not isinstance(options, HyenaMROptions) or name not in theirs:
            continue
        stored = theirs[name][:, : options.taps].float()
        expected = apply_decay(torch.ones(options.groups, options.taps), options)
        if stored.shape != expected.shape or not torch.allclose(stored, expected, atol=0.01):
            raise CheckpointError(
                f"{name} is not the decay of explicit_filter_decay_preset, "
                "explicit_filter_num_decay_repeats and seq_length",
                where=str(folder),
            )
