"""Fused kernels: a file for each, with its plain twin beside it or named in its first lines.

Each is a custom op, which torch.compile keeps whole in its graph: it checks and lays out its
tensors, and launches the programs of the same name in programs/.
"""

KERNELS = (
    "fft_convolution",
    "gated_rms_norm",
    "glu",
    "linear_cross_entropy",
    "modal",
    "rms_norm",
    "rope",
    "selective_scan",
    "short_convolution",
    "ssd",
    "toeplitz",
)
