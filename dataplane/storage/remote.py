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
    describe_error,
    is_transient,
    is_unknown_host,
    read_response,
    refuses_connections,
    storage_error,
)

T = TypeVar("T")

log = get_logger(__name__)

_first = ContextVar("first requests", default=False)

PROBE = 5.0
"""Seconds within which a host refuses a connection, if it does."""


@dataclass(frozen=True, kw_only=True)
class RequestPolicy:
    """When a request is repeated, and when a write times out."""

    attempts: int = 8
    first_pause: float = 0.2
    """Seconds before the second attempt, times a random number around 1; later pauses double."""
    max_pause: float = 20.0
    stall_seconds: float = 120.0
    """Seconds after which a write times out, plus its size over `min_bytes_per_second`. Without a
    time-out, a store that accepts nothing blocks until TCP gives up."""
    min_bytes_per_second: int = 256 << 10

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait after each attempt."""
        pause = self.first_pause
        for _ in range(self.attempts):
            yield pause * random.uniform(0.5, 1.5)
            pause = min(pause * 2, self.max_pause)

    def write_timeout(self, size: int) -> float:
        """Return the seconds after which a write of `size` bytes times out."""
        return self.stall_seconds + size / self.min_bytes_per_second


POLICY = RequestPolicy()


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and its path there."""
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
    """Resolve a signed request's host, as a handler of botocore."""
    url = urlsplit(request.url)
    _resolve(f"{url.scheme}://{url.netloc}")


@cache
def _resolve(endpoint: str) -> None:
    """Raise if an S3 endpoint's host does not exist, or refuses connections.

    botocore would ask again for eight seconds, in silence. A proxy resolves names by itself.
    """
    from urllib.request import getproxies, proxy_bypass  # 3 MiB in a process that reads local files

    url = urlsplit(endpoint)
    if getproxies().get(url.scheme) and not proxy_bypass(url.netloc):
        return
    try:
        socket.getaddrinfo(url.hostname, None)
    except socket.gaierror as error:
        if is_unknown_host(error):
            raise socket.gaierror(error.errno, f"{error.strerror} ({endpoint})") from None
        return
    port = url.port or {"http": 80, "https": 443}[url.scheme]
    try:
        socket.create_connection((url.hostname, port), PROBE).close()
    except ConnectionRefusedError:
        raise
    except OSError:  # the request itself shows what is wrong
        return


def request(verb: str, url: str, act: Callable[[Any, str], T]) -> T:
    """Run `act(fs, path)` with retries on transient errors.

    A refused request is sent once more with freshly loaded credentials: they may have been renewed.
    """

    def attempt() -> T:
        fs, path = file_system(url)
        try:
            return act(fs, path)
        except Exception as error:
            if not isinstance(error, PermissionError) and read_response(error)[0] != 400:
                raise
            type(fs).clear_instance_cache()
            return act(*file_system(url))

    return retry(verb, url, attempt)


def retry(verb: str, url: str, act: Callable[[], T]) -> T:
    """Run `act()`; on transient errors run it again, after growing pauses."""
    for attempt, pause in enumerate(POLICY.pauses(), start=1):
        try:
            return act()
        except UserError:
            raise
        except Exception as error:  # fsspec's back ends share no class for transient errors
            is_final = not is_transient(error) or (refuses_connections(error) and _first.get())
            if attempt == POLICY.attempts or is_final:
                raise storage_error(verb, url, error) from error
            reason = describe_error(error)
            log.warning("cannot %s %s (%s); retrying in %.1f s", verb, url, reason, pause)
            time.sleep(pause)
    raise AssertionError("unreachable")


@contextmanager
def first_requests() -> Iterator[None]:
    """Do not retry refused connections: nothing shows yet that a server was ever there.

    Later a refusing server may be restarting.
    """
    token = _first.set(True)
    try:
        yield
    finally:
        _first.reset(token)


def timeout_arguments(fs: Any, size: int) -> dict[str, float]:
    """Return a write's time-out as arguments; only fsspec's async back ends take it."""
    return {"timeout": POLICY.write_timeout(size)} if fs.async_impl else {}
