from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.models.config.options.moe import MoEOptions
from headrace.models.layers.routing import balance_loss, sinkhorn
from headrace.models.operators import BatchContext
from headrace.models.operators.moe import MoE
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
    return torch.ones(1, tokens, dtype=torch.bool)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def one_expert(moe: MoE, number: int, x: Tensor) -> Tensor:
    gate, up = (moe.gate_up[number] @ x).chunk(2)
    return moe.down[number] @ (F.silu(gate) * up)


@pytest.mark.parametrize("normalize", [None, True, False])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_each_token_goes_to_its_most_likely_experts(top_k: int, normalize: bool | None) -> None:
    moe, x = experts(top_k=top_k, normalize=normalize), normal(2, 5, 8)
    y = moe(x, context())
    for token, got in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True):
        probabilities = (moe.router.weight @ token).softmax(0)
        largest = probabilities.argsort(descending=True)[:top_k]
        share = probabilities[largest]
        if normalize or (normalize is None and top_k > 1):
            share = share / share.sum()
        expected = sum(
            s * one_expert(moe, int(e), token) for s, e in zip(share, largest, strict=True)
        )
        assert torch.allclose(got, expected, rtol=1e-10)


def test_the_loss_trains_the_router_of_one_expert_for_each_token() -> None:
    """Switch's gate: the gradient equals that of an independent form, computed by hand."""
    moe, x = experts(top_k=1), normal(2, 5, 8)
    probe = normal(2, 5, 8)
    (moe(x, context()) * probe).sum().backward()
    expected = torch.zeros_like(moe.router.weight)
    with torch.no_grad():
        for token, direction in zip(x.flatten(0, 1), probe.flatten(0, 1), strict=True):
            p = (moe.router.weight @ token).softmax(0)
            best = int(p.argmax())
            # dp_best / dlogit_e = p_best · (δ - p_e)
            slope = p[best] * (F.one_hot(torch.tensor(best), 4) - p)
            expected += (direction @ one_expert(moe, best, token)) * torch.outer(slope, token)
    assert moe.router.weight.grad is not None
    assert float(expected.abs().max()) > 0.1
    assert torch.allclose(moe.router.weight.grad, expected, rtol=1e-10)
    divided = experts(top_k=1, normalize=True)
    (divided(x, context()) * probe).sum().backward()
    assert divided.router.weight.grad is not None
    assert float(divided.router.weight.grad.abs().max()) < 1e-12, "a negative control"


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
        chosen, _ = moe.route(moe.router(x), context())
        return torch.bincount(chosen.flatten(), minlength=4)

    trained, evaluated = counts(), (moe.eval(), counts())[1]
    assert int(evaluated.max()) > 250
    assert int(trained.max()) < 150


def test_sinkhorn_gives_equal_totals() -> None:
    [shares] = sinkhorn(normal(1, 50, 4) * 2, all_of(50))
    assert torch.allclose(shares.sum(0), torch.full((4,), 1 / 4, dtype=torch.float64), rtol=1e-5)
    assert torch.allclose(shares.sum(1), torch.full((50,), 1 / 50, dtype=torch.float64), rtol=1e-3)


def test_the_range_of_the_balance_loss() -> None:
    even = torch.full((8, 4), 0.25)
    assert balance_loss(even[None], torch.arange(8)[None, :, None] % 4, all_of(8)) == 1
    single_expert = torch.zeros(8, 4)
    single_expert[:, 1] = 1
    assert balance_loss(single_expert[None], torch.ones(1, 8, 1, dtype=torch.int64), all_of(8)) == 4


def test_losses_are_reported_in_training() -> None:
    moe, x = experts(balance_loss=0.1, z_loss=0.01), normal(1, 9, 8)
    where = context()
    moe(x, where)
    logits = moe.router(x)
    chosen = logits.topk(2).indices
    assert torch.allclose(
        where.losses[0], 0.1 * balance_loss(logits.softmax(-1), chosen, all_of(9))
    )
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


BALANCED = [
    {"top_k": 2, "balance_loss": 0.5, "z_loss": 0.1},
    {"top_k": 1, "router": "sigmoid", "sinkhorn": True, "z_loss": 0.1},
]


@pytest.mark.parametrize("options", BALANCED)
def test_a_row_is_the_same_beside_any_others(options: dict[str, Any]) -> None:
    moe, x = experts(**options), normal(3, 9, 8)

    def run_with_losses(moe: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
        batch = context()
        return moe(x, batch), sum(batch.losses, start=x.new_zeros(len(x)))

    y, losses = run_with_losses(moe, x)
    for number, row in enumerate(x):
        alone, loss = run_with_losses(moe, row[None])
        assert torch.allclose(alone[0], y[number], rtol=1e-12)
        assert torch.allclose(loss[0], losses[number], rtol=1e-12)
    coupled = experts(**options, balance_over="micro-batch")
    assert coupled.options.couples_rows and not moe.options.couples_rows
    everything = run_with_losses(coupled, x)
    worst = max(
        float(
            (run_with_losses(coupled, row[None])[part][0] - everything[part][number])
            .detach()
            .abs()
            .max()
        )
        for part in (0, 1)
        for number, row in enumerate(x)
    )
    assert worst > 1e-3, "a negative control"
    for coupled_part, plain_part in zip(
        run_with_losses(coupled, x[:1]), run_with_losses(moe, x[:1]), strict=True
    ):
        assert torch.equal(coupled_part, plain_part), "of one row, both are the same"


def test_sinkhorn_agrees_with_blackmambas_published_function() -> None:
    """Their function balances all tokens that it is given; ours, those of each group."""
    logits = normal(3, 40, 4)
    everything = torch.ones(3, 40, dtype=torch.bool)
    for assignment, row_logits in zip(sinkhorn(logits, everything), logits, strict=True):
        assert torch.allclose(assignment, published_sinkhorn(row_logits), rtol=1e-3)
        assert torch.equal(assignment.argmax(-1), published_sinkhorn(row_logits).argmax(-1))
    flat = sinkhorn(logits.view(1, -1, 4), everything.view(1, -1))[0]
    assert torch.equal(flat.argmax(-1), published_sinkhorn(logits.view(-1, 4)).argmax(-1))
    assert not torch.equal(flat.view_as(logits).argmax(-1), sinkhorn(logits, everything).argmax(-1))


def published_sinkhorn(logits: Tensor) -> Tensor:
    """Sinkhorn's iteration as Megatron and BlackMamba define it, for a fixed number of rounds.
    (Theirs stops when a factor moves by less than 1e-4, on a scale that depends on the logits.)"""
    cost = torch.exp(2.0 * logits)
    tokens, experts = cost.shape
    columns = 1 / (experts * cost.sum(0))
    for _ in range(100):
        rows = 1 / (tokens * ((cost * columns).sum(1) + 1e-8))
        columns = 1 / (experts * ((cost * rows[:, None]).sum(0) + 1e-8))
    return columns * cost * rows[:, None]


@pytest.mark.parametrize("options", BALANCED)
def test_statistics_over_a_micro_batch_leave_out_padding_rows(options: dict[str, Any]) -> None:
    moe, x = experts(**options, balance_over="micro-batch"), normal(2, 9, 8)
    alone, blind = context(), context()
    padded = replace(context(), rows=torch.tensor([True, True, False, False, False]))
    fill = torch.cat([x, torch.ones(3, 9, 8, dtype=x.dtype)])
    y = moe(x, alone)
    assert torch.allclose(moe(fill, padded)[:2], y, rtol=1e-12)
    torch.testing.assert_close([loss[:2] for loss in padded.losses], alone.losses)
    moved = (moe(fill, blind)[:2] - y).detach().abs().max()
    counted = [sum(loss[0].item() for loss in where.losses) for where in (blind, alone)]
    assert max(abs(counted[0] - counted[1]), float(moved)) > 1e-3, "a negative control"
    nothing = replace(context(), rows=torch.zeros(5, dtype=torch.bool))
    assert moe(fill, nothing).isfinite().all()
    assert all(loss.isfinite().all() for loss in nothing.losses)


@pytest.mark.parametrize("options", BALANCED)
def test_autocast_rounds_the_products_and_not_the_balance(options: dict[str, Any]) -> None:
    moe, x = experts(**options).float(), normal(2, 9, 8).float()
    exact = moe(x, context())
    with torch.autocast("cpu", torch.bfloat16):
        y = moe(x, context())
        assert y.dtype == moe.router(x).dtype == torch.bfloat16, "as a linear layer"
    y.sum().backward()
    assert moe.gate_up.grad is not None and moe.gate_up.grad.dtype == torch.float32
    near = (y - exact).abs().amax(dim=-1) < 0.05 * exact.abs().max()
    assert float(near.double().mean()) > 0.7, "all but tokens whose choice was close"
    assert not torch.equal(y.float(), exact), "a negative control"


def test_the_balance_loss_of_an_even_spread_is_top_k() -> None:
    even = torch.full((4, 4), 0.25, dtype=torch.float64)
    chosen = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
    assert float(balance_loss(even[None], chosen[None], all_of(4))) == pytest.approx(2.0)


PUBLISHED = [
    {
        "router": "sigmoid",
        "bias_update_rate": 0.1,
        "groups": 2,
        "shared_hidden": 6,
        "shared_gate": True,
    },
    {"bias": True, "glu_limit": 0.5, "glu_offset": 1.0, "capacity_factor": 0.8},
    {"gated": False, "bias": True, "activation": "relu2", "router_fp32": True},
]


@pytest.mark.parametrize("options", [*BALANCED, *PUBLISHED])
def test_compiled_without_a_graph_break(options: dict[str, Any]) -> None:
    moe, x = experts(**options), normal(3, 9, 8)
    moe.sinkhorn_rounds = 4  # rounds are unrolled
    rows = torch.tensor([True, True, False])

    axes = Axes()

    def run(x: Tensor) -> Tensor:
        where = BatchContext(x, rows=rows, axes=axes)
        return moe(x, where).sum() + sum(where.losses, start=x.new_zeros(3)).sum()

    x.requires_grad_()
    loss, compiled = run(x), torch.compile(run, backend="aot_eager", fullgraph=True)(x)
    parameters = [x, *(parameter for parameter in moe.parameters() if parameter.requires_grad)]
    expected = torch.autograd.grad(loss, parameters)
    assert torch.allclose(compiled, loss, rtol=1e-12)
    for compiled_gradient, eager_gradient in zip(
        torch.autograd.grad(compiled, parameters), expected, strict=True
    ):
        assert torch.allclose(compiled_gradient, eager_gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", BALANCED)
def test_an_expert_takes_the_first_tokens_of_a_row_up_to_its_capacity(
    options: dict[str, Any],
) -> None:
    """An independent form, token by token; evaluation drops nothing."""
    moe, x = experts(**options, capacity_factor=0.7), normal(2, 9, 8)
    y, full = moe(x, context()), moe.eval()(x, context())
    capacity = math.ceil(0.7 * moe.options.top_k * 9 / 4)
    expert_ids, weights = moe.train().route(moe.router(x), context())
    dropped = 0
    for row, ids, shares, got in zip(x, expert_ids, weights, y, strict=True):
        taken = [0] * 4
        for token, chosen, share, output in zip(row, ids.tolist(), shares, got, strict=True):
            expected = torch.zeros_like(token)
            for expert, weight in zip(chosen, share, strict=True):
                taken[expert] += 1
                if taken[expert] <= capacity:
                    expected = expected + weight * one_expert(moe, expert, token)
                else:
                    dropped += 1
            assert torch.allclose(output, expected, rtol=1e-10, atol=1e-12)
    assert dropped
    y.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in moe.parameters())  # type: ignore[union-attr]
    assert torch.equal(full, experts(**options).eval()(x, context()))


def test_the_correction_chooses_and_does_not_weigh() -> None:
    options = {"router": "sigmoid", "router_bias": False, "bias_update_rate": 0.1}
    moe, x = experts(**options), normal(1, 9, 8)
    moe.correction_bias.data = torch.tensor([0.0, 9.0, 0.0, 5.0], dtype=torch.float64)
    expert_ids, weights = moe.route(moe.router(x), context())
    assert {tuple(sorted(ids)) for ids in expert_ids[0].tolist()} == {(1, 3)}
    assert torch.equal(weights, moe.router(x).sigmoid().gather(-1, expert_ids))
    assert not moe.correction_bias.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 3}, "groups (3) does not divide experts (4)"),
        ({"groups": 2, "top_k_groups": 3}, "top_k_groups (3) must lie between 1 and groups (2)"),
        ({"groups": 2, "top_k": 3}, "top_k (3) is above the 2 experts of top_k_groups groups"),
        ({"sinkhorn": True, "bias_update_rate": 0.1}, "Sinkhorn chooses the experts"),
        ({"shared_gate": True}, "shared_gate needs a shared expert"),
        ({"gated": False, "glu_limit": 7.0}, "belong to gated experts"),
        ({"capacity_factor": 0.0}, "capacity_factor must be above 0"),
    ],
)
def test_contradictions_are_named(options: dict[str, Any], message: str) -> None:
    assert any(message in line for line in MoEOptions(experts=4, hidden=6, **options).problems(8))
