"""Random rows instead of a mixture, to measure a machine or to try a model with torch alone.

A row depends on the seed and its number alone, as a mixture's row depends on the plan alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...dataplane.order.timeline import PhaseRows, PhaseTimeline
from .batches import PADDING, micro_batches

if TYPE_CHECKING:
    import torch

    from ...dataplane.arrays import Int64


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Random rows instead of a mixture, to measure a machine with torch alone."""

    steps: int = 20
    """Number of optimizer steps."""
    seq_len: int = 1024
    """Tokens per row."""
    batch_rows: int = 8
    """Rows per optimizer step."""
    warmup: int = 2
    """Steps over which the learning rate rises."""

    def __post_init__(self) -> None:
        for key, minimum in (("steps", 1), ("seq_len", 1), ("batch_rows", 1), ("warmup", 0)):
            if getattr(self, key) < minimum:
                raise ValueError(f"{key} must be at least {minimum}, not {getattr(self, key)}")


@dataclass(frozen=True)
class SyntheticSource:
    name: str = "synthetic"


@dataclass(frozen=True)
class SyntheticPlan(PhaseTimeline[PhaseRows]):
    """The RunPlan of random rows: one phase, one source."""

    config: SyntheticConfig
    vocab_size: int
    seed: int
    sources = (SyntheticSource(),)
    lengths = ()

    @property
    def phases(self) -> tuple[PhaseRows, ...]:
        config = self.config
        return (
            PhaseRows(
                name="synthetic",
                first_row=0,
                first_step=0,
                first_token=0,
                rows=config.steps * config.batch_rows,
                seq_len=config.seq_len,
                batch_rows=config.batch_rows,
            ),
        )

    @property
    def hash(self) -> str:
        identity = f"synthetic {self.seed} {self.vocab_size} {self.config}"
        return hashlib.sha256(identity.encode()).hexdigest()[:32]

    def lr_factor(self, step: int) -> float:
        """Compute the fraction of the peak learning rate at a step."""
        return min(1.0, (step + 1) / (self.config.warmup + 1))


@dataclass(frozen=True, eq=False)
class SyntheticBatch:
    """A micro-batch: b rows, and this rank's t of their seq_len tokens on the context axis."""

    tokens: torch.Tensor
    """[b, t] Inputs, int64."""
    targets: torch.Tensor
    """[b, t] The tokens after the inputs."""
    weights: torch.Tensor
    """[b, t] Loss weights: 1, or 0 in padding rows."""
    cu_seqlens: torch.Tensor
    """[b + 1] Bounds of the documents in b · seq_len tokens: each row is a document."""
    rows: list[int]
    """[b] Row numbers; PADDING for padding rows, which are last."""
    sources: list[int]
    """[b] Index into the plan's sources."""
    digests: list[bytes]
    """One per row, without padding rows."""

    @property
    def documents(self) -> Int64:
        return self.cu_seqlens.long().numpy()


class SyntheticLoader:
    """Yields a data rank's micro-batches, a list for each step, as dataplane's Loader does."""

    def __init__(
        self,
        plan: SyntheticPlan,
        *,
        rank: int,
        world: int,
        micro_batch: int,
        start_step: int,
        context_rank: int = 0,
        context_size: int = 1,
    ) -> None:
        """`rank`, `world`: place on the data axis, and its size. `micro_batch`: rows."""
        self.plan = plan
        self.rank, self.world = rank, world
        self.context_rank, self.context_size = context_rank, context_size
        self.micro_batch = micro_batch
        self.start_step = start_step

    def __iter__(self) -> Iterator[list[SyntheticBatch]]:
        for number in range(self.start_step, self.plan.end_step):
            step = self.plan.step(number)
            first_row = step.first_row + step.rows * self.rank // self.world
            end_row = step.first_row + step.rows * (self.rank + 1) // self.world
            num_batches = micro_batches(self.micro_batch, step.phase, self.world)
            batch_starts = [first_row + index * self.micro_batch for index in range(num_batches)]
            yield [
                self._build_batch(range(start, min(start + self.micro_batch, end_row)))
                for start in batch_starts
            ]

    def _build_batch(self, rows: range) -> SyntheticBatch:
        """Build a micro-batch from at most `micro_batch` rows, and pad it to this size."""
        import torch

        length = self.plan.config.seq_len
        tokens = torch.zeros(self.micro_batch, length + 1, dtype=torch.int64)
        weights = torch.zeros(self.micro_batch, length)
        digests = []
        for index, row in enumerate(rows):
            generator = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + row)
            tokens[index] = torch.randint(
                0, self.plan.vocab_size, (length + 1,), generator=generator
            )
            weights[index] = 1.0
            digests.append(hashlib.blake2b(str(row).encode(), digest_size=16).digest())
        padding = [PADDING] * (self.micro_batch - len(rows))
        tokens_per_rank = length // self.context_size
        start = self.context_rank * tokens_per_rank
        end = start + tokens_per_rank
        return SyntheticBatch(
            tokens=tokens[:, start:end],
            targets=tokens[:, start + 1 : end + 1],
            weights=weights[:, start:end],
            cu_seqlens=torch.arange(self.micro_batch + 1, dtype=torch.int32) * length,
            rows=[*rows, *padding],
            sources=[0] * self.micro_batch,
            digests=digests,
        )
