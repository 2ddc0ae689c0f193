from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.console.errors import IntegrityError
from headrace.dataplane.runlog import ledger
from headrace.dataplane.runlog.ledger import LedgerEntry


def test_the_hash_covers_the_previous_hash_and_the_digests_in_order() -> None:
    first, second = b"a" * 16, b"b" * 16
    plan = "0f" * 16
    after = hashlib.blake2b(bytes([15] * 16) + first + second, digest_size=16).hexdigest()
    assert ledger.roll(plan, first + second) == after
    assert ledger.roll(plan, second + first) != after
    assert ledger.roll(ledger.roll(plan, first), second) != after


def write(file: Path, steps: list[int], *, torn: bool = False) -> list[LedgerEntry]:
    entries = [LedgerEntry(step, 8 * step, 8, f"{step:032x}") for step in steps]
    text = "".join(json.dumps(vars(entry)) + "\n" for entry in entries)
    file.write_text(text + '{"step": 99' * torn)
    return entries


@given(steps=st.lists(st.integers(0, 60), max_size=40, unique=True).map(sorted), torn=st.booleans())
@settings(max_examples=100, deadline=None)
def test_find_returns_a_step_and_its_predecessor(
    steps: list[int], torn: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("ledger") / ledger.NAME
    entries = write(file, steps, torn=torn)
    assert ledger.last(file) == (entries[-1] if entries else None)
    for step in range(62):
        before = [entry for entry in entries if entry.step < step]
        same = [entry for entry in entries if entry.step == step]
        assert ledger.find(file, step) == (
            before[-1] if before else None,
            same[0] if same else None,
        )


def test_an_invalid_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / ledger.NAME
    file.write_text('{"step": 1}\n')
    with pytest.raises(IntegrityError, match="invalid line"):
        ledger.find(file, 1)
