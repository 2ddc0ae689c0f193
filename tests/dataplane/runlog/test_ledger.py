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
from headrace.dataplane.runlog.writer import encode_line


def test_the_hash_covers_the_previous_hash_and_the_digests_in_order() -> None:
    first, second = b"a" * 16, b"b" * 16
    plan = "0f" * 16
    after = hashlib.blake2b(bytes([15] * 16) + first + second, digest_size=16).hexdigest()
    assert ledger.roll(plan, first + second) == after
    assert ledger.roll(plan, second + first) != after
    assert ledger.roll(ledger.roll(plan, first), second) != after


def write(file: Path, steps: list[int], *, torn: bool = False) -> list[LedgerEntry]:
    entries = [LedgerEntry(step, 8 * step, 8, f"{step:032x}") for step in steps]
    text = b"".join(encode_line(vars(entry)) for entry in entries)
    file.write_bytes(text + b'{"step": 99' * torn)
    return entries


@given(first=st.integers(0, 9), count=st.integers(0, 40), torn=st.booleans())
@settings(max_examples=30, deadline=None)
def test_find_returns_a_step_and_its_predecessor(
    first: int, count: int, torn: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("ledger") / ledger.NAME
    entries = write(file, list(range(first, first + count)), torn=torn)
    assert ledger.read_last(file) == (entries[-1] if entries else None)
    for step in range(52):
        before = [entry for entry in entries if entry.step < step]
        at_step = [entry for entry in entries if entry.step == step]
        assert ledger.find_entries(file, step) == (
            before[-1] if before else None,
            at_step[0] if at_step else None,
        )


def test_a_flipped_bit_of_any_byte_is_named(tmp_path: Path) -> None:
    file = tmp_path / ledger.NAME
    write(file, [0, 1, 2])
    whole = file.read_bytes()
    assert ledger.find_gap(file) is None
    first, end = len(whole) // 3, 2 * len(whole) // 3
    for place in range(first, end):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        file.write_bytes(data)
        assert ledger.find_gap(file) is not None, (place, bytes(data[first:end]))


def test_a_missing_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / ledger.NAME
    write(file, [0, 1, 2, 4, 5])
    for step in (3, 4):
        with pytest.raises(IntegrityError, match="no line between those of step 2 and step 4"):
            ledger.find_entries(file, step)
    assert ledger.find_gap(file) == "has no line between those of step 2 and step 4"
    assert ledger.find_entries(file, 5)[1] == LedgerEntry(5, 40, 8, f"{5:032x}")
    assert ledger.find_entries(file, 6)[1] is None


def test_a_line_of_an_earlier_version_has_no_check(tmp_path: Path) -> None:
    file = tmp_path / ledger.NAME
    entry = LedgerEntry(0, 0, 8, "ab" * 16)
    file.write_text(json.dumps(vars(entry)) + "\n")
    assert ledger.read_last(file) == entry and ledger.find_gap(file) is None


def test_an_invalid_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / ledger.NAME
    file.write_text('{"step": 1}\n')
    with pytest.raises(IntegrityError, match="invalid line"):
        ledger.find_entries(file, 1)
