from __future__ import annotations

import pytest

from headrace.trainer.run.request import Request, Start, steps_between


def test_overrides_go_where_they_belong() -> None:
    asked = Request(overrides=["optimizer.lr=1", "model.width=2", "mixture.seed=3"])
    assert asked.own == ["optimizer.lr=1"]
    assert (asked.part("model"), asked.part("mixture")) == (["width=2"], ["seed=3"])


@pytest.mark.parametrize("text", ["10", "10:10", "15:10", "a:b", ":5", "1:2:3"])
def test_steps_are_written_first_last(text: str) -> None:
    with pytest.raises(ValueError, match="FIRST:LAST"):
        steps_between(text)


def test_what_a_start_was_asked_reaches_its_processes() -> None:
    start = Start(stop_after=3, fallback=True, profile=range(10, 15), began=7.5)
    told = ["--began=7.5", "--stop-after=3", "--profile=10:15", "--fallback"]
    assert start.words() == told
    assert steps_between("10:15") == start.profile
