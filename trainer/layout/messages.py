"""Messages between stages: what an action receives, and which sent messages have arrived by then.

    stage 0    F0 F1 B0 F2 B1 …    F1 sends its stream to stage 1
    stage 1    F0 B0 F1 B1 …       F1 receives it; a message of B1 proves to stage 0 that it arrived

A stage's messages of a kind arrive in the order of its actions. An action that needs a later
message receives those before it too; they are kept for the actions that need them.

A sender keeps a message until it has arrived. On gloo, a rank learns this only if it waits, so a
message in return is the proof: a stage that sends one has received everything that its actions
needed so far.
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
    """Return the messages of a stage's actions, in the order in which it runs them."""
    indices = {action: index for order in orders for index, action in enumerate(order)}
    """Index of each action among those of its stage."""
    incoming = {kind: _iterate_incoming(kind, orders, stage) for kind in HOPS}
    received: set[StageAction] = set()
    last_sender_index: dict[int, int] = {}
    """Index of the last action from which a message came, by stage."""
    in_transit: dict[StageAction, StageAction] = {}
    """The receiver of each message that has not been proved to arrive, by sender."""
    messages = {}
    for action in orders[stage]:
        receivers = []
        if _sender(action) in indices:
            while action not in received:
                sender, receiver = next(incoming[action.kind])
                sending_stage = sender.chunk % len(orders)
                last_sender_index[sending_stage] = max(
                    indices[sender], last_sender_index.get(sending_stage, -1)
                )
                received.add(receiver)
                receivers.append(receiver)
        arrived = [
            sender
            for sender, receiver in in_transit.items()
            if indices[receiver] <= last_sender_index.get(receiver.chunk % len(orders), -1)
        ]
        for sender in arrived:
            del in_transit[sender]
        messages[action] = ActionMessages(receivers, arrived)
        receiver = _receiver(action)
        if receiver in indices:
            in_transit[action] = receiver
    return messages


def _iterate_incoming(
    kind: Kind, orders: Orders, stage: int
) -> Iterator[tuple[StageAction, StageAction]]:
    """Yield (sender, receiver) of a stage's incoming messages, in order of arrival."""
    needed = {_sender(action): action for action in orders[stage] if action.kind == kind}
    for sender in orders[(stage - HOPS[kind]) % len(orders)]:
        if sender in needed:
            yield sender, needed[sender]


def _sender(action: StageAction) -> StageAction:
    return StageAction(action.kind, action.chunk - HOPS[action.kind], action.micro)


def _receiver(action: StageAction) -> StageAction:
    return StageAction(action.kind, action.chunk + HOPS[action.kind], action.micro)
