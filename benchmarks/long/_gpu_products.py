"""Library operations at the sizes of the 1B models: attention of cuDNN beside flash attention,
and products of matrices in fp8 beside bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.models.documents import Documents
from headrace.models.layers.attention.packed import packed_attention

from ._gpu_lines import Line, Sizes
from ._kernel_measures import Clock

LARGEST = 448.0
"""Largest number of e4m3."""


def attention(dry: bool) -> int:
    """Time attention of one document and of packed documents by each library."""
    sizes, clock = Sizes(dry), Clock(dry)
    config = sizes.model("transformer-1b")
    heads = config.operators["attention"].heads  # type: ignore[attr-defined]
    shape = (1, heads, sizes.tokens, config.width // heads)
    q, k, v = (
        torch.randn(shape, device=sizes.device).bfloat16().requires_grad_() for _ in range(3)
    )
    orders = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    failed = 0
    for name, backend in orders.items():
        for rows, run in (("one document", whole), ("packed", packed(sizes))):
            try:
                with sdpa_kernel([SDPBackend.MATH] if dry else [backend]):
                    forward, both = passes(clock, lambda run=run: run(q, k, v), (q, k, v))
            except Exception as error:
                failed += 1
                print(f"attention, {rows}, {name}: {type(error).__name__}: {error}"[:300])
                continue
            print(
                f"attention, {rows}, {name}: {clock.milliseconds(forward)} forward, "
                f"{clock.milliseconds(both - forward)} backward",
                flush=True,
            )
    return 1 if failed == 2 * len(orders) else 0


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def packed(sizes: Sizes) -> Callable[..., Tensor]:
    """Return attention within packed documents, as the operator computes it on CUDA."""
    ends = torch.tensor(sizes.boundaries(Line(model="transformer-1b"), 0), dtype=torch.int32)
    documents = Documents.build(ends, (1, sizes.tokens)).to(torch.device(sizes.device))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if sizes.dry:  # it has no CPU form
            return whole(q, k, v)
        rows = (x.transpose(1, 2) for x in (q, k, v))
        return packed_attention(*rows, documents.spans(), scale=q.shape[-1] ** -0.5, window=None)

    return run


def passes(
    clock: Clock, run: Callable[[], Tensor], inputs: tuple[Tensor, ...]
) -> tuple[float, float]:
    """Return the seconds of a forward pass, and of both."""
    above = torch.randn_like(run())
    return clock.seconds(run), clock.seconds(lambda: torch.autograd.grad(run(), inputs, above))


def products(sizes: Sizes) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, rows, inner size and columns of the products of a Transformer's layer."""
    config = sizes.model("transformer-1b")
    width, hidden = config.width, config.operators["glu"].hidden  # type: ignore[attr-defined]
    yield "q, k, v", sizes.tokens, width, 3 * width
    yield "output", sizes.tokens, width, width
    yield "gate and value", sizes.tokens, width, 2 * hidden
    yield "down", sizes.tokens, hidden, width


def fp8(dry: bool) -> int:
    """Time products in fp8 with a scale for each row, and check them against bf16."""
    clock, failed = Clock(dry), 0
    for name, rows, inner, columns in products(Sizes(dry)):
        a = torch.randn(rows, inner, device=clock.device).bfloat16()
        b = torch.randn(columns, inner, device=clock.device).bfloat16()
        try:
            (a8, scale_a), (b8, scale_b) = (quantised(x, rows=not dry) for x in (a, b))

            multiply = partial(
                torch._scaled_mm,
                a8,
                b8.T,
                scale_a=scale_a,
                scale_b=scale_b.T,
                out_dtype=torch.bfloat16,
            )
            expected = (a8.float() * scale_a) @ (b8.float() * scale_b).T
            off = float((multiply().float() - expected).norm() / expected.norm())
            fast, usual = clock.seconds(multiply), clock.seconds(lambda a=a, b=b: a @ b.T)
            casts = clock.seconds(lambda a=a: quantised(a))
        except Exception as error:
            failed += 1
            print(f"fp8, {name}: failed: {type(error).__name__}: {error}"[:300], flush=True)
            continue
        wrong = off > 1e-2
        failed += wrong
        print(
            f"fp8, {name} [{rows}, {inner}] × [{inner}, {columns}]: "
            f"{clock.number(usual / fast)}x the speed of bf16, {clock.milliseconds(fast)} and "
            f"{clock.milliseconds(casts)} to quantise the first factor in plain torch, "
            f"{'WRONG: ' * wrong}error {off:.1e}",
            flush=True,
        )
    return 1 if failed else 0


def quantised(x: Tensor, rows: bool = True) -> tuple[Tensor, Tensor]:
    """Return x in e4m3, and the scale of each row, or of all: torch 2.11 has no others on CPU."""
    largest = x.abs().amax(dim=1, keepdim=True) if rows else x.abs().amax().view(1, 1)
    scale = largest.float().clamp(min=1e-12) / LARGEST
    return (x / scale).to(torch.float8_e4m3fn), scale
