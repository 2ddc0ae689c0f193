"""Programs that a step launches on a rank of two, on a fake GPU, beside those that are listed.

python two_ranks.py RANK PORT prints both for each case, as JSON.

Host tensors travel by gloo, tensors of the device nowhere. Experts get equally many rows.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)

from benchmarks._fake_gpu import FakeGpu, fake_gpu
from benchmarks._synthetic_run import train
from headrace.models.accounting.count import build_meta
from headrace.models.accounting.shape import Shape
from headrace.models.accounting.state import Degrees
from headrace.models.compilation import launches, worker
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.transforms.fp8 import quantize
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.objective import Objective
from headrace.trainer.engines.optimizers.adamw import AdamWConfig
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.groups import create_groups

TOKENS = 1024
DOCUMENTS = ([0, 100, 101, 640, TOKENS], [0, TOKENS])
CASES = {
    "hybrid, fp8, cp 2": ("tiny-hybrid", "fp8", {"cp": 2}),
    "experts, bf16, cp 2, ep 2": ("tiny-moe", "bf16", {"cp": 2, "ep": 2}),
    "transformer, fp8, tp 2": ("tiny-transformer", "fp8", {"tp": 2}),
}


def compare(model: str, name: str, degrees: dict[str, int]) -> dict[str, Any]:
    config, precision = load_model_config(model), PRECISIONS[name]
    if precision.fp8 is not None:
        precision = replace(precision, fp8=replace(precision.fp8, smallest=16))
    layout = LayoutConfig(**degrees)
    shape = Shape(
        rows=1,
        seq_len=TOKENS,
        precision=precision,
        device="cuda",
        degrees=Degrees(tp=layout.tp, cp=layout.cp, ep=layout.ep),
    )
    recorder = launches.LaunchRecorder()
    launch, read = FakeGpu.program, FakeGpu._read

    def record(gpu: FakeGpu, program: Any, *arguments: Any, **options: Any) -> None:
        named = tuple((name, launches._describe(value)) for name, value in options.items())
        values = tuple(map(launches._describe, arguments))
        recorder.launches[launches.Launch(program, values, named)] = None
        launch(gpu, program, *arguments, **options)

    def balance(gpu: FakeGpu, operation: Any, *arguments: Any) -> Any:
        answer = read(gpu, operation, *arguments)
        if operation.name() == "aten::_to_copy" and getattr(answer, "ndim", 0) == 3:
            answer.fill_(TOKENS // layout.cp // answer[0].numel())  # rows that ranks exchange
        return answer

    with (
        mock.patch.object(FakeGpu, "program", record),
        mock.patch.object(FakeGpu, "_read", balance),
    ):
        for boundaries in DOCUMENTS:
            with fake_gpu() as gpu:
                parallel = create_groups(layout, "cuda", timedelta(minutes=1))
                built = quantize(build_meta(config), precision.fp8)
                built.shard(parallel.axes)
                engine = Fsdp2Config().build(Objective(built), AdamWConfig(), precision, parallel)
                gpu.trains = True
                train(
                    engine,
                    parallel,
                    config.vocab_size,
                    steps=1,
                    tokens=TOKENS // layout.cp,
                    boundaries=lambda row, ends=boundaries: ends,  # type: ignore[misc]
                )
    listed, unknown = launches.list_launches(config, [shape])
    launched_programs, listed_programs = (
        sorted([program.entry, program.name] for program in worker.list_programs(list(of), 90))
        for of in (recorder.launches, listed)
    )
    return {"launched": launched_programs, "listed": listed_programs, "unknown": unknown}


def main() -> None:
    rank, port = map(int, sys.argv[1:])
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("cpu:gloo,cuda:fake", store=store, rank=rank, world_size=2)
    print(json.dumps({name: compare(*case) for name, case in CASES.items()}))
    dist.barrier()  # the store is rank 0's


if __name__ == "__main__":
    main()
