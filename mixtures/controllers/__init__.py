"""Controllers of a phase's shares: a file per kind, and the table of names.

A controller is a frozen dataclass derived from `Controller`, whose fields are the keys of `control`
in the YAML. Parsing, checks, plans, runs and the audit find it in `CONTROLLERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...console.errors import PlanError
from .controller import Controller
from .held_out import HeldOut
from .odm import OnlineDataMixing

CONTROLLERS: dict[str, type[Controller]] = {"odm": OnlineDataMixing, "held-out": HeldOut}


def load_controller(control: Mapping[str, Any]) -> Controller:
    """Build the controller from a plan's settings for a phase."""
    kind = control["kind"]
    if kind not in CONTROLLERS:
        raise PlanError(
            f"the plan uses the controller `{kind}`, which this headrace does not have",
            hint=f"known controllers: {', '.join(CONTROLLERS)}; add it to mixtures/controllers, or "
            "make the plan again",
        )
    settings = dict(control)
    if "stages" in settings:
        settings["stages"] = tuple(settings["stages"])
    return CONTROLLERS[kind](**settings)
