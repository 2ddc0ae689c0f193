"""The fused loss takes no more memory than Liger's, and its backward pass none."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from headrace.models.kernels.linear_cross_entropy import (
    MIN_TOKENS,
    chunk_layout,
    liger_chunk_logits,
    row_stride,
    workspace_bytes,
)

SIZES = [
    (tokens, width, vocabulary)
    for tokens in (1, 600, 4096, 16_384, 65_536, 100_000)
    for width in (512, 1024, 2048, 4096, 6000)
    for vocabulary in (4, 512, 5003, 32_000, 50_257, 65_536, 128_256, 262_144)
]
BACKWARD = """
import json
import torch
from headrace.models.kernels.linear_cross_entropy import linear_cross_entropy

torch.manual_seed(0)
hidden, weight = torch.randn(8, 6).requires_grad_(), torch.randn(24, 6).requires_grad_()
weights = torch.rand(8)
total = linear_cross_entropy(hidden, weight, torch.arange(8), weights, 0.1, True, 24, "")[0] / 3
twice = [torch.autograd.grad(total, (hidden, weight), retain_graph=True) for _ in range(2)]
saved = {tensor.data_ptr() for tensor in total.grad_fn.next_functions[0][0].saved_tensors}
total.backward()
equal = [torch.equal(a, b) for grads in twice for a, b in zip(grads, (hidden.grad, weight.grad))]
print(json.dumps([equal, len(saved), {hidden.grad.data_ptr(), weight.grad.data_ptr()} == saved]))
"""


def liger_bytes(tokens: int, width: int, vocabulary: int, itemsize: int) -> int:
    """Return the peak of a forward pass of Liger 0.8.5: both gradients and a chunk of logits."""
    gradients = (tokens + vocabulary) * width
    return (gradients + liger_chunk_logits(tokens, width, vocabulary)) * itemsize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_loss_takes_no_more_memory_than_liger(dtype: torch.dtype) -> None:
    sum_dtypes = set()
    for tokens, width, vocabulary in SIZES:
        headrace = workspace_bytes(tokens, width, vocabulary, dtype)
        liger = liger_bytes(tokens, width, vocabulary, dtype.itemsize)
        chunk, sum_dtype = chunk_layout(tokens, width, vocabulary, dtype)
        sum_dtypes.add(sum_dtype)
        if liger_chunk_logits(tokens, width, vocabulary) >= min(MIN_TOKENS, tokens) * row_stride(
            vocabulary
        ):
            assert headrace <= liger, (tokens, width, vocabulary)
        else:  # Liger's products take as long as reading the weight
            assert chunk == min(MIN_TOKENS, tokens)
    assert sum_dtypes == {dtype, torch.float32}


def test_sums_are_fp32_where_they_have_room() -> None:
    """DNA's ids are few beside its tokens, those of a text more."""
    assert chunk_layout(8192, 4096, 512, torch.bfloat16)[1] == torch.float32
    assert chunk_layout(16_384, 2048, 32_000, torch.bfloat16) == (1024, torch.bfloat16)


@pytest.mark.slow
def test_a_backward_pass_scales_in_place_unless_the_graph_is_kept() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BACKWARD],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    equal, num_saved, in_place = json.loads(done.stdout.strip().splitlines()[-1])
    assert equal == [True] * 4
    assert num_saved == 2 and in_place
