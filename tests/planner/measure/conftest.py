"""The counts of collectives are no part of the package: the root makes them importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))
