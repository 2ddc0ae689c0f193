"""Pools of processes that share the rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import Ranks

WORK = Path(__file__).with_name("work.py")


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2, WORK)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4, WORK)
    yield ranks
    ranks.stop()
