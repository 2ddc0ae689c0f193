"""Fused kernels, a file each. A kernel's *twin* is its reference implementation in plain torch; the
kernel's docstring names it.

A kernel is a custom op, which torch.compile keeps whole in its graph: it checks and lays out its
tensors, and launches the Triton programs in programs/, in a file with the same name.
"""

KERNELS = (
    "fft_convolution",
    "gated_rms_norm",
    "glu",
    "linear_cross_entropy",
    "modal",
    "rms_norm",
    "rope",
    "routed_rows",
    "selective_scan",
    "short_convolution",
    "ssd",
    "toeplitz",
)
