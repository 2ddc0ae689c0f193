"""Heartbeats: the launcher ends a run in which a rank begins no new step for too long."""

from __future__ import annotations

from ...cluster.ranks import Watched
from .hook import Hook


class Heartbeat(Hook):
    """Reports the begin of each step to the launcher."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched

    def step_begins(self, step: int) -> None:
        self.watched.beat(f"step {step}")
