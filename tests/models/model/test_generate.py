"""Recurrent steps with constant-size states and a KV cache equal the full forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.kernels.operator_checks import context, make, normal

from headrace.console.errors import ConfigError, LayoutError
from headrace.models.documents import Documents
from headrace.models.model.generate import Sampling, generate, sample_tokens
from headrace.models.model.model import Model
from headrace.models.operators import State

BOUND = 1e-10


def tokens_of(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 23, (rows, length), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("pieces", [[1] * 41, [40, 1], [13, 1, 1, 17, 9]])
def test_pieces_equal_the_whole(tiny: Model, pieces: list[int]) -> None:
    tokens = tokens_of(2, 41)
    states = tiny.new_states(41)
    with torch.no_grad():
        parts = [tiny(part, states=states) for part in tokens.split(pieces, dim=1)]
        assert (torch.cat(parts, dim=1) - tiny(tokens)).abs().max() < BOUND


def test_a_document_may_begin_anywhere(tiny: Model) -> None:
    tokens = tokens_of(2, 41)
    cuts = torch.tensor([0, 11, 41, 47, 48, 82], dtype=torch.int32)
    documents = Documents.build(cuts, (2, 41))
    states = tiny.new_states(41)
    with torch.no_grad():
        parts = [
            tiny(part, Documents(positions), states=states)
            for part, positions in zip(
                tokens.split([7, 19, 1, 14], dim=1),
                documents.positions.split([7, 19, 1, 14], dim=1),
                strict=True,
            )
        ]
        assert (torch.cat(parts, dim=1) - tiny(tokens, documents)).abs().max() < BOUND


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("hyena-se", {"groups": 2}),
        ("hyena-mr", {"groups": 2}),
        ("hyena-li", {}),
        ("hyena-li-freeform", {"filter_horizon": 32}),
        ("mamba1", {}),
    ],
)
def test_generation_uses_plain_torch(kind: str, options: dict[str, Any]) -> None:
    """`kernel: triton` is refused on a CPU, but not in generation."""
    mixer = make(kind, kernel="triton", **options)
    there = context(1, 1)
    with torch.no_grad(), pytest.raises(LayoutError):
        mixer(normal(1, 1, 8), there)
    with torch.no_grad():
        assert mixer(normal(1, 1, 8), there.call_context(State(4))).isfinite().all()


def test_a_lost_state_is_seen(tiny: Model) -> None:
    tokens = tokens_of(2, 20)
    states = tiny.new_states(20)
    with torch.no_grad():
        tiny(tokens[:, :19], states=states)
        for layer_states in states:
            for state in layer_states:
                for tensor in state.tensors.values():
                    tensor.zero_()
        last = tiny(tokens[:, 19:], states=states)
        assert (last - tiny(tokens)[:, 19:]).abs().max() > 1e-4


def continue_without_state(model: Model, prompt: list[int], tokens: int) -> list[int]:
    """Return the most likely continuation by full forward passes."""
    ids = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


GREEDY = Sampling(temperature=0)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [3, 5, 8, 9, 7]]


def test_prompts_of_different_lengths_share_a_batch(tiny: Model) -> None:
    expected = [continue_without_state(tiny, prompt, 6) for prompt in PROMPTS]
    assert generate(tiny, PROMPTS, 6, sampling=GREEDY) == expected
    assert generate(tiny, PROMPTS[:1], 6, sampling=GREEDY) == expected[:1]


def test_a_row_ends_at_the_stop_token(tiny_operator: Model) -> None:
    expected = [continue_without_state(tiny_operator, prompt, 6) for prompt in PROMPTS]
    stop = expected[0][2]
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in expected]
    assert generate(tiny_operator, PROMPTS, 6, sampling=GREEDY, stop=stop) == cut
    assert not tiny_operator.training


def test_sampling_follows_the_seed_and_the_logits() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(4000, -1)

    def frequencies(**options: Any) -> list[float]:
        generator = torch.Generator().manual_seed(1)
        chosen = sample_tokens(logits, Sampling(**options), generator)
        return (torch.bincount(chosen, minlength=4) / len(chosen)).tolist()

    assert frequencies() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert frequencies(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert frequencies(top_p=0.6) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert frequencies(top_p=0.5) == [1, 0, 0, 0]
    assert frequencies(temperature=0.0) == [1, 0, 0, 0]
    assert frequencies(temperature=0.5) == pytest.approx([0.685, 0.247, 0.062, 0.007], abs=0.03)
    assert frequencies(top_k=9) == frequencies()


def test_wrong_prompts_and_options_are_refused(tiny_operator: Model) -> None:
    with pytest.raises(ConfigError) as raised:
        generate(tiny_operator, [[1], [], [2, 23]], 3)
    assert "prompt 1: is empty" in str(raised.value)
    assert "prompt 2: has the id 23; the vocabulary has 23" in str(raised.value)
    with pytest.raises(ConfigError, match="there is no prompt"):
        generate(tiny_operator, [], 3)
    tiny_operator.config = dataclasses.replace(tiny_operator.config, isolate_documents=False)
    with pytest.raises(ConfigError, match="isolate_documents"):
        generate(tiny_operator, PROMPTS, 3)
    assert len(generate(tiny_operator, PROMPTS[:1], 3)[0]) == 3
    with pytest.raises(ValueError, match="top_p"):
        Sampling(top_p=1.5)


def test_a_row_ends_when_its_tokens_say_so_and_the_others_go_on(tiny: Model) -> None:
    prompts = tokens_of(6, 5).tolist()
    whole = generate(tiny, prompts, 12)
    asked: list[int] = []

    def ended(row: Sequence[int]) -> bool:
        asked.append(len(row))
        return sum(row) % 4 == 0 or len(row) == 9

    result = generate(tiny, prompts, 12, ended=ended)
    ends = [next(n for n in range(1, 10) if sum(row[:n]) % 4 == 0 or n == 9) for row in whole]
    assert result == [row[:end] for row, end in zip(whole, ends, strict=True)]
    assert len(set(ends)) > 1 and max(asked) == max(ends), "none is generated to its full length"
