"""Messages of an engine in a step, and its own work on the host: data that the planner prices.

beside each forward and backward pass of a block      FSDP2 by block, by micro-batch; ZeRO-3
beside the first forward, the last backward pass      FSDP2 by step
after the last backward pass, beside nothing          ZeRO-0 to 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Message = Literal["gather", "reduce", "all_reduce", "all_reduce_compute"]
"""gather: weights, among the ranks that share a copy, in the precision that computes. reduce:
gradients in fp32, reduce-scattered among them and summed over the copies. all_reduce: gradients in
fp32, summed over all ranks; all_reduce_compute: in the precision that computes."""
MESSAGES: tuple[Message, ...] = get_args(Message)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Messages for the parameters of a block, or of what stands outside the blocks."""

    shard: int | None = None
    """Ranks that share one copy of the state. None: all."""
    forward: tuple[Message, ...] = ()
    """Beside each forward pass."""
    backward: tuple[Message, ...] = ()
    """Beside each backward pass."""
    first_forward: tuple[Message, ...] = ()
    """Beside the first forward pass of a step."""
    last_backward: tuple[Message, ...] = ()
    """Beside the last backward pass of a step."""
    update: tuple[Message, ...] = ()
    """Before and after the optimizer step, beside no pass."""
    gather_bucket: int = 0
    """Maximum of the elements of a gather or an all-reduce that blocks share. 0: each block has
    messages of its own."""
    reduce_bucket: int = 0
    may_stay_whole: bool = False
    """True if the weights of a chosen block may stay whole from its forward to its backward pass,
    which then gathers nothing."""
    updates_all: bool = False
    """True: each rank updates all parameters that it has; False: its shards."""
    pass_launches: int = 0
    """Launches that take as long as the engine's own work in a pass of a block."""
    message_launches: int = 0
    """The same for each message beside a pass."""
    recompute_launches: int = 0
    """The same for the second forward pass of a block."""

    def __post_init__(self) -> None:
        if unknown := sorted({*self._all()} - {*MESSAGES}):
            raise ValueError(f"an engine sends {unknown[0]!r}; prices have {', '.join(MESSAGES)}")

    @property
    def messages(self) -> list[Message]:
        """The different messages of a step."""
        sent = {*self._all()}
        return [message for message in MESSAGES if message in sent]

    def _all(self) -> list[Message]:
        return [
            *self.forward,
            *self.backward,
            *self.first_forward,
            *self.last_backward,
            *self.update,
        ]


@dataclass(frozen=True, kw_only=True)
class KeptWhole:
    """Weights that stay whole from a forward pass to the backward pass."""

    blocks: bool
    """Weights of blocks stay whole."""
    outside: bool
    """Weights of embedding, head, final norm and shared blocks stay whole."""
