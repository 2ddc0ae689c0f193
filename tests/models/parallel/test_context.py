"""Context parallelism: every operator computes on parts of rows the same as on whole rows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks.ranks import Ranks
from support.trained import trained_parameters

from headrace.models.config.options.precision import Fp8Config
from headrace.models.documents import Documents
from headrace.models.model.model import Model
from headrace.models.operators.mla import MLA
from headrace.models.parallel.local_shard import LocalShard
from headrace.models.transforms.fp8 import quantize

ROWS, LENGTH = 3, 48
CUTS = [0, 1, 2, 9, 46, 48, 60, 72, 73, 144]
"""A document over all parts, others that begin at or just after a boundary, a row of one."""
BOUND = 1e-12


def batch(model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.config.vocab_size, (ROWS, LENGTH), generator=generator)
    probe = torch.randn(*tokens.shape, model.config.vocab_size, generator=generator).double()
    return tokens, probe


def compute_alone(
    model: Model, cuts: list[int] | None
) -> tuple[torch.Tensor, float, dict[str, Any]]:
    """Logits, auxiliary losses and gradients in one process."""
    tokens, probe = batch(model)
    documents = None
    if cuts is not None:
        documents = Documents.build(torch.tensor(cuts), (ROWS, LENGTH))
    hidden, losses = model.hidden(tokens, documents)
    logits = model.logits(hidden)
    names, parameters = zip(*trained_parameters(model), strict=True)
    total = (logits * probe).sum() + losses.sum()
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    return logits.detach(), float(losses.detach().sum()), dict(zip(names, gradients, strict=True))


def max_difference(
    ranks: Ranks, model: Model, cuts: list[int] | None, *, dropped: int = 0, **options: Any
) -> float:
    """Greatest difference of logits, losses and gradients between parts and whole rows.

    `dropped` ranks are left out of the sum of gradients.
    """
    tokens, probe = batch(model)
    logits, losses, gradients = compute_alone(model, cuts)
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
    answers = ranks.run(
        "model_part", model.config, weights, tokens.numpy(), probe.numpy(), cuts, **options
    )
    tensor = options.get("tensor", 1)
    rows = [
        np.concatenate([part for part, _, _ in answers[first : first + tensor]], axis=2)
        for first in range(0, len(answers), tensor)
    ]
    worst = relative(np.concatenate(rows, axis=1), logits.numpy())
    for _, loss, _ in answers:
        worst = max(worst, abs(loss * tensor - losses))
    for name, expected in gradients.items():
        if expected is not None:
            held = [gradients[name] for _, _, gradients in answers[dropped:] if name in gradients]
            worst = max(worst, relative(assembled(held), expected.numpy()))
    return worst


def assembled(held: list[tuple[LocalShard, np.ndarray]]) -> np.ndarray:
    """Assemble the whole gradient: the sum of the ranks' local shards, each at its place."""
    whole = torch.zeros(held[0][0].shape, dtype=torch.float64)
    for part, gradient in held:
        index = torch.arange(part.shape[part.dim])
        if part.runs is not None:
            index = torch.cat([index[run.start : run.stop] for run in part.runs])
        whole.index_add_(part.dim, index, torch.from_numpy(gradient))
    return whole.numpy()


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / max(1.0, np.abs(b).max()))


def heads_divide(model: Model, ranks: Ranks) -> bool:
    heads = [getattr(options, "heads", 0) or 0 for options in model.config.operators.values()]
    return all(number % ranks.size == 0 for number in heads)


@pytest.fixture(scope="module")
def mixed(tiny_of: Callable[..., Model]) -> Model:
    """Mixers of every kind, and learned positions."""
    pattern = "[gqa, mamba1, mamba2, gdn, kda, mr-toeplitz, li-complex, freeform]"
    return tiny_of(pattern, learned_positions=LENGTH)


RING = {"attention": "ring", "hyena_li": "a2a", "delta": "a2a"}


def test_every_operator(two_ranks: Ranks, four_ranks: Ranks, tiny: Model) -> None:
    """With four ranks, filters reach over several parts, and kv_heads are fewer than ranks."""
    assert max_difference(two_ranks, tiny, CUTS) < BOUND
    assert max_difference(two_ranks, tiny, None, **RING) < BOUND
    assert max_difference(four_ranks, tiny, CUTS, **RING) < BOUND
    if heads_divide(tiny, four_ranks):
        assert max_difference(four_ranks, tiny, None) < BOUND


@pytest.mark.slow
@settings(max_examples=14, deadline=None)
@given(
    cuts=st.lists(st.integers(0, ROWS * LENGTH) | st.sampled_from(range(0, 145, 12)), max_size=9),
    size=st.sampled_from([2, 4]),
    attention=st.sampled_from(["a2a", "ring"]),
    hyena_li=st.sampled_from(["a2a", "states"]),
    delta=st.sampled_from(["a2a", "states"]),
)
def test_any_documents(
    pools: dict[int, Ranks],
    mixed: Model,
    cuts: list[int],
    size: int,
    attention: str,
    hyena_li: str,
    delta: str,
) -> None:
    edges = sorted([0, *cuts, ROWS * LENGTH])
    forms = {"attention": attention, "hyena_li": hyena_li, "delta": delta}
    assert max_difference(pools[size], mixed, edges, **forms) < BOUND


def test_documents_that_see_each_other(four_ranks: Ranks, mixed: Model) -> None:
    together = copy.copy(mixed)
    together.config = dataclasses.replace(mixed.config, isolate_documents=False)
    assert max_difference(four_ranks, together, CUTS) < BOUND
    assert max_difference(four_ranks, together, CUTS, **RING) < BOUND


@pytest.mark.parametrize("recompute", ["block", "operator"])
def test_recompute_repeats_the_communication(
    four_ranks: Ranks, mixed: Model, recompute: str
) -> None:
    assert max_difference(four_ranks, mixed, CUTS, recompute=recompute) < BOUND
    assert max_difference(four_ranks, mixed, CUTS, recompute=recompute, **RING) < BOUND


def test_with_tensor_parallelism(
    four_ranks: Ranks, mixed: Model, tiny_of: Callable[..., Model]
) -> None:
    """Two by two: inside an operator, a rank has a part of the row and of the channels."""
    assert max_difference(four_ranks, mixed, CUTS, tensor=2) < BOUND
    assert max_difference(four_ranks, mixed, CUTS, tensor=2, **RING) < BOUND
    zamba = {"kind": "zamba-block", "heads": 4, "hidden": 24, "lora_rank": 3}
    model = tiny_of("[a>mamba2-groups, mha/hyena-mlp, se]", {"a": zamba})
    assert max_difference(four_ranks, model, CUTS, tensor=2) < BOUND
    heads = tiny_of("[mr-heads, li-heads, freeform-heads, li-s4d]")
    assert max_difference(four_ranks, heads, CUTS, tensor=2) < BOUND
    assert max_difference(four_ranks, heads, CUTS, tensor=2, **RING) < BOUND


def test_latents_with_tensor_parallelism_and_recompute(
    four_ranks: Ranks, tiny_of: Callable[..., Model]
) -> None:
    """The second model's latents are wider than its keys and values: these change ranks."""
    sizes = {"qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 6}
    for rank in (8, 40):
        model = tiny_of("[a, a]", {"a": {"kind": "mla", "heads": 4, "kv_lora_rank": rank, **sizes}})
        assert max_difference(four_ranks, model, CUTS, tensor=2) < BOUND
        assert max_difference(four_ranks, model, CUTS, recompute="block") < BOUND
        assert max_difference(four_ranks, model, CUTS, tensor=2, attention="ring") < BOUND
        assert max_difference(four_ranks, model, CUTS, recompute="block", attention="ring") < BOUND


def test_expansions_of_latents_stay_out_of_fp8(
    two_ranks: Ranks,
    four_ranks: Ranks,
    tiny_of: Callable[..., Model],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks hold parts of their gradients, in an exchange of heads and in a ring."""
    sizes = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 4, "v_head_dim": 16}
    options = {"kind": "mla", "heads": 4, "kv_lora_rank": 16, **sizes}
    config = Fp8Config(smallest=16, ends=0)
    model = quantize(tiny_of("[a, a]", {"a": options}), config)
    in_fp8 = {name: m.fp8 for name, m in model.named_modules() if hasattr(m, "fp8")}
    assert {name.rpartition(".")[2] for name in in_fp8 if not in_fp8[name]} >= {"kv_b"}
    assert any(in_fp8.values())
    assert max_difference(two_ranks, model, CUTS, fp8=config) < BOUND
    assert max_difference(two_ranks, model, CUTS, fp8=config, attention="ring") < BOUND
    assert max_difference(four_ranks, model, CUTS, fp8=config, tensor=2) < BOUND
    monkeypatch.setattr(MLA, "unrounded", ())
    assert max_difference(two_ranks, quantize(model, config), CUTS, fp8=config) > 1e-6


@pytest.mark.parametrize("over", ["row", "micro-batch"])
def test_routers_count_all_parts(
    four_ranks: Ranks, tiny_of: Callable[..., Model], over: str
) -> None:
    """Balance and z losses, and Sinkhorn's choice, cover whole rows."""
    moe = {"kind": "moe", "hidden": 12, "balance_over": over}
    softmax = {**moe, "experts": 4, "balance_loss": 0.5, "z_loss": 0.1}
    sigmoid = {**moe, "experts": 3, "top_k": 1, "router": "sigmoid", "sinkhorn": True}
    operators = {"a": softmax, "b": sigmoid}
    model = tiny_of("[se/a, se/b]", operators).train()
    assert max_difference(four_ranks, model, CUTS, training=True) < BOUND
    assert max_difference(four_ranks, model, CUTS, training=True, fault="routers") > 1e-4


def test_faults_are_detected(four_ranks: Ranks, mixed: Model) -> None:
    """Negative controls: a sum without one rank, a shifted halo, discarded states, positions that
    restart in each part."""
    assert max_difference(four_ranks, mixed, CUTS, dropped=1) > 1e-3
    for fault in ("halo", "states", "positions"):
        assert max_difference(four_ranks, mixed, CUTS, fault=fault) > 1e-4, fault
