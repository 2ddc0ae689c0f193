from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.models.operators import BatchContext
from headrace.models.operators.moe import MoE, MoEOptions, balance, sinkhorn
from headrace.models.parallel.axes import Axes


def experts(**options: Any) -> MoE:
    moe = MoE(MoEOptions(experts=4, hidden=6, **options), width=8).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in moe.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return moe


def context() -> BatchContext:
    return BatchContext(torch.zeros(1, 1))


def all_of(tokens: int) -> Tensor:
    return torch.ones(tokens, dtype=torch.bool)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def one_expert(moe: MoE, number: int, x: Tensor) -> Tensor:
    gate, up = (moe.gate_up[number] @ x).chunk(2)
    return moe.down[number] @ (F.silu(gate) * up)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_each_token_goes_to_its_most_likely_experts(top_k: int) -> None:
    moe, x = experts(top_k=top_k), normal(2, 5, 8)
    y = moe(x, context())
    for token, got in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True):
        probabilities = (moe.router.weight @ token).softmax(0)
        largest = probabilities.argsort(descending=True)[:top_k]
        share = probabilities[largest] / probabilities[largest].sum()
        expected = sum(
            s * one_expert(moe, int(e), token) for s, e in zip(share, largest, strict=True)
        )
        assert torch.allclose(got, expected, rtol=1e-10)


def test_blackmambas_router() -> None:
    moe, x = experts(top_k=1, router="sigmoid", sinkhorn=True).eval(), normal(1, 7, 8)
    y = moe(x, context())
    for token, got in zip(x[0], y[0], strict=True):
        probabilities = (moe.router.weight @ token + moe.router.bias).sigmoid()
        best = int(probabilities.argmax())
        assert torch.allclose(got, probabilities[best] * one_expert(moe, best, token))


def test_sinkhorn_balances_the_choice_in_training_only() -> None:
    moe, x = experts(top_k=1, router="sigmoid", sinkhorn=True), normal(1, 400, 8)
    moe.router.bias.data[2] += 3.0

    def counts() -> Tensor:
        chosen, _ = moe.route(moe.router(x[0]), context(), all_of(400))
        return torch.bincount(chosen.flatten(), minlength=4)

    trained, evaluated = counts(), (moe.eval(), counts())[1]
    assert int(evaluated.max()) > 250
    assert int(trained.max()) < 150


def test_sinkhorn_gives_equal_totals() -> None:
    shares = sinkhorn(normal(50, 4) * 2, all_of(50))
    assert torch.allclose(shares.sum(0), torch.full((4,), 1 / 4, dtype=torch.float64), rtol=1e-5)
    assert torch.allclose(shares.sum(1), torch.full((50,), 1 / 50, dtype=torch.float64), rtol=1e-3)


def test_the_range_of_the_balance_loss() -> None:
    even = torch.full((8, 4), 0.25)
    assert balance(even, torch.arange(8)[:, None] % 4, all_of(8)) == 1
    one = torch.zeros(8, 4)
    one[:, 1] = 1
    assert balance(one, torch.ones(8, 1, dtype=torch.int64), all_of(8)) == 4


def test_losses_are_reported_in_training() -> None:
    moe, x = experts(balance_loss=0.1, z_loss=0.01), normal(1, 9, 8)
    where = context()
    moe(x, where)
    logits = moe.router(x[0])
    chosen = logits.topk(2).indices
    assert torch.allclose(where.losses[0], 0.1 * balance(logits.softmax(-1), chosen, all_of(9)))
    assert torch.allclose(where.losses[1], 0.01 * logits.logsumexp(-1).square().mean())
    moe.eval()(x, where)
    assert len(where.losses) == 2


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    moe = experts(top_k=1)
    x = normal(1, 1, 8)
    moe(x, context()).sum().backward()
    used = int(moe.router(x[0]).argmax())
    assert moe.gate_up.grad is not None
    for expert in range(4):
        assert bool(moe.gate_up.grad[expert].abs().sum() > 0) == (expert == used)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 2, "balance_loss": 0.5, "z_loss": 0.1},
        {"top_k": 1, "router": "sigmoid", "sinkhorn": True, "z_loss": 0.1},
    ],
)
def test_batch_statistics_leave_out_padding_rows(options: dict[str, Any]) -> None:
    moe, x = experts(**options), normal(2, 9, 8)
    alone, blind = context(), context()
    padded = replace(context(), rows=torch.tensor([True, True, False, False, False]))
    fill = torch.cat([x, torch.ones(3, 9, 8, dtype=x.dtype)])
    y = moe(x, alone)
    assert torch.allclose(moe(fill, padded)[:2], y, rtol=1e-12)
    torch.testing.assert_close(padded.losses, alone.losses)
    moe(fill, blind)
    counted = [sum(loss.item() for loss in where.losses) for where in (blind, alone)]
    assert abs(counted[0] - counted[1]) > 1e-3, "a negative control"
    nothing = replace(context(), rows=torch.zeros(5, dtype=torch.bool))
    assert moe(fill, nothing).isfinite().all() and not any(nothing.losses)


def test_the_balance_loss_of_an_even_spread_is_top_k() -> None:
    even = torch.full((4, 4), 0.25, dtype=torch.float64)
    chosen = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
    assert float(balance(even, chosen, all_of(4))) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 2, "balance_loss": 0.5, "z_loss": 0.1},
        {"top_k": 1, "router": "sigmoid", "sinkhorn": True, "z_loss": 0.1},
    ],
)
def test_compiled_without_a_graph_break(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.models.operators.moe.SINKHORN_ROUNDS", 4)  # rounds are unrolled
    moe, x = experts(**options), normal(3, 9, 8)
    rows = torch.tensor([True, True, False])

    axes = Axes()

    def run(x: Tensor) -> Tensor:
        where = BatchContext(x, rows=rows, axes=axes)
        return moe(x, where).sum() + sum(where.losses)

    x.requires_grad_()
    loss, compiled = run(x), torch.compile(run, backend="aot_eager", fullgraph=True)(x)
    parameters = [x, *moe.parameters()]
    wanted = torch.autograd.grad(loss, parameters)
    assert torch.allclose(compiled, loss, rtol=1e-12)
    for one, other in zip(torch.autograd.grad(compiled, parameters), wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)
