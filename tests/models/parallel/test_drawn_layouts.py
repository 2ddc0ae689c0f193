"""Random models of our own operators: documents alone, tokens one by one, parts of a row, experts
and heads on other ranks compute what the whole model computes, in fp64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product
from random import Random
from typing import Any

import pytest
import torch
from support.models.drawn_operators import VOCABULARY, build_drawn, draw_model
from support.ranks.threads import ThreadRanks
from support.trained import trained_parameters
from torch import Tensor

from headrace.models.config.options.recompute import Recompute, Selective
from headrace.models.documents import Documents
from headrace.models.model.generate import Sampling, generate
from headrace.models.model.model import Model
from headrace.models.parallel.sharding import slice_local_shard
from headrace.trainer.layout.checks import problems
from headrace.trainer.layout.config import LayoutConfig

BOUND = 1e-8
"""Relative; of a gradient at least a millionth of the greatest one."""
Gradients = Mapping[str, Tensor]
DEGREES = [
    (processes, {"tp": tp, "cp": cp, "ep": ep})
    for processes, tp, cp, ep in product((2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4))
    if max(tp * cp, ep) > 1 and processes % (tp * cp) == 0 and processes % ep == 0
]
RULES: list[Recompute] = ["none", "none", "block", "operator", Selective(save=("matmul",))]


@dataclass(frozen=True)
class Case:
    """A model, its rows, and the documents in them."""

    model: Model
    tokens: Tensor
    weights: Tensor
    documents: Documents

    @property
    def length(self) -> int:
        return self.weights.shape[1]

    def select(self, rows: list[int]) -> Case:
        documents = Documents(self.documents.positions[rows])
        return replace(
            self, tokens=self.tokens[rows], weights=self.weights[rows], documents=documents
        )


def draw_case(seed: int, rows: int) -> Case:
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    length = 4 * random.choice([1, 2, 4, 5, 8, 9, 12])
    edges = [place + step for place in (16, 32, length) for step in (-1, 0, 1)]
    edges += [random.randrange(rows * length) for _ in range(random.choice([0, 3, 8]))]
    inner = [edge for edge in edges if 0 < edge < rows * length and random.random() < 0.5]
    cuts = torch.tensor([0, *sorted(inner), rows * length])
    return Case(
        build_drawn(draw_model(seed), seed),
        torch.randint(0, VOCABULARY, (rows, length + 1), generator=generator),
        (torch.rand(rows, length, generator=generator) > 0.3).double(),
        Documents.build(cuts, (rows, length)),
    )


def compute(model: Model, case: Case) -> tuple[float, dict[str, Tensor]]:
    """Return this rank's share of the objective and its gradients."""
    axis = model.axes.context
    part = axis.part(case.length)
    hidden, losses = model.hidden(case.tokens[:, :-1][:, part], case.documents.shard(axis))
    weights = case.weights[:, part]
    total, _ = model.loss(hidden, case.tokens[:, 1:][:, part], weights, 1e-3)
    total = total + (losses * weights.sum(1)).sum()
    names, parameters = zip(*trained_parameters(model), strict=True)
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    known = zip(names, gradients, strict=True)
    return float(total.detach()), {name: g for name, g in known if g is not None}


def find_differences(
    loss: float, gradients: Gradients, expected_loss: float, expected: Gradients
) -> Iterator[str]:
    floor = 1e-6 * max(float(gradient.abs().max()) for gradient in expected.values())
    if abs(loss - expected_loss) > BOUND * max(1.0, abs(expected_loss)):
        yield f"the loss is {loss}, not {expected_loss}"
    for name, gradient in expected.items():
        worst = float((gradients[name] - gradient).abs().max())
        if worst > BOUND * max(float(gradient.abs().max()), floor):
            yield f"{name} differs by {worst}"


def draw_layouts(random: Random, model: Model, length: int) -> list[tuple[int, LayoutConfig]]:
    """Return the layouts that shard the model and its rows, in random order."""
    layouts = []
    for processes, degrees in random.sample(DEGREES, len(DEGREES)):
        forms: Any = {
            "attention": random.choice(["a2a", "ring"]),
            "hyena_li": random.choice(["a2a", "states"]),
            "delta": random.choice(["a2a", "states"]),
        }
        layout = LayoutConfig(**degrees, **forms)
        if not any(problems(layout, processes, model.config, [length])):
            layouts.append((processes, layout))
    return layouts


def compute_divided(
    case: Case, processes: int, layout: LayoutConfig, rule: Recompute
) -> tuple[float, dict[str, Tensor]]:
    """Return the sums of the objective and of the gradients of ranks in a layout."""
    ranks, whole = ThreadRanks(processes), case.model.state_dict()
    gradients: dict[str, Tensor] = {}

    def work(rank: int) -> tuple[float, dict[str, Tensor], Model]:
        data, axes = ranks.axes(layout, rank)
        model = Model(case.model.config).double().train(case.model.training)
        model.load_state_dict(whole)
        model.shard(axes)
        model.set_recompute(rule)
        rows = list(range(data.rank, len(case.tokens), data.size))
        return *compute(model, case.select(rows)), model

    shares = ranks.run(work)
    for _, local_gradients, model in shares:
        for name, gradient in local_gradients.items():
            total = gradients.setdefault(name, torch.zeros_like(whole[name]))
            numbers = torch.arange(total.numel()).view(total.shape)
            index = slice_local_shard(model.local_shards[name], numbers).flatten()
            total.view(-1).index_add_(0, index, gradient.flatten())
    return sum(loss for loss, _, _ in shares), gradients


def check_layouts(seed: int, count: int) -> int:
    """Compare so many layouts of a drawn model; return how many there were."""
    random, case = Random(seed), draw_case(seed, rows=4)
    case.model.train(random.random() < 0.8)
    expected = compute(case.model, case)
    layouts = draw_layouts(random, case.model, case.length)[:count]
    for processes, layout in layouts:
        rule = random.choice(RULES)
        divided = compute_divided(case, processes, layout, rule)
        faults = list(find_differences(*divided, *expected))
        assert not faults, (seed, processes, layout, rule, case.model.config.pattern, faults[:5])
    return len(layouts)


def check_tokens(seed: int) -> None:
    """Compare documents with each alone, pieces of a row with the row, prompts of a batch with each
    alone, and recomputed passes with kept ones."""
    random, case = Random(seed), draw_case(seed, rows=2)
    model, tokens = case.model.eval(), case.tokens[:, :-1]
    positions, pattern = case.documents.positions, (seed, case.model.config.pattern)
    with torch.no_grad():
        logits = model(tokens, case.documents)
        scale = BOUND * max(1.0, float(logits.abs().max()))
        starts = (positions.flatten() == 0).nonzero().flatten().tolist()
        for start, end in pairwise([*starts, tokens.numel()]):
            alone = model(tokens.flatten()[None, start:end])[0]
            assert (logits.flatten(0, 1)[start:end] - alone).abs().max() < scale, pattern
        sizes = []
        while sum(sizes) < case.length:
            sizes.append(min(random.choice([1, 1, 2, 3, 7, 16]), case.length - sum(sizes)))
        states = model.new_states(case.length)
        pieces = zip(tokens.split(sizes, 1), positions.split(sizes, 1), strict=True)
        parts = [model(piece, Documents(places), states=states) for piece, places in pieces]
        assert (torch.cat(parts, 1) - logits).abs().max() < scale, (*pattern, sizes)
        prompts = [tokens[0, : random.choice([1, 2, 3])].tolist(), tokens[1].tolist()]
        greedy = Sampling(temperature=0)
        both = generate(model, prompts, 2, sampling=greedy)
        assert both == [generate(model, [p], 2, sampling=greedy)[0] for p in prompts], pattern
    model.train()
    expected = compute(model, case)
    for rule in ("block", "operator", Selective(save=("matmul", "convolution"))):
        model.set_recompute(rule)
        faults = list(find_differences(*compute(model, case), *expected))
        assert not faults, (*pattern, rule, faults[:5])


@pytest.mark.parametrize("seed", range(3))
def test_drawn_models_are_the_same_in_drawn_layouts(seed: int) -> None:
    assert check_layouts(seed, 3) == 3
    check_tokens(seed)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_drawn_models_are_the_same_in_drawn_layouts() -> None:
    compared = 0
    for seed in range(100, 250):
        compared += check_layouts(seed, 8)
        check_tokens(seed)
    assert compared > 700


def test_a_rank_that_keeps_its_sums_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: sums over the axes are those of each rank alone."""
    monkeypatch.setattr(
        "support.ranks.threads.Operations.reduce_scatter_tensor",
        lambda self, x, operation, size, name: x.chunk(size)[self.groups[name].swap(x)[0]],
    )
    case = draw_case(1, rows=2)
    expected = compute(case.model, case)
    layouts = [layout for n, layout in draw_layouts(Random(1), case.model, case.length) if n == 2]
    layout = next(layout for layout in layouts if layout.tp == 2)
    assert list(find_differences(*compute_divided(case, 2, layout, "none"), *expected))
