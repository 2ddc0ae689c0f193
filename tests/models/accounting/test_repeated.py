"""Operations that repeat give results like the first ones, and each its own tensors."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from headrace.models.accounting.fake import repeated, trace
from headrace.models.accounting.fake.model import FakeModel
from headrace.models.accounting.fake.repeated import run_operation
from headrace.models.accounting.fake.trace import fake_tensors
from headrace.models.accounting.layer_kinds import reduce_to_kinds
from headrace.models.accounting.pieces import Passes
from headrace.models.accounting.shape import Shape
from headrace.models.accounting.state import Degrees
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS

ATEN = torch.ops.aten


def as_first(operation: Any, inputs: Any, options: Any) -> Any:
    return operation(*inputs, **(options or {}))


def passes_of(name: str, device: str) -> list[Passes]:
    model = reduce_to_kinds(load_model_config(name))
    shape = Shape(
        rows=2,
        seq_len=64,
        precision=PRECISIONS["bf16"],
        device=device,
        degrees=Degrees(tp=2),
        attention="a2a",
        hyena_li="states",
        threads=1,
    )
    fake = FakeModel(model, shape)
    asked = product(range(len(model.layers)), ("none", "block"))
    layers = [fake.run(partial(FakeModel.layer, number=n, rule=rule)) for n, rule in asked]
    return [fake.run(FakeModel.first), *layers, fake.run(FakeModel.last)]


@pytest.mark.parametrize(
    ("name", "device"), [("tiny-hybrid", "cuda"), ("tiny-moe", "cpu"), ("tiny-moe", "cuda")]
)
def test_traces_are_those_of_the_mode_alone(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated, "_layouts_by_key", {})
    result = passes_of(name, device)
    assert sum(known is not None for known in repeated._layouts_by_key.values()) > 20
    monkeypatch.setattr(trace, "run_operation", as_first)
    assert passes_of(name, device) == result


def test_traces_see_how_long_repeated_results_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    result = passes_of("tiny-moe", "cuda")
    make, alive = repeated._create_result, []

    def create_recorded(*like: Any) -> Any:
        alive.append(make(*like))
        return alive[-1]

    monkeypatch.setattr(repeated, "_create_result", create_recorded)
    assert passes_of("tiny-moe", "cuda") != result


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        (ATEN.view.default, ([6, 4],)),
        (ATEN._unsafe_view.default, ([6, 4],)),
        (ATEN.view.dtype, (torch.uint8,)),
        (ATEN.transpose.int, (0, 1)),
        (ATEN.select.int, (0, 2)),
        (ATEN.slice.Tensor, (1, 1, 5, 2)),
        (ATEN.expand.default, ([2, 4, 6],)),
        (ATEN.as_strided.default, ([2, 2], [1, 3], 4)),
        (ATEN.detach.default, ()),
        (ATEN.split.Tensor, (2, 1)),
        (ATEN.split_with_sizes.default, ([1, 5], 1)),
        (ATEN.unbind.int, (0,)),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_view_is_that_of_the_mode_and_shares_its_input(
    operation: Any, arguments: Any, device: str
) -> None:
    with fake_tensors(torch.float32):
        x = torch.empty(5, 6, device=device)[1:]
        views = [find(operation, (x, *arguments), None) for find in (run_operation, as_first)]
        our_views, theirs = (view if isinstance(view, list) else [view] for view in views)
        assert [_described(item) for item in our_views] == [_described(their) for their in theirs]
        assert {repeated.storage_key(item) for item in our_views} == {repeated.storage_key(x)}


def _described(x: Any) -> Any:
    return type(x), x.shape, x.stride(), x.storage_offset(), x.dtype, x.fake_device


def test_results_have_storages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "_layouts_by_key", {})
    with fake_tensors(torch.float32):
        x, y = torch.empty(3, 4), torch.empty(4, 5)
        results = [run_operation(ATEN.mm.default, (x, y), None) for _ in range(3)]
    assert len({result.untyped_storage()._cdata for result in results}) == 3
    assert {(tuple(result.shape), result.untyped_storage().nbytes()) for result in results} == {
        ((3, 5), 60)
    }


def test_equal_numbers_of_other_types_are_other_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "_layouts_by_key", {})
    with fake_tensors(torch.float32):
        x = torch.empty(3, dtype=torch.int64)
        types = [run_operation(ATEN.mul.Tensor, (x, n), None).dtype for n in (2, 2.0, 2, 2.0)]
    assert types == [torch.int64, torch.float32] * 2


def test_the_standard_type_is_a_part_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "_layouts_by_key", {})
    for dtype in (torch.float32, torch.bfloat16) * 2:
        with fake_tensors(dtype):
            x = torch.empty(3, dtype=torch.int64)
            assert run_operation(ATEN.div.Tensor, (x, x), None).dtype == dtype


@pytest.mark.parametrize("operation", ["in place", "two inputs of one storage", "constant", "real"])
def test_other_operations_are_left_to_the_mode(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated, "_layouts_by_key", {})
    real = torch.ones(3)
    with fake_tensors(torch.float32):
        x = torch.empty(3)
        for _ in range(2):
            if operation == "in place":
                assert run_operation(ATEN.add_.Tensor, (x, x), None) is x
            elif operation == "two inputs of one storage":
                expanded = run_operation(ATEN.expand_as.default, (x, x.unsqueeze(0)), None)
                assert expanded.shape == (1, 3)
            elif operation == "constant":
                constant = torch.tensor(1)
                assert run_operation(ATEN._local_scalar_dense.default, (constant,), None) == 1
            else:
                assert run_operation(ATEN.add.Tensor, (real, real), None).shape == (3,)
    assert not any(repeated._layouts_by_key.values())
