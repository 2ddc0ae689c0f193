"""Object stores through fsspec, with retries on transient errors."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ...console.errors import MissingError, UserError
from ...console.explain import nearest
from ...console.log import get_logger
from . import hub
from .faults import (
    is_transient,
    message_of,
    refuses_connections,
    response_of,
    storage_error,
    unknown_host,
)

T = TypeVar("T")

log = get_logger(__name__)

_first = ContextVar("first requests", default=False)

PROBE = 5.0
"""Seconds within which a host refuses a connection, if it does."""


@dataclass(frozen=True, kw_only=True)
class RequestPolicy:
    """When a request is sent again, and when a write times out."""

    attempts: int = 8
    first_pause: float = 0.2
    """Seconds before the second attempt, times a random number around 1; each pause is twice as
    long as the one before it."""
    max_pause: float = 20.0
    stall_seconds: float = 120.0
    """Seconds after which a write times out, plus its size over `min_bytes_per_second`. Without a
    limit, a store that accepts nothing blocks until TCP gives up."""
    min_bytes_per_second: int = 256 << 10

    def pauses(self) -> Iterator[float]:
        """Yield the pause after each attempt."""
        pause = self.first_pause
        for _ in range(self.attempts):
            yield pause * random.uniform(0.5, 1.5)
            pause = min(pause * 2, self.max_pause)

    def write_timeout(self, size: int) -> float:
        """Return the seconds after which a write of `size` bytes times out."""
        return self.stall_seconds + size / self.min_bytes_per_second


POLICY = RequestPolicy()


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it."""
    import fsspec
    from fsspec.registry import known_implementations

    scheme = url.partition("://")[0]
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        known = known_implementations.get(scheme, {"class": "fsspec"})
        module = known["class"].partition(".")[0]
        hint = "install the package" if module == "fsspec" else f"pip install {module}"
        raise MissingError(
            f"cannot open {url}: {scheme}:// needs a package that is not installed ({error})",
            hint=hint,
        ) from None
    except ValueError as error:
        near = nearest(scheme, known_implementations)
        hint = f"did you mean {near}://?" if near else "check the URL"
        raise MissingError(f"cannot open {url}: {error}", hint=hint) from None
    if hub.is_hub(url):
        hub.check_pinned(url)
    if "s3" in fs.protocol:
        events = fs.s3.meta.events
        events.register("before-send.s3", _resolve_host, unique_id=_resolve_host.__qualname__)
    return fs, path


def _resolve_host(request: Any, **_: Any) -> None:
    """Handler of botocore: resolve the host of a signed request."""
    parts = urlsplit(request.url)
    _resolve(f"{parts.scheme}://{parts.netloc}")


@cache
def _resolve(endpoint: str) -> None:
    """Raise an error if the host of an S3 endpoint does not exist, or refuses connections: botocore
    would ask again for eight seconds, in silence. A proxy resolves names by itself."""
    from urllib.request import getproxies, proxy_bypass  # 3 MiB in a process that reads local files

    parts = urlsplit(endpoint)
    if getproxies().get(parts.scheme) and not proxy_bypass(parts.netloc):
        return
    try:
        socket.getaddrinfo(parts.hostname, None)
    except socket.gaierror as error:
        if unknown_host(error):
            raise socket.gaierror(error.errno, f"{error.strerror} ({endpoint})") from None
        return
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    try:
        socket.create_connection((parts.hostname, port), PROBE).close()
    except ConnectionRefusedError:
        raise
    except OSError:  # the request itself shows what is wrong
        return


def request(verb: str, url: str, act: Callable[[Any, str], T]) -> T:
    """Run `act(fs, path)` with retries on transient errors. A refused request is sent once more
    with freshly loaded credentials, which may have been renewed."""

    def once() -> T:
        fs, path = file_system(url)
        try:
            return act(fs, path)
        except Exception as error:
            if not isinstance(error, PermissionError) and response_of(error)[0] != 400:
                raise
            type(fs).clear_instance_cache()
            return act(*file_system(url))

    return retry(verb, url, once)


def retry(verb: str, url: str, act: Callable[[], T]) -> T:
    """Run `act()`; on transient errors run it again, after growing pauses."""
    for attempt, pause in enumerate(POLICY.pauses(), start=1):
        try:
            return act()
        except UserError:
            raise
        except Exception as error:  # fsspec's back ends share no class for transient errors
            final = not is_transient(error) or (refuses_connections(error) and _first.get())
            if attempt == POLICY.attempts or final:
                raise storage_error(verb, url, error) from error
            reason = message_of(error)
            log.warning("cannot %s %s (%s); retrying in %.1f s", verb, url, reason, pause)
            time.sleep(pause)
    raise AssertionError("unreachable")


@contextmanager
def first_requests() -> Iterator[None]:
    """Send the first requests of a command to their hosts: a refused connection is not tried again,
    since nothing shows that a server was ever there. Later it may be one that is restarted."""
    token = _first.set(True)
    try:
        yield
    finally:
        _first.reset(token)


def limit(fs: Any, size: int) -> dict[str, float]:
    """Return the time-out of a write as arguments; only fsspec's async back ends take one."""
    return {"timeout": POLICY.write_timeout(size)} if fs.async_impl else {}
