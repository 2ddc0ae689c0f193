"""Operators in plain torch, compared with peers: forward and backward passes, in turns in one run.

python -m benchmarks.models_peers [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.models.config.options.mamba2 import Mamba2Options
from headrace.models.layers.convolution import causal_convolution
from headrace.models.layers.scan import modal_scan
from headrace.models.operators import BatchContext
from headrace.models.operators.mamba2 import Mamba2

ROWS, LENGTH, WIDTH = 1, 512, 128


def mamba2() -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return our module and that of transformers without kernels, of the same sizes."""
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    settings = Mamba2Config(
        hidden_size=WIDTH, num_heads=4, head_dim=64, state_size=64, n_groups=1, chunk_size=64
    )
    theirs = Mamba2Mixer(settings, layer_idx=0)
    ours = Mamba2(Mamba2Options(state_size=64, head_dim=64), WIDTH)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    u = torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)
    where = BatchContext(torch.arange(LENGTH).unsqueeze(0))
    return lambda: ours(u, where), lambda: theirs(u)


def hyena_li() -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return the modal scan and the FFT convolution of the published models."""
    w = torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)
    rates = (torch.rand(WIDTH, 16) * 0.03).requires_grad_()
    residues = torch.randn(WIDTH, 16, requires_grad=True)

    def fft() -> Tensor:
        powers = torch.exp(-rates.unsqueeze(-1) * torch.arange(LENGTH))
        taps = (residues.unsqueeze(-1) * powers).sum(1)
        return causal_convolution(w, taps, method="fft")

    return lambda: modal_scan(w, rates, residues, final_state=False)[0], fft


def hyena_mr() -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return the product with Toeplitz blocks and torch's depthwise convolution, 128 taps."""
    w = torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)
    taps = torch.randn(WIDTH // 16, 128, requires_grad=True)

    def conv1d() -> Tensor:
        filters = taps.flip(-1).repeat_interleave(16, dim=0).unsqueeze(1)
        return F.conv1d(F.pad(w.transpose(1, 2), (127, 0)), filters, groups=WIDTH).transpose(1, 2)

    return lambda: causal_convolution(w, taps, method="toeplitz"), conv1d


def step(run: Callable[[], Tensor]) -> float:
    started = time.perf_counter()
    run().sum().backward()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)  # times of one core can be compared
    torch.manual_seed(0)
    for name, make, peer in (
        ("Mamba-2", mamba2, "transformers without kernels"),
        ("Hyena-LI scan", hyena_li, "an FFT convolution"),
        ("Hyena-MR Toeplitz", hyena_mr, "conv1d"),
    ):
        ours, theirs = make()
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(repeats + 1):  # the first pass warms up
            times["ours"].append(step(ours))
            times["theirs"].append(step(theirs))
        our_time, peer_time = (statistics.median(times[key][1:]) for key in ("ours", "theirs"))
        print(
            f"{name}: {peer_time / our_time:.2f}x the speed of {peer}, {our_time * 1e3:.0f} ms"
            f" forward and backward, {ROWS} x {LENGTH} tokens, width {WIDTH}, fp32, one CPU thread",
            flush=True,
        )


if __name__ == "__main__":
    main()
