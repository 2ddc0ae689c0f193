"""Stores behind a network: anything that fsspec knows, asked again where a fault may pass."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ...console.errors import MissingError, UserError
from ...console.log import get_logger
from .faults import answer, failed, passes, said

T = TypeVar("T")

log = get_logger(__name__)

ATTEMPTS = 8
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 20.0
SLOWEST, STALLED = 256 << 10, 120.0
"""Bytes a second that a store must take of what is written to it, and the seconds on top of that:
one that takes nothing would be waited for until TCP gives up."""


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it."""
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise MissingError(f"cannot open {url}: {error}", hint="check the URL's scheme") from None
    return fs, path


def ask(verb: str, url: str, act: Callable[[Any, str], T]) -> T:
    """What `act` gives for a file system and a path in it, through faults that pass. A store that
    refuses is asked once more: credentials are read anew, and may have been renewed."""

    def once() -> T:
        fs, path = file_system(url)
        try:
            return act(fs, path)
        except Exception as error:
            if not isinstance(error, PermissionError) and answer(error)[0] != 400:
                raise
            type(fs).clear_instance_cache()
            return act(*file_system(url))

    return tried_again(verb, url, once)


def tried_again(verb: str, url: str, act: Callable[[], T]) -> T:
    """What `act` gives, which is called again, after growing pauses, where a fault may pass."""
    for attempt, pause in enumerate(_pauses(), start=1):
        try:
            return act()
        except UserError:
            raise
        except Exception as error:  # fsspec's back ends share no class for a passing fault
            if attempt == ATTEMPTS or not passes(error):
                raise failed(verb, url, error) from error
            why = said(error)
            log.warning("could not %s %s (%s); trying again in %.1f s", verb, url, why, pause)
            time.sleep(pause)
    raise AssertionError("unreachable")


def limit(fs: Any, size: int) -> dict[str, float]:
    """How long a write may take. fsspec's own back ends for stores are those that can be told."""
    return {"timeout": STALLED + size / SLOWEST} if fs.async_impl else {}


def _pauses() -> Iterator[float]:
    pause = FIRST_PAUSE
    for _ in range(ATTEMPTS):
        yield pause * random.uniform(0.5, 1.5)
        pause = min(pause * 2, LONGEST_PAUSE)
