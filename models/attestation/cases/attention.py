"""Cases for attention by torch's implementations, in the order in which a run tries them.

Each implementation that may run has cases of its own, in which it comes first: a later one computes
what it cannot, and takes its place if it fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...documents import Documents
from ...layers.attention.limits import HALF_PRECISION, AttentionCall, unsupported_reason
from ...layers.attention.order import Implementation, attention_order
from ...layers.attention.packed import packed_attention
from ...layers.attention.rows import row_attention
from ...operators.attention import attention_mask
from ...operators.base import BatchContext
from .case import Case, Draw, Inputs, InputShape

ATTENTION = " attention"
"""Ending of the names of implementations among the names of kernels."""
ATTESTED: tuple[Implementation, ...] = ("cudnn", "flash4", "flash")
MAX_LENGTH = 2048
"""Tokens in a long row: the twin has a score for each pair of tokens."""
MAX_KV_HEADS = 2
TABLE_CALLS = tuple(
    AttentionCall(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        window=window,
        scale=head_dim**-0.5,
        dtype=dtype,
        packed=True,
    )
    for heads, kv_heads, head_dim, window in ((2, 2, 128, None), (4, 1, 64, None), (2, 2, 128, 100))
    for dtype in HALF_PRECISION
)
"""Calls for the table of all kernels."""


def attention_cases(
    calls: Sequence[AttentionCall], order: Sequence[Implementation], *, deterministic: bool
) -> Iterator[Case]:
    """Yield the cases of each implementation in the order, for the calls that it can compute."""
    for place, implementation in enumerate(order):
        for call in calls if implementation in ATTESTED else ():
            if unsupported_reason(implementation, call) is None:
                for packed in (False, True) if call.packed else (False,):
                    yield attention_case(
                        call, tuple(order[place:]), packed=packed, deterministic=deterministic
                    )


def attention_case(
    call: AttentionCall,
    order: tuple[Implementation, ...],
    *,
    packed: bool,
    deterministic: bool,
) -> Case:
    """Return a case with few heads, which share keys and values as those of the call do."""
    sharing = call.heads // call.kv_heads
    kv_heads = min(call.kv_heads, MAX_KV_HEADS if sharing < 8 else 1)
    heads = kv_heads * sharing
    scale, window = call.scale, call.window

    def make(draw: Draw, shape: InputShape) -> Inputs:
        def normal(name: str, heads: int, width: int) -> Tensor:
            return draw.normal(name, shape.rows, shape.length, heads, width)

        inputs: Inputs = {
            "q": normal("q", heads, call.head_dim),
            "k": normal("k", kv_heads, call.head_dim),
            "v": normal("v", kv_heads, call.value_dim),
        }
        return inputs | ({"documents": draw.documents(shape)} if packed else {})

    def run(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
        if documents is not None:
            return packed_attention(q, k, v, documents.spans(), scale=scale, window=window)
        positions = torch.arange(q.shape[1], device=q.device).unsqueeze(0)
        mask = attention_mask(BatchContext(positions), q.shape[1], window)
        return row_attention(q, k, v, mask, scale=scale)

    def twin(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
        k, v = (t.repeat_interleave(sharing, dim=2) for t in (k, v))
        time = torch.arange(q.shape[1], device=q.device)
        age = time[:, None] - time
        visible = (age >= 0) & (age < (window or q.shape[1]))
        if documents is not None:
            number = documents.segment_starts().cumsum(1)
            visible = (visible & (number[:, :, None] == number[:, None])).unsqueeze(1)
        scores = torch.einsum("bqhd, bkhd -> bhqk", q, k) * scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return torch.einsum("bhqk, bkhd -> bqhd", weights, v)

    name = ", ".join([str(call), *["packed"] * packed, *["deterministic"] * deterministic])
    case = Case(
        f"{order[0]}{ATTENTION}",
        f"{name}, {call.dtype}, by {', '.join(order)}",
        make,
        run,
        twin,
        context=lambda: attention_order(order),
        repeatable=deterministic,
        max_length=MAX_LENGTH,
    )
    dtypes = dict.fromkeys(("q", "k", "v"), getattr(torch, call.dtype))
    return case.fix_sizes(case.name, heads * call.head_dim, dtypes)
