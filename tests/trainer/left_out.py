"""One process of a test: each engine is given a step that must leave no trace.

Run by test_guard.py, never imported: `python left_out.py FOLDER`.
"""

from __future__ import annotations

import json
import math
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from layouts import LR, gathered, global_batch, make_engine, train

from headrace.models.documents import Documents
from headrace.trainer import group
from headrace.trainer.layout import LayoutConfig, join

LAYOUTS = [f"deepspeed-{stage}-fp32" for stage in range(4)]
LAYOUTS += ["fsdp2-0-fp32", "deepspeed-1-bf16", "deepspeed-3-bf16"]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    group.initialise("gloo", timedelta(seconds=120))
    parallel = join(LayoutConfig(), "cpu", timedelta(seconds=120))
    found = {}
    for layout in LAYOUTS:
        never = train(make_engine(layout, parallel), parallel, 0, 2)
        engine = make_engine(layout, parallel)
        train(engine, parallel, 0, 1)
        before, updates = gathered(engine, parallel), engine.updates
        tokens, targets, weights, _ = (part[1:2] for part in global_batch(7))
        documents = Documents.from_cu_seqlens(torch.tensor([0, tokens.numel()]), tokens.shape)
        for last, factor in ((False, 1.0), (True, math.nan)):
            sums = engine(tokens, targets, weights, documents)
            engine.backward(sums.total * factor, last=last)
        applied = engine.update(LR).applied
        after = gathered(engine, parallel)
        same = all(torch.equal(before[key], after[key]) for key in before)
        goes_on = train(engine, parallel, 1, 1) == never[1:]
        found[layout] = [applied, same, engine.updates == updates + 1, goes_on]
    if parallel.first:
        (folder / "result.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
