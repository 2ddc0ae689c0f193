"""An engine's messages and host work in a step, which the planner prices.

beside each forward and backward pass of a block      FSDP2 by block, by micro-batch; ZeRO-3
beside the first forward, the last backward pass      FSDP2 by step
after the last backward pass, beside nothing          ZeRO-0 to 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Message = Literal["gather", "reduce", "all_reduce", "all_reduce_compute"]
"""gather: weights in compute precision, among the ranks that share a copy. reduce: gradients in
fp32, reduce-scattered among these ranks and summed over copies. all_reduce: gradients in fp32,
summed over all ranks; all_reduce_compute: the same in compute precision."""
HostCopy = Literal["gather", "reduce", "update", "weights"]
"""What happens in host memory: gather: a rank's shard is copied to the device before a gather;
reduce: its gradients are copied from there after a reduction; update: the CPU updates the shard;
weights: these are copied to the device after the update."""
MESSAGES: tuple[Message, ...] = get_args(Message)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Messages for a block's parameters, and for those outside blocks."""

    shard: int | None = None
    """Ranks that share a copy of the state. None: all."""
    forward: tuple[Message, ...] = ()
    """Beside every forward pass."""
    backward: tuple[Message, ...] = ()
    """Beside every backward pass."""
    first_forward: tuple[Message, ...] = ()
    """Beside a step's first forward pass."""
    last_backward: tuple[Message, ...] = ()
    """Beside a step's last backward pass."""
    update: tuple[Message, ...] = ()
    """Before and after the optimizer step, beside no pass."""
    gather_bucket: int = 0
    """Maximum elements in a gather that several blocks share; 0: blocks send separately."""
    reduce_bucket: int = 0
    """The same for an all-reduce."""
    may_stay_unsharded: bool = False
    """True if chosen blocks may stay unsharded from forward to backward pass, which then gathers
    nothing."""
    on_host: tuple[HostCopy, ...] = ()
    updates_all: bool = False
    """True: ranks update all their parameters; False: shards."""
    pass_launches: int = 0
    """Engine's host work in a block's pass, as a number of launches."""
    message_launches: int = 0
    """The same for a message beside a pass."""
    recompute_launches: int = 0
    """The same for a block's second forward pass."""

    def __post_init__(self) -> None:
        if unknown := sorted({*self._all()} - {*MESSAGES}):
            raise ValueError(f"an engine sends {unknown[0]!r}; prices have {', '.join(MESSAGES)}")

    @property
    def messages(self) -> list[Message]:
        """Distinct kinds in a step."""
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
class UnshardedWeights:
    """Weights that stay unsharded between forward and backward pass."""

    blocks: bool
    outside: bool
    """Embedding, head, final norm and shared blocks."""
