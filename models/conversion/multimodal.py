"""Folders of multimodal models: the text model is read, and what is not is named.

`config.json` has the text model's settings in `text_config`, and its tensors lie under a module
`language_model`. Towers for images and sound, and their projections, are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ...console.log import get_logger
from ..weights import Weights

TEXT = "text_config"
MODULES = ("model.language_model.", "language_model.")
"""Modules of the text model, in folders of transformers 5 and of older versions."""
OUTER = ("tie_word_embeddings", "quantization_config", "torch_dtype", "dtype")
"""Keys that stand beside `text_config`."""
KEPT = ("lm_head", "mtp")
"""Modules of the text model that may stand beside it."""

log = get_logger(__name__)


def select_text_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text model's settings, or the same ones if they are those of a text model."""
    if TEXT not in settings:
        return dict(settings)
    outer = {key: settings[key] for key in OUTER if settings.get(key) is not None}
    return {**settings[TEXT], **outer}


def select_text_weights(theirs: Weights, settings: Mapping[str, Any], *, source: str) -> Weights:
    """Return the text model's tensors by the names in a folder of it alone; log what is left
    out."""
    if TEXT not in settings:
        return theirs
    stored = {rename(name): name for name in theirs}
    if stored.keys() == theirs.keys():
        return theirs
    names = {ours: name for ours, name in stored.items() if ours is not None}
    skipped = [name for name in theirs if rename(name) is None]
    if skipped:
        modules = Counter(".".join(name.split(".")[:2]) for name in skipped)
        listed = ", ".join(f"{module} ({count} tensors)" for module, count in modules.items())
        log.warning("%s: the text model alone is read, not %s", source, listed)
    shapes = {ours: theirs.shapes[name] for ours, name in names.items()}
    return Weights(shapes, lambda ours: theirs[names[ours]])


def rename(name: str) -> str | None:
    """Return a tensor's name in a folder of the text model; None if it is no part of it."""
    if name.startswith(KEPT):
        return name
    for module in MODULES:
        if name.startswith(module):
            rest = name.removeprefix(module)
            named = rest.startswith((*KEPT, "model.", "backbone."))
            return rest if named else f"model.{rest}"
    return None
