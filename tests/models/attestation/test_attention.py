"""Attention is attested, with an emulation of torch's `varlen_attn`, which needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from support.kernels.varlen import emulated
from torch import Tensor
from torch.nn.attention import varlen

from headrace.models.attestation.calls import attention_calls
from headrace.models.attestation.plan import AttestationPlan, Subject
from headrace.models.attestation.trials import Trial, Verdict, examine
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.layers.attention.limits import AttentionCall
from headrace.models.layers.attention.order import DEFAULT_ORDER

CALL = AttentionCall(
    heads=4, kv_heads=2, head_dim=16, value_dim=16, window=None, scale=0.25, dtype="bfloat16",
    packed=True,
)  # fmt: skip
TRIALS = [Trial(2, 20, seed=1), Trial(1, 33, seed=2)]


def subjects(call: AttentionCall, *order: str, deterministic: bool = False) -> list[Subject]:
    plan = AttestationPlan(
        calls=[], longest=64, attention=[call], order=list(order), deterministic=deterministic
    )  # type: ignore[arg-type]
    return AttestationPlan.decode(plan.encode()).subjects()


def verdicts(*subjects: Subject) -> list[Verdict]:
    return [examine(case, dtype, "cpu", TRIALS) for case, dtype, _ in subjects]


@pytest.mark.parametrize("changes", [{}, {"window": 5}, {"kv_heads": 4}])
@pytest.mark.parametrize("deterministic", [False, True])
def test_right_attention_passes(
    changes: dict[str, Any], deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", emulated)
    call = AttentionCall(**{**vars(CALL), **changes})
    rows, packed = subjects(call, "flash", "math", deterministic=deterministic)
    assert [verdict.problem for verdict in verdicts(rows, packed)] == [None, None]
    assert "packed" in packed.case.name and packed.case.kernel == "flash attention"


def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that see each other, a wrong last token, and bits that differ between two runs."""
    _, packed = subjects(CALL, "flash", "math")
    _, repeated = subjects(CALL, "flash", "math", deterministic=True)
    runs = iter(range(99))

    def joined(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *rest: Any, **options: Any) -> Tensor:
        fewer = ends[[0, -1]]
        return emulated(q, k, v, fewer, fewer, 99, 99, **options)

    def last(*arguments: Any, **options: Any) -> Tensor:
        y = emulated(*arguments, **options)
        return y + y * (y.new_tensor(range(len(y))) == len(y) - 1)[:, None, None]

    def unequal(*arguments: Any, **options: Any) -> Tensor:
        return emulated(*arguments, **options) * (1 + 1e-2 * (next(runs) % 2))

    def problem(fault: Any, subject: Subject) -> str | None:
        monkeypatch.setattr(varlen, "varlen_attn", fault)
        return verdicts(subject)[0].problem

    assert "output 0 is wrong by" in str(problem(joined, packed))
    assert "output 0 is wrong by" in str(problem(last, packed))
    assert problem(unequal, packed) is None, "within the bound, and equal bits are not promised"
    assert "differs between two runs" in str(problem(unequal, repeated))


def test_each_implementation_that_may_run_has_cases() -> None:
    def names(call: AttentionCall, *order: str) -> list[str]:
        return [subject.case.kernel for subject in subjects(call, *order)]

    assert names(CALL, *DEFAULT_ORDER) == ["cudnn attention"] * 2 + ["flash attention"] * 2
    windowed = AttentionCall(**{**vars(CALL), "window": 9})
    assert names(windowed, *DEFAULT_ORDER) == ["flash attention"] * 2
    assert names(CALL, "flash4", "efficient") == ["flash4 attention"] * 2
    eager = AttentionCall(**{**vars(CALL), "packed": False})
    assert names(eager, "flash") == ["flash attention"]
    assert names(AttentionCall(**{**vars(CALL), "dtype": "float32"}), *DEFAULT_ORDER) == []


def test_calls_are_those_of_the_model() -> None:
    def calls(model: str, precision: str) -> list[str]:
        config = load_model_config(model)
        return [str(call) for call in attention_calls(config, PRECISIONS[precision])]

    assert calls("hybrid-1b", "bf16") == ["16 heads of 128"]
    assert calls("mamba2-1.3b", "bf16") == []
    [call] = attention_calls(load_model_config("hybrid-1b"), PRECISIONS["fp32"])
    assert call.dtype == "float32"
