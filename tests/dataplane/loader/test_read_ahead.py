from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataplane.loader.read_ahead import read_ahead


@given(
    max_ahead=st.integers(0, 4),
    pauses=st.lists(st.sampled_from([0.0, 0.0, 0.003]), max_size=20),
)
@settings(max_examples=40, deadline=None)
def test_results_come_in_order_and_few_are_made_ahead(max_ahead: int, pauses: list[float]) -> None:
    result: list[int] = []

    def results() -> Iterator[int]:
        for number in range(len(pauses)):
            time.sleep(0.001)
            result.append(number)
            yield number

    seen = []
    for number in read_ahead(results(), max_ahead, pause=0.001):
        time.sleep(pauses[number])
        seen.append(number)
        assert len(result) <= len(seen) + max_ahead
    assert seen == result == [*range(len(pauses))]


def test_the_thread_works_while_the_consumer_is_away() -> None:
    """Without a thread, and by a consumer that is not away, results are made when asked for."""
    for max_ahead in (0, 2):
        makers = read_ahead((threading.get_ident() for _ in range(500)), max_ahead)
        assert next(makers) == threading.get_ident()
        time.sleep(0.5)
        ahead = [next(makers) != threading.get_ident() for _ in range(100)]
        assert ahead[:2] == [max_ahead > 0] * 2
        assert sum(ahead) < 20
        assert len(list(makers)) == 399


@pytest.mark.parametrize("max_ahead", [0, 1, 3])
@pytest.mark.parametrize("away", [0.0, 0.05])
def test_an_error_comes_in_its_turn(max_ahead: int, away: float) -> None:
    def results() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("broken")

    making = read_ahead(results(), max_ahead)
    for expected in (1, 2):
        assert next(making) == expected
        time.sleep(away)
    with pytest.raises(OSError, match="broken") as caught:
        next(making)
    assert caught.traceback[-1].name == "results"
    assert next(making, None) is None
