"""Published training runs, and what their programs do (published_runs.yaml has their sources)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from headrace.console import config as reader
from headrace.models.config.config import ModelConfig
from headrace.models.config.options.recompute import OPERATIONS, Rule, Selective

FOLDER = Path(__file__).parent
RUNS, MODELS = FOLDER / "published_runs.yaml", FOLDER / "published_models.yaml"
UNSEEN = FOLDER / "unseen_runs.yaml"
"""Runs that no figure is fitted to."""
FAMILIES = {
    "A100": "A100",
    "A100-40": "A100",
    "H100": "H100",
    "B200": "Blackwell",
    "B300": "Blackwell",
    "GB200": "Blackwell",
    "GB300": "Blackwell",
}
"""Devices that attain one part of their rates, by device."""
LENGTH = 4096
"""Tokens of a row where the file has none."""
RECOMPUTED = Selective(save=("attention", "scan", "convolution"))
"""Recomputes products, and keeps attention."""
ELEMENTWISE = Selective(save=tuple(OPERATIONS))
"""Recomputes norms, activations and the like alone."""
RULES: Mapping[str, tuple[Rule, ...]] = {
    "none": ("none",),
    "selective": ("none",),  # and attention's scores: _published_layouts.py
    "block": ("block",),
    "2 of 5 blocks (inferred from HFU/MFU)": ("none", "block", "none", "block", "none"),
    "per-op selective, about half": (RECOMPUTED, ELEMENTWISE),
    "norms and activations": (ELEMENTWISE,),
    "norms and experts": (RECOMPUTED,),
}


@dataclass(frozen=True, eq=False)
class Run:
    """A published run."""

    group: str
    name: str
    shape: Mapping[str, Any]
    layout: Mapping[str, Any]
    recompute: str
    unit: str
    value: float
    kind: str
    """dense, fp8, context, experts or hybrids."""
    first: float | None = None
    """Error when an unseen run was first predicted."""

    def get(self, name: str, default: Any = 1) -> Any:
        return self.layout.get(name, default)

    @property
    def device(self) -> str:
        words = f"{self.group} {self.name}".replace(",", " ").split()
        return next(device for device in FAMILIES if device in words)

    @property
    def family(self) -> str:
        return FAMILIES[self.device]

    @property
    def engine(self) -> str:
        """What computes products in FP8 and rings: Transformer Engine, XLA or torch."""
        if "MaxText" in self.group:
            return "xla"
        is_nvidia = self.group.startswith(("Megatron", "NeMo", "NVIDIA"))
        return "transformer" if is_nvidia or "llm-foundry" in self.group else "torch"

    @property
    def length(self) -> int:
        return int(self.get("seq", LENGTH))

    @property
    def data_ranks(self) -> int:
        return int(self.get("world") // (self.get("tp") * self.get("cp") * self.get("pp")))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return int(self.data_ranks * self.get("rows") * self.get("micro") * self.length)

    @cached_property
    def model(self) -> ModelConfig:
        name = self.shape.get("name")
        data = model_data(self.shape) if name is None else load_models()[name]
        return reader.build(ModelConfig, data, source=str(MODELS))

    @property
    def seconds(self) -> float:
        """Published seconds of a step."""
        world = self.get("world")
        if self.unit == "tokens/s/GPU":
            return self.tokens / (self.value * world)
        if self.unit == "model TFLOP/s/GPU":
            return self.model_flops * self.tokens / (self.value * 1e12 * world)
        return self.value

    @property
    def layer_products(self) -> float:
        """Operations of a layer's matrix products for a token, in a forward pass."""
        m = self.shape
        size = m["width"] // m["heads"]
        attention = m["width"] * (2 * m["width"] + 2 * m["kv_heads"] * size)
        return 2.0 * (attention + (3 if m["gated_mlp"] else 2) * m["width"] * m["hidden"])

    @property
    def layer_attention(self) -> float:
        """Operations of causal attention for a token."""
        return 2.0 * self.length * self.shape["width"]

    @property
    def head(self) -> float:
        return 2.0 * self.shape["width"] * self.shape["vocabulary"]

    @property
    def model_flops(self) -> float:
        """Operations for a token that publications count."""
        if "name" in self.shape:
            return self.shape["model_tflops"] * 1e12 / self.value
        attention = 2 * self.get("causal", 0.5) * self.layer_attention
        return 3 * (self.shape["layers"] * (self.layer_products + attention) + self.head)

    @property
    def hardware_flops(self) -> float:
        """Operations for a token with those that are repeated."""
        repeated = {
            "none": (0.0, 0.0),
            "block": (1.0, 1.0),
            "selective": (0.0, 1.0),
            "2 of 5 blocks (inferred from HFU/MFU)": (0.4, 0.4),
            "per-op selective, about half": (0.5, 0.0),
        }
        if "name" in self.shape:
            return self.model_flops
        products, attention = repeated[self.recompute]
        layer = (3 + products) * self.layer_products + (3.5 + attention) * self.layer_attention
        return float(self.shape["layers"] * layer + 3 * self.head)


@cache
def runs(path: Path = RUNS) -> tuple[Run, ...]:
    published = []
    for row in load_rows(path):
        if "refused" in row:
            continue
        renamed = {"source": "group", "run": "name", "model": "shape", "class": "kind"}
        row.pop("memory_gib", None)
        published.append(Run(**{renamed.get(key, key): value for key, value in row.items()}))
    return tuple(published)


def load_rows(path: Path = RUNS) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = yaml.safe_load(path.read_text())
    return rows


@cache
def load_models() -> Mapping[str, Any]:
    models: Mapping[str, Any] = yaml.safe_load(MODELS.read_text())
    return models


def model_data(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a dense transformer."""
    attention = {name: shape[name] for name in ("heads", "kv_heads")}
    return {
        "vocab_size": shape["vocabulary"],
        "width": shape["width"],
        "pattern": f"[attention] * {shape['layers']}",
        "mlp": "mlp",
        "operators": {
            "attention": {"kind": "attention", **attention},
            "mlp": {"kind": "glu" if shape["gated_mlp"] else "mlp", "hidden": shape["hidden"]},
        },
        "tie_embeddings": shape["tied"],
    }
