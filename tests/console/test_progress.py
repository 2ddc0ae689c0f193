"""Progress: an updated line on a terminal, one line per minute elsewhere."""

import io
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.console import progress
from headrace.console.progress import (
    Progress,
    Waiting,
    exact_count,
    format_bytes,
    format_duration,
    format_number,
)
from headrace.console.yaml_text import count


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.4, "999"),
        (999.6, "1K"),
        (12345, "12.3K"),
        (999_999, "1M"),
        (2.5e9, "2.5B"),
        (-4500, "-4.5K"),
        (1.5e15, "1500T"),
        (0.25, "0.25"),
        (12.0, "12"),
    ],
)
def test_numbers_are_formatted(number: float, text: str) -> None:
    assert format_number(number) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1024, "1.02 KB"),
        (123_700, "124 KB"),
        (832_100_000, "832 MB"),
        (999_900_000, "1 GB"),
        (80 << 30, "85.9 GB"),
        (1.5e12, "1.5 TB"),
    ],
)
def test_bytes_are_formatted(size: float, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(1000, 10**17))
def test_formatted_numbers_are_valid_counts(number: int) -> None:
    assert count(format_number(number)) == pytest.approx(number, rel=5.01e-3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0s"), (1.26, "1.3s"), (12.3, "12s"), (59.7, "1m00s"), (65, "1m05s"), (3725, "1h02m")],
)
def test_durations_are_formatted(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_terminal_shows_one_updated_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), Terminal()
    with Progress("building", total=2000, unit="B", stream=stream) as bar:
        bar.advance(100)
        assert stream.getvalue() == ""  # too soon
        clock.now += 1
        bar.advance(400, documents=3)
        clock.now += 1
        bar.advance(500, documents=4)
    first, second, last = stream.getvalue().split("\r\x1b[2K")[1:]
    assert first == "building: 500 bytes of 2 KB (25%), 3 documents, 500 bytes/s, 3.0s left"
    assert second.startswith("building: 1 KB of 2 KB (50%), 7 documents")
    assert last.endswith("\n")
    assert stream.getvalue().count("\n") == 1


def test_a_line_never_wraps_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    Progress("a label that is longer than the terminal is wide", stream=stream).show()
    assert len(stream.getvalue().removeprefix("\r\x1b[2K")) < 20


def test_a_log_gets_one_line_per_minute_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    with Progress("reading", stream=stream) as bar:
        for _ in range(150):
            clock.now += 1
            bar.advance()
    lines = stream.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == ["reading: 60", "reading: 120", "reading: 150"]
    assert "\r" not in stream.getvalue()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Progress("reading", stream=stream) as bar:
        bar.advance(files=1)
    assert stream.getvalue().startswith("reading: 1, 1 file, ") and "\x1b" not in stream.getvalue()


def test_the_last_line_has_the_duration_and_a_failure_has_no_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    with Progress("reading", total=10, stream=stream) as bar:
        clock.now += 3
        bar.advance(9)  # totals are estimates
    assert stream.getvalue().endswith(", 3.0s\n")
    with pytest.raises(ValueError), Progress("writing", stream=stream):
        raise ValueError
    assert "writing" not in stream.getvalue()


def test_the_last_line_shows_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    with Progress("reading", total=10, stream=stream) as bar:
        clock.now += 5
        bar.advance(10)
    assert stream.getvalue() == "reading: 10 of 10 (100%), 2/s, 5.0s\n"


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_work_that_cannot_be_counted_shows_its_time(stream: io.StringIO) -> None:
    """A thread prints the lines, while the work says nothing."""
    waiting = Waiting("merging", stream=stream)
    waiting.pause = 0.01
    with waiting:
        deadline = time.monotonic() + 60
        while stream.getvalue().count("merging: 0.") < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    shown = stream.getvalue()
    time.sleep(0.05)
    assert stream.getvalue() == shown and shown.endswith("\n")
    with pytest.raises(ValueError), Waiting("sorting", stream=io.StringIO()):
        raise ValueError


def test_counts_have_the_nouns_number() -> None:
    assert exact_count(1, "documents") == "1 document"
    assert [exact_count(number, "rows") for number in (0, 2, 12_345)] == [
        "0 rows",
        "2 rows",
        "12,345 rows",
    ]
