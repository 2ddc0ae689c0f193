"""The choice of matrices in FP8: the whole list of a model, and each setting."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from headrace.console.headrace import main
from headrace.models.accounting.count import build_meta, forward_flops
from headrace.models.accounting.passes import model_passes
from headrace.models.accounting.shape import Shape
from headrace.models.accounting.show import render
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS, Fp8Config, Precision
from headrace.models.config.options.recompute import Rule, Selective
from headrace.models.model.model import Model
from headrace.models.transforms.fp8 import fp8_share, iterate_matrices, quantize, summary

SMALL = Fp8Config(smallest=16, ends=0)


def names(model: Model, config: Fp8Config) -> set[str]:
    return {matrix.name for matrix in iterate_matrices(model, config) if matrix.reason is None}


def reasons(model: Model, config: Fp8Config) -> dict[str, str | None]:
    return {matrix.name: matrix.reason for matrix in iterate_matrices(model, config)}


def test_what_stays_in_bf16_and_why(everything: Model) -> None:
    result = reasons(everything, SMALL)
    assert result["blocks.0.gated.qkv"] is None
    assert result["blocks.1.mamba2.input"] is None
    assert result["blocks.1.mamba2.input[B, C, dt]"] == "selects states"
    assert result["blocks.2.mamba1.[select, dt]"] == "selects states"
    assert result["blocks.2.moe.router"] == "router"
    assert result["blocks.2.moe.[gate_up, down]"] == "experts"
    assert result["blocks.2.call.project"] == "call of a shared block"
    assert result["blocks.3.mlp.up"] == "not a multiple of 16"
    assert result["blocks.4.gdn.input[decay, beta]"] == "selects states"
    assert result["blocks.4.mha.qkv"] is result["blocks.4.gdn.output"] is None, "side by side"
    assert result["embedding"] == "table"
    assert result["head"] == "head"


def test_settings(everything: Model) -> None:
    every = names(everything, SMALL)
    outer = names(everything, Fp8Config(smallest=16, ends=2))
    assert every - outer == {
        name for name in every if name.startswith(tuple(f"blocks.{n}." for n in (0, 1, 7, 8)))
    }
    hyena = names(everything, Fp8Config(smallest=16, ends=0, matrices="hyena"))
    assert hyena == {f"blocks.{name}" for name in ("3.se.qkv", "3.se.output", "5.mr-toeplitz.qkv",
        "5.mr-toeplitz.output", "6.li.qkv", "6.li.output")}  # fmt: skip
    evo2 = names(everything, Fp8Config(smallest=16, ends=0, matrices="evo2"))
    assert evo2 == {name for name in hyena if name.endswith("qkv")}
    assert not names(everything, Fp8Config())
    for wrong in ({"smallest": 8}, {"ends": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Fp8Config(**wrong)


def test_all_flops_of_matrices_are_listed(everything: Model) -> None:
    """All that the accounting counts as products with weights, and nothing else."""
    listed = sum(matrix.flops for matrix in iterate_matrices(everything, SMALL))
    counted = forward_flops(everything, 1)
    unlisted = 0.0
    for layer, block in zip(everything.config.layers, everything.typed_blocks(), strict=True):
        shared = everything.shared_block(layer)
        for operator in [*block.operators(), *([shared] if shared is not None else [])]:
            parts = operator.flops(1)
            unlisted += sum(v for k, v in parts.items() if k not in ("experts", "projections"))
    assert listed == pytest.approx(sum(counted.values()) - unlisted)


def test_marks_are_those_of_the_list(tiny: Model) -> None:
    marked = quantize(build_meta(tiny.config), SMALL)
    plain = build_meta(tiny.config)
    narrow = [matrix for matrix in iterate_matrices(marked, SMALL) if matrix.reason is None]
    assert {id(item.module) for item in narrow} == {
        id(module) for module in marked.modules() if getattr(module, "fp8", False)
    }
    assert not any(getattr(module, "fp8", False) for module in plain.modules())


def test_a_model_computes_with_its_marks(tiny: Model) -> None:
    tokens = torch.randint(0, 23, (2, 20), generator=torch.Generator().manual_seed(0))
    before = tiny(tokens).detach()
    after = quantize(tiny, SMALL)(tokens).detach()
    marked = any(matrix.reason is None for matrix in iterate_matrices(tiny, SMALL))
    difference = float((after - before).abs().max() / before.abs().max())
    assert (1e-5 < difference < 0.3) if marked else difference == 0.0


def test_the_accounting_measures_products_in_fp8(everything: Model) -> None:
    """The op keeps what a product in bf16 keeps: x in bf16, and the matrix."""
    config = everything.config

    def kept(precision: Precision, rule: Rule) -> list[int]:
        shape = Shape(rows=2, seq_len=24, precision=precision, device="cpu")
        passes = model_passes(config, shape, [rule] * len(config.layers))
        return [layer.activations for layer in passes.layers]

    fp8, bf16 = replace(PRECISIONS["fp8"], fp8=SMALL), PRECISIONS["bf16"]
    products = Selective(save=("matmul",))
    assert kept(fp8, "none") == kept(bf16, "none")
    assert kept(fp8, products) == kept(bf16, products)
    assert sum(kept(fp8, products)) > sum(kept(fp8, "block")), "recompute may keep the op's results"


def test_shipped_models_have_most_flops_in_fp8() -> None:
    for name in ("hybrid-1b", "transformer-1b", "llama2-7b"):
        model = build_meta(load_model_config(name))
        assert fp8_share(iterate_matrices(model, Fp8Config())) > 0.8, name
    evo2 = build_meta(load_model_config("evo2-7b-8k"))
    entries = summary(evo2, Fp8Config(matrices="evo2"))["fp8"]
    assert {entry["matrix"] for entry in entries} == {
        f"blocks.*.{n}.qkv" for n in ("se", "mr", "li")
    }


def test_the_list_is_shown() -> None:
    words = ["models", "show", "tiny-hybrid", "--seq-len", "64", "--precision", "fp8"]
    words += ["--fp8", "smallest=64"]
    document = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    shares = document["fp8"]
    assert shares["training_share"] == pytest.approx(shares["share"] * 2 / 3)
    shown = render(document)
    assert "blocks.*.glu.gate_up ×3" in shown
    assert "bf16: in a block at an end" in shown
    assert f"{shares['share']:.1%} of these FLOPs" in shown
    wrong = CliRunner().invoke(main, ["models", "show", "tiny-hybrid", "--fp8", "ends=0"])
    assert wrong.exit_code == 2
    assert "--fp8 needs --precision fp8" in wrong.output
    wrong = CliRunner().invoke(main, [*words, "--fp8", "end=0"])
    assert "did you mean `ends`" in wrong.output
