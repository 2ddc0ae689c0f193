"""Trace chosen steps with torch's profiler: `--profile 10:15`.

Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) open the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ...console.log import get_logger

log = get_logger(__name__)


class Profiler:
    """Writes one trace file per rank; `begin` is called at the start of each step."""

    def __init__(self, folder: Path, steps: range, rank: int) -> None:
        self.file = folder / f"steps-{steps.start}-{steps.stop}.rank-{rank}.json.gz"
        self.steps = steps
        self.running: Any = None

    def begin(self, step: int) -> None:
        if step in self.steps and self.running is None and not self.file.exists():
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self.running = profile(activities=activities, record_shapes=True)
            self.running.start()
        elif step >= self.steps.stop:
            self.close()

    def close(self) -> None:
        """Write the trace; also if the run ends within the traced steps."""
        if self.running is None:
            return
        running, self.running = self.running, None
        running.stop()
        self.file.parent.mkdir(exist_ok=True)
        partial = self.file.with_name(f".{self.file.name}")  # torch compresses by the .gz ending
        running.export_chrome_trace(str(partial))
        partial.rename(self.file)
        log.info("the trace of steps %d:%d is in %s", self.steps.start, self.steps.stop, self.file)
