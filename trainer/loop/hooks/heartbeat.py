"""Heartbeats: the launcher ends a run if no rank begins a step for too long."""

from __future__ import annotations

from ...cluster.ranks import Watched
from .hook import Hook


class Heartbeat(Hook):
    """Reports every new step to the launcher."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched

    def step_begins(self, step: int) -> None:
        self.watched.beat(f"step {step}")
