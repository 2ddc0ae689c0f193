"""Traced memory, beside the events of torch's allocator on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headrace.models.accounting.fake.linear import linear_layers
from headrace.models.accounting.fake.trace import StorageMeter, fake_tensors, trace
from headrace.models.accounting.pieces import Passes, find_peak, sum_changes
from headrace.models.config.options.names import LinearForm
from headrace.models.config.options.recompute import Selective
from headrace.models.kernels.choice import as_on_gpu
from headrace.models.layers.grouped import grouped_product
from headrace.models.layers.recompute import Recomputable

sys.path.insert(0, str(Path(__file__).parent))
from support.models.allocator import Levels, levels, turn

ROWS, LENGTH, WIDTH = 2, 64, 96
SCALARS = 64
"""Bytes of the loss and of other tensors of one element."""
RANDOM = torch.get_rng_state().nbytes
"""Bytes of the state of torch's generator, which `checkpoint` keeps."""
Run = Callable[["Layer", Tensor], Tensor]


class Layer(nn.Module):
    """Attention and an MLP: views, saved results, a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, u: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(u)).unflatten(-1, (3, 4, -1)).movedim(2, 0).transpose(2, 3)
        u = u + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return u + self.down(nn.functional.gelu(self.up(self.norm(u))))


def plain(layer: Layer, u: Tensor) -> Tensor:
    return layer(u).square().mean()


def recompute(layer: Layer, u: Tensor) -> Tensor:
    result: Tensor = checkpoint(layer, u, use_reentrant=False)
    return result.square().mean()


def traced(run: Run) -> Passes:
    with fake_tensors(torch.float32):
        layer = Layer()
        make = partial(torch.empty, ROWS, LENGTH, WIDTH)
        return trace(partial(run, layer), make, dict(layer.named_parameters()))


def allocated(run: Run) -> Levels:
    """Measure both passes beside the input, and drop each gradient when it is complete."""
    layer, u = Layer(), torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)
    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def run_both_passes() -> None:
        loss = run(layer, u)
        turn()
        loss.backward()

    return levels(run_both_passes)


class Products(Recomputable):
    """A layer whose products alone are kept."""

    recompute, saved = True, Selective(save=("matmul",))

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, u: Tensor) -> Tensor:
        result: Tensor = self.layer(u)
        return result


def products(layer: Layer, u: Tensor) -> Tensor:
    result: Tensor = Products(layer)(u)
    return result.square().mean()


@pytest.mark.parametrize("run", [plain, recompute])
def test_traced_levels_are_those_of_the_allocator(run: Run) -> None:
    passes = traced(run)
    real = allocated(run)
    unseen = SCALARS if run is plain else SCALARS + RANDOM
    assert abs(passes.activations - real.turn) <= unseen
    peak = max(find_peak(passes.forward), passes.activations + find_peak(passes.backward))
    assert abs(peak - real.peak) <= unseen


@pytest.mark.parametrize("form", ["torch", "zero3"])
def test_linear_layers_are_traced_as_the_engine_computes_them(
    form: LinearForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's function drops the kept product of each linear layer with a bias."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    kept, peak = {}, {}
    for argument in get_args(LinearForm):
        with linear_layers(argument):
            passes = traced(products)
        kept[argument], peak[argument] = (
            passes.activations,
            passes.activations + find_peak(passes.backward),
        )
    assert kept["torch"] - kept["zero3"] == 4 * ROWS * LENGTH * (3 + 4 + 1) * WIDTH
    if form == "zero3":
        monkeypatch.setattr(nn.functional, "linear", zero3_linear_wrap)
    real = allocated(products)
    assert abs(kept[form] - real.turn) <= SCALARS
    assert abs(peak[form] - real.peak) <= SCALARS


BF16 = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


@pytest.mark.skipif(not BF16, reason="oneDNN has other blocks without AVX-512 and with AMX")
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("height", "inner", "width"), [(512, 128, 192), (128, 512, 192)])
def test_products_in_bf16_hold_the_blocks_of_each_thread(
    height: int, inner: int, width: int, columns: bool, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        left, right = torch.ones(height, inner), torch.ones(inner, width)
        if columns:
            left = left.t().contiguous().t()
        left, right = left.bfloat16(), right.bfloat16()
        real = levels(lambda: left @ right).peak
        with fake_tensors(torch.bfloat16), StorageMeter() as meter:
            torch.empty_strided(left.shape, left.stride()) @ torch.empty(inner, width)
    finally:
        torch.set_num_threads(before)
    result = meter.peak - left.nbytes - right.nbytes
    assert 0.96 < result / real < 1.01
    assert height * width * 2 < 0.9 * real


def test_the_passes_cancel_and_name_every_gradient() -> None:
    passes = traced(plain)
    assert abs(sum_changes(passes.forward) + sum_changes(passes.backward)) <= SCALARS
    names = [piece.gradient for piece in passes.backward if piece.gradient]
    assert sorted(names) == sorted(name for name, _ in Layer().named_parameters())
    assert passes.activations > traced(recompute).activations


def test_a_saved_result_is_kept_beside_the_stream() -> None:
    """sigmoid keeps its result, which is the next layer's input too."""
    size = 4 * ROWS * LENGTH * WIDTH
    with fake_tensors(torch.float32):
        passes = trace(torch.sigmoid, partial(torch.empty, ROWS, LENGTH, WIDTH), {})
    assert abs(passes.activations - size) <= SCALARS


def test_products_of_experts_hold_the_results_of_each_group() -> None:
    """A loop over the experts joins its results: both are there for a moment."""
    rows, width = 64, 3 * WIDTH
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)

    def traced(dtype: torch.dtype = torch.float32) -> Passes:
        with fake_tensors(dtype):
            weights = torch.empty(4, width, WIDTH, requires_grad=True)
            make = partial(torch.empty, rows, WIDTH)
            return trace(lambda u: grouped_product(u, weights, ends), make, {"weights": weights})

    weights = torch.ones(4, width, WIDTH, requires_grad=True)
    weights.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    u, result = torch.ones(rows, WIDTH, requires_grad=True), 4 * rows * width

    def forward() -> None:
        grouped_product(u, weights, ends)

    def run_both_passes() -> None:
        y = grouped_product(u, weights, ends)  # lives beside its gradient; in a chain it would not
        y.backward(torch.empty_like(y))

    passes = traced()
    assert abs(find_peak(passes.forward) - levels(forward).peak) <= SCALARS
    assert (
        abs(passes.activations + find_peak(passes.backward) + result - levels(run_both_passes).peak)
        <= SCALARS
    )
    with as_on_gpu():  # one launch in bf16, a loop in fp32
        assert traced() == passes
        assert abs(find_peak(traced(torch.bfloat16).forward) - result // 2) <= SCALARS
