"""Fused kernels, a file each. A kernel's *twin* is its reference implementation in plain torch; the
kernel's docstring names it.

A kernel is a custom op, which torch.compile keeps whole in its graph: it checks and lays out its
tensors, and launches the Triton programs in programs/, in a file with the same name.
"""

NEXT = (
    "fft_convolution",
    "gated_rms_norm",
    "modal",
    "rms_norm",
    "short_convolution",
    "ssd",
    "toeplitz",
)
"""Kernels with next programs: faster by the counts of their binaries, but on no device so far. The
commit that confirms one on a device deletes the old program."""
KERNELS = (
    "delta",
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
