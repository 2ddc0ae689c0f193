"""Cost of a checkpoint and of a restart, for a run of about 50M parameters.

    python -m benchmarks.trainer_checkpoint

A run on random rows, 1,024 tokens per step, saves in the background; its metrics hold the time of
each step. The wait of a save is compared with a step, the steps after a save with the other steps,
and the time from a restart to the end of its first step, without imports, with a limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from headrace.trainer.cluster.ranks import INTERRUPTED

RESTART_LIMIT = 30.0
EVERY, STEPS, STOP = 4, 11, 10
MODEL = """
vocab_size: 8192
width: 640
pattern: "[se, mamba, attention] * 3"
mlp: glu
operators:
  se: {kind: hyena-se, groups: 64}
  mamba: {kind: mamba2, state_size: 64, head_dim: 64}
  attention: {kind: attention, heads: 8}
  glu: {kind: glu, hidden: 1536}
"""


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, out = Path(folder) / "model.yaml", Path(folder) / "run"
        model.write_text(MODEL)
        words = [f"synthetic.steps={STEPS}", "synthetic.seq_len=512", "synthetic.batch_rows=2"]
        command = [
            *(sys.executable, "-m", "headrace.trainer.cli", "run"),
            *("--model", str(model), "--out", str(out), f"checkpoints.every={EVERY}", *words),
        ]
        for part, code in (["--stop-after", str(STOP)], INTERRUPTED), ([], 0):
            done = subprocess.run([*command, *part], capture_output=True, text=True, check=False)
            if done.returncode != code:
                raise SystemExit(done.stderr)
        events, metrics = lines(out / "events.jsonl"), lines(out / "metrics.jsonl")

    saves = [event for event in events if event["event"] == "checkpoint"]
    saved = {event["step"] for event in saves}
    warm = [entry for entry in metrics[:STOP] if entry["step"] > 1]
    after = median(entry["seconds"] for entry in warm if entry["step"] in saved)
    quiet = median(entry["seconds"] for entry in warm if entry["step"] - 1 not in saved
                   and entry["step"] not in saved)  # fmt: skip
    blocked = median(event["blocked"] for event in saves)
    (resumed,) = [event for event in events if event["event"] == "resume"]
    (first,) = [entry["seconds"] for entry in metrics if entry["step"] == resumed["step"]]
    restart = resumed["seconds"] + first
    print(
        f"background save: the step waits {blocked:.3f} s, {blocked / quiet:.2f} of a step of "
        f"{quiet:.2f} s (limit 1)"
    )
    print(f"a step during a save: {after:.2f} s, {after / quiet:.2f} of other steps")
    print(
        f"restart to the end of the first step, without imports: {restart:.1f} s, "
        f"{restart / RESTART_LIMIT:.2f} of the limit of {RESTART_LIMIT:.0f} s"
    )


if __name__ == "__main__":
    main()
