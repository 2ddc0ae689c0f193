"""torch.compile of a model's blocks: graphs of each kind, operators left out, and errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.configs import CONFIGS
from torch._dynamo import config
from torch._dynamo.utils import counters

from headrace.console.errors import LayoutError
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import Fp8Config
from headrace.models.documents import Documents
from headrace.models.model.model import Model
from headrace.models.operators.hyena_mr import HyenaMR
from headrace.models.parallel.axes import Axes, Axis
from headrace.models.transforms.compilation import compile_blocks, find_eager_operators
from headrace.models.transforms.fp8 import quantize

CPU = torch.device("cpu")
ATTENTION = ("few", "narrow", "block", "mla")
EXPERTS = ("moe", "deepseek", "oss")
PACKINGS: list[list[int] | None] = [None, [3, 6, 9, 12], [20], [1, 2, 4, 5, 7, 8, 10]]
"""First tokens of the documents after the first of a row; None: each row is one document."""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forget graphs, counts and limits after each test."""
    torch.compiler.reset()
    counters.clear()
    names = ("recompile_limit", "fail_on_recompile_limit_hit", "suppress_errors")
    before = {name: getattr(config, name) for name in names}
    yield
    torch.compiler.reset()
    for name, value in before.items():
        setattr(config, name, value)


def model_of(*changes: str, name: str = "tiny") -> Model:
    torch.manual_seed(0)
    model = Model(load_model_config(CONFIGS / f"{name}.yaml", changes))
    model.init_weights(3)
    return model.double()


def results(model: Model, length: int, starts: list[int] | None) -> list[torch.Tensor]:
    """Return the outputs and all gradients of two rows."""
    tokens = torch.randint(0, 37, (2, length), generator=torch.Generator().manual_seed(length))
    documents = None
    if starts is not None:
        ends = torch.tensor([0, *starts, length, 2 * length])
        documents = Documents.build(ends, (2, length))
    y = model(tokens, documents)
    return [y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))]


def check_equal(compiled: Model, eager: Model, lengths: list[int], bound: float = 1e-12) -> None:
    for length in lengths:
        for starts in PACKINGS:
            pairs = zip(
                results(compiled, length, starts), results(eager, length, starts), strict=True
            )
            for ours, expected in pairs:
                scale = max(1.0, float(expected.detach().abs().max()))
                assert (ours - expected).abs().max() < bound * scale, (length, starts)


def graphs() -> int:
    assert not counters["graph_break"]
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.slow
def test_a_kind_has_two_graphs_for_each_length() -> None:
    """Packed and not, whatever the packing and the number of blocks."""
    changes = ('pattern="[se, attention] * 2"', "mlp=null")
    compiled, eager = model_of(*changes), model_of(*changes)
    compile_blocks(compiled, CPU, "eager")
    check_equal(compiled, eager, [24, 32])
    assert graphs() == 2 * 2 * 2


@pytest.mark.slow
def test_chunks_of_the_delta_rule_break_no_graph() -> None:
    changes = ('pattern="[gdn, kda]"', "mlp=null", "learned_positions=null", "norm=rms")
    compiled, eager = (model_of(*changes, name="every") for _ in range(2))
    compile_blocks(compiled, CPU, "eager")
    check_equal(compiled, eager, [24])
    assert graphs() == 2 * 2


@pytest.mark.long
def test_graphs_of_all_kinds_are_bounded() -> None:
    """li has a graph for each number of chunks too, which takes few values."""
    compiled, eager = model_of(), model_of()
    compile_blocks(compiled, CPU, "eager")
    check_equal(compiled, eager, [32, 48, 64])
    assert 3 * 5 * 2 <= graphs() <= 3 * (5 * 2 + 2)


@pytest.mark.long
def test_generated_code_computes_the_same() -> None:
    changes = ('pattern="[se, attention]"',)
    compiled, eager = model_of(*changes), model_of(*changes)
    compile_blocks(compiled, CPU)
    check_equal(compiled, eager, [24], bound=1e-8)  # rotations are fp32


def test_the_number_of_documents_makes_no_graph() -> None:
    graph = torch.compile(
        lambda spans: spans.ends.sum() * spans.longest, backend="eager", dynamic=False
    )
    for starts, empty in (([8], 0), ([8, 16], 1), ([4, 8, 12, 20], 3)):
        ends = [0, *starts, 32]
        documents = Documents.build(torch.tensor(ends), (1, 32))
        documents.prepare([], spans=True, compiled=True)
        spans = documents.spans()
        assert spans.ends.tolist() == ends + empty * [32]
        assert graph(spans) == (sum(ends) + empty * 32) * spans.longest
    assert graphs() == 2  # documents of more than 16 tokens, and shorter ones


def test_a_part_of_the_rows_prepares_the_ends_of_whole_rows() -> None:
    whole = Documents.build(torch.tensor([0, 20, 32]), (1, 32))
    whole.shard(Axis(None, 1, 2)).prepare([], spans=True, compiled=True)
    [spans] = whole._spans
    assert spans.ends.tolist() == [0, 20, 32]


@pytest.mark.slow
def test_products_in_fp8_are_compiled() -> None:
    """One graph for each block, the same numbers; negative control: products in fp64."""
    changes = ("pattern='[attention]'", "width=48", "operators.glu.hidden=64")
    compiled, eager = (
        quantize(model_of(*changes), Fp8Config(smallest=16, ends=0)) for _ in range(2)
    )
    compile_blocks(compiled, CPU, "aot_eager")
    ours, expected, exact = (
        results(item, 8, None) for item in (compiled, eager, model_of(*changes))
    )
    assert all(
        torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(ours, expected, strict=True)
    )
    assert not torch.allclose(expected[0], exact[0], rtol=1e-3)
    assert graphs() == 1


def test_a_kind_with_too_many_graphs_is_an_error_unless_allowed() -> None:
    changes = ("pattern='[attention]'", "mlp=null")
    model = model_of(*changes)
    compile_blocks(model, CPU, "eager", limit=1)
    results(model, 32, None)
    with pytest.raises(LayoutError, match="compiled the blocks `attention` 1 times") as caught:
        results(model, 24, None)
    assert "engine.compile_fallback=true" in str(caught.value.hint)
    torch.compiler.reset()
    counters.clear()
    model = model_of(*changes)
    compile_blocks(model, CPU, "eager", limit=1, fallback=True)
    check_equal(model, model_of(*changes), [24, 32])
    assert graphs() == 1


def test_an_operator_that_cannot_be_traced_runs_eagerly() -> None:
    changes = ("pattern='[mr]'", "operators.mr.method=fft", "operators.mr.groups=3")
    compiled, eager = model_of(*changes), model_of(*changes)
    assert find_eager_operators(compiled, Axes(), CPU) == {
        "mr": "FFTs of packed rows in plain torch"
    }
    compile_blocks(compiled, CPU, "eager")
    check_equal(compiled, eager, [24])
    assert graphs() == 2, "the MLP, after packed rows and others"


def test_an_untraced_part_that_is_not_named_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HyenaMR, "untraced", lambda *_: None)
    model = model_of("pattern='[mr]'", "operators.mr.method=fft", "mlp=null")
    compile_blocks(model, CPU, "eager")
    with pytest.raises(LayoutError, match="cannot compile the blocks `mr`") as caught:
        results(model, 16, [8])
    assert "documents.py" in str(caught.value.where)


@pytest.mark.parametrize(
    ("axes", "names"),
    [
        (Axes(), {"waves"}),
        (Axes(tensor=Axis(None, 0, 2)), {"waves"}),
        (Axes(context=Axis(None, 0, 2)), {"free", "waves"}),
        (Axes(context=Axis(None, 0, 2), hyena_li="a2a"), {"free", "waves", "li"}),
        (Axes(context=Axis(None, 0, 2), attention="ring"), {"free", "waves", *ATTENTION}),
        (Axes(experts=Axis(None, 0, 2)), {"waves", *EXPERTS}),
    ],
)
def test_operators_that_are_left_out(axes: Axes, names: set[str]) -> None:
    model = model_of(name="every")
    assert set(find_eager_operators(model, axes, CPU)) == names
    on_gpu = {*EXPERTS, *ATTENTION} & names
    assert set(find_eager_operators(model, axes, torch.device("cuda"))) == on_gpu
