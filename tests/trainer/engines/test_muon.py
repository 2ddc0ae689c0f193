"""Muon equals the published method, and is the same in every engine and layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import CONFIGS

from headrace.models.config.config import load_model_config
from headrace.models.documents import Documents
from headrace.models.model.model import Model
from headrace.models.transforms.matrices import find_matrices
from headrace.trainer.checkpoints.fragments import masters
from headrace.trainer.engines.objective import Objective
from headrace.trainer.engines.optimizers.exchange import assign_owners
from headrace.trainer.engines.optimizers.muon_step import orthogonalize
from headrace.trainer.layout.groups import Parallel

REFERENCE = "fsdp2-0-fp32"


def by_singular_values(matrix: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Apply the iteration to the singular values, in fp64: U·p(S)·V^T."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    for _ in range(iterations):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s.unsqueeze(-2) @ v


@pytest.mark.parametrize("shape", [(7, 12), (12, 7), (3, 5, 4), (1, 6)])
def test_singular_values_approach_one(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    result = orthogonalize(matrix, 5, torch.float32)
    assert torch.allclose(result.double(), by_singular_values(matrix), atol=2e-5)
    values = torch.linalg.svdvals(result)
    assert float(values.min()) > 0.6 and float(values.max()) < 1.25
    rounded = orthogonalize(matrix, 5, torch.bfloat16)
    assert 1e-4 < float((rounded - result).abs().max()) < 0.1


def test_zeros_stay_zeros() -> None:
    assert not orthogonalize(torch.zeros(3, 4), 5, torch.float32).any()


PROJECTIONS = {
    "qkv.weight",
    "output.weight",
    "out.weight",
    "input.weight",
    "gate_up.weight",
    "decay_up.weight",
    "up.weight",
    "down.weight",
    "project.weight",
    "router.weight",
    "operator.gate_up",
    "operator.up",
    "q_a.weight",
    "q_b.weight",
    "kv_a.weight",
    "kv_b.weight",
    "operator.down",
    "operator.select",
    "operator.dt",
}


def test_only_projections_of_operators_are_matrices() -> None:
    config = load_model_config(CONFIGS / "every.yaml")
    result = find_matrices(config)
    for name, parameter in Model(config).named_parameters():
        ends = ".".join(name.split(".")[-2:])
        expected = ends in PROJECTIONS or name.split(".")[-2:] == ["down", "weight"]
        expected |= ".qkv." in name and name.endswith("down.weight")
        assert (name in result) == expected, name
        if name in result:
            assert result[name].shape == tuple(parameter.shape)
            assert sum(result[name].rows) == parameter.shape[-2]
    assert result["blocks.0.mixer.operator.qkv.weight"].rows == (24, 24, 24)
    assert result["blocks.7.mlp.operator.gate_up"].rows == (21, 21)


def test_every_tensor_has_an_owner_and_work_is_balanced() -> None:
    result = assign_owners({"a": 5.0, "b": 4.0, "c": 3.0, "d": 3.0, "e": 1.0}, 2)
    assert result == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 1}


def test_it_is_the_published_method(work: Any, parallel: Parallel) -> None:
    """Compared with a separate loop: torch's AdamW and clipping, singular values in fp64."""
    engine = work.make_engine(REFERENCE, parallel, optimizer="muon", weight_decay=0.2)
    ours = {master.parameter: master.data for master in masters(engine.fragments())}
    config = load_model_config(CONFIGS / "tiny.yaml")
    model = Model(config)
    model.init_weights(3)
    objective = Objective(model, work.Z_LOSS)
    rows = {
        "qkv.weight": (36, 36, 36),
        "gate_up.weight": (50, 50),
        "input.weight": tuple(model.typed_blocks()[3].mixer.operator.input.parts.values()),
    }
    matrix, decayed, plain = {}, [], []
    for name, parameter in model.named_parameters():
        ends = ".".join(name.split(".")[-2:])
        if ends in PROJECTIONS:
            matrix[name] = (parameter, rows.get(ends, (len(parameter),)))
        elif parameter.ndim > 1 and not name.endswith(("rates", "residues")):
            decayed.append(parameter)
        else:
            plain.append(parameter)
    groups = [
        {"params": decayed, "weight_decay": 0.2},
        {"params": plain, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=work.LR, betas=(0.9, 0.95), eps=1e-8)
    momentum = {name: torch.zeros_like(p) for name, (p, _) in matrix.items()}
    for step, limit in enumerate((1e-5, 3e-4, 3e-4)):  # Adam's first step amplifies rounding
        [[loss, norm]] = work.train(engine, parallel, step, 1)
        tokens, targets, weights, starts = work.global_batch(step)
        objective.zero_grad()
        total = torch.zeros(())
        for row in range(work.ROWS):
            cuts = starts[row].nonzero().flatten()
            ends_at = torch.tensor([work.LENGTH])
            documents = Documents.build(
                torch.cat([ends_at - work.LENGTH, cuts, ends_at]), (1, work.LENGTH)
            )
            single_row = slice(row, row + 1)
            sums = objective(
                tokens[single_row], targets[single_row], weights[single_row], documents
            )
            (sums.total / weights.sum()).backward()
            total += sums.rows.sum().detach()
        assert float(total / weights.sum()) == pytest.approx(loss, rel=2e-6)
        length = torch.nn.utils.clip_grad_norm_(objective.parameters(), 0.5)
        assert float(length) == pytest.approx(norm, rel=1e-5)
        with torch.no_grad():
            for name, (parameter, sizes) in matrix.items():
                assert parameter.grad is not None
                mean = momentum[name] = 0.95 * momentum[name] + 0.05 * parameter.grad
                ahead = 0.95 * mean + 0.05 * parameter.grad
                parts = [
                    by_singular_values(part) * 0.2 * max(part.shape) ** 0.5
                    for part in ahead.split(sizes)
                ]
                parameter.mul_(1 - work.LR * 0.2).sub_(work.LR * torch.cat(parts).float())
                parameter.grad = None
        adam.step()
        worst = {
            name: float((ours[name].view(weight.shape) - weight.detach()).abs().max())
            for name, (weight, _) in matrix.items()
        }
        assert max(worst.values()) < limit, (step, worst)


def max_differences(have: list[list[float]], expected: list[list[float]]) -> tuple[float, float]:
    loss = max(abs(x[0] - y[0]) for x, y in zip(have, expected, strict=True))
    return loss, max(abs(x[1] - y[1]) / y[1] for x, y in zip(have, expected, strict=True))


def compare_with_one_rank(
    in_processes: Any, folder: Path, layouts: list[str], processes: int, **options: Any
) -> dict[str, tuple[float, float, float]]:
    """Return the differences of each layout after three steps: loss, norm, worst weight."""
    arguments = {"steps": 3, "optimizer": "muon", "model": options.pop("model", "tiny")}
    alone, together = folder / "alone", folder / "together"
    for place in (alone, together):
        place.mkdir()
    reference = in_processes(1, "parity", alone, layouts=[REFERENCE], **arguments)[REFERENCE]
    result = in_processes(processes, "parity", together, layouts=layouts, **arguments, **options)
    expected = torch.load(alone / f"{REFERENCE}.pt")
    worst = {}
    for layout, steps in result.items():
        have = torch.load(together / f"{layout}.pt")
        assert have.keys() == expected.keys()
        weight = max(float((have[key] - expected[key]).abs().max()) for key in expected)
        worst[layout] = (*max_differences(steps, reference), weight)
    return worst


def check_bounds(worst: dict[str, tuple[float, float, float]]) -> None:
    for layout, (loss, norm, weight) in worst.items():
        assert loss < 2e-6 and norm < 2e-5 and weight < 2e-4, (layout, loss, norm, weight)


@pytest.mark.slow
def test_two_ranks_equal_one(in_processes: Any, tmp_path: Path) -> None:
    layouts = ["deepspeed-1-fp32", "deepspeed-3-fp32", "fsdp2-0-fp32", "fsdp2-0-fp32-tp2"]
    check_bounds(compare_with_one_rank(in_processes, tmp_path, layouts, 2))


@pytest.mark.slow
def test_ranges_orthogonalised_by_themselves_show(in_processes: Any, tmp_path: Path) -> None:
    """Negative control: ranks do not exchange their ranges."""
    worst = compare_with_one_rank(in_processes, tmp_path, ["fsdp2-0-fp32"], 2, fault="own ranges")
    [(loss, _, weight)] = worst.values()
    assert loss > 1e-4 and weight > 1e-3, worst


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("model", ["tiny", "shared"])
def test_every_layout_equals_one_rank(in_processes: Any, tmp_path: Path, model: str) -> None:
    engines = ["deepspeed-0", "deepspeed-1", "deepspeed-2", "deepspeed-3", "fsdp2-0"]
    axes = ["", "-tp2", "-cp2", "-tp2cp2ring"] if model == "tiny" else ["", "-tp2"]
    layouts = [f"{engine}-fp32{degrees}" for engine in engines for degrees in axes]
    check_bounds(
        compare_with_one_rank(in_processes, tmp_path, [*layouts, "fsdp2-2-fp32"], 4, model=model)
    )


@pytest.mark.long
@pytest.mark.timeout(900)
def test_momentum_moves_between_layouts(in_processes: Any, tmp_path: Path) -> None:
    """Masters and states are equal to the bit; so are the steps after a resume in one layout."""
    layouts = ["deepspeed-1-bf16-tp2", "deepspeed-3-fp32", "fsdp2-0-fp32"]
    options = {"steps": 2, "optimizer": "muon"}
    kept = in_processes(2, "save_all", tmp_path, layouts=layouts, **options)
    options |= {"sources": layouts, "targets": layouts, "used": True}
    result = in_processes(2, "load_all", tmp_path, **options)
    assert {worst for worst, _ in result.values()} == {0.0}
    assert all(result[f"{name} → {name}"][1] == kept[name] for name in layouts)


def test_moments_of_another_optimizer_are_refused(in_processes: Any, tmp_path: Path) -> None:
    options = {"layouts": ["fsdp2-0-fp32"], "steps": 1}
    in_processes(1, "save_all", tmp_path, **options)
    with pytest.raises(AssertionError, match=r"holds no momentum.*another optimizer"):
        in_processes(
            1,
            "load_all",
            tmp_path,
            sources=["fsdp2-0-fp32"],
            targets=["fsdp2-0-fp32"],
            steps=1,
            used=False,
            optimizer="muon",
        )
