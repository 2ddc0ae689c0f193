"""The ledger: which rows each step took, and a hash that rolls over their tokens.

    {"step": 120, "first_row": 960, "rows": 8, "hash": "5d0c…"}

The hash is blake2b over the hash before and the digests of the step's rows in global order. No
layout changes it: two runs with one hash have seen the same tokens in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

NAME = "ledger.jsonl"
DIGEST_BYTES = 16


def roll(previous: str, digests: Iterable[bytes]) -> str:
    """The hash after a step. `previous` is empty before the first."""
    state = hashlib.blake2b(bytes.fromhex(previous), digest_size=DIGEST_BYTES)
    for digest in digests:
        assert len(digest) == DIGEST_BYTES
        state.update(digest)
    return state.hexdigest()
