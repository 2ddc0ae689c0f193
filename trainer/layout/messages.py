"""Messages between stages: what an action receives, and which messages have arrived by then.

    stage 0    F0 F1 B0 F2 B1 …    F1 sends its stream to stage 1
    stage 1    F0 B0 F1 B1 …       F1 receives it; a message of B1 proves to stage 0 that it arrived

Messages of one kind from one stage arrive in the order of the sender's actions. A message that is
wanted later is received early, and kept.

A sender keeps a message until it has arrived. Gloo says so only to a rank that waits. So the proof
is another message: what an action sends proves that its stage has all that the action received.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .schedules import Action, Kind, Orders

HOPS: Mapping[Kind, int] = {"forward": 1, "backward": -1}
"""Chunks from a sender to the receiver."""


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages of an action with other stages."""

    received: Sequence[Action] = ()
    """Actions whose messages are received before the action runs, in the order in which they
    arrive. The last one is its own, unless that came early."""
    arrived: Sequence[Action] = ()
    """Earlier actions of the same stage, whose own messages have arrived by then."""


def messages(orders: Orders, stage: int) -> dict[Action, Messages]:
    """Return the messages of each action of a stage."""
    last = max((action.chunk for order in orders for action in order), default=0)
    due = {kind: _due(kind, orders, stage, last) for kind in HOPS}
    early: set[Action] = set()
    reached: dict[int, int] = {}
    """Place of the last action of each stage from which a message came."""
    waiting: list[tuple[Action, int, int]] = []
    """Actions whose message is on its way, with the receiver's stage and place."""
    found = {}
    for action in orders[stage]:
        received = []
        if 0 <= action.chunk - HOPS[action.kind] <= last:
            while action not in early:
                receiver, sender, place = next(due[action.kind])
                reached[sender] = max(place, reached.get(sender, -1))
                early.add(receiver)
                received.append(receiver)
        arrived = [own for own, to, place in waiting if place <= reached.get(to, -1)]
        waiting = [each for each in waiting if each[0] not in arrived]
        found[action] = Messages(received, arrived)
        target = action.chunk + HOPS[action.kind]
        if 0 <= target <= last:
            to = target % len(orders)
            place = orders[to].index(Action(action.kind, target, action.micro))
            waiting.append((action, to, place))
    return found


def _due(kind: Kind, orders: Orders, stage: int, last: int) -> Iterator[tuple[Action, int, int]]:
    """Yield the action of a stage that each message is for, with the sender's stage and place."""
    sender = (stage - HOPS[kind]) % len(orders)
    for place, action in enumerate(orders[sender]):
        target = action.chunk + HOPS[kind]
        if action.kind == kind and 0 <= target <= last:
            yield Action(kind, target, action.micro), sender, place
