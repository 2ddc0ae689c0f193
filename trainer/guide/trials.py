"""Short trials of a start's models: real steps on its dataset, by the ordinary commands."""

from __future__ import annotations

import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...console.machine import cores, free_memory
from ...console.progress import format_bytes, format_count, format_number
from ...dataplane.runlog import writer as lines
from ..cluster.ranks import INTERRUPTED
from ..folders.folder import RunFolder
from ..layout.devices import count_gpus
from .shell import Shell, note
from .sizing import MICRO_BATCHES, Candidate, Layout, Trial

if TYPE_CHECKING:
    from ..run.job import Job

STEPS, WARM_UP = 5, 2
"""Steps of a trial; the first ones do not count."""
MIXTURE_STEPS = 32
"""Steps of a trial's mixture: both of its phases need one."""
FAILED = 1
MAX_PROCESSES = 8
"""Ranks on a CPU."""
MEMORY_SHARE = 0.85
"""Share of the free memory that a rank's counted bytes may take."""
CHECKPOINTS = 3
"""Checkpoints on disk: two that are kept, and one that is written."""
UNSAVED = 10**6
"""Steps between checkpoints, of a run that saves none."""


ONE_RANK = Layout(1, 1024, "none")
"""Layout for counting parameters, which depend on none."""


@dataclass
class Trials:
    """Measures candidates, each with the layout that was fastest for the first."""

    shell: Shell
    folder: Path
    dataset: str
    seq_len: int
    device: Literal["cpu", "cuda"]
    processes: int | None = None
    """Ranks of the fastest layout; None before the first trial."""
    refused: str = ""
    """Why the last candidate does not fit this machine."""

    def measure(self, candidate: Candidate) -> Trial | None:
        """Return a candidate's trial, or None if it does not fit this machine."""
        fastest: Trial | None = None
        for processes in self._process_counts():
            trial = self._measure(candidate, processes)
            if trial is None or (fastest and trial.tokens_per_second < fastest.tokens_per_second):
                break
            fastest = trial
        if fastest is not None:
            self.processes = fastest.layout.processes
        return fastest

    def _process_counts(self) -> list[int]:
        if self.processes is not None:
            return [self.processes]
        if self.device == "cuda":
            return [count_gpus()]
        return [2**n for n in range(10) if 2**n <= min(cores(), MAX_PROCESSES)]

    def _measure(self, candidate: Candidate, processes: int) -> Trial | None:
        for micro_batch, recompute in MICRO_BATCHES[self.device]:
            layout = Layout(processes, max(micro_batch, self.seq_len), recompute)
            if self._fits(candidate, layout):
                break
        else:
            return None
        batch = layout.micro_batch * processes
        run = self._run(candidate, layout, batch)
        if run is None:
            return None
        seconds = [line["seconds"] for line in list(lines.read(run.metrics))[WARM_UP:STEPS]]
        speed = batch / statistics.median(seconds)
        note(
            f"{candidate.name} on {format_count(processes, 'ranks')}: "
            f"{format_number(speed)} tokens a second"
        )
        return Trial(layout, speed)

    def _run(self, candidate: Candidate, layout: Layout, batch: int) -> RunFolder | None:
        """Run a trial that an earlier start has not finished; return None if it failed."""
        name = f"{candidate.name}-{layout.processes}x{layout.micro_batch}-{layout.recompute}"
        run = RunFolder(self.folder / name)
        if len(list(lines.read(run.metrics))) >= STEPS:
            return run
        mixture = self.folder / f"mixture-{batch}.yaml"
        sizes = ["--seq-len", str(self.seq_len), "--batch", str(batch)]
        sizes += ["--tokens", str(batch * MIXTURE_STEPS), "--out", str(mixture), "--force"]
        if not mixture.exists():
            self.shell.run("mixtures", "new", self.dataset, *sizes)
        code = self.shell.run(
            *("trainer", "run", "--mixture", str(mixture), *candidate.words, *layout.words),
            *("--out", str(run.root), "--stop-after", str(STEPS)),
            *(f"checkpoints.every={UNSAVED}", "watch.tensorboard=false"),
            expected=(INTERRUPTED, FAILED),
        )
        shutil.rmtree(run.checkpoints, ignore_errors=True)
        self.refused = "its trial failed, as printed above"
        return run if code == INTERRUPTED else None

    def _fits(self, candidate: Candidate, layout: Layout) -> bool:
        """Return True if the counted bytes of a rank and the checkpoints fit this machine."""
        from ...models.accounting.state import device_bytes
        from ..accounting import memory

        job = self.resolve(candidate, layout)
        needed = max(device_bytes(moment.parts) for moment in memory.timelines(job, 0))
        free, saved = (
            self._free_memory(layout.processes),
            CHECKPOINTS * memory.checkpoint_bytes(job),
        )
        disk = shutil.disk_usage(self.folder.parent).free
        if saved > disk:
            self.refused = (
                f"its checkpoints need {format_bytes(saved)} of disk, and {self.folder.parent} has "
                f"{format_bytes(disk)} left"
            )
            return False
        self.refused = (
            f"a rank needs {format_bytes(needed)} of memory, and has {format_bytes(free)}"
        )
        return needed <= free

    def _free_memory(self, processes: int) -> int:
        if self.device == "cpu":
            return int(MEMORY_SHARE * free_memory() / processes)
        from ..accounting.exceeded import memory_limit
        from ..layout.devices import local_device

        return int(MEMORY_SHARE * memory_limit(local_device("cuda")))

    def resolve(self, candidate: Candidate, layout: Layout = ONE_RANK) -> Job:
        """Resolve a candidate's run, with synthetic rows like the dataset's."""
        from ..run.request import RunRequest
        from ..run.resolve import resolve

        rows = (
            "synthetic.steps=1",
            f"synthetic.seq_len={self.seq_len}",
            f"synthetic.batch_rows={layout.processes * max(MICRO_BATCHES[self.device])[0]}",
            f"processes={layout.processes}",
        )
        overrides = (*candidate.overrides, *layout.overrides, *rows)
        return resolve(
            RunRequest(
                model=candidate.model,
                out=str(self.folder / "resolved"),
                overrides=overrides,
                dry_run=True,
            )
        )
