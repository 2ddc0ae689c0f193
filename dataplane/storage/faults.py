"""Errors of files and object stores: whether they are transient, and their messages."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator

from ...console.errors import StorageError, UserError, file_fault
from ...console.explain import path_hint

TRANSIENT = (408, 429, 500, 502, 503, 504)
"""HTTP status codes after which a request is retried."""
HOST = re.compile(r"(?:://|host=\\?')([\w.-]+)")
"""Host in a network library's message."""
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired")
"""S3 error codes for expired credentials."""


class AbsentError(StorageError):
    """A file or object does not exist."""


def is_transient(error: Exception) -> bool:
    """True if a retry may help: time-outs, dropped or damaged answers, throttling, 5xx."""
    status, code = read_response(error)
    if is_unknown_host(error):
        return False
    if isinstance(error, (TimeoutError, ConnectionError)) or status in TRANSIENT:
        return True
    if code == "NoSuchUpload":  # completed, but the response was lost: upload again
        return True
    if status or isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError)):
        return False
    text = f"{type(error).__module__}.{type(error).__name__} {error}".lower()
    words = ["timeout", "connect", "slow", "throttl", "503", "429", "payload", "disconnected"]
    words += ["checksum"]  # the client's library has checked the answer itself
    return any(word in text for word in words)


def read_response(error: Exception) -> tuple[int, str]:
    """Return the HTTP status and the error code in an S3 store's response, or (0, "").

    s3fs raises a built-in error from the error that holds the response.
    """
    for raised in (error, error.__cause__):
        response = getattr(raised, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return int(status), str(response.get("Error", {}).get("Code", ""))
    return 0, ""


def is_unknown_host(error: BaseException | None) -> bool:
    """True if the cause is a host name that does not exist.

    A name server that does not answer is a different cause, which may pass.
    """
    for cause in _causes(error):
        if isinstance(cause, socket.gaierror):
            return cause.errno in (socket.EAI_NONAME, socket.EAI_NODATA)
    return False


def refuses_connections(error: BaseException | None) -> bool:
    """True if the cause is a host without a server at the port."""
    return any(isinstance(cause, ConnectionRefusedError) for cause in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, from the outside in."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        wrapped = getattr(error, "os_error", None) or getattr(error, "reason", None)
        inner = wrapped if isinstance(wrapped, BaseException) else None
        error = inner or error.__cause__ or error.__context__


def _requested_urls(error: BaseException) -> Iterator[str]:
    """Yield the URLs that an HTTP library names beside its errors, not in their texts."""
    for cause in _causes(error):
        try:
            yield str(cause.request.url)  # type: ignore[attr-defined]
        except (AttributeError, RuntimeError):
            continue


def storage_error(verb: str, url: str, error: Exception) -> StorageError:
    """Return the user error for a failed operation on a file or object."""
    kind: type[StorageError] = StorageError
    hint: str | None = None
    status, code = read_response(error)
    local = "://" not in url or url.startswith("file://")
    if is_unknown_host(error):
        host = HOST.search(" ".join([str(error), *_requested_urls(error), url]))
        reason = f"there is no host {host[1]}" if host else "there is no such host"
        hint = "check the URL, the endpoint of its store (AWS_ENDPOINT_URL) and the network"
    elif refuses_connections(error):
        reason = "no server answers there: the connection is refused"
        hint = "check the host and the port (of a store, AWS_ENDPOINT_URL), and that it runs"
    elif code == "NoSuchBucket":
        reason, hint = "the bucket does not exist", "check the URL, or create the bucket"
    elif code in EXPIRED:
        reason, hint = "the credentials have expired", "renew them and run the same command again"
    elif code == "RequestTimeTooSkewed":
        reason, hint = "the store says that this machine's clock is wrong", "set the clock"
    elif status == 400:
        reason = f"the store rejected the request ({error})"
        hint = "check that the credentials have not expired, and the endpoint and its region"
    elif isinstance(error, FileNotFoundError) and verb == "write":
        reason, hint = "its folder cannot be created", "choose another folder"
    elif isinstance(error, FileNotFoundError):
        kind = AbsentError
        reason, hint = "it does not exist", "check the path"
        hint = path_hint(url.removeprefix("file://"), hint) if local else hint
    elif isinstance(error, PermissionError) and not local:
        reason, hint = "access is denied", "check the credentials (`headrace doctor` shows them)"
    elif type(error).__name__ == "NoCredentialsError":  # botocore's
        reason = "the store's credentials are missing"
        hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    elif isinstance(error, OSError) and (local or isinstance(error, IsADirectoryError)):
        reason, hint = file_fault(error)
    elif "checksum" in type(error).__name__.lower():  # botocore's FlexibleChecksumError
        reason = f"its bytes do not match the store's own checksum ({error})"
        hint = "check the network; if the object itself is damaged, restore it from a copy"
    else:
        reason = describe_error(error)
    return kind(f"cannot {verb} {url}: {reason}", hint=hint)


def describe_error(error: Exception) -> str:
    """Return the error's message, or a substitute if it has none."""
    substitute = "timed out" if isinstance(error, TimeoutError) else type(error).__name__
    return str(error) or substitute


@contextlib.contextmanager
def add_location(where: str) -> Iterator[None]:
    """Add the file `where` to user errors that name none."""
    try:
        yield
    except UserError as error:
        error.where = error.where or where
        raise
