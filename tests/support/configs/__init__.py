"""Small models, as YAML."""

from pathlib import Path

CONFIGS = Path(__file__).parent
