"""Zamba and Zamba2: Mamba layers, some with input from shared blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config.config import ModelConfig
from ..config.options.base import OperatorOptions
from ..config.options.mamba1 import Mamba1Options
from ..config.options.mamba2 import Mamba2Options
from ..config.options.rope import Rope
from ..config.options.zamba import ZambaBlockOptions
from .family import (
    Settings,
    build_pattern,
    expect,
    published_family,
    read_rope,
    require,
    require_plain_decoder,
)
from .keys import NO_IDS
from .mamba import CONV_NAMES, MAMBA2_NAMES, require_grouped_norm
from .names import Names, interleaved, operator_rules
from .rules import Rule, map_ends, map_rows, map_same

MAMBA1: Names = {
    **CONV_NAMES,
    "input": interleaved("in_proj", 2),
    "select": "x_proj_weight",
    "dt": "dt_proj_weight",
    "dt_bias": "dt_proj_bias",
    "A_log": "A_log",
    "D": "D",
    "output": "out_proj",
}


class ZambaFamily:
    model_type = "zamba"
    architecture = "ZambaForCausalLM"
    published = published_family(architecture, "7B", [Mamba1Options, ZambaBlockOptions])

    def read(self, settings: Mapping[str, Any]) -> ModelConfig:
        width, heads = settings["hidden_size"], settings["num_attention_heads"]
        expect(
            settings,
            hidden_act="gelu",
            hidden_mamba_act="silu",
            mamba_conv_bias=True,
            mamba_proj_bias=False,
            attention_hidden_size=2 * width,
            attention_head_dim=2 * width // heads,
            num_key_value_heads=heads,
        )
        rank = settings.get("mamba_dt_rank", "auto")
        mamba = Mamba1Options(
            state_size=settings["mamba_d_state"],
            heads=settings["n_mamba_heads"],
            expand=settings["mamba_expand"],
            conv=settings["mamba_d_conv"],
            dt_rank=None if rank == "auto" else rank,
        )
        eps = settings["rms_norm_eps"]
        block = ZambaBlockOptions(heads=heads, hidden=settings["intermediate_size"], norm_eps=eps)
        return read_hybrid(
            settings, list_block_types(settings), {"mamba": mamba, "shared": block}, ["shared"]
        )

    def write(self, config: ModelConfig) -> Settings:
        mamba, blocks = split_hybrid(config, Mamba1Options)
        assert isinstance(mamba, Mamba1Options)
        block = blocks[0]
        require(len(blocks) == 1, "it has several shared blocks")
        require(not block.lora_rank, "its shared block has LoRA corrections")
        require(block.rope is None, "its shared block has rotary positions")
        period = find_call_period(config)
        return {
            **write_hybrid(config, block),
            "model_type": "zamba",
            "attn_layer_period": period[0],
            "attn_layer_offset": period[1],
            "n_mamba_heads": mamba.heads,
            "mamba_d_state": mamba.state_size,
            "mamba_d_conv": mamba.conv,
            "mamba_expand": mamba.expand,
            "mamba_dt_rank": mamba.rank(config.width),
            "use_mamba_kernels": False,
        }

    def rules(self, config: ModelConfig) -> list[Rule]:
        result = map_ends(config, "model.embed_tokens.weight", "model.final_layernorm.weight")
        for name in list_blocks(config):
            modules = list_block_modules(config, name, "shared_transf")
            result += block_rules(f"shared.{name}", modules, config.operators[name], config.width)
        return [*result, *mamba_rules(config, MAMBA1)]


class Zamba2Family:
    model_type = "zamba2"
    architecture = "Zamba2ForCausalLM"
    published = published_family(architecture, "1.2B, 2.7B, 7B", [Mamba2Options, ZambaBlockOptions])

    def read(self, settings: Mapping[str, Any]) -> ModelConfig:
        heads = settings["num_attention_heads"]
        expect(
            settings,
            hidden_act="gelu",
            use_conv_bias=True,
            add_bias_linear=False,
            num_key_value_heads=heads,
            use_long_context=False,
            time_step_limit=None,
        )
        inner = settings["mamba_expand"] * settings["hidden_size"]
        mamba = Mamba2Options(
            state_size=settings["mamba_d_state"],
            head_dim=inner // settings["n_mamba_heads"],
            groups=settings["mamba_ngroups"],
            expand=settings["mamba_expand"],
            conv=settings["mamba_d_conv"],
        )
        block = ZambaBlockOptions(
            heads=heads,
            hidden=settings["intermediate_size"],
            lora_rank=settings["adapter_rank"],
            attention_lora=settings["use_shared_attention_adapter"],
            rope=read_rope(settings) if settings["use_mem_rope"] else None,
            norm_eps=settings["rms_norm_eps"],
        )
        blocks = settings["num_mem_blocks"]
        names = [f"shared{number}" for number in range(blocks)] if blocks > 1 else ["shared"]
        operators: dict[str, OperatorOptions] = {"mamba": mamba, **dict.fromkeys(names, block)}
        return read_hybrid(settings, settings["layers_block_type"], operators, names)

    def write(self, config: ModelConfig) -> Settings:
        mamba, blocks = split_hybrid(config, Mamba2Options)
        assert isinstance(mamba, Mamba2Options)
        block = blocks[0]
        require(all(shared_block == block for shared_block in blocks), "its shared blocks differ")
        require(block.lora_rank > 0, "its shared blocks have no LoRA corrections")
        require(mamba.norm_eps == 1e-5, f"the eps of its gated norm is {mamba.norm_eps}, not 1e-5")
        require_grouped_norm(mamba.norm_groups, mamba)
        require(not mamba.bias, "its Mamba-2 has biases")
        rope = block.rope
        plain = rope is None or (rope.scaling == "none" and rope.channels is None)
        require(plain, "its rotary positions are scaled")
        return {
            **write_hybrid(config, block),
            "model_type": "zamba2",
            "layers_block_type": ["hybrid" if layer.shared else "mamba" for layer in config.layers],
            "num_mem_blocks": len(blocks),
            "adapter_rank": block.lora_rank,
            "use_shared_attention_adapter": block.attention_lora,
            "use_mem_rope": rope is not None,
            "rope_theta": rope.base if rope is not None else 10_000.0,
            "max_position_embeddings": (rope or Rope()).original_length,
            "n_mamba_heads": mamba.expand * config.width // mamba.head_dim,
            "mamba_d_state": mamba.state_size,
            "mamba_d_conv": mamba.conv,
            "mamba_expand": mamba.expand,
            "mamba_ngroups": mamba.groups,
            "chunk_size": 256,
            # transformers without kernels takes this as a lower bound of dt. The published models
            # have none, but zero is impossible: its logarithm is taken.
            "time_step_min": 1e-30,
        }

    def rules(self, config: ModelConfig) -> list[Rule]:
        result = map_ends(config, "model.embed_tokens.weight", "model.final_layernorm.weight")
        result += mamba_rules(config, MAMBA2_NAMES)
        calls = [number for number, layer in enumerate(config.layers) if layer.shared]
        for name in list_blocks(config):
            modules = list_block_modules(config, name, "shared_transformer")
            block = config.operators[name]
            assert isinstance(block, ZambaBlockOptions)
            result += block_rules(f"shared.{name}", modules, block, config.width)
            for index, number in enumerate(calls):
                if config.layers[number].shared == name:
                    ours = f"blocks.{number}.call"
                    result += call_rules(ours, modules, index, attention=block.attention_lora)
        return result


def mamba_rules(config: ModelConfig, names: Names) -> Iterator[Rule]:
    """Yield the rules for the Mamba layers, and for what a layer adds from a shared block."""
    for number, layer in enumerate(config.layers):
        ours, theirs = f"blocks.{number}", f"model.layers.{number}"
        if layer.shared:
            yield map_same(f"{ours}.call.project.weight", f"{theirs}.linear.weight")
            theirs += ".mamba_decoder"
        yield map_same(f"{ours}.mixer.norm.weight", f"{theirs}.input_layernorm.weight")
        options = config.operators[layer.mixer]
        mamba = f"{theirs}.mamba"
        yield from operator_rules(names, f"{ours}.mixer.operator", mamba, options, config.width)


def list_block_modules(config: ModelConfig, name: str, module: str) -> tuple[str, ...]:
    """Return where the layers that call a shared block hold it."""
    callers = [number for number, layer in enumerate(config.layers) if layer.shared == name]
    return tuple(f"model.layers.{number}.{module}" for number in callers)


def call_rules(
    ours: str, modules: tuple[str, ...], index: int, *, attention: bool
) -> Iterator[Rule]:
    """Yield the rules for a call's LoRA corrections; theirs are stored in the block, by call."""
    theirs = modules[0]
    lists = {"gate_up": f"{theirs}.feed_forward.gate_up_proj_adapter_list.{index}"}
    if attention:
        for projection, name in enumerate("qkv"):
            lists[f"qkv.{projection}"] = f"{theirs}.self_attn.linear_{name}_adapter_list.{index}"
    for our_name, name in lists.items():
        for place, matrix in enumerate(("down", "up")):
            rule = map_same(f"{ours}.{our_name}.{matrix}.weight", f"{name}.{place}.weight")
            yield replace(rule, prefixes=modules)


def block_rules(
    ours: str, modules: tuple[str, ...], options: OperatorOptions, width: int
) -> Iterator[Rule]:
    assert isinstance(options, ZambaBlockOptions)
    theirs = modules[0]
    qkv = {f"{theirs}.self_attn.{name}_proj.weight": 2 * width for name in "qkv"}
    result = [
        map_same(f"{ours}.norm.weight", f"{theirs}.input_layernorm.weight"),
        map_same(f"{ours}.mlp_norm.weight", f"{theirs}.pre_ff_layernorm.weight"),
        map_rows(f"{ours}.attention.qkv.weight", qkv),
        map_same(f"{ours}.attention.out.weight", f"{theirs}.self_attn.o_proj.weight"),
        map_same(f"{ours}.down.weight", f"{theirs}.feed_forward.down_proj.weight"),
    ]
    if options.lora_rank:
        fused = f"{theirs}.feed_forward.gate_up_proj.weight"
        result.append(map_same(f"{ours}.gate_up.weight", fused))
    else:
        gate_up = {
            f"{theirs}.feed_forward.{name}_proj.weight": options.hidden for name in ("gate", "up")
        }
        result.append(map_rows(f"{ours}.gate_up.weight", gate_up))
    return (replace(rule, prefixes=modules) for rule in result)


def list_block_types(settings: Mapping[str, Any]) -> list[str]:
    """List layer kinds from Zamba-1's period and offset."""
    period, offset = settings["attn_layer_period"], settings["attn_layer_offset"]
    numbers = range(settings["num_hidden_layers"] - 3)
    later_types = ["hybrid" if i % period == offset else "mamba" for i in numbers]
    return ["mamba", "mamba", "hybrid", *later_types]


def find_call_period(config: ModelConfig) -> tuple[int, int]:
    """Return the period and offset at which Zamba-1 calls the block; raise Unsuitable if none
    fit."""
    calls = [bool(layer.shared) for layer in config.layers]
    num_layers = len(calls)
    for period in range(1, num_layers + 1):
        for offset in range(period):
            settings = {"attn_layer_period": period, "attn_layer_offset": offset}
            types = list_block_types({**settings, "num_hidden_layers": num_layers})
            if [kind == "hybrid" for kind in types] == calls:
                return period, offset
    require(False, "its shared block is not called in layer 2 and then periodically")
    raise AssertionError


def read_hybrid(
    settings: Mapping[str, Any],
    types: Sequence[str],
    operators: dict[str, OperatorOptions],
    blocks: Sequence[str],
) -> ModelConfig:
    names: list[str] = []
    for kind in types:
        calls = sum(name != "mamba" for name in names)
        is_call = kind == "hybrid"  # else "mamba", or "linear_attention" in transformers 5
        names.append(f"{blocks[calls % len(blocks)]}>mamba" if is_call else "mamba")
    return ModelConfig(
        vocab_size=settings["vocab_size"],
        width=settings["hidden_size"],
        **build_pattern(names, operators),
        norm_eps=settings["rms_norm_eps"],
        tie_embeddings=bool(settings.get("tie_word_embeddings", True)),
    )


def list_blocks(config: ModelConfig) -> list[str]:
    return list(dict.fromkeys(layer.shared for layer in config.layers if layer.shared))


def split_hybrid(
    config: ModelConfig, kind: type[OperatorOptions]
) -> tuple[OperatorOptions, list[ZambaBlockOptions]]:
    require_plain_decoder(config)
    mixers = {layer.mixer for layer in config.layers}
    require(len(mixers) == 1, "its mixers differ")
    mixer = config.operators[mixers.pop()]
    require(isinstance(mixer, kind), f"its mixer is of kind {mixer.kind}")
    require(all(layer.mlp is None for layer in config.layers), "it has MLPs")
    names = list_blocks(config)
    require(bool(names), "it has no shared block")
    blocks = []
    for name in names:
        options = config.operators[name]
        assert isinstance(options, ZambaBlockOptions)
        require(options.activation == "gelu", "the activation of its shared block is not GELU")
        require(options.norm_eps == config.norm_eps, "its norms have different eps")
        blocks.append(options)
    calls = [layer.shared for layer in config.layers if layer.shared]
    alternating = [names[number % len(names)] for number in range(len(calls))]
    require(calls == alternating, "its shared blocks are not called in turn")
    return mixer, blocks


def write_hybrid(config: ModelConfig, block: ZambaBlockOptions) -> Settings:
    return {
        **NO_IDS,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": block.heads,
        "num_key_value_heads": block.heads,
        "intermediate_size": block.hidden,
        "hidden_act": "gelu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }
