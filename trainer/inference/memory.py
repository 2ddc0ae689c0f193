"""Count the memory of a batch of rows before it runs, with the accounting of runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ...console.errors import LayoutError
from ...console.progress import format_bytes
from ...models.accounting.count import build_meta
from ...models.accounting.memory import rank_shards
from ...models.accounting.shape import Shape
from ...models.accounting.state import Degrees, cut_rows
from ...models.config.config import ModelConfig
from ..accounting.exceeded import memory_limit
from ..accounting.memory import batch_memory
from ..engines.shard_groups import parse_layer_number
from ..layout.devices import local_device
from ..placement.placement import Placement, choose_layout

MAX_RANKS = 256
"""Maximum degree that an error proposes."""


def count_memory(
    model: ModelConfig, rows: int, length: int, placement: Placement, kept: int = 0
) -> dict[str, int]:
    """Return a rank's bytes by part for a batch of rows; it keeps `kept` layers' states in fp32, in
    host memory."""
    import torch

    device, ranks = placement.device, placement.row_ranks
    degrees = Degrees(cp=placement.layout.cp, tp=placement.layout.tp)
    length += -length % ranks
    shape = Shape(
        rows=rows,
        seq_len=length,
        precision=placement.precision,
        device=device,
        degrees=degrees,
        **placement.layout.row_forms,
        threads=torch.get_num_threads() if device == "cpu" else 1,
    )
    sizes = {**count_weights(model, placement), **batch_memory(model, shape)}
    if kept and device == "cpu":
        sizes["kept states"] = kept * rows * length // ranks * model.width * 4
    return sizes


def count_weights(model: ModelConfig, placement: Placement) -> dict[str, int]:
    """Return the bytes in weights on the rank with most: those that it holds, and those that it
    gathers.

    Weights outside blocks stay gathered; of a block there are the weights and the buffer into which
    they were gathered, until the next block has its own.
    """
    precision, tp = placement.precision, placement.layout.tp
    fp32 = build_meta(model).full_precision(precision)

    def count(sizes: Mapping[str, int]) -> int:
        """Count the bytes of parameters, from their elements."""
        return sum(
            size * (4 if name in fp32 else precision.weight_bytes) for name, size in sizes.items()
        )

    def count_on(rank: int) -> dict[str, int]:
        shards = rank_shards(model, Degrees(tp=tp), rank)
        held = {name: cut_rows({name: s.local}, placement.shard) for name, s in shards.items()}
        if placement.shard == 1:
            return {"weights": count(held)}
        by_layer: dict[int | None, dict[str, int]] = {}
        for name, size in held.items():  # gathered tensors have equal shards, which pads them
            by_layer.setdefault(parse_layer_number(name), {})[name] = size * placement.shard
        outside = count(by_layer.pop(None))
        largest = max(map(count, by_layer.values()))
        return {"weights": count(held), "gathered weights": outside + 2 * largest}

    return max(map(count_on, range(tp)), key=lambda sizes: sum(sizes.values()))


def check_memory(
    model: ModelConfig, rows: int, length: int, placement: Placement, kept: int = 0
) -> str:
    """Return a line with the bytes of a rank; raise if they are more than it has."""
    sizes = count_memory(model, rows, length, placement, kept)
    total, limit = sum(sizes.values()), memory_limit(local_device(placement.device))
    parts = ", ".join(f"{part} {format_bytes(size)}" for part, size in sizes.items() if size)
    ranks = placement.row_ranks
    line = (
        f"memory: {format_bytes(total)} on a rank, for {rows:,} row{'s' * (rows > 1)} of "
        f"{length:,} tokens on {ranks} rank{'s' * (ranks > 1)} ({parts})"
    )
    if total <= limit:
        return line
    for candidate in _larger_placements(model, placement):
        if sum(count_memory(model, 1, length, candidate, kept).values()) <= limit:
            hint = f"{candidate.options} fits, a row at a time (--batch-tokens {length})"
            break
    else:
        hint = "take shorter rows"
    raise LayoutError(f"a rank has {format_bytes(limit)}", where=line, hint=hint)


def _larger_placements(model: ModelConfig, placement: Placement) -> Iterator[Placement]:
    """Yield placements that share rows, weights, or both among more ranks; few ranks first."""
    cp, shard = placement.layout.cp, placement.shard
    yield placement
    ranks = 2
    while ranks <= MAX_RANKS:
        for more_cp, more_shard in ((cp, ranks), (ranks, shard), (ranks, ranks)):
            if more_cp >= cp and more_shard >= shard and (more_cp, more_shard) != (cp, shard):
                layout = choose_layout(model, placement.layout.tp, more_cp)
                yield replace(placement, layout=layout, shard=more_shard)
        ranks *= 2
