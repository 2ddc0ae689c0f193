"""Every layout is the same model, and any checkpoint loads into any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.models.config.options.recompute import Recompute, Selective

FP32 = ["deepspeed-0-fp32", "deepspeed-1-fp32", "deepspeed-2-fp32", "deepspeed-3-fp32"]
BF16 = [name.replace("fp32", "bf16") for name in FP32[1:]]
FSDP2 = ["fsdp2-0-fp32", "fsdp2-0-bf16"]
EVERY = [*FP32, *BF16, *FSDP2]


def max_differences(a: list[list[float]], b: list[list[float]]) -> tuple[float, float]:
    """Return the greatest difference of the losses, and the greatest relative one of the norms."""
    loss = max(abs(x[0] - y[0]) for x, y in zip(a, b, strict=True))
    norm = max(abs(x[1] - y[1]) / y[1] for x, y in zip(a, b, strict=True))
    return loss, norm


@pytest.mark.parametrize("model", ["tiny", pytest.param("shared", marks=pytest.mark.long)])
def test_every_layout_trains_the_same_model(in_processes: Any, tmp_path: Path, model: str) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    reference = in_processes(1, "parity", alone, layouts=["deepspeed-0-fp32"], steps=3, model=model)
    results = in_processes(
        2, "parity", together, layouts=[*FP32, "fsdp2-0-fp32"], steps=3, model=model
    )
    for layout, result in results.items():
        loss, norm = max_differences(result, reference["deepspeed-0-fp32"])
        assert loss < 2e-6, (layout, loss)
        assert norm < 2e-5, (layout, norm)
        expected = torch.load(alone / "deepspeed-0-fp32.pt")
        have = torch.load(together / f"{layout}.pt")
        worst = max(float((have[key] - expected[key]).abs().max()) for key in expected)
        assert worst < 2e-4, (layout, worst)


DIVISIONS = [
    "deepspeed-1-fp32",
    "deepspeed-3-fp32",
    "deepspeed-1-fp32-cp2",
    "fsdp2-0-fp32-tp2",
    "fsdp2-0-fp32",
]


@pytest.mark.parametrize("over", ["row", "micro-batch"])
def test_experts_are_balanced_over_rows(in_processes: Any, tmp_path: Path, over: str) -> None:
    """One row at a time on one rank, or two at a time on two, is the same model, with the same
    biases that follow the loads, to the bit; if experts are balanced over a micro-batch (the
    negative control), it is not."""
    names = ("black", "switch", "mixtral")
    changes = [f"operators.{name}.balance_over={over}" for name in names]
    arguments = {"steps": 3, "model": "experts", "changes": changes}
    alone = {"layouts": ["fsdp2-0-fp32"], "at_once": 1, **arguments}
    [expected] = in_processes(1, "parity", tmp_path, **alone).values()
    whole = torch.load(tmp_path / "fsdp2-0-fp32.pt")
    [bias] = (name for name in whole if name.endswith("correction_bias"))
    layouts = DIVISIONS if over == "row" else DIVISIONS[:1]
    result = in_processes(2, "parity", tmp_path, layouts=layouts, at_once=2, **arguments)
    for layout, steps in result.items():
        loss, norm = max_differences(steps, expected)
        if over == "row":
            assert loss < 1e-6 and norm < 2e-6, (layout, loss, norm)
            biases = torch.load(tmp_path / f"{layout}.pt")[bias]
            assert torch.equal(biases, whole[bias]) and len(biases.unique()) > 1
        else:
            assert loss > 1e-4 and norm > 1e-3, (layout, loss, norm)


def loads_everywhere(
    in_processes: Any, folder: Path, layouts: list[str], worlds: list[int]
) -> None:
    """Save in every layout; load all into all, at several world sizes, also into used engines."""
    for saved in worlds:
        place = folder / str(saved)
        place.mkdir()
        kept = in_processes(saved, "save_all", place, layouts=layouts, steps=2)
        for loaded in worlds:
            used = loaded == saved
            result = in_processes(
                loaded, "load_all", place, sources=layouts, targets=layouts, steps=2, used=used
            )
            assert len(result) == len(layouts) ** 2
            for pair, (worst, steps) in result.items():
                source, target = pair.split(" → ")
                assert worst == 0, f"{pair}: the state differs by {worst}"
                if source == target and used:
                    assert steps == kept[source], f"{pair}: a resume is not equal to the bit"


@pytest.mark.slow
def test_checkpoints_load_across_engines_and_worlds(in_processes: Any, tmp_path: Path) -> None:
    """ZeRO-3 too: test_parity.py loads it on two ranks."""
    core = ["deepspeed-1-bf16", "fsdp2-0-fp32"]
    kept = in_processes(2, "save_all", tmp_path, layouts=core, steps=2)
    assert set(kept) == set(core)
    for processes, used, targets in ((2, True, core), (1, False, ["deepspeed-3-fp32"])):
        result = in_processes(
            processes, "load_all", tmp_path, sources=core, targets=targets, steps=2, used=used
        )
        assert {worst for worst, _ in result.values()} == {0.0}
        if used:
            assert all(result[f"{name} → {name}"][1] == kept[name] for name in core)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_any_checkpoint_loads_into_any_layout(in_processes: Any, tmp_path: Path) -> None:
    loads_everywhere(in_processes, tmp_path, EVERY, [2, 1])


@pytest.mark.slow
def test_replicated_shards_are_the_same_model(in_processes: Any, tmp_path: Path) -> None:
    """HSDP on four ranks: two copies of the state, each sharded over two."""
    reference = in_processes(1, "parity", tmp_path, layouts=["fsdp2-0-fp32"], steps=3)
    result = in_processes(4, "parity", tmp_path, layouts=["fsdp2-2-fp32", "fsdp2-0-fp32"], steps=3)
    for layout in result:
        loss, norm = max_differences(result[layout], reference["fsdp2-0-fp32"])
        assert loss < 2e-6 and norm < 2e-5, (layout, loss, norm)


PLAIN = ["deepspeed-1-fp32", "deepspeed-3-fp32"]
DIVIDED = ["fsdp2-0-fp32-tp2", "fsdp2-0-fp32-cp2"]
SELECTIVE = Selective(save=("matmul", "attention"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recompute", "layouts"),
    [
        pytest.param(0.5, [*PLAIN, *DIVIDED], marks=pytest.mark.long),
        pytest.param(SELECTIVE, [*PLAIN, *DIVIDED], marks=pytest.mark.long),
        (SELECTIVE, [PLAIN[1], DIVIDED[0]]),
    ],
    ids=str,
)
def test_recompute_changes_no_bit_of_any_engine(
    in_processes: Any, tmp_path: Path, recompute: Recompute, layouts: list[str]
) -> None:
    arguments = {"layouts": layouts, "steps": 2}
    expected = in_processes(2, "parity", tmp_path, **arguments)
    assert in_processes(2, "parity", tmp_path, recompute=recompute, **arguments) == expected


@pytest.mark.long
def test_half_precision_stays_near(in_processes: Any, tmp_path: Path) -> None:
    """bf16 in every layout differs from fp32 by rounding alone: each gradient is at most twice as
    far from that of fp32 as the gradients of one bf16 rank."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    exact, rounded = "fsdp2-0-fp32", "fsdp2-0-bf16"
    reference = in_processes(1, "parity", alone, layouts=[exact, rounded], steps=1)
    expected = gradients(alone / f"{exact}.pt")
    limit = 2 * farthest(gradients(alone / f"{rounded}.pt"), expected)
    assert limit < 0.05
    sharded = [f"{engine}-bf16-tp2" for engine in ("deepspeed-1", "deepspeed-3", "fsdp2-0")]
    result = in_processes(2, "parity", together, layouts=[*BF16, rounded, *sharded], steps=1)
    for layout in result:
        loss, norm = max_differences(result[layout], reference[exact])
        assert loss < 5e-3 and norm < 5e-3, (layout, loss, norm)
        away = farthest(gradients(together / f"{layout}.pt"), expected)
        assert limit / 20 < away < limit, (layout, away, limit)  # a smaller distance would be fp32


def gradients(file: Path) -> dict[str, torch.Tensor]:
    """Return the gradients of one step: Adam's first moments after it."""
    return {key: t for key, t in torch.load(file).items() if key.startswith("exp_avg.")}


def farthest(have: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the greatest relative distance of a parameter."""
    return max(float((have[key] - expected[key]).norm() / expected[key].norm()) for key in expected)


def test_bf16_does_not_round_the_weights_of_the_loss(in_processes: Any, tmp_path: Path) -> None:
    """bf16 has no 0.1: a rounded weight differs from its part of the divisor."""
    layouts = ["deepspeed-1-bf16", "fsdp2-0-bf16"]
    result = in_processes(1, "scaled", tmp_path, layouts=layouts, scales=[1.0, 0.1])
    for layout, (whole, tenth) in result.items():
        assert tenth == pytest.approx(whole, rel=1e-6), layout


def test_a_mean_of_means_is_another_model(in_processes: Any, tmp_path: Path) -> None:
    """Negative control: weights are uneven, so dividing by each rank's own sum must show."""
    right = in_processes(1, "parity", tmp_path, layouts=["fsdp2-0-fp32"], steps=1)
    wrong = in_processes(
        2, "parity", tmp_path, layouts=["fsdp2-0-fp32"], steps=1, mean_of_means=True
    )
    _, norm = max_differences(wrong["fsdp2-0-fp32"], right["fsdp2-0-fp32"])
    assert norm > 1e-3, norm
