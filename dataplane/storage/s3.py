"""Reads from S3 stores by obstore, if the environment holds all that it needs.

obstore starts in a tenth of s3fs's CPU time and reads without a thread. It serves only while it
answers: what it cannot read is left to fsspec, which knows profiles, retries and renewed
credentials, and whose errors are explained (`faults.py`).
"""

from __future__ import annotations

import os
import re
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...console.log import get_logger

log = get_logger(__name__)

REQUIRED = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
KNOWN = (
    *REQUIRED,
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_CA_BUNDLE",
)
"""Variables that a client depends on."""
BOTOCORE_ONLY = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")
"""Variables that only botocore understands."""
FILES = (("AWS_CONFIG_FILE", "~/.aws/config"), ("FSSPEC_CONFIG_DIR", "~/.config/fsspec"))
"""Settings of botocore and fsspec: a variable that names the path, and the default path."""
PLAIN_KEY = re.compile(r"[\w.=-]+(/[\w.=-]+)*", re.ASCII)
"""Keys that no client has to encode."""
STALLED = "60s"
REST_SECONDS = 60.0
"""Seconds for which a bucket is left to fsspec after an error."""

_failed: dict[tuple[str | None, ...], float] = {}
"""When obstore last failed to read, by bucket and environment."""
_forked = False


def read(url: str, start: int, end: int | None) -> memoryview | None:
    """Return an object's bytes [start, end), or None to leave the read to fsspec."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    store = bucket, *map(os.environ.get, KNOWN)
    if _forked or not PLAIN_KEY.fullmatch(key) or not _is_plain():
        return None
    if time.monotonic() - _failed.get(store, -REST_SECONDS) < REST_SECONDS:
        return None
    try:
        client = _client(*store)
        if end is None:
            return memoryview(client.get(key).bytes())[start:]
        return memoryview(client.get_range(key, start=start, end=end))
    except FileNotFoundError:  # fsspec says whether the bucket exists
        return None
    except Exception as error:  # obstore's errors share no class with those of fsspec
        log.debug("obstore cannot read %s: %s", url, error)
        _failed[store] = time.monotonic()
        return None


def _is_plain() -> bool:
    """True if the environment alone says how to read from S3, in words that obstore knows."""
    if not all(map(os.environ.get, REQUIRED)) or any(map(os.environ.get, BOTOCORE_ONLY)):
        return False
    if fsspec := sys.modules.get("fsspec.config"):
        return not fsspec.conf.get("s3") and not _file(*FILES[0]).exists()
    set_by_variables = any(name.startswith("FSSPEC_") for name in os.environ)
    return not set_by_variables and not any(_file(*file).exists() for file in FILES)


def _file(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or default).expanduser()


@lru_cache(8)
def _client(bucket: str, *_environment: str | None) -> Any:
    """Return a client with credentials and endpoint from the environment."""
    from datetime import timedelta

    from obstore.store import S3Store

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    options: dict[str, Any] = {"allow_http": True, "read_timeout": STALLED, "timeout": "1h"}
    bundle = os.environ.get("AWS_CA_BUNDLE")
    if bundle and not (endpoint or "").startswith("http://"):
        options["root_certificate"] = Path(bundle).read_bytes()
    return S3Store(
        bucket,
        config={"endpoint": endpoint} if endpoint else {},
        client_options=options,  # type: ignore[arg-type]
        retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=10)},
    )


def _leave() -> None:
    """Stop using obstore in a forked process, which lacks the threads that it started."""
    global _forked
    _forked = _forked or _client.cache_info().misses > 0


os.register_at_fork(after_in_child=_leave)
