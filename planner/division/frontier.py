"""Pareto frontiers in memory and time, for the choices of a few layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .problem import Choice, Integers, Numbers


class Frontier(NamedTuple):
    """Selections, a choice per layer, by rising memory and falling time."""

    memory: Numbers
    """Bytes [selections]."""
    time: Numbers
    """Seconds [selections]."""
    counts: Integers
    """Number of layers by choice [selections, choices]; of several kinds, one after the other."""


EMPTY = Frontier(np.zeros(1), np.zeros(1), np.zeros((1, 0), dtype=np.int64))
"""The single selection for zero layers."""


def layer_frontier(
    choices: Sequence[Choice], in_flight: int, workspace: float, weight: float
) -> Frontier:
    """Return a single layer's frontier, empty if no choice is within `workspace`; seconds count
    `weight` times."""
    within = [n for n, choice in enumerate(choices) if choice.workspace <= workspace]
    memory = np.array([choices[n].state + in_flight * choices[n].activations for n in within])
    time = weight * np.array([choices[n].backward for n in within])
    counts = np.eye(len(choices), dtype=np.int64)[within]
    return _keep_front(Frontier(memory, time, counts))


def join_frontiers(
    a: Frontier, b: Frontier, budget: float = np.inf, *, same_kind: bool = False
) -> Frontier:
    """Return the frontier for both layer sets together within `budget`. With `same_kind`, counts by
    choice add up; else they are concatenated."""
    memory = (a.memory[:, None] + b.memory).ravel()
    [fits] = np.nonzero(memory <= budget)
    a_indices, b_indices = np.divmod(fits, max(1, len(b.memory)))
    time = a.time[a_indices] + b.time[b_indices]
    front = _find_front(memory[fits], time)
    pair = a.counts[a_indices[front]], b.counts[b_indices[front]]
    counts = pair[0] + pair[1] if same_kind else np.concatenate(pair, axis=1)
    return Frontier(memory[fits][front], time[front], counts)


def _keep_front(frontier: Frontier) -> Frontier:
    front = _find_front(frontier.memory, frontier.time)
    return Frontier(frontier.memory[front], frontier.time[front], frontier.counts[front])


def _find_front(memory: Numbers, time: Numbers) -> Integers:
    """Return the indices on the Pareto front, by rising memory."""
    order = np.lexsort((time, memory))
    fastest = np.minimum.accumulate(time[order])
    front: Integers = order[np.append(True, fastest[1:] < fastest[:-1])[: len(order)]]
    return front
