"""One of two ranks with kernels in Triton's interpreter: its shards of a model, compared with the
whole model in plain torch and fp64. Prints the difference for each layout and fault.

    python divided.py STORE RANK
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.console.config import build
from headrace.models.config.config import ModelConfig
from headrace.models.config.options.names import Kernel
from headrace.models.documents import Documents
from headrace.models.kernels import (
    choice,
    delta,
    gated_rms_norm,
    modal,
    modal_next,
    modal_states,
    selective_scan,
    ssd,
    ssd_launch,
    ssd_next,
)
from headrace.models.layers.norms import GatedRMSNorm
from headrace.models.model.model import Model
from headrace.models.parallel.axes import ALONE, Axes, Axis

ROWS, LENGTH = 1, 32
CUTS = torch.tensor([0, 7, 20, 32])
"""The second document crosses the border between the ranks' shards."""
ALL = "[li, ssd, mamba, mr, se/glu]"
DELTA = {"kind": "delta", "key_head_dim": 3, "value_head_dim": 4}
OPERATORS: dict[str, dict[str, Any]] = {
    "li": {"kind": "hyena-li", "state_size": 3},
    "ssd": {"kind": "mamba2", "state_size": 5, "head_dim": 4, "groups": 2, "norm_groups": 1},
    "mamba": {"kind": "mamba1", "state_size": 3, "dt_rank": 2},
    "gdn": {**DELTA, "heads": 1, "value_heads": 2, "max_beta": 2},
    "kda": {**DELTA, "heads": 2, "decay": "channel"},
    "mr": {"kind": "hyena-mr", "groups": 2, "taps": 29, "filter_horizon": 64},
    "se": {"kind": "hyena-se", "groups": 2},
    "glu": {"kind": "glu", "hidden": 8},
}


def make_model(pattern: str, kernel: str) -> Model:
    operators = {
        name: {**options, "kernel": kernel}
        for name, options in OPERATORS.items()
        if name in pattern
    }
    data = {"vocab_size": 13, "width": 8, "pattern": pattern, "kernel": kernel}
    model = Model(build(ModelConfig, {**data, "operators": operators}, source="a test"))
    model.init_weights(1)
    for number, parameter in enumerate(model.parameters()):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        parameter.data += 0.2 * noise
    return model


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    weights = torch.rand(ROWS, LENGTH)
    weights[0, 3] = 0.0
    return torch.randint(13, (ROWS, LENGTH + 1)), weights


def loss(model: Model, axis: Axis, documents: Documents, weights: Tensor) -> Tensor:
    """Return the loss of this rank's shard of the rows."""
    tokens, _ = batch()
    ours = axis.part(LENGTH)
    hidden, _ = model.hidden(tokens[:, :-1][:, ours], documents)
    targets = tokens[:, 1:][:, ours]
    return model.loss(hidden, targets, weights[:, ours], z_loss=0.01)[0]


def gradients(model: Model, total: Tensor) -> dict[str, Tensor]:
    """Return the gradients at the size of whole parameters, zero outside this rank's shards."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    result = {}
    for name, gradient in zip(names, torch.autograd.grad(total, parameters), strict=True):
        part = model.local_shards.get(name)
        result[name] = gradient.double()
        if part is not None and part.runs is not None:
            index = torch.cat([torch.arange(run.start, run.stop) for run in part.runs])
            result[name] = gradient.new_zeros(part.shape).double()
            result[name].index_copy_(part.dim, index, gradient.double())
    return result


def max_difference(axes: Axes, pattern: str = ALL) -> float:
    """Return the largest difference of loss and gradients, relative to the largest number."""
    whole, divided = make_model(pattern, "torch").double(), make_model(pattern, "triton")
    _, weights = batch()
    documents = Documents.build(CUTS, (ROWS, LENGTH))
    expected = loss(whole, ALONE, documents, weights.double())
    divided.shard(axes)
    result = loss(divided, axes.context, documents.shard(axes.context), weights)
    ours = gradients(divided, result)
    result = result.detach().double()
    dist.all_reduce(result)
    references = gradients(whole, expected)
    worst = abs(float(result / expected.detach()) - 1)
    for name, reference in references.items():
        dist.all_reduce(ours[name])
        worst = max(worst, float((ours[name] - reference).abs().max() / reference.abs().max()))
    return worst


def norms_apart(axis: Axis, groups: int) -> float:
    """Return the largest difference of Mamba-2's norm and its gradients; shards of 24 channels."""
    torch.manual_seed(0)
    y, z, weight, above = torch.randn(4, 2, 5, 24).unbind()
    inputs = {"y": y, "z": z, "weight": weight[0, 0]}

    def results(kernel: Kernel, axis: Axis, dtype: torch.dtype) -> list[Tensor]:
        local_inputs = [x[..., axis.part(24)].to(dtype).requires_grad_() for x in inputs.values()]
        norm = GatedRMSNorm(24, 1e-2, groups=groups, kernel=kernel)
        del norm._parameters["weight"]
        norm.weight = local_inputs[2]
        result = norm(local_inputs[0], local_inputs[1], axis)
        return [
            result.detach(),
            *torch.autograd.grad(result, local_inputs, above[..., axis.part(24)].to(dtype)),
        ]

    whole = results("torch", ALONE, torch.float64)
    ours = results("triton", axis, torch.float32)
    return max(
        float((part - all_[..., axis.part(24)]).abs().max() / all_.abs().max())
        for part, all_ in zip(ours, whole, strict=True)
    )


def unsummed(sums: Tensor, *_: Any) -> Tensor:
    return sums


def forgetful(direction: bool) -> Callable[..., Tensor]:
    """Exchange states, but drop those of one direction: a fault that the comparison must find."""
    right = modal_states.receive_state

    def entering(*arguments: Any, backward: bool, **options: Any) -> Tensor:
        state = right(*arguments, backward=backward, **options)
        return state * float(backward != direction)

    return entering


def main(store: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    modal.BLOCK, modal.BLOCKS, ssd_launch.CHUNK, ssd_launch.CHUNKS = 4, 2, 4, 2  # several chunks
    selective_scan.CHUNK = delta.CHUNK = delta.BLOCK = 8
    axis = Axis(dist.group.WORLD, rank, 2)
    context = Axes(context=axis)
    result = {
        "states": max_difference(context),
        "states and transition matrices": max_difference(context, "[gdn, kda]"),
        "channels": max_difference(Axes(context=axis, hyena_li="a2a"), "[li]"),
        "vocabulary": max_difference(Axes(tensor=axis), "[ssd/glu]"),
    }
    for groups in (1, 2, 3):
        result[f"a norm of {groups} groups"] = norms_apart(axis, groups)
    with mock.patch.object(gated_rms_norm, "sum_groups", unsummed):
        result["groups whose sums are on one rank"] = norms_apart(axis, 3)
    scans = ((modal_states, "[li]"), (ssd, "[ssd]"), (selective_scan, "[mamba]"), (delta, "[gdn]"))
    for kernel, pattern in scans:
        for direction in (False, True):
            with mock.patch.object(kernel, "receive_state", forgetful(direction)):
                result[f"{pattern}, forgetful {direction}"] = max_difference(context, pattern)
    ssd_next.CHUNK, ssd_next.DTYPES = 4, (torch.float32,)
    with choice.next_programs(["ssd"]):
        result["states of next programs"] = max_difference(context, "[ssd]")
        for direction in (False, True):
            with mock.patch.object(ssd_next, "receive_state", forgetful(direction)):
                result[f"next programs, forgetful {direction}"] = max_difference(context, "[ssd]")
    modal_next.TILE = 8
    with choice.next_programs(["modal"]):
        result["states of Hyena-LI's next programs"] = max_difference(context, "[li]")
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
