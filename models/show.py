"""`models show`: the layers as a stripe, parameters and FLOPs by part."""

from __future__ import annotations

from typing import Any

from .config import ModelConfig
from .count import (
    build_meta,
    forward_flops_per_token,
    parameters,
    parameters_by_part,
    training_flops_per_token,
)


def describe(config: ModelConfig, seq_len: int) -> dict[str, Any]:
    model = build_meta(config)
    return {
        "layers": [str(layer) for layer in config.layers],
        "parameters": parameters(model),
        "parameters_by_part": parameters_by_part(model),
        "seq_len": seq_len,
        "forward_flops_per_token": forward_flops_per_token(config, seq_len),
        "training_flops_per_token": training_flops_per_token(config, seq_len),
    }


def render(summary: dict[str, Any]) -> str:
    total = summary["parameters"]
    flops = summary["forward_flops_per_token"]
    lines = [
        " ".join(summary["layers"]),
        "",
        f"{'part':<14}{'parameters':>16}{'share':>8}{'FLOPs':>12}",
    ]
    names = dict.fromkeys([*summary["parameters_by_part"], *flops])
    for name in names:
        count = summary["parameters_by_part"].get(name, 0)
        lines.append(f"{name:<14}{count:>16,}{count / total:>8.1%}{flops.get(name, 0):>12.4g}")
    lines.append(f"{'all':<14}{total:>16,}{'':>8}{sum(flops.values()):>12.4g}")
    lines.append("")
    lines.append(f"FLOPs are of the forward pass, for each token of {summary['seq_len']:,}.")
    return "\n".join(lines)
