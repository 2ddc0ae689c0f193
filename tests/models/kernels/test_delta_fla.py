"""`kernel: fla`: our op around fla's functions, whose plain twins stand for them without a GPU."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.models.peers import in_fp64, naive_fla
from torch import Tensor

from headrace.console.errors import LayoutError
from headrace.models.attestation.cases.case import TINY, Draw
from headrace.models.attestation.cases.compare import measure_errors
from headrace.models.attestation.cases.scans import delta_case
from headrace.models.kernels import choice, delta_fla
from headrace.models.layers.delta import scan
from headrace.models.parallel.axes import Axis


def by_document(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a plain function of fla, without `cu_seqlens`, for each document."""

    def call(*tensors: Tensor, scale: float, cu_seqlens: Tensor) -> tuple[Tensor, None]:
        outputs = []
        for start, end in pairwise(cu_seqlens.tolist()):
            q, k, v, g, beta = (x[:, start:end] for x in tensors)
            members = v.shape[2] // q.shape[2]
            if "gated" in function.__name__:
                q, k = (x.repeat_interleave(members, dim=2) for x in (q, k))
            y, _ = in_fp64(function, q=q, k=k, v=v, g=g, beta=beta, scale=scale)
            outputs.append(y.to(v.dtype))
        return torch.cat(outputs, dim=1), None

    return call


@pytest.fixture
def plain_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = (
        by_document(naive_fla("gated_delta_rule").naive_recurrent_gated_delta_rule),
        by_document(naive_fla("kda").naive_recurrent_kda),
    )
    monkeypatch.setattr(delta_fla, "_functions", lambda: functions)
    monkeypatch.setattr(choice, "INTERPRETED", True)


@pytest.mark.usefixtures("plain_functions")
@pytest.mark.parametrize("by_channel", [False, True])
def test_the_op_equals_the_twin(by_channel: bool) -> None:
    for packed in (False, True):
        case = delta_case(1, 2, by_channel=by_channel, state=False, packed=packed, kernel="fla")
        assert case.kernel == "delta_fla"
        errors = measure_errors(case, Draw(torch.float32, "cpu", 1), TINY)
        assert len(errors) == 6 and max(errors.values()) < 1e-5, errors


def test_what_fla_lacks_is_refused() -> None:
    v = torch.ones(1, 3, 1, 4)
    inputs = v, v, v, -torch.ones(1, 3, 1, 1), torch.ones(1, 3, 1)
    with pytest.raises(LayoutError, match="no initial state"):
        scan.kernel_delta_rule(*inputs, state=torch.ones(1, 1, 4, 4), kernel="fla")
    with pytest.raises(LayoutError, match="passes no states") as caught:
        scan.kernel_delta_rule(*inputs, axis=Axis(None, 0, 2), kernel="fla")
    assert "layout.delta=a2a" in str(caught.value.hint)
    with mock.patch.object(delta_fla, "find_spec", lambda _: None):
        with pytest.raises(LayoutError, match="fla is not installed") as caught:
            scan.kernel_delta_rule(*inputs, kernel="fla")
        assert caught.value.hint == 'pip install "headrace[fla]"'
    with pytest.raises(LayoutError, match="Triton needs a GPU"):
        scan.kernel_delta_rule(*inputs, kernel="fla")


@pytest.mark.parametrize(
    ("operation", "function"),
    [("gated_delta_rule", "chunk_gated_delta_rule"), ("kda", "chunk_kda")],
)
def test_fla_has_the_arguments(operation: str, function: str) -> None:
    spec = find_spec("fla")
    assert spec is not None and spec.submodule_search_locations is not None
    file = Path(spec.submodule_search_locations[0]) / "ops" / operation / "chunk.py"
    [definition] = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    names = [argument.arg for argument in definition.args.args]
    assert names[:6] == ["q", "k", "v", "g", "beta", "scale"] and "cu_seqlens" in names
