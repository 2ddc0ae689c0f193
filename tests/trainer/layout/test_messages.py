"""Messages between stages: the order in which they come, and the proof that they arrived."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.layout.messages import HOPS, ActionMessages, messages_by_action
from headrace.trainer.layout.schedules import SCHEDULES, Orders, StageAction, forward_only

Found = list[dict[StageAction, ActionMessages]]


@st.composite
def orders(draw: st.DrawFn) -> Orders:
    """Draw the orders of a schedule."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    stages, micro_batches = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    chunks = draw(st.integers(2, 3)) if name == "interleaved" and stages > 1 else 1
    result = SCHEDULES[name].orders(stages, chunks, micro_batches)
    return forward_only(result) if draw(st.booleans()) else result


def all_messages(stage_orders: Orders) -> Found:
    return [messages_by_action(stage_orders, stage) for stage in range(len(stage_orders))]


def receivers(stage_orders: Orders) -> dict[StageAction, StageAction]:
    """Return the action that needs the message of each action that sends one."""
    every = {action for order in stage_orders for action in order}
    targets = {a: StageAction(a.kind, a.chunk + HOPS[a.kind], a.micro) for a in every}
    return {action: target for action, target in targets.items() if target in every}


def causes(stage_orders: Orders, messages_by_stage: Found) -> nx.DiGraph:
    """Return a graph in which one action leads to another if it begins earlier in every run: it is
    before it on a stage, or sends a message that is received before it begins."""
    graph = nx.DiGraph()
    senders = {target: action for action, target in receivers(stage_orders).items()}
    for order, messages in zip(stage_orders, messages_by_stage, strict=True):
        graph.add_nodes_from(order)
        graph.add_edges_from(pairwise(order))
        graph.add_edges_from(
            (senders[taker], action) for action in order for taker in messages[action].received
        )
    return graph


def received_by(messages_by_stage: Found) -> dict[StageAction, StageAction]:
    """Return, for the receiver of each message, the action before which it is received."""
    return {
        taker: action
        for messages in messages_by_stage
        for action, action_messages in messages.items()
        for taker in action_messages.received
    }


@given(orders())
def test_each_message_is_received_once_in_the_order_of_its_wire(stage_orders: Orders) -> None:
    """It comes before the action that needs it, and every schedule ends."""
    result, expected = all_messages(stage_orders), receivers(stage_orders)
    place = {action: n for order in stage_orders for n, action in enumerate(order)}
    for stage, messages in enumerate(result):
        for kind, hop in HOPS.items():
            taken = [
                item
                for action in stage_orders[stage]
                if action.kind == kind
                for item in messages[action].received
            ]
            sender = stage_orders[(stage - hop) % len(stage_orders)]
            sent = [
                expected[action] for action in sender if action.kind == kind and action in expected
            ]
            assert taken == sent[: len(taken)]
    by = received_by(result)
    assert by.keys() == set(expected.values())
    assert all(place[action] <= place[taker] for taker, action in by.items())
    assert nx.is_directed_acyclic_graph(causes(stage_orders, result))


@given(orders())
def test_a_message_that_counts_as_arrived_was_received_in_every_run(stage_orders: Orders) -> None:
    result, expected = all_messages(stage_orders), receivers(stage_orders)
    graph, by = causes(stage_orders, result), received_by(result)
    for messages in result:
        for action, action_messages in messages.items():
            for earlier in action_messages.arrived:
                assert nx.has_path(graph, by[expected[earlier]], action)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("micro_batches", [8, 40])
def test_few_gradients_are_on_their_way(stages: int, micro_batches: int) -> None:
    """Without the proof a rank on gloo would keep those of all micro-batches."""
    result = SCHEDULES["1f1b"].orders(stages, 1, micro_batches)
    for stage in range(1, stages):
        max_gradients = max(_on_their_way(result[stage], messages_by_action(result, stage)))
        assert max_gradients <= stages - stage + 1


def _on_their_way(
    order: list[StageAction], messages: dict[StageAction, ActionMessages]
) -> Iterator[int]:
    """Yield the gradients of earlier actions that have not arrived when each action begins."""
    waiting = 0
    for action in order:
        waiting -= sum(item.kind == "backward" for item in messages[action].arrived)
        yield waiting
        waiting += action.kind == "backward"
