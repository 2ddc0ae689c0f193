"""A pipeline computes what one process computes: to the bit where one chunk uses a parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tasks.parity import check_parity, differences

SCHEDULES = ["pp2", "pp2gpipe", "pp2x2"]
MODELS = ["every", "untied", "shared"]


def check_cases(cases: dict[str, tuple[list[str], float, bool]]) -> None:
    for case, (differing, worst, losses) in cases.items():
        assert not differing and worst < 1e-12 and losses, (case, differing, worst, losses)


def test_gradients_are_those_of_one_process(in_processes: Any) -> None:
    """Tied embeddings, a shared block on both stages, routers in a stage without the loss."""
    cases = [("untied", "pp2", 3), ("shared", "pp2x2", 3), ("shared", "pp2gpipe", 2)]
    check_cases(in_processes(2, "piped.exact", cases=cases))


@pytest.mark.long
def test_gradients_are_those_of_torchs_own_pipelines(in_processes: Any) -> None:
    """A second oracle. It has no way out for the losses of routers, and knows no copies: here
    each stage's own gradients are compared."""
    assert in_processes(2, "piped.second_oracle", name="tiny", number=5) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["copies", "handed", "routers", "rows"])
def test_faults_show(in_processes: Any, fault: str) -> None:
    """Negative controls."""
    case = ("every" if fault == "routers" else "shared", "pp2", 2)
    [(differing, worst, _)] = in_processes(2, "piped.exact", cases=[case], fault=fault).values()
    assert worst > 1e-3 and (differing or fault == "copies"), (differing, worst)


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "operator", "block"])
@pytest.mark.parametrize("packed", [True, False])
def test_every_schedule_is_exact(in_processes: Any, recompute: str, packed: bool) -> None:
    """Micro-batches that the stages divide, and one more."""
    cases = [(model, words, m) for model in MODELS for words in SCHEDULES for m in (4, 5)]
    check_cases(in_processes(2, "piped.exact", cases=cases, recompute=recompute, packed=packed))


TINY = ["tiny-hybrid", "tiny-zamba", "tiny-moe", "tiny-delta"]


@pytest.mark.long
def test_shipped_models_are_exact(in_processes: Any) -> None:
    cases = [(model, words, 4) for model in TINY for words in ("pp2", "pp2x2")]
    check_cases(in_processes(2, "piped.exact", cases=cases))
    check_cases(
        in_processes(4, "piped.exact", cases=[(model, "pp4", 5) for model in (*TINY, "every")])
    )
    check_cases(
        in_processes(
            4, "piped.exact", cases=[("untied", "pp4uneven", 3), ("every", "pp4uneven", 3)]
        )
    )


# Engines, against one rank without stages (see test_parity.py)

ENGINES = ["deepspeed-0", "deepspeed-1", "deepspeed-2", "fsdp2-0"]
PIPED = ["pp2", "pp2gpipe", "pp2x2", "pp2tp2", "pp2cp2", "pp2cp2ring", "pp4uneven"]


@pytest.mark.slow
def test_stages_train_the_same_model_under_every_engine(in_processes: Any, tmp_path: Path) -> None:
    layouts = ["deepspeed-1-fp32-pp2x2", "deepspeed-2-fp32-pp4uneven", "fsdp2-0-fp32-pp2tp2"]
    check_parity(differences(in_processes, tmp_path, layouts, "every"))


@pytest.mark.long
@pytest.mark.parametrize("fault", ["unsummed", "counted twice", "other rows"])
def test_faults_show_under_an_engine(in_processes: Any, tmp_path: Path, fault: str) -> None:
    """Negative controls. The embedding is tied, and on two stages."""
    result = differences(in_processes, tmp_path, ["fsdp2-0-fp32-pp2"], "tiny", fault=fault)
    [(_, norm, gradient)] = result.values()
    assert norm > 1e-3 and gradient > 1e-3, (norm, gradient)


@pytest.mark.long
def test_gathering_seldom_changes_nothing(in_processes: Any, tmp_path: Path) -> None:
    """Gathered weights are those of the last step: the second step shows it."""
    options: dict[str, Any] = {"steps": 2, "model": "tiny"}
    layouts = ["fsdp2-0-fp32", "fsdp2-0-fp32-step", "fsdp2-0-fp32-micro", "fsdp2-0-fp32-pp2block"]
    layouts += ["fsdp2-0-fp32-pp2x2micro", "fsdp2-0-fp32-pp2step", "fsdp2-2-fp32-step"]
    expected, *gathered_seldom = in_processes(4, "parity", layouts=layouts, **options).values()
    for layout, result in zip(layouts[1:], gathered_seldom, strict=True):
        for (loss, norm), (its_loss, its_norm) in zip(expected, result, strict=True):
            assert abs(its_loss - loss) < 2e-6 and abs(its_norm / norm - 1) < 2e-5, layout


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("model", ["every", "untied"])
def test_the_whole_matrix_of_stages(in_processes: Any, tmp_path: Path, model: str) -> None:
    layouts = [f"{engine}-fp32-{axes}" for engine in ENGINES for axes in PIPED]
    layouts += ["fsdp2-2-fp32-pp2", "fsdp2-0-fp32-pp2block"]
    result = differences(in_processes, tmp_path, layouts, model)
    check_parity(result)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_half_precision_stays_near(in_processes: Any, tmp_path: Path) -> None:
    """bf16 with stages is as far from fp32 as bf16 without."""
    engines = ["deepspeed-1", "deepspeed-2", "fsdp2-0"]
    layouts = [f"{engine}-bf16-{axes}" for engine in engines for axes in ("pp2", "pp2x2", "pp2tp2")]
    worst = differences(in_processes, tmp_path, [*layouts, "fsdp2-0-bf16"], "every")
    rounded = worst.pop("fsdp2-0-bf16")[2]
    for layout, (loss, norm, gradient) in worst.items():
        assert loss < 5e-3 and norm < 5e-3, (layout, loss, norm)
        assert gradient < 2 * rounded, (layout, gradient, rounded)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_muon_brings_matrices_together_from_all_stages(in_processes: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 3, "model": "shared", "optimizer": "muon"}
    alone = in_processes(1, "parity", layouts=["fsdp2-0-fp32"], **options)["fsdp2-0-fp32"]
    layouts = ["deepspeed-1-fp32-pp2", "fsdp2-0-fp32-pp2x2"]
    for layout, result in in_processes(4, "parity", layouts=layouts, **options).items():
        for (loss, norm), (its_loss, its_norm) in zip(alone, result, strict=True):
            assert abs(its_loss - loss) < 2e-5 and abs(its_norm / norm - 1) < 1e-4, layout


# Skipped steps and checkpoints


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        ["deepspeed-1-bf16-pp2"],
        pytest.param(["fsdp2-0-fp32-pp2", "deepspeed-1-bf16-pp2"], marks=pytest.mark.long),
    ],
)
def test_a_step_that_one_rank_spoils_is_skipped_on_every_stage(
    in_processes: Any, layouts: list[str]
) -> None:
    """A NaN from one rank of the last stage: no copy of the state changes."""
    result = in_processes(4, "left_out", layouts=layouts, faulty=1)
    assert result == {layout: [False, True, True, True] for layout in layouts}


SAVED = ["deepspeed-1-fp32-pp2tp2", "fsdp2-0-fp32-pp4", "deepspeed-2-fp32-pp2x2"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_checkpoint_of_stages_loads_into_others(in_processes: Any, tmp_path: Path) -> None:
    """Masters and moments are equal to the bit; so are the steps after a resume in one layout."""
    saved = ["deepspeed-1-fp32-pp2"]
    kept = in_processes(2, "save_all", tmp_path, layouts=saved, steps=1)
    targets = [*saved, "fsdp2-0-fp32-pp2x2"]
    result = in_processes(
        2, "load_all", tmp_path, sources=saved, targets=targets, steps=1, used=True
    )
    assert {worst for worst, _ in result.values()} == {0.0}
    assert result[f"{saved[0]} → {saved[0]}"][1] == kept[saved[0]]


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_checkpoints_load_across_stages_and_engines(in_processes: Any, tmp_path: Path) -> None:
    kept = in_processes(4, "save_all", tmp_path, layouts=SAVED, steps=2)
    targets = {4: [*SAVED, "deepspeed-3-fp32"], 1: ["fsdp2-0-fp32"], 2: ["fsdp2-0-bf16-pp2"]}
    for processes, layouts in targets.items():
        used = processes == 4
        result = in_processes(
            processes, "load_all", tmp_path, sources=SAVED, targets=layouts, steps=2, used=used
        )
        assert len(result) == len(SAVED) * len(layouts)
        assert {worst for worst, _ in result.values()} == {0.0}
        if used:
            assert all(result[f"{name} → {name}"][1] == kept[name] for name in SAVED)


SPLIT = [
    "deepspeed-1-fp32-pp2tp2",
    "fsdp2-0-fp32-pp4",
    "fsdp2-0-fp32-ep2",
    "deepspeed-2-fp32-pp2ep2",
]


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_checkpoints_load_across_stages_and_experts(
    in_processes: Any, tmp_path: Path, optimizer: str
) -> None:
    """Shared blocks and experts, from four layouts to eight, ZeRO-3 among them."""
    options: dict[str, Any] = {"model": "shared", "optimizer": optimizer, "steps": 1}
    kept = in_processes(4, "save_all", tmp_path, layouts=SPLIT, **options)
    targets = {
        4: [*SPLIT, "deepspeed-3-fp32", "deepspeed-1-bf16-tp2ep4"],
        2: ["fsdp2-0-bf16-pp2x2"],
        1: ["fsdp2-0-fp32"],
    }
    for processes, layouts in targets.items():
        used = processes == 4
        result = in_processes(
            processes, "load_all", tmp_path, sources=SPLIT, targets=layouts, used=used, **options
        )
        assert len(result) == len(SPLIT) * len(layouts)
        assert {worst for worst, _ in result.values()} == {0.0}
        if used:
            assert all(result[f"{name} → {name}"][1] == kept[name] for name in SPLIT)
