"""Trace chosen steps, with a file per rank: `--profile 10:15`, `--memory-snapshot 12`.

Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) open the profiler's trace, which includes
memory in use; https://pytorch.org/memory_viz opens the snapshot. Beside a trace stands a table of
the operations that spend the device's time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ....console.log import get_logger
from .attribution import attribute, read_trace
from .hook import Hook

log = get_logger(__name__)


class Profiler(Hook):
    """Writes a trace with torch's profiler (operations, shapes, memory), and its table."""

    def __init__(self, folder: Path, steps: range, rank: int) -> None:
        self.file = folder / f"steps-{steps.start}-{steps.stop}.rank-{rank}.json.gz"
        self.table = self.file.with_name(self.file.name.replace(".json.gz", ".txt"))
        self.steps, self.rank = steps, rank
        self.traced = 0
        """Steps that began in the trace."""
        self.running: Any = None

    def step_begins(self, step: int) -> None:
        if step in self.steps and self.running is None and not self.file.exists():
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self.running = profile(activities=activities, record_shapes=True, profile_memory=True)
            self.running.start()
        elif step >= self.steps.stop:
            self.close()
        self.traced += self.running is not None

    def close(self) -> None:
        if self.running is None:
            return
        running, self.running = self.running, None
        running.stop()
        self.file.parent.mkdir(exist_ok=True)
        partial = self.file.with_name(f".{self.file.name}")  # torch compresses by the .gz ending
        running.export_chrome_trace(str(partial))
        self._write_table(partial)
        partial.rename(self.file)
        log.info("the trace of steps %d:%d is in %s", self.steps.start, self.steps.stop, self.file)

    def _write_table(self, trace: Path) -> None:
        """Write the table of a trace, and log it on the first rank. The trace gets its name
        afterwards: there is none without a table."""
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        table = attribute(read_trace(trace), self.traced).render()
        heading = (
            f"device time of {self.traced} steps from step {self.steps.start}, rank {self.rank}, "
            f"{device} (while the host traces, it launches more slowly)"
        )
        self.table.write_text(f"{heading}\n{table}\n", encoding="utf-8")
        if self.rank == 0:
            log.info("%s\n%s", heading, table)


class MemorySnapshot(Hook):
    """Writes the CUDA allocator's history in a step: allocations with stacks, and the state of the
    memory at the end of the step, or at a failure within it."""

    def __init__(self, folder: Path, step: int, rank: int) -> None:
        self.file = folder / f"memory-{step}.rank-{rank}.pickle"
        self.step = step
        self.running = False

    def step_begins(self, step: int) -> None:
        if step == self.step and not self.running and not self.file.exists():
            torch.cuda.memory._record_memory_history()
            self.running = True
        elif step > self.step:
            self.close()

    def close(self) -> None:
        if not self.running:
            return
        self.running = False
        self.file.parent.mkdir(exist_ok=True)
        partial = self.file.with_name(f".{self.file.name}")
        torch.cuda.memory._dump_snapshot(str(partial))
        torch.cuda.memory._record_memory_history(enabled=None)
        partial.rename(self.file)
        log.info("the memory of step %d is in %s", self.step, self.file)
