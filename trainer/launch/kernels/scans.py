"""Preflight check of scans by kernels of other packages."""

from __future__ import annotations

from importlib.util import find_spec

from ....console.errors import LayoutError, MissingError
from ....models.config.options.delta import DeltaOptions
from ....models.config.options.names import FLA_INSTALL
from ...run.job import Job


def check_fla(job: Job) -> None:
    """Raise if an operator names fla's kernels, and they are missing or cannot run."""
    layout = job.run.layout
    for name, options in job.model.operators.items():
        if not isinstance(options, DeltaOptions) or options.kernel != "fla":
            continue
        named = f"operators.{name}: kernel is fla"
        if job.run.device == "cpu":
            raise LayoutError(f"{named}, which needs a GPU", hint="use `kernel: auto`")
        if layout.cp > 1 and layout.delta == "states":
            raise LayoutError(
                f"{named}, which passes no states between ranks", hint="set layout.delta=a2a"
            )
        if find_spec("fla") is None:
            raise MissingError(
                f"{named}, and flash-linear-attention is not installed", hint=FLA_INSTALL
            )
