"""Define a run's keys for FSDP2, and what follows from them alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

from ....console.errors import ConfigProblem, ConfigProblems, LayoutError
from ....models.config.options.precision import Precision
from ...layout.config import LayoutConfig
from ..config import EngineConfig
from ..shard_groups import (
    LayerShards,
    check_shard_ranks,
    choose_shard_ranks,
    find_overlaps,
    parse_layer_number,
)
from ..traffic import UnshardedWeights

Gather = Literal["block", "micro-batch", "step"]
BY_BLOCK = {"keep_last": 0, "forward_prefetch": 0, "backward_prefetch": 1}
"""Defaults of the keys that need weights gathered block by block."""


@dataclass(frozen=True, kw_only=True)
class FsdpConfig(EngineConfig):
    """Keys of a run, and what follows from them alone."""

    chooses_layers = True

    kind: Literal["fsdp2"] = "fsdp2"
    shard: int | None = None
    """Ranks that share a copy of the state; more copies are replicas (HSDP). None: all ranks."""
    gather: Gather | None = None
    """When weights are gathered, and gradients reduced. `block`: for each pass of a block; a rank
    holds one block unsharded. `micro-batch`: once per micro-batch; a rank holds all weights of the
    stage unsharded. `step`: once per step; a rank holds weights and gradients unsharded, and
    where it holds the whole state alone, nothing is gathered or reduced; there `micro-batch` is the
    same. Default: `step` for a pipeline, whose stages are small, and for a rank that holds the
    whole state alone, unless `keep_last`, `layers` or a prefetch is set; else `block`."""
    keep_last: int = 0
    """Number of final layers whose weights stay unsharded from the forward to the backward pass,
    with `gather: block`. The backward pass begins with them: one gather less per layer."""
    layers: tuple[LayerShards, ...] = ()
    """Spans of layers with separate settings: `{layers: [0, 7], reshard: false, shard: 8}`. Other
    layers follow `gather`, `shard` and `keep_last`."""
    forward_prefetch: int = 0
    """Blocks gathered ahead of the block that runs forward, with `gather: block`."""
    backward_prefetch: int = 1
    """Blocks gathered ahead of the block that runs backward, with `gather: block`."""
    offload: Literal["cpu"] | None = None
    """`cpu`: sharded weights, gradients and optimizer states are in host memory, and the CPU
    updates them with headrace's AdamW. Muon is refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard is not None and self.shard < 1:
            raise ValueError(f"shard must be at least 1, not {self.shard}")
        for key, minimum in (("keep_last", 0), ("forward_prefetch", 0), ("backward_prefetch", 1)):
            if getattr(self, key) < minimum:
                raise ValueError(f"{key} must be at least {minimum}, not {getattr(self, key)}")
        if overlaps := [ConfigProblem("layers", message) for message in find_overlaps(self.layers)]:
            raise ConfigProblems(overlaps)

    @property
    def offloads(self) -> bool:
        return self.offload is not None

    def offloading(self) -> Self:
        return replace(self, offload="cpu")

    @property
    def by_block(self) -> dict[str, int]:
        """Keys with a value that needs weights gathered block by block."""
        values = {key: getattr(self, key) for key in BY_BLOCK}
        return {key: value for key, value in values.items() if value != BY_BLOCK[key]}

    def check(self, layout: LayoutConfig, processes: int, precision: Precision) -> None:
        ranks = processes // layout.shards * layout.cp
        span_shards = {f"engine.layers.{n}.shard": s.shard for n, s in enumerate(self.layers)}
        for key, shard in {"engine.shard": self.shard, **span_shards}.items():
            if shard is not None:
                check_shard_ranks(key, shard, ranks, layout)
        changed = [f"{key}={value}" for key, value in self.by_block.items()]
        changed += [f"layers.{n}.reshard=false" for n, s in enumerate(self.layers) if not s.reshard]
        if changed and self.gather_mode(layout) != "block":
            raise LayoutError(
                f"engine.{changed[0]} needs weights that are gathered block by block; "
                f"engine.gather={self.gather_mode(layout)} gathers all at once",
                hint=f"set engine.gather=block, or leave {changed[0].partition('=')[0]} out",
            )

    @classmethod
    def candidates(cls, shard: int | None, *, alone: bool) -> list[Self]:
        if alone:  # nothing is gathered; by block, fewer weights exist
            return [cls(), cls(gather="block")]
        gathers: tuple[Gather, ...] = get_args(Gather)
        return [cls(shard=shard, gather=gather) for gather in gathers]

    @property
    def is_special_case(self) -> bool:
        return self.gather == "micro-batch"  # `block` where no layer reshards

    @classmethod
    def fewest_messages(cls) -> Self:
        return cls(gather="step")

    def choices(self, layout: LayoutConfig) -> dict[str, object]:
        choices: dict[str, object] = {
            "gather": self.gather_mode(layout),
            "shard": self.shard or "all",
        }
        return {**choices, "offload": self.offload} if self.offloads else choices

    def unsharded_weights(self, layout: LayoutConfig) -> UnshardedWeights:
        return UnshardedWeights(blocks=self.gather_mode(layout) != "block", outside=True)

    @property
    def layer_shards(self) -> tuple[LayerShards, ...]:
        return self.layers

    def replace_layer_shards(self, spans: Sequence[LayerShards]) -> Self:
        return replace(self, layers=tuple(spans))

    def describe_with_layout(self, layout: LayoutConfig) -> str:
        return f"{self.describe()}, gather by {self.gather_mode(layout)}"

    def describe(self) -> str:
        shards, spans = f", shards of {self.shard}" if self.shard else "", len(self.layers)
        shards += f", {spans} span{'s' * (spans > 1)} of layers apart" if spans else ""
        shards += ", on the CPU between passes" * self.offloads
        return f"FSDP2{shards}{', compiled' if self.compile else ''}"

    def shard_ranks(self, parameter: str) -> int | None:
        """Return the number of ranks that share a copy of a parameter's state; None: all."""
        return choose_shard_ranks(self.layers, parse_layer_number(parameter), self.shard)

    def reshards(self, layer: int, num_later_layers: int) -> bool:
        """Return True if `gather: block` reshards a layer after the forward pass; the rank has
        `num_later_layers` after it."""
        spans_reshard = all(span.reshard for span in self.layers if layer in span)
        return num_later_layers >= self.keep_last and spans_reshard

    def gather_mode(self, layout: LayoutConfig) -> Gather:
        return self.gather or ("block" if layout.holds_all_layers else "step")
