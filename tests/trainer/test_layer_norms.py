"""Norms by layer: the same in every layout, without a change of the step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import CONFIGS
from support.tasks.parity import REFERENCE
from support.tasks.piped import config_of
from support.tasks.watched_layers import whole_forward

from headrace.models.config.config import load_model_config
from headrace.models.model.layer_watch import LayerWatch

TWO = ["fsdp2-0-fp32", "fsdp2-0-fp32-tp2", "deepspeed-1-fp32-tp2", "deepspeed-3-fp32"]
CLOSE = 2e-5


def norms(in_processes: Any, ranks: int, folder: Path, layouts: list[str], **more: Any) -> Any:
    model = more.pop("model", "tiny")
    return in_processes(
        ranks, "watched_layers.norms_of", folder, layouts=layouts, model=model, **more
    )


def max_differences(norms_by_layer: Any, expected: Any) -> list[float]:
    """Return the greatest relative difference of the weight, gradient and update norms."""
    assert norms_by_layer.keys() == expected.keys()
    return [
        max(
            abs(norms_by_layer[item][kind] - expected[item][kind]) / expected[item][kind]
            for item in expected
        )
        for kind in range(3)
    ]


def check(in_processes: Any, folder: Path, ranks: int, layouts: list[str], model: str) -> None:
    reference = norms(in_processes, 1, folder, [REFERENCE], model=model)[REFERENCE]
    norms_by_layout = norms(in_processes, ranks, folder, layouts, model=model)
    for layout, (watched, whole, (unchanged, norm)) in {
        REFERENCE: reference,
        **norms_by_layout,
    }.items():
        assert unchanged, f"{layout}: the step changed"
        for layer, (weight, _, update) in watched.items():
            assert (weight, update) == pytest.approx(whole[layer], rel=1e-12), (layout, layer)
        total = math.sqrt(sum(gradient**2 for _, gradient, _ in watched.values()))
        assert total == pytest.approx(norm, rel=1e-12), layout
        assert max(max_differences(watched, reference[0])) < CLOSE, (
            layout,
            max_differences(watched, reference[0]),
        )


@pytest.mark.slow
def test_every_layout_has_the_norms_of_one_process(in_processes: Any, tmp_path: Path) -> None:
    """Also: those of the whole weights before and after the step; the gradients' join to the norm
    of the step; losses, norms and state are equal to the bit without them."""
    check(in_processes, tmp_path, 2, TWO, "tiny")


@pytest.mark.long
@pytest.mark.parametrize("model", ["every", "untied", "shared"])
def test_stages_and_experts_have_the_norms_of_one_process(
    in_processes: Any, tmp_path: Path, model: str
) -> None:
    axes = ["deepspeed-2-fp32-pp2", "fsdp2-0-fp32-pp2tp2", "fsdp2-2-fp32", "deepspeed-1-fp32-cp2"]
    experts = ["fsdp2-2-fp32-ep2", "deepspeed-2-fp32-ep2"] if model == "shared" else []
    check(in_processes, tmp_path, 4, [*axes, *experts], model)


@pytest.mark.slow
def test_the_accounting_counts_the_copy_of_the_masters(in_processes: Any, tmp_path: Path) -> None:
    layouts = ["fsdp2-0-fp32", "deepspeed-1-bf16", "fsdp2-0-bf16-tp2", "deepspeed-0-fp32"]
    result = in_processes(2, "watched_layers.copied_masters", tmp_path, layouts=layouts)
    for layout, (copied, counted) in result.items():
        slack = 8192 if layout != "deepspeed-0-fp32" else copied // 2  # whole parameters in turns
        assert 0 <= counted - copied + slack // 2 <= slack, (layout, copied, counted)


@pytest.mark.slow
def test_copies_that_count_twice_show(in_processes: Any, tmp_path: Path) -> None:
    """Negative control: each rank counts its copy of a parameter."""
    reference = norms(in_processes, 1, tmp_path, [REFERENCE])[REFERENCE][0]
    wrong = norms(in_processes, 2, tmp_path, ["fsdp2-0-fp32-tp2"], fault="counted twice")
    differences = max_differences(wrong["fsdp2-0-fp32-tp2"][0], reference)
    assert all(difference > 1e-3 for difference in differences), differences


FORWARD = ["fsdp2-0-fp32-tp2", "deepspeed-3-fp32", "fsdp2-0-fp32-cp2"]


def check_forward(
    in_processes: Any, folder: Path, ranks: int, layouts: list[str], model: str, **more: Any
) -> None:
    result = in_processes(
        ranks, "watched_layers.forward_signals", folder, layouts=layouts, model=model, **more
    )
    expected = whole_forward(config_of(model))
    for layout, layer_signals in result.items():
        assert layer_signals.keys() == expected.keys(), layout
        for layer, signals in expected.items():
            assert {name: layer_signals[layer][name] for name in signals} == pytest.approx(
                signals, rel=1e-4
            )


@pytest.mark.slow
def test_activations_and_loads_are_those_of_a_whole_model(
    in_processes: Any, tmp_path: Path, work: Any
) -> None:
    check_forward(in_processes, tmp_path, 1, [REFERENCE], "experts", recompute="block")
    check_forward(in_processes, tmp_path, 2, FORWARD, "tiny")
    check_forward(in_processes, tmp_path, 2, ["fsdp2-0-fp32-tp2", "deepspeed-1-fp32"], "experts")


@pytest.mark.long
def test_stages_and_split_experts_have_them_too(
    in_processes: Any, tmp_path: Path, work: Any
) -> None:
    layouts = ["fsdp2-0-fp32-pp2", "fsdp2-2-fp32-ep2", "fsdp2-0-fp32-tp2ep4"]
    check_forward(in_processes, tmp_path, 4, [*layouts, "deepspeed-2-fp32-ep2"], "experts")


def test_the_load_of_experts_in_numbers() -> None:
    shape = load_model_config(CONFIGS / "experts.yaml")
    watch = LayerWatch(shape, torch.device("cpu"))
    rows, tokens = torch.tensor([True, False]), torch.tensor([6, 2, 0, 0])
    u = torch.full((2, 5, 36), 2.0)
    watch.add(1, u, rows, [tokens])
    watch.add(1, 2 * u, rows, [tokens])
    outputs = watch.outputs(watch.sums)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert outputs["blocks.1"] == pytest.approx((math.sqrt(10), 3.0, entropy))
    assert outputs["blocks.0"] == (0.0, None, None)
