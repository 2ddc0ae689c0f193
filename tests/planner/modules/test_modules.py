"""Plans of modules that are not ours: torchvision's vision transformer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn
from torchvision.models import ViT_B_16_Weights

from headrace.console.errors import LayoutError, PlanError
from headrace.console.progress import format_bytes
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.config.options.recompute import Rule
from headrace.planner.grid.split import Split
from headrace.planner.modules.memory import ModuleParts
from headrace.planner.modules.model import TracedModules, count_flops
from headrace.planner.modules.trace import ModuleRecorder, trace_modules
from headrace.trainer.cli import main
from headrace.trainer.run.job import Job

pytestmark = pytest.mark.slow
MODULE = "support.planner.vision_modules"
NAME = f"{MODULE}:transformer"
PUBLISHED = ViT_B_16_Weights.IMAGENET1K_V1.meta


@pytest.fixture(scope="module")
def traced() -> TracedModules:
    return trace_modules(NAME, PRECISIONS["bf16"])


def test_layers_that_are_alike_are_one_kind(traced: TracedModules) -> None:
    assert traced.model.layers == (0, *[1] * 12, 2)
    sizes = [kind.num_parameters for kind in traced.model.layer_kinds]
    assert sum(sizes) == PUBLISHED["num_params"]


def test_operations_are_those_that_torchvision_publishes(traced: TracedModules) -> None:
    """Torchvision counts a multiplication with its addition as one."""
    forward = [count_flops(kind.forward) for kind in traced.trace.kinds]
    whole = sum(forward[kind] for kind in traced.trace.layers)
    assert whole == pytest.approx(2e9 * PUBLISHED["_ops"], rel=0.001)
    backward = [count_flops(kind.backward) for kind in traced.trace.kinds]
    # Twice the products; the rates add attention's factor.
    assert 1.8 * forward[1] < backward[1] < 2 * forward[1]
    assert backward[0] == pytest.approx(forward[0])  # an image needs no gradient


def test_kept_bytes_grow_with_the_rows_and_shrink_with_recompute(traced: TracedModules) -> None:
    parts = ModuleParts(traced.model, traced.trace, PRECISIONS["bf16"])
    stream = traced.trace.kinds[1].stream
    assert stream == 197 * 768 * 2

    def kept_of(rows: int, rule: Rule) -> int:
        return parts.traces(Split(rows), 1, "torch").layer(1, rule).activations

    kept = {rows: kept_of(rows, "none") for rows in (1, 2, 16)}
    # Inputs of the norms and products: at least twelve times the stream without recompute.
    assert 12 * stream < kept[1] < 24 * stream
    assert kept[2] == pytest.approx(2 * kept[1], rel=0.01)
    assert kept[16] == pytest.approx(16 * kept[1], rel=0.01)
    assert kept_of(1, "block") == pytest.approx(stream, rel=0.02)


def test_convolutions_are_counted_as_torch_counts_them() -> None:
    """torch counts only the forward pass of grouped convolutions."""
    from torch.utils.flop_counter import FlopCounterMode

    modules = [
        nn.Conv2d(6, 12, 3, stride=2),
        nn.ConvTranspose2d(6, 4, 4, stride=2),
        nn.Conv2d(6, 12, 3, groups=3),
        nn.ConvTranspose2d(6, 4, 4, groups=2),
    ]
    for module in modules:
        row = torch.randn(2, 6, 17, 17, requires_grad=True)
        counter = FlopCounterMode(display=False)
        with counter, ModuleRecorder() as recorder:
            result = module(row)
            if module.groups == 1:
                result.sum().backward()
        assert count_flops(tuple(recorder.work)) == counter.get_total_flops()


def plan(*words: str, code: int = 0) -> Result:
    command = ["plan", "--module", *words, "--hardware", "h100"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == code, result.output
    return result


def test_a_plan_of_modules_is_explained_and_not_executed(
    tmp_path: Path, ask: Callable[..., Job]
) -> None:
    file, page = tmp_path / "vit.yaml", tmp_path / "vit.html"
    words = ("--batch-rows", "4096", "--gpus", "16", "--explain", "pp=2")
    done = plan(NAME, *words, "--out", str(file), "--html", str(page), "--json")
    stored = json.loads(done.stdout)["plan"]
    assert stored["planned"]["module"] == NAME
    assert stored["planned"]["executable"] is False
    assert stored["layers"][-1]["layers"][1] == 13
    assert "ends" not in stored["predicted"]["by"]  # embedding and head are plain modules
    assert stored["predicted"]["memory"] > 2 * PUBLISHED["num_params"]
    text = done.stderr
    assert "module 1–12: EncoderBlock (1, 197, 768), 7.09M parameters" in text
    assert "rows/s on each device" in text and "pp=2 in phase steps:" in text
    assert "EncoderBlock" in page.read_text()
    memory = tmp_path / "memory.html"
    shown = CliRunner().invoke(main, ["plan", "show", str(file), "--html", str(memory)])
    assert shown.exit_code == 0, shown.output
    drawn = memory.read_text()
    assert format_bytes(stored["predicted"]["memory"]) in drawn
    assert "4,096 rows a step" in drawn and "12 EncoderBlock" in drawn
    words = ["plan", "show", str(file), "--html", str(memory), "--model", "llama2-7b"]
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 2 and "leave --model out" in refused.stderr
    with pytest.raises(LayoutError, match=rf"{NAME}.*not a model of headrace"):
        ask("processes=2", layout=str(file))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (MODULE, "has no function"),
        ("no_such_package:f", "cannot be imported"),
        (f"{MODULE}:nothing", "cannot be imported"),
        (f"{MODULE}:PUBLISHED", "cannot be imported"),
        (f"{MODULE}:no_pair", "does not return a pair"),
        (f"{MODULE}:no_modules", "no sequence of modules"),
        (
            f"{MODULE}:widths_that_differ",
            "module 1 (Linear) fails on an input of (1, 8)",
        ),
    ],
)
def test_a_function_that_cannot_be_planned_is_named(name: str, message: str) -> None:
    with pytest.raises(PlanError) as error:
        trace_modules(name, PRECISIONS["bf16"])
    assert message in str(error.value)


def test_modules_take_rows_and_models_tokens() -> None:
    small = f"{MODULE}:linear"
    assert "need each other" in plan(small, "--gpus", "2", code=2).stderr
    both = plan(small, "--gpus", "2", "--batch-rows", "8", "--model", "llama2-7b", code=2)
    assert "not both" in both.stderr
    tokens = plan(small, "--gpus", "2", "--batch-rows", "8", "--seq-len", "4", code=2)
    assert "modules have rows" in tokens.stderr
