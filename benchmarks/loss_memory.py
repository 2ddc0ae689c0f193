"""Memory of the fused loss beside Liger's, by formula, and what its sums round away.

    python -m benchmarks.loss_memory

headrace's formula is `workspace_bytes`, which tests hold equal to the trace of a pass. Liger's is
that of the fused loss in Liger 0.8.5: both gradients and a chunk of logits. Errors
of the weight's gradient are those of the same sums in plain torch, beside fp64. No GPU is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.models.kernels.linear_cross_entropy import (
    chunk_layout,
    liger_chunk_logits,
    workspace_bytes,
)

SIZES = {
    "hybrid-1b": (16_384, 2048, 32_000),
    "mamba2-1.3b": (16_384, 2048, 50_288),
    "benchmarks.long.kernels": (16_384, 4096, 65_536),
    "llama3-8b": (16_384, 4096, 128_256),
    "llama3-8b, a short row": (8192, 4096, 128_256),
    "evo2-7b": (8192, 4096, 512),
}
"""Tokens of a micro-batch, width and ids."""
NUM_CHUNKS = (4, 8, 16, 32)


def main() -> None:
    bf16 = torch.bfloat16
    for name, (tokens, width, vocabulary) in SIZES.items():
        chunk, sum_dtype = chunk_layout(tokens, width, vocabulary, bf16)
        headrace = workspace_bytes(tokens, width, vocabulary, bf16)
        logits = liger_chunk_logits(tokens, width, vocabulary)
        liger = ((tokens + vocabulary) * width + logits) * bf16.itemsize
        print(
            f"{name}: {tokens:,} tokens, {width:,} wide, {vocabulary:,} ids: "
            f"{headrace / 2**20:,.0f} MiB, Liger {liger / 2**20:,.0f} MiB: "
            f"{headrace / liger:.3f} of it; chunks of {chunk:,} tokens, Liger's "
            f"{logits // vocabulary:,}; sums in {str(sum_dtype).removeprefix('torch.')}"
        )
    torch.manual_seed(0)
    hidden, weight = torch.randn(2048, 128).bfloat16(), (torch.randn(2048, 128) / 11).bfloat16()
    targets = torch.randint(len(weight), (len(hidden),))
    exact = logit_gradients(hidden, weight, targets, torch.float64).T @ hidden.double()
    for sum_dtype in (torch.float32, bf16):
        errors = []
        for num_chunks in NUM_CHUNKS:
            total = torch.zeros(weight.shape, dtype=sum_dtype)
            for rows, ids in zip(hidden.chunk(num_chunks), targets.chunk(num_chunks), strict=True):
                product = logit_gradients(rows, weight, ids, bf16).float().T @ rows.float()
                total = (total.float() + product).to(sum_dtype)
            error = (total.bfloat16().double() - exact).norm() / exact.norm()
            errors.append(f"{num_chunks} chunks {error:.1e}")
        name = str(sum_dtype).removeprefix("torch.")
        print(f"error of the weight's gradient, sums in {name}: {', '.join(errors)}")


def logit_gradients(hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradients of the logits [tokens, ids]; logits and gradients are rounded to a
    dtype."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    logits = (hidden.to(wide) @ weight.to(wide).T).to(dtype).to(wide)
    gradients = logits.softmax(-1)
    gradients[torch.arange(len(targets)), targets] -= 1
    return gradients.to(dtype)


if __name__ == "__main__":
    main()
