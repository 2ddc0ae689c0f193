"""Attestations of this machine in `~/.cache/headrace-kernels`: a second start reads the first's.

A file is named by everything that was attested, and holds passes alone: kernels that failed are
compared again at each start. A damaged file, or one of another version, counts as none.
"""

from __future__ import annotations

import os
from pathlib import Path

from ...console.errors import UserError
from ...console.log import get_logger
from ...dataplane.storage import storage
from ...dataplane.storage.sealed import seal, unseal
from ...models.attestation.record import Record

VERSION = 1

log = get_logger(__name__)


def locate(key: str) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "headrace-kernels" / f"{key}.json"


def load(key: str) -> Record | None:
    """Return the stored attestation, or None. Say so if there is one that cannot be used."""
    path = locate(key)
    try:
        values = unseal(str(path), path.read_bytes(), hint="", version=VERSION)
        record = Record.unpack(values)
    except FileNotFoundError:
        return None
    except (OSError, UserError, KeyError, TypeError) as error:
        unreadable = f"{path} cannot be read: {error!r}"
        message = error.message if isinstance(error, UserError) else unreadable
        log.warning("%s; the kernels are attested again", message)
        return None
    return None if record.problems else record


def save(key: str, record: Record) -> None:
    """Store an attestation that passed. A folder that cannot be written to is no error: the next
    start attests again."""
    try:
        storage.write(str(locate(key)), seal({"version": VERSION, **record.pack()}))
    except UserError as error:
        log.warning("the attestation of the kernels is not kept: %s", error.message)
