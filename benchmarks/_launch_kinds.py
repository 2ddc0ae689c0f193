"""Classes of the launches of a step, and the rates at which an H200 runs them.

    GEMM        products of matrices by cuBLAS: FLOPs at FLOPS
    attention   flash attention: its bytes are counted, its FLOPs are not
    kernel      a Triton program of headrace
    engine      launches of the engine: gathering weights, reducing gradients, their norm, clipping,
                the optimizer; once a micro-batch or once a step
    glue        everything else of the forward and backward passes: bytes at BYTES

An operation that no class names is an error: a new one must be put into a class.
"""

from __future__ import annotations

from ._fake_gpu import Launch

FLOPS = 790e12
"""Dense bf16 FLOP/s of large products on an H200."""
BYTES = 4.3e12
"""Bytes/s of copies on an H200."""

GEMM = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm"}
ATTENTION = {
    f"{name}{part}"
    for name in (
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention"),
        *("_varlen_attn", "_flash_attention", "_cudnn_attention", "_efficient_attention"),
    )
    for part in ("", "_forward", "_backward")
}
GLUE = {
    "copies and casts": {"_to_copy", "copy_", "clone", "cat", "constant_pad_nd", "stack"},
    "fills": {"zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "fill_", "zero_"}
    | {"full", "full_like", "scalar_tensor", "arange", "linspace", "logspace", "slice_backward"},
    "arithmetic": {
        "add",
        "add_",
        "addcmul",
        "sub",
        "mul",
        "mul_",
        "div",
        "neg",
        "pow",
        "exp",
        "log",
        "sqrt",
    }
    | {"rsqrt", "reciprocal", "cos", "sin", "softplus", "softplus_backward", "silu", "where"}
    | {"silu_backward", "gelu", "gelu_backward", "eq", "ne", "lt", "le", "gt", "ge", "bitwise_not"}
    | {"bitwise_and", "logical_not", "clamp", "clamp_min", "maximum", "sigmoid", "tanh", "expm1"}
    | {"sigmoid_backward", "tanh_backward", "isfinite", "abs", "masked_fill", "remainder"}
    | {"masked_fill_", "sub_", "__lshift__"},
    "sums": {"sum", "mean", "amax", "cumsum", "any", "all", "prod", "linalg_vector_norm"},
    "norms": {"native_layer_norm", "native_layer_norm_backward"},
    "gathers": {"embedding", "index", "index_select", "gather", "repeat", "repeat_interleave"},
    "scatters": {"embedding_dense_backward", "index_put", "index_put_", "scatter_add_", "scatter"}
    | {"index_add", "scatter_add"},
    "order": {"flip", "sort", "roll", "topk"},
}


def kind_of(launch: Launch) -> str:
    """Return the class of a launch."""
    if launch.engine:
        return "engine"
    kind = kind_of_operation(launch.name)
    if kind is None:
        raise KeyError(f"{launch.name} at {launch.place} has no class in {__file__}")
    return kind


def kind_of_operation(operation: str) -> str | None:
    """Return the class of an operation of the forward and backward passes; None if no class names
    it."""
    space, _, name = operation.partition("::")
    name = name.split(".")[0]
    if space in ("triton", "headrace"):
        return "kernel"
    if name in GEMM:
        return "GEMM"
    if name in ATTENTION:
        return "attention"
    if any(name in names for names in GLUE.values()):
        return "glue"
    return None
