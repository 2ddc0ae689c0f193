"""Work of the ranks of test_state.py: train an engine, and measure what it holds of its state.

A measurement walks all live tensors of the process, so it sees the buffers that an engine does not
show. Only the names of the parts need the engine: masters and optimizer states are its fragments,
weights are its parameters, buffers have the size of DeepSpeed's buckets, and the rest is gradients.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from support.configs import CONFIGS
from support.tasks import layouts

from headrace.models.accounting.count import build_meta
from headrace.models.accounting.memory import rank_shards
from headrace.models.accounting.state import HOST, Degrees
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.documents import Documents
from headrace.trainer.accounting.parameters import parameter_state
from headrace.trainer.accounting.state import add_full_precision
from headrace.trainer.checkpoints.kinds import MASTER
from headrace.trainer.engines import deepspeed as deepspeed_engine
from headrace.trainer.run.config import RunConfig

BUCKET = 20_000
"""Elements; below the number of parameters, and the size of no other tensor."""
BUCKETS = (2 * BUCKET, 4 * BUCKET)
"""Bytes of a bucket in bf16 and in fp32."""
deepspeed_engine.LARGEST_BUCKET["cpu"] = BUCKET
ADAMW = 8
"""Bytes per parameter: two fp32 tensors."""

EMBEDDING = "model.embedding.weight"
"""Its gradient is the last one of a backward pass: DeepSpeed's bucket exists by then. FSDP2 never
calls a hook of a sharded parameter, and has no bucket."""

OF_ZERO3 = ("ds_tensor", "ds_secondary_tensor")
"""Attributes of a parameter of ZeRO-3 with a rank's shards of it."""

Held = dict[str, int]
"""Bytes of each part."""


def measure(layout: str, model: str = "tiny") -> dict[str, Any]:
    """Measure one layout, such as `deepspeed-1-bf16` or `fsdp2-0-fp32-tp2`."""
    parallel = layouts.place(layout)
    batches = [batch_of(number, parallel) for number in range(2)]
    gc.unfreeze()  # objects of the server may hold garbage of the engine
    gc.collect()
    alive = list(tensors())  # kept, so that no new storage gets the key of an old one
    before = {key_of(tensor) for tensor in alive}
    engine = layouts.make_engine(layout, parallel, model=model)
    layouts.train(engine, parallel, 0, 1)  # allocates what later steps reuse
    during: list[Held] = []
    after: list[Held] = []
    last = dict(engine.objective.named_parameters())[EMBEDDING]
    last.register_hook(lambda _: during.append(parts_of(engine, before)))
    gathered = [0]
    for block in engine.objective.model.typed_blocks() if layout.startswith("fsdp2") else ():
        operator = next(iter(block.branches())).operator
        operator.register_forward_pre_hook(lambda *_: gathered.append(whole_weights(engine)))
        operator.register_full_backward_pre_hook(lambda *_: gathered.append(whole_weights(engine)))
    for number, batch in enumerate(batches):
        sums = engine(*batch)
        engine.backward(sums.total / 100, last=number == 1)
        del sums
        after.append(parts_of(engine, before))
    del alive
    held = {part: max(moment[part] for moment in after) for part in after[0]}
    held["buffers"] = max(moment["buffers"] for moment in [*during, *after])
    held["weights"] = max(held["weights"], *gathered)
    tensor, context = parallel.axes.tensor, parallel.axes.context
    experts = parallel.axes.experts
    degrees = Degrees(dp=parallel.dp, tp=tensor.size, cp=context.size, ep=experts.size)
    precision = layout.split("-")[2]
    config = layouts.engine_config(layout).for_ranks(parallel.data.size)
    sharded = config.state_layout(PRECISIONS[precision], ADAMW, "cpu", parallel.pipe.layout)
    shape = load_model_config(CONFIGS / f"{model}.yaml")
    run = replace(RunConfig(), engine=config)
    parameters = parameter_state(run, build_meta(shape), PRECISIONS[precision])
    parts = add_full_precision(sharded, parameters)
    parts = [
        replace(
            part,
            name=measured_as(part.name),
            bytes_per_parameter=ADAMW
            if callable(part.bytes_per_parameter)
            else part.bytes_per_parameter,
        )
        for part in parts
    ]
    return {
        "tensor_rank": tensor.rank,
        "held": held,
        "parts": parts,
        "shards": rank_shards(shape, degrees, tensor.rank),
        "degrees": degrees,
    }


def measured_as(name: str) -> str:
    """Return the measured part that contains a listed one: all memory is the host's here, and what
    is on its way to the device is neither a parameter nor a fragment."""
    return "gradients" if name == f"{HOST}weights" else name.removeprefix(HOST)


def whole_weights(engine: Any) -> int:
    """Return the bytes of the weights that FSDP2 has gathered, or gathers ahead, at this moment."""
    states = [
        module._get_fsdp_state() for module in engine.objective.modules() if is_sharded(module)
    ]
    return sum(
        parameter._orig_size.numel() * (parameter.param_dtype or torch.float32).itemsize
        for group in (group for state in states for group in state._fsdp_param_groups)
        if group.is_unsharded or group._all_gather_result is not None
        for parameter in group.fsdp_params
    )


def is_sharded(module: Any) -> bool:
    return hasattr(module, "_get_fsdp_state")


def batch_of(number: int, parallel: Any) -> tuple[Any, ...]:
    ours = parallel.axes.context.part(layouts.LENGTH)
    rows = [tensor[number : number + 1][:, ours].clone() for tensor in layouts.global_batch(0)[:3]]
    documents = Documents.build(torch.tensor([0, layouts.LENGTH]), (1, layouts.LENGTH))
    return (*rows, documents.shard(parallel.axes.context))


def parts_of(engine: Any, before: set[int]) -> Held:
    """Sort the storages that came since `before` into the parts of the state."""
    live = {key: size for key, size in storages().items() if key not in before}
    fragments = engine.fragments()
    masters = {key_of(f.data) for f in fragments if f.key.startswith(MASTER)}
    optimizer = {key_of(f.data) for f in fragments if not f.key.startswith(MASTER)}
    weights = {
        key_of(tensor)
        for parameter in engine.objective.parameters()
        for tensor in (local(parameter), *(getattr(parameter, name, None) for name in OF_ZERO3))
        if tensor is not None
    }
    held = {
        "masters": take(live, masters),
        "optimizer": take(live, optimizer),
        "weights": take(live, weights),
        "buffers": take(live, {k for k, size in live.items() if size in BUCKETS}),
    }
    return {**held, "gradients": sum(live.values())}


def take(live: dict[int, int], keys: set[int]) -> int:
    return sum(live.pop(key, 0) for key in keys)


def storages() -> dict[int, int]:
    """Return the bytes of every storage of a live tensor."""
    gc.collect()
    return {key_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors()}


def tensors() -> Iterator[torch.Tensor]:
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor) and candidate.device.type == "cpu":
            yield local(candidate)
            if candidate.is_leaf and candidate.grad is not None:
                yield local(candidate.grad)


def local(tensor: Any) -> torch.Tensor:
    """The tensor itself, or this rank's shard of a DTensor."""
    whole: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return whole.detach()


def key_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
