"""Runs of one plan, and boards that show them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.pages.board_client import Client
from support.pages.board_runs import STEPS, write_checkpoint, write_plan, write_run

from headrace.dataplane.order.plan import Plan


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    """Two runs of one plan, in a folder: one has ended, one goes on."""
    root = tmp_path_factory.mktemp("board")
    plan = write_plan(root, STEPS)
    write_checkpoint(write_run(root / "runs/base", plan), plan, 10)
    write_run(root / "runs/other", plan, lr=2e-3, taken=12)
    return root, plan


@pytest.fixture
def runs(written: tuple[Path, Plan], tmp_path: Path) -> Path:
    """A copy of the runs, which a test may change."""
    return Path(shutil.copytree(written[0] / "runs", tmp_path / "runs"))


@pytest.fixture
def open_board() -> Iterator[Any]:
    clients: list[Client] = []

    def start(*places: Path | str) -> Client:
        clients.append(Client(*places))
        return clients[-1]

    yield start
    for client in clients:
        client.server.shutdown()
        client.server.server_close()
