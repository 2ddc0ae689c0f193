"""A hardware file for tests of the planner."""

from __future__ import annotations

import json
from pathlib import Path


def cpu_hardware(folder: Path) -> str:
    """Write figures of a CPU with rates for plain torch; return the file."""
    row = {"source": "here"}
    file = folder / "cpu.yaml"
    directions = ("forward", "backward")
    figures = {
        "name": "cpu",
        "devices_per_node": 2,
        "sources": {"here": {"kind": "measured", "date": "2026-11-22", "text": "a test"}},
        "device": {"name": "cpu", "kind": "cpu", "memory": 1 << 30, **row},
        "reserved": {"bytes": 1, **row},
        "matmul": [{"m": 64, "k": 64, "n": 64, "precision": "fp32", "rate": 1e10, **row}],
        "memory": [{"bytes": 1 << 20, "rate": 1e10, **row}],
        "attention": [
            {"head_width": 18, "heads": 2, "length": 16, "precision": "fp32", "rate": 1e9,
             "direction": direction, **row}
            for direction in directions
        ],
        "links": {"node": {"bandwidth": 1e9, "latency": 1e-5, **row}},
    }  # fmt: skip
    file.write_text(json.dumps(figures))
    return str(file)
