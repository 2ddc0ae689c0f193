"""An answer ends at its first stop sequence, and no sooner."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.scores.answers import stop_condition

LETTERS = "abé€"
"""Characters of one, two and three bytes."""


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


@given(
    text=st.text(LETTERS, max_size=30),
    until=st.lists(st.text(LETTERS, max_size=3), max_size=3),
)
def test_it_ends_at_the_id_that_completes_a_stop_sequence(text: str, until: list[str]) -> None:
    ids = list(text.encode())
    ended = stop_condition(until, decode)
    result = next((n for n in range(1, len(ids) + 1) if ended(ids[:n])), None)
    stops = [stop for stop in until if stop and stop in text]
    ends = [len((text[: text.index(stop)] + stop).encode()) for stop in stops]
    first = min(ends, default=None)
    assert result == first


def test_a_part_of_a_character_is_not_its_text() -> None:
    """The last bytes alone read as the stop sequence, the whole text does not."""
    ids = list("€".encode())
    assert decode(ids[1:]) == "\ufffd\ufffd"
    assert not any(stop_condition(["\ufffd\ufffd"], decode)(ids[:n]) for n in (1, 3))
