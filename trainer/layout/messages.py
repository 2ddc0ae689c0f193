"""Messages between stages: what an action receives, and which sent messages have arrived by then.

    stage 0    F0 F1 B0 F2 B1 …    F1 sends its stream to stage 1
    stage 1    F0 B0 F1 B1 …       F1 receives it; a message of B1 proves to stage 0 that it arrived

Messages of a kind from a stage arrive in the order of the sender's actions. A message for a later
action is received early, and buffered.

A sender keeps a message until it has arrived. Gloo says so only to a rank that waits, so another
message is the proof: when stage B's action sends, B has everything that this action received.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .schedules import Kind, Orders, StageAction

HOPS: Mapping[Kind, int] = {"forward": 1, "backward": -1}
"""Chunks from sender to receiver."""


@dataclass(frozen=True, slots=True)
class ActionMessages:
    """Messages that an action exchanges with neighbouring stages."""

    received: Sequence[StageAction] = ()
    """Actions whose messages are received before this action runs, in order of arrival. The last is
    this action, unless its message came early."""
    arrived: Sequence[StageAction] = ()
    """Earlier actions of the same stage whose sent messages have arrived by then."""


def messages_by_action(orders: Orders, stage: int) -> dict[StageAction, ActionMessages]:
    """Return a stage's messages, by action."""
    last = max((action.chunk for order in orders for action in order), default=0)
    due = {kind: _due(kind, orders, stage, last) for kind in HOPS}
    early: set[StageAction] = set()
    reached: dict[int, int] = {}
    """Index of the last action from which a message came, by sending stage."""
    waiting: list[tuple[StageAction, int, int]] = []
    """Actions whose message is on its way, with the receiver's stage and action index."""
    messages = {}
    for action in orders[stage]:
        received = []
        if 0 <= action.chunk - HOPS[action.kind] <= last:
            while action not in early:
                receiver, sender, index = next(due[action.kind])
                reached[sender] = max(index, reached.get(sender, -1))
                early.add(receiver)
                received.append(receiver)
        arrived = [sent for sent, target, index in waiting if index <= reached.get(target, -1)]
        waiting = [message for message in waiting if message[0] not in arrived]
        messages[action] = ActionMessages(received, arrived)
        chunk = action.chunk + HOPS[action.kind]
        if 0 <= chunk <= last:
            target = chunk % len(orders)
            index = orders[target].index(StageAction(action.kind, chunk, action.micro))
            waiting.append((action, target, index))
    return messages


def _due(
    kind: Kind, orders: Orders, stage: int, last: int
) -> Iterator[tuple[StageAction, int, int]]:
    """Yield the receiving action of each message, with the sender's stage and action index."""
    sender = (stage - HOPS[kind]) % len(orders)
    for index, action in enumerate(orders[sender]):
        chunk = action.chunk + HOPS[kind]
        if action.kind == kind and 0 <= chunk <= last:
            yield StageAction(kind, chunk, action.micro), sender, index
