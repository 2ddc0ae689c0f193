"""Published weights in 4 and 8 bits, read as numbers: MXFP4 (gpt-oss) and FP8 by blocks (DeepSeek).

Writing gives the numbers themselves, in the precision of the model, without `quantization_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...console.errors import CheckpointError, ConfigProblem, ConfigProblems
from ..weights import Weights

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of FP4 (E2M1) by their last three bits; the first bit is the sign."""
FP4_BLOCK = 32
SCALE = "_scale_inv"


def dequantize(theirs: Weights, settings: Mapping[str, Any]) -> Weights:
    """Return the tensors as `quantization_config` says that they are to be read, unchanged without
    one. Raise ConfigProblems for a method that we do not know."""
    quantization = settings.get("quantization_config")
    if quantization is None:
        return theirs
    method = str(quantization.get("quant_method"))
    if method not in METHODS:
        message = f"`{method}` is not supported, only {' and '.join(METHODS)}"
        raise ConfigProblems([ConfigProblem("quantization_config.quant_method", message)])
    name = settings.get("torch_dtype") or settings.get("dtype") or "bfloat16"
    return METHODS[method](theirs, quantization, getattr(torch, str(name)))


def read_mxfp4(theirs: Weights, quantization: Mapping[str, Any], dtype: torch.dtype) -> Weights:
    """Read NAME_blocks [experts, rows, blocks, 16] and NAME_scales [experts, rows, blocks] as NAME
    [experts, 32·blocks, rows]."""
    packed = {
        name.removesuffix("_blocks"): shape
        for name, shape in theirs.shapes.items()
        if name.endswith("_blocks")
    }
    shapes = {
        name: shape
        for name, shape in theirs.shapes.items()
        if name.removesuffix("_blocks").removesuffix("_scales") not in packed
    }
    for name, shape in packed.items():
        _check_shape(theirs, f"{name}_scales", shape[:-1])
    shapes |= {name: (*s[:-3], FP4_BLOCK * s[-2], s[-3]) for name, s in packed.items()}

    def read(name: str) -> Tensor:
        if name not in packed:
            return theirs[name]
        return unpack_mxfp4(theirs[f"{name}_blocks"], theirs[f"{name}_scales"], dtype).mT

    return Weights(shapes, read)


def unpack_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [..., 32·blocks] for bytes [..., blocks, 16], each with two numbers, the low bits
    first; scales [..., blocks] are powers of two, biased by 127."""
    values = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], dtype=dtype)
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32).unsqueeze(-1) - 127
    return torch.ldexp(values[pairs.int()], exponents).to(dtype).flatten(-2)


def read_fp8(theirs: Weights, quantization: Mapping[str, Any], dtype: torch.dtype) -> Weights:
    """Read NAME, FP8 [..., rows, columns], with NAME_scale_inv, the factor of each block, as
    NAME."""
    block = quantization.get("weight_block_size")
    if block is None:
        message = "is required: only weights with a factor for each block are supported"
        raise ConfigProblems([ConfigProblem("quantization_config.weight_block_size", message)])
    rows, columns = block
    for name, (*stack, height, width) in ((n, s) for n, s in theirs.shapes.items() if len(s) > 1):
        if f"{name}{SCALE}" in theirs:
            blocks = (*stack, -(-height // rows), -(-width // columns))
            _check_shape(theirs, f"{name}{SCALE}", blocks)
    shapes = {name: shape for name, shape in theirs.shapes.items() if not name.endswith(SCALE)}

    def read(name: str) -> Tensor:
        tensor = theirs[name]
        if f"{name}{SCALE}" not in theirs:
            if tensor.dtype.itemsize == 1:
                raise CheckpointError(f"{name} is {tensor.dtype}, and {name}{SCALE} is missing")
            return tensor
        factors = theirs[f"{name}{SCALE}"].float()
        factors = factors.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
        factors = factors[..., : tensor.shape[-2], : tensor.shape[-1]]
        return (tensor.float() * factors).to(dtype)

    return Weights(shapes, read)


def _check_shape(theirs: Weights, name: str, shape: tuple[int, ...]) -> None:
    stored = theirs.shapes.get(name)
    if stored != shape:
        fault = "is missing" if stored is None else f"is {stored}, not {shape}"
        raise CheckpointError(f"{name} {fault}: there is a factor for each block")


METHODS: dict[str, Callable[[Weights, Mapping[str, Any], torch.dtype], Weights]] = {
    "mxfp4": read_mxfp4,
    "fp8": read_fp8,
}
