"""A trace of chosen steps, by torch's profiler: `--profile 10:15`.

Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) show the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ...console.log import get_logger

log = get_logger(__name__)


class Profiler:
    """Told when each step begins; writes one file for each process."""

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
        """Write what was traced, if the run ends within the steps as well."""
        if self.running is None:
            return
        running, self.running = self.running, None
        running.stop()
        self.file.parent.mkdir(exist_ok=True)
        half = self.file.with_name(f".{self.file.name}")  # it ends with .gz as well
        running.export_chrome_trace(str(half))
        half.rename(self.file)
        log.info("the trace of steps %d:%d is in %s", self.steps.start, self.steps.stop, self.file)
