"""Cases for the calls of a model: every op, with the model's widths, dtypes and options."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import pytest
import torch

from headrace.models import kernels
from headrace.models.accounting.shape import Shape
from headrace.models.accounting.state import Degrees
from headrace.models.attestation.calls import model_calls
from headrace.models.attestation.cases import all_cases
from headrace.models.attestation.model_cases import CASES_BY_OP, build_cases
from headrace.models.attestation.plan import AttestationPlan
from headrace.models.attestation.trials import TILE
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.kernels import KERNELS, choice


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def names(model: str, precision: str = "bf16", *, tp: int = 1, z_loss: float = 0.0) -> list[str]:
    shape = Shape(
        rows=1,
        seq_len=4096,
        precision=PRECISIONS[precision],
        device="cuda",
        degrees=Degrees(tp=tp),
    )
    cases = build_cases(model_calls(load_model_config(model), shape, z_loss))
    return [f"{case.kernel}: {case.name}" for case in cases]


def test_a_hybrid_has_the_cases_of_its_layers() -> None:
    cases = names("hybrid-1b", z_loss=1e-4)
    assert "toeplitz: 128 taps, 16 each, gated, skip, packed; 2,048 wide, bf16, taps fp32" in cases
    assert "short_convolution: 7 taps, 16 each, gated; 2,048 wide, bf16" in cases
    assert "linear_cross_entropy: 32,000 ids, z_loss 0.0001, weighted; 2,048 wide, bf16" in cases
    kernels_used = {case.partition(":")[0] for case in cases}
    assert kernels_used == {
        *("rms_norm", "short_convolution", "glu", "toeplitz", "modal", "rope"),
        "linear_cross_entropy",
    }


def test_a_shard_has_the_widths_of_a_rank() -> None:
    assert "glu: silu; 5,504 wide, bf16" in names("hybrid-1b")
    assert "glu: silu; 2,752 wide, bf16" in names("hybrid-1b", tp=2)


def test_fp8_stores_are_compared_too() -> None:
    cases = names("evo2-7b-8k", "fp8")
    assert "glu: identity, fp8; 11,008 wide, bf16" in cases
    assert "fp8: rows, and rows of x · gains; 22,016 wide, bf16" in cases


def test_every_op_of_a_forward_pass_has_cases() -> None:
    """An op without one would train without having been compared."""
    for module in pkgutil.iter_modules(kernels.__path__):
        import_module(f"{kernels.__name__}.{module.name}")
    ops = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names()
           if name.startswith("headrace::")}  # fmt: skip
    forward = {op.partition(".")[0] for op in ops if not op.endswith("_backward")}
    assert len(forward) > len(KERNELS)
    assert forward - {"grouped_outer"} == set(CASES_BY_OP)


def test_a_known_fault_is_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run takes plain torch there, with a warning."""
    monkeypatch.setattr(choice, "FAULTY", {("toeplitz", torch.bfloat16): "Triton 3.6 …"})
    assert not any(case.startswith("toeplitz") for case in names("hybrid-1b"))


def test_rows_begin_at_one_tile_and_their_loops_have_many_turns() -> None:
    shape = Shape(rows=1, seq_len=8200, precision=PRECISIONS["bf16"], device="cuda")
    calls = model_calls(load_model_config("hybrid-1b"), shape)
    for subject in AttestationPlan(calls=calls, longest=8200).subjects():
        lengths = [trial.length for trial in subject.trials]
        assert lengths[:2] == [TILE, TILE + 1]
        assert all(length % 16 == 8200 % 16 for length in lengths[2:]), "as it is compiled for"
        assert subject.trials[-1].programs < subject.trials[0].programs


def test_plans_travel_to_workers() -> None:
    shape = Shape(rows=1, seq_len=64, precision=PRECISIONS["fp32"], device="cuda")
    plan = AttestationPlan(calls=model_calls(load_model_config("tiny-moe"), shape), longest=64)
    assert AttestationPlan.decode(plan.encode()) == plan
    table = AttestationPlan(dtypes=["float32"])
    assert len(table.subjects()) > len(all_cases())
