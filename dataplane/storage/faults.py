"""What goes wrong with files and stores: whether it may pass, and what a person is told of it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from ...console.errors import StorageError, UserError

PASSING = (408, 429, 500, 502, 503, 504)
"""Answers of a store that may be others in a while."""
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired")
"""What S3 stores say of credentials that were good once."""


def passes(error: Exception) -> bool:
    """Whether trying again may help: time-outs, dropped connections, throttling, 5xx."""
    status, code = answer(error)
    if isinstance(error, (TimeoutError, ConnectionError)) or status in PASSING:
        return True
    if code == "NoSuchUpload":  # it was completed, and the answer lost: it is begun again
        return True
    if status or isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError)):
        return False
    text = f"{type(error).__module__}.{type(error).__name__} {error}".lower()
    words = ("timeout", "connect", "slow", "throttl", "503", "429", "payload", "disconnected")
    return any(word in text for word in words)


def answer(error: Exception) -> tuple[int, str]:
    """The status and the code with which an S3 store has refused; s3fs raises an error of Python's
    from the one that holds them."""
    for one in (error, error.__cause__):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return int(status), str(response.get("Error", {}).get("Code", ""))
    return 0, ""


def failed(verb: str, url: str, error: Exception) -> StorageError:
    """What went wrong with a file, for a person."""
    hint = None
    status, code = answer(error)
    if code in EXPIRED:
        reason, hint = "the credentials have expired", "renew them and run the same command again"
    elif code == "RequestTimeTooSkewed":
        reason, hint = "the clock of this machine is wrong, says the store", "set the clock"
    elif status == 400:
        reason = f"the store refuses the request ({error})"
        hint = "the credentials may have expired; check the endpoint and its region, too"
    elif isinstance(error, IsADirectoryError):
        reason, hint = "it is a folder", "name a file"
    elif isinstance(error, FileNotFoundError) and verb == "write":
        reason, hint = "its folder cannot be made", "choose another folder"
    elif isinstance(error, FileNotFoundError):
        reason, hint = "it does not exist", "check the path, or build the dataset first"
    elif isinstance(error, PermissionError):
        reason, hint = "access is denied", "check the credentials (`headrace doctor` shows them)"
    elif isinstance(error, (NotADirectoryError, FileExistsError)):
        reason, hint = "a part of its path is a file, not a folder", "choose another folder"
    elif type(error).__name__ == "NoCredentialsError":  # botocore's
        reason = "the store's credentials are missing"
        hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        reason, hint = "the disk is full", "free some space and run the same command again"
    else:
        reason = said(error)
    return StorageError(f"cannot {verb} {url}: {reason}", hint=hint)


def said(error: Exception) -> str:
    """The words of an error, or what stands for them."""
    silent = "it took too long" if isinstance(error, TimeoutError) else type(error).__name__
    return str(error) or silent


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Add the file `where` to user errors that name none."""
    try:
        yield
    except UserError as error:
        error.where = error.where or where
        raise
