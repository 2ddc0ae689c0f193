"""Ranks share the batches of an evaluation; the results are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks.ranks import Ranks

from headrace.console.errors import InputError
from headrace.trainer.placement.team import Team


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 2, 6, 7, 20])
def test_two_ranks_give_the_results_of_one(
    two_ranks: Ranks, tmp_path: Path, count: int, workers: int
) -> None:
    batches = [list(range(number, 2 * number)) for number in range(count)]
    first, second = two_ranks.run("teamwork", tmp_path, batches, workers)
    result, failure, again = first["found"]
    assert result == [[number * number for number in batch] for batch in batches]
    assert ("rank 1 failed: KeyError('of rank 1')" in failure) == (workers == 2)
    assert again == [[81]]
    assert second["found"] is None
    shares = [batches[rank::workers] if rank < workers else [] for rank in range(2)]
    assert first["computed"] == [*shares[0], [9]] and second["computed"] == shares[1]


def test_an_error_of_a_user_is_raised_as_it_is() -> None:
    def fail(batch: object) -> None:
        raise InputError("too long", hint="shorten it")

    with pytest.raises(InputError, match="too long"):
        Team({"fail": fail}).map_batches("fail", [[1]], "", "")
