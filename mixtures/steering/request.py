"""A request to change the shares of a run, as a file in its folder.

    steer.json   {"id": "7f31…", "shares": {"web": 0.7, "code": 0.3}, "step": null}

The file appears whole, by a link that fails if there is one already. The run takes it between two
steps: it records the decision, then deletes the file. A run that is killed in between knows the
request by its id.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...console.errors import PlanError, StorageError, file_fault

NAME = "steer.json"


@dataclass(frozen=True, kw_only=True)
class SteerRequest:
    """Shares that a person wants; fields are keys of the file."""

    id: str
    shares: Mapping[str, float]
    step: int | None = None
    """First step with these shares; None: as soon as possible."""


def write_request(run: Path, shares: Mapping[str, float], step: int | None) -> SteerRequest:
    """Leave a request for the run; raise if another one waits."""
    request = SteerRequest(id=uuid.uuid4().hex, shares=shares, step=step)
    temporary = run / f".{NAME}.{request.id[:8]}.tmp"
    try:
        with temporary.open("x") as file:
            json.dump(vars(request), file)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, run / NAME)
        except FileExistsError:
            raise PlanError(
                f"{run} has a request that waits already: the run takes it between two steps, or "
                "at its next start",
                hint=f"delete {run / NAME} to withdraw it",
            ) from None
        finally:
            temporary.unlink()
    except OSError as error:
        raise StorageError(f"cannot write to {run}: {file_fault(error)[0]}") from None
    return request


def find_request(run: Path) -> SteerRequest | None:
    """Read the request that waits; None if there is none."""
    try:
        data = (run / NAME).read_bytes()
    except FileNotFoundError:
        return None
    try:
        return SteerRequest(**json.loads(data))
    except (ValueError, TypeError):
        raise PlanError(f"{run / NAME} is no request of `mixtures steer`") from None


def remove_request(run: Path) -> None:
    (run / NAME).unlink(missing_ok=True)
