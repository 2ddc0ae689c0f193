"""Repositories of the Hugging Face Hub: hf://datasets/OWNER/NAME@COMMIT/PATH, read through
`huggingface_hub` (HF_ENDPOINT names another hub, HF_TOKEN holds the token).

A URL must name a commit. A branch may move: the same command would read other bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ...console.errors import InputError

SCHEME = "hf://"
KINDS = {"datasets": "dataset", "spaces": "space"}
"""Kinds of repositories by the first part of a path; without one it is that of a model."""
COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub(url: str) -> bool:
    return url.startswith(SCHEME)


def check_pinned(url: str) -> None:
    """Raise if a URL names no commit; the hint has the one that it names now."""
    path = url.removeprefix(SCHEME)
    name, _, rest = path.partition("@")
    if COMMIT.fullmatch(rest.partition("/")[0]):
        return
    commit = next(_commits(name, _revision(rest) or None), None)
    hint = f"write …@{commit}, the commit that it names now" if commit else "write …@COMMIT"
    what = f"`{_revision(rest)}` is no commit" if rest else "no commit"
    kind = name.partition("/")[0]
    folder = f"{kind}/" if kind in KINDS else ""
    raise InputError(
        f"{url} must name a commit, as in {SCHEME}{folder}OWNER/NAME@COMMIT ({what}): another "
        "revision may change",
        hint=hint if folder else f"{hint}; the URL of a dataset begins with {SCHEME}datasets/",
    )


def _revision(rest: str) -> str:
    """Return the revision that begins the text after the @ of a URL."""
    return "/".join(rest.split("/")[: 3 if rest.startswith("refs/") else 1])


def file_of(url: str, name: str) -> str:
    """Return the URL of a file of a repository, if the URL names a repository alone."""
    if is_hub(url) and COMMIT.fullmatch(url.rstrip("/").rpartition("@")[2]):
        return f"{url.rstrip('/')}/{name}"
    return url


def content_hash(information: dict[str, Any]) -> str | None:
    """Return the hash of a file's content, of its attributes in a repository."""
    large = information.get("lfs")
    hash = large["sha256"] if large else information.get("blob_id")
    return None if hash is None else str(hash)


def reading(fs: Any) -> dict[str, Any]:
    """Return the arguments with which `cat_file` fetches a range and no more."""
    return {"cache_type": "none"} if "hf" in fs.protocol else {}


def _commits(name: str, revision: str | None) -> Iterator[str]:
    """Yield the commit of a repository's revision, or nothing if the hub does not know it."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    kind, _, rest = name.partition("/")
    id = rest if kind in KINDS else name
    parts = id.split("/")
    for length in (2, 1):  # old repositories have no owner
        try:
            found = HfApi().repo_info(
                "/".join(parts[:length]), repo_type=KINDS.get(kind), revision=revision, timeout=10
            )
        except (HfHubHTTPError, HFValidationError, OSError):
            continue
        if found.sha:
            yield found.sha
