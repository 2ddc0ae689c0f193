"""Logs go to stderr, with the rank."""

import io
import logging
from collections.abc import Iterator

import pytest

from headrace.console import log


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("headrace")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], root.level = before[0], before[1]
    ours.setLevel(before[2])


def test_headrace_logs_info_and_other_libraries_warnings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.setup()
    log.get_logger("headrace.dataplane").info("ours")
    log.get_logger("headrace.dataplane").debug("not shown either")
    log.get_logger("other").info("not shown")
    log.get_logger("other").warning("wrong")
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "INFO headrace.dataplane: ours",
        "WARNING other: wrong",
    ]


def test_debug_shows_debug_messages(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(debug=True)
    log.get_logger("headrace.x").debug("detail")
    assert "DEBUG headrace.x: detail" in capsys.readouterr().err


def test_log_lines_name_the_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    log.setup()
    log.get_logger("headrace.x").info("here")
    assert "headrace.x: [rank 3] here" in capsys.readouterr().err


def test_warnings_on_a_terminal_have_a_coloured_level(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(log.sys, "stderr", Terminal())
    log.setup()
    log.get_logger("headrace.x").warning("slow")
    log.get_logger("headrace.x").info("fine")
    warning, fine, _ = log.sys.stderr.getvalue().split("\n")
    assert "\x1b[33mWARNING\x1b[0m headrace.x: slow" in warning
    assert "INFO headrace.x: fine" in fine and "\x1b[3" not in fine
