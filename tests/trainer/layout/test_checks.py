from __future__ import annotations

from dataclasses import replace

import pytest
from support.configs import CONFIGS

from headrace.console.errors import LayoutError
from headrace.models.config.config import ModelConfig, load_model_config
from headrace.trainer.layout.checks import check, problems
from headrace.trainer.layout.config import LayoutConfig


@pytest.fixture(scope="module")
def all_operators() -> ModelConfig:
    return load_model_config(CONFIGS / "every.yaml")


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_layouts_that_divide_pass(all_operators: ModelConfig, tp: int) -> None:
    check(LayoutConfig(tp=tp), 4, all_operators, [48])


def test_other_layouts_are_rejected_with_alternatives(all_operators: ModelConfig) -> None:
    with pytest.raises(LayoutError) as caught:
        check(LayoutConfig(tp=8), 8, all_operators, [48, 50])
    told = str(caught.value)
    assert "operators.few: tp=8 does not divide its 4 heads" in told
    assert "rows of 50 tokens do not divide by tp × cp = 8" in told
    assert "layout.tp=2 layout.cp=1" in told, "4 processes would cut a row of 50"
    assert "layout.tp=4" not in told


def test_states_are_exchanged_if_they_divide(all_operators: ModelConfig) -> None:
    check(LayoutConfig(cp=8, attention="ring"), 8, all_operators, [48])
    with pytest.raises(LayoutError) as caught:
        check(LayoutConfig(cp=8, attention="ring", delta="a2a"), 8, all_operators, [48])
    message = "operators.kda: tp=1 × cp=8 does not divide its 4 heads, as layout.delta=a2a requires"
    assert message in str(caught.value)


def test_experts_are_split_evenly(all_operators: ModelConfig) -> None:
    check(LayoutConfig(ep=4), 8, all_operators, [48])
    check(LayoutConfig(tp=2, cp=2, ep=4), 4, all_operators, [48])
    with pytest.raises(LayoutError) as caught:
        check(LayoutConfig(tp=2, ep=3), 8, all_operators, [48])
    told = str(caught.value)
    assert "layout.tp=2 layout.cp=1 layout.ep=3 does not shard this model" in told
    assert "ep=3 is neither 1 nor a multiple of tp=2" in told
    assert "ep=3 does not divide the 8 ranks" in told
    assert "operators.moe: ep=3 does not divide its 4 experts" in told
    assert "on 8 ranks: layout.tp=2 layout.cp=1 layout.ep=4" in told


def test_a_remainder_of_ranks_is_rejected_once_with_alternatives(
    all_operators: ModelConfig,
) -> None:
    with pytest.raises(LayoutError) as caught:
        check(LayoutConfig(pp=2, tp=2, ep=4), 6, all_operators, [48])
    told = str(caught.value)
    assert "pp × tp × cp = 4 does not divide 6 processes" in told
    assert "ep=4 does not divide" not in told, "3 ranks of a stage are no number"
    assert "layouts that work on 6 ranks: layout." in told


def test_only_layouts_that_work_are_named(all_operators: ModelConfig) -> None:
    assert len(all_operators.layers) < 32, "a stage would be without a layer"
    with pytest.raises(LayoutError) as caught:
        check(
            LayoutConfig(pp=32),
            32,
            all_operators,
            [48],
            lambda candidate: candidate.pp == 1 and candidate.tp == 4,
        )
    hint = str(caught.value.hint)
    assert "layout.tp=4 layout.cp=1" in hint and "pp" not in hint and "tp=1" not in hint
    with pytest.raises(LayoutError, match="no layout of 32 ranks works with this engine"):
        check(LayoutConfig(pp=32), 32, all_operators, [48], lambda candidate: False)


def test_a_model_without_experts_has_none_to_split() -> None:
    model = load_model_config(CONFIGS / "tiny.yaml")
    with pytest.raises(LayoutError, match="the model has none") as caught:
        check(LayoutConfig(ep=2), 2, model, [48])
    assert "on 2 ranks: layout.tp=1 layout.cp=1; layout.tp=2" in str(caught.value)


def test_ring_attention_needs_no_heads_per_rank(all_operators: ModelConfig) -> None:
    a2a, ring = (LayoutConfig(tp=2, cp=4, attention=form) for form in ("a2a", "ring"))  # type: ignore[arg-type]
    assert any("attention=a2a" in line for line in problems(a2a, 8, all_operators, [48]))
    assert not list(problems(ring, 8, all_operators, [48]))


def test_the_vocabulary_has_an_id_for_each_rank() -> None:
    model = load_model_config(CONFIGS / "tiny.yaml", ["vocab_size=2", "width=36"])
    assert any("2 ids are fewer" in line for line in problems(LayoutConfig(tp=3), 3, model, [48]))


def test_more_chunks_than_layers_are_rejected_with_alternatives(all_operators: ModelConfig) -> None:
    count = len(all_operators.layers)
    layout = LayoutConfig(pp=4, schedule="interleaved", chunks=count // 4)
    check(layout, 4, all_operators, [48])
    layout = replace(layout, chunks=layout.chunks + 1)
    with pytest.raises(LayoutError) as caught:
        check(layout, 4, all_operators, [48])
    chunks = layout.chunks
    told = f"pp=4 × chunks={chunks} are {4 * chunks} chunks, and the model has {count} layers"
    assert told in str(caught.value)
    assert "layout.pp=4 layout.tp=1 layout.cp=1" in str(caught.value)
    told = f"there is no layer {count}; the last is {count - 1}"
    with pytest.raises(LayoutError, match=told) as caught:
        check(LayoutConfig(pp=2, cuts=(count,)), 2, all_operators, [48])
    assert "layout.pp=2 layout.tp=1" in str(caught.value)
    check(LayoutConfig(pp=2, cuts=(count - 1,)), 2, all_operators, [48])
