"""Small models, as YAML."""

from pathlib import Path

CONFIGS = Path(__file__).parent

DEEPSPEEDS_OWN = {"steps_per_print": 1 << 30}
"""Keys of DeepSpeed's own. With them, it runs on one rank too."""
