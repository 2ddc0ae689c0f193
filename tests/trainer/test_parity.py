"""The parity matrix: every layout computes what one rank computes.

The reference runs on one rank, all other layouts on one pool of four. The tests compare the loss,
the norm, and every gradient, assembled from all ranks: it is Adam's first moment after one step.
Rows are packed, weights uneven, a step has several micro-batches, and clipping is active.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tasks.parity import GRADIENT, LOSS, NORM, REFERENCE, check_parity, differences

ENGINES = ["deepspeed-0", "deepspeed-1", "deepspeed-2", "deepspeed-3", "fsdp2-0"]
AXES = ["tp2", "tp4", "cp2", "cp2ring", "cp2a2a", "cp4", "cp4ring", "tp2cp2", "tp2cp2ring"]
EXPERTS = ["ep2", "ep4", "cp2ep4", "cp2ringep2", "tp2ep2", "tp2ep4", "tp4ep4", "tp2cp2ep4"]
STAGED = ["pp2ep2", "pp2tp2ep2", "pp2cp2ep2"]
EXPERT_ENGINES = ["deepspeed-1", "deepspeed-2", "fsdp2-0"]
"""Engines that split experts."""


@pytest.mark.slow
def test_the_core_of_the_matrix(in_processes: Any, tmp_path: Path) -> None:
    tensor = ["fsdp2-0-fp32-tp2cp2"]  # below, two ranks compare the gradients of deepspeed-1
    context = ["deepspeed-3-fp32-cp2ring"]  # models/parallel/test_context.py has four parts
    experts = ["deepspeed-2-fp32-tp2ep4"]
    check_parity(differences(in_processes, tmp_path, [*tensor, *context, *experts], "every"))


@pytest.mark.slow
def test_replicas_of_split_experts(in_processes: Any, tmp_path: Path) -> None:
    """With few parameters: torch's first step on a mesh of two axes takes long for each shape."""
    check_parity(differences(in_processes, tmp_path, ["fsdp2-2-fp32-ep2"], "shared"))


@pytest.mark.slow
def test_gradients_that_are_not_summed_show(in_processes: Any, tmp_path: Path) -> None:
    """Negative control: gradients of copies are not summed."""
    faulty(in_processes, tmp_path, ["fsdp2-0-fp32-tp2"])


@pytest.mark.long
def test_every_engine_shows_gradients_that_are_not_summed(
    in_processes: Any, tmp_path: Path
) -> None:
    faulty(in_processes, tmp_path, [f"{engine}-fp32-tp2" for engine in ENGINES])


def faulty(in_processes: Any, folder: Path, layouts: list[str]) -> None:
    worst = differences(in_processes, folder, layouts, "tiny", fault="unsummed")
    assert all(norm > 1e-3 and gradient > 1e-2 for _, norm, gradient in worst.values()), worst


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("model", ["every", "untied", "tiny"])
def test_the_whole_matrix(in_processes: Any, tmp_path: Path, model: str) -> None:
    axes = AXES if model != "tiny" else ["tp2", "cp2ring", "tp2cp2ring"]
    layouts = [f"{engine}-fp32-{degrees}" for engine in ENGINES for degrees in axes]
    check_parity(differences(in_processes, tmp_path, [*layouts, "fsdp2-2-fp32-tp2"], model))


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("model", ["every", "untied", "shared"])
def test_the_whole_matrix_of_experts(in_processes: Any, tmp_path: Path, model: str) -> None:
    axes = EXPERTS if model != "shared" else ["ep2", "ep4", "tp2ep2", "tp2ep4"]
    axes = [*axes, *STAGED]
    layouts = [f"{engine}-fp32-{degrees}" for engine in EXPERT_ENGINES for degrees in axes]
    replicas = ["fsdp2-2-fp32-ep2", "fsdp2-1-fp32-ep4", "fsdp2-1-fp32-tp2ep2"]
    check_parity(differences(in_processes, tmp_path, [*layouts, *replicas], model))


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_shipped_model_splits_its_experts(in_processes: Any, tmp_path: Path) -> None:
    """Sinkhorn's sums over other ranks, in fp32, are as far from one rank without ep as with it."""
    layouts = ["deepspeed-1-fp32-ep4", "deepspeed-2-fp32-pp2ep2", "fsdp2-2-fp32-ep2"]
    result = differences(in_processes, tmp_path, ["fsdp2-0-fp32", *layouts], "tiny-moe")
    plain = result.pop("fsdp2-0-fp32")
    for layout, values in result.items():
        for value, without in zip(values, plain, strict=True):
            assert value < 2 * max(without, 1e-6), (layout, values, plain)


@pytest.mark.slow
def test_gradients_of_different_experts_are_not_summed(in_processes: Any, tmp_path: Path) -> None:
    """Negative control: gradients of experts are summed over all data-parallel ranks."""
    layouts = [f"{engine}-fp32-ep2" for engine in EXPERT_ENGINES]
    worst = differences(in_processes, tmp_path, layouts, "shared", fault="mixed")
    assert all(gradient > 1e-2 for _, _, gradient in worst.values()), worst


@pytest.mark.long
def test_muon_takes_whole_experts(in_processes: Any, tmp_path: Path) -> None:
    alone = in_processes(
        1, "parity", tmp_path, layouts=[REFERENCE], steps=2, model="shared", optimizer="muon"
    )
    layout = "deepspeed-1-fp32-ep2"
    split = in_processes(
        2, "parity", tmp_path, layouts=[layout], steps=2, model="shared", optimizer="muon"
    )
    for expected, result in zip(alone[REFERENCE], split[layout], strict=True):
        assert (
            abs(result[0] - expected[0]) < LOSS
            and abs(result[1] - expected[1]) < 2e-5 * expected[1]
        )


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_checkpoint_of_split_experts_loads_into_others(in_processes: Any, tmp_path: Path) -> None:
    layouts = ["fsdp2-0-fp32-ep2", "deepspeed-2-fp32-ep2", "deepspeed-3-fp32"]
    names = {"model": "shared", "steps": 1}
    kept = in_processes(2, "save_all", tmp_path, layouts=layouts, **names)
    targets = [*layouts, "fsdp2-1-fp32-tp2ep2"]
    result = in_processes(
        2, "load_all", tmp_path, sources=layouts, targets=targets, used=True, **names
    )
    assert {worst for worst, _ in result.values()} == {0.0}
    assert all(result[f"{name} → {name}"][1] == kept[name] for name in layouts)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_half_precision_stays_near(in_processes: Any, tmp_path: Path) -> None:
    engines = ["deepspeed-1", "deepspeed-2", "deepspeed-3", "fsdp2-0"]
    layouts = [f"{engine}-bf16-{degrees}" for engine in engines for degrees in ("tp2", "tp2cp2")]
    experts = ["ep2", "tp2ep2", "pp2ep2"]
    layouts += [f"{engine}-bf16-{axes}" for engine in EXPERT_ENGINES for axes in experts]
    worst = differences(in_processes, tmp_path, [*layouts, "fsdp2-0-bf16"], "every")
    rounded = worst.pop("fsdp2-0-bf16")[2]  # four data-parallel ranks in bf16
    for layout, (loss, norm, gradient) in worst.items():
        assert loss < 5e-3 and norm < 5e-3, (layout, loss, norm)
        assert gradient < 2 * rounded, (layout, gradient, rounded)


SAVED = ["deepspeed-1-bf16-tp2", "deepspeed-3-fp32-tp2", "fsdp2-0-fp32-tp2", "deepspeed-2-fp32"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_checkpoint_of_a_sharded_model_loads_into_others(
    in_processes: Any, tmp_path: Path
) -> None:
    """Masters and moments are equal to the bit; so are the steps after a resume in one layout."""
    source = "deepspeed-3-fp32-tp2"
    kept = in_processes(2, "save_all", tmp_path, layouts=[source], steps=1)
    targets = [source, "deepspeed-1-bf16-tp2", "fsdp2-0-fp32"]
    result = in_processes(
        2, "load_all", tmp_path, sources=[source], targets=targets, steps=1, used=True
    )
    assert {worst for worst, _ in result.values()} == {0.0}
    assert result[f"{source} → {source}"][1] == kept[source]


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_checkpoints_load_across_engines_and_divisions(in_processes: Any, tmp_path: Path) -> None:
    """4 sources on two ranks; 4 targets on two, 2 on one and 4 on four: 40 pairs."""
    kept = in_processes(2, "save_all", tmp_path, layouts=SAVED, steps=2)
    four = [
        "deepspeed-1-fp32-tp2",
        "deepspeed-3-bf16-tp2",
        "fsdp2-0-fp32-tp2cp2ring",
        "fsdp2-2-fp32",
    ]
    targets = {2: SAVED, 1: ["deepspeed-1-fp32", "fsdp2-0-bf16"], 4: four}
    for processes, layouts in targets.items():
        used = processes == 2
        result = in_processes(
            processes, "load_all", tmp_path, sources=SAVED, targets=layouts, steps=2, used=used
        )
        assert len(result) == len(SAVED) * len(layouts)
        assert {worst for worst, _ in result.values()} == {0.0}
        if used:
            assert all(result[f"{name} → {name}"][1] == kept[name] for name in SAVED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        ["deepspeed-1-fp32-tp2", "deepspeed-2-fp32", "deepspeed-3-fp32", "fsdp2-1-fp32-tp2"],
        pytest.param(
            [f"{engine}-fp32{axes}" for engine in [*ENGINES, "fsdp2-1"] for axes in ("", "-tp2")],
            marks=pytest.mark.long,
        ),
    ],
    ids=["some", "all"],
)
def test_shards_of_gradients_are_the_whole_gradient(
    in_processes: Any, tmp_path: Path, layouts: list[str]
) -> None:
    """One rank writes each element, and the norm equals the norm of the whole gradient."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    for place in (alone, together):
        place.mkdir()
    names = {"model": "tiny"}
    expected = in_processes(
        1, "gradient_shards.shards_of_gradients", alone, layouts=[REFERENCE], **names
    )[REFERENCE]
    whole = torch.load(alone / f"{REFERENCE}.gradients.pt")
    result = in_processes(
        2, "gradient_shards.shards_of_gradients", together, layouts=layouts, **names
    )
    for layout, norm in result.items():
        have = torch.load(together / f"{layout}.gradients.pt")
        shard_norm = (
            sum(float(gradient.double().square().sum()) for gradient in have.values()) ** 0.5
        )
        assert abs(norm - shard_norm) < 1e-12 * shard_norm, (layout, norm, shard_norm)
        assert abs(norm - expected) < NORM * expected, (layout, norm, expected)
        for name, gradient in whole.items():
            apart = float((have[name] - gradient).abs().max() / gradient.abs().max())
            assert apart < GRADIENT, (layout, name, apart)
