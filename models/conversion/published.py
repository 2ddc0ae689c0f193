"""The table of published families: what can be read, and written, and what tests it."""

from __future__ import annotations

from . import FAMILIES, vortex
from .blackmamba import BlackMamba
from .family import Published
from .mamba_ssm import MambaSSM
from .savanna import checkpoint
from .stripedhyena import StripedHyena


def list_published() -> list[Published]:
    families = [family.published for family in FAMILIES.values()]
    originals = [original.published for original in (BlackMamba(), MambaSSM(), StripedHyena())]
    return [*families, *originals, vortex.PUBLISHED, checkpoint.PUBLISHED]
