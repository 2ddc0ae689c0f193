"""Count the memory of a batch of rows before it runs, with the accounting of runs."""

from __future__ import annotations

from ...console.errors import LayoutError
from ...console.progress import format_bytes
from ...models.accounting.count import build_meta
from ...models.accounting.shape import Shape
from ...models.accounting.state import Degrees
from ...models.config.config import ModelConfig
from ...models.config.options.precision import default_precision
from ..accounting.exceeded import memory_limit
from ..accounting.memory import batch_memory
from ..layout.devices import DeviceKind, choose_device, local_device
from .ranks import choose_layout

MAX_RANKS = 256
"""Maximum --cp that an error proposes."""


def count_memory(
    model: ModelConfig, rows: int, length: int, cp: int, device: DeviceKind, kept: int = 0
) -> dict[str, int]:
    """Return a rank's bytes by part for a batch of rows; it keeps `kept` layers' states in fp32, in
    host memory."""
    import torch

    kind = choose_device(device)
    precision, layout = default_precision(kind), choose_layout(model, cp)
    meta = build_meta(model)
    meta.cast(precision)
    weights = sum(weight.numel() * weight.element_size() for weight in meta.parameters())
    length += -length % cp
    shape = Shape(
        rows=rows,
        seq_len=length,
        precision=precision,
        device=kind,
        degrees=Degrees(cp=cp),
        **layout.row_forms,
        threads=torch.get_num_threads() if kind == "cpu" else 1,
    )
    sizes = {"weights": weights, **batch_memory(model, shape)}
    if kept and kind == "cpu":
        sizes["kept states"] = kept * rows * length // cp * model.width * 4
    return sizes


def check_memory(
    model: ModelConfig, rows: int, length: int, cp: int, device: DeviceKind, kept: int = 0
) -> str:
    """Return a line with the bytes of a rank; raise if they are more than it has."""
    sizes = count_memory(model, rows, length, cp, device, kept)
    total, limit = sum(sizes.values()), memory_limit(local_device(choose_device(device)))
    parts = ", ".join(f"{part} {format_bytes(size)}" for part, size in sizes.items() if size)
    line = (
        f"memory: {format_bytes(total)} on a rank, for {rows:,} row{'s' * (rows > 1)} of "
        f"{length:,} tokens on {cp} rank{'s' * (cp > 1)} ({parts})"
    )
    if total <= limit:
        return line
    more = 2 * cp
    while more < MAX_RANKS and (
        sum(count_memory(model, 1, length, more, device, kept).values()) > limit
    ):
        more *= 2
    raise LayoutError(
        f"a rank has {format_bytes(limit)}",
        where=line,
        hint=f"share rows among more ranks (--cp {more}), or take shorter rows",
    )
