"""A dataset's licences and sources, as people state them, in about.json beside the manifest.

They belong to no hash: stating them changes nothing else.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from ...console.errors import InputError
from ..storage import storage
from ..storage.sealed import check_seal, seal

NAME = "about.json"
RESTATE_HINT = "remove it, and state them again with `tokenize card`"


@dataclass(frozen=True, kw_only=True)
class About:
    """Licences and sources, as people state them."""

    licenses: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


def load(url: str) -> About:
    """Read the facts stated at `url`; empty if there is no file."""
    where = storage.join(url, NAME)
    if not storage.exists(where):
        return About()
    try:
        data = json.loads(storage.read(where))
        check_seal(where, data, hint=RESTATE_HINT)
        about = About(licenses=tuple(data["licenses"]), sources=tuple(data["sources"]))
        if not all(isinstance(fact, str) for fact in (*about.licenses, *about.sources)):
            raise TypeError("a licence or a source is no text")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{where} does not state licences and sources: {error!r}",
            hint=RESTATE_HINT,
        ) from None
    return about


def save(url: str, about: About) -> None:
    """Write the facts beside the manifest."""
    storage.write(storage.join(url, NAME), seal(asdict(about), indent=1))
