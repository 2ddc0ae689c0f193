"""Programs of all parts, compiled by this machine's Triton for a GPU that it need not have.

    python -m benchmarks.long.gpu_suite.programs --arch 90 --cache CACHE --out FILE

CACHE is Triton's own: what it has is not compiled again. FILE holds a program for each name of
`carried.name_program`: binary, what its launch needs, and the C launcher's types.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tarfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.long.gpu_suite.carried import OPTIONS, name_entry, name_program

LAUNCH = (
    *("name", "shared", "num_warps", "num_ctas", "tmem_size", "tensordesc_meta"),
    *("global_scratch_size", "global_scratch_align"),
    *("profile_scratch_size", "profile_scratch_align", "maxnreg", "num_stages"),
)
"""What a launch reads of a program's metadata; the rest are options of the compiler."""
SIDE = 1 << 17, 4096
"""Rows and width of the timed kernels (`_kernel_measures.py`)."""


def list_suite() -> Iterator[tuple[str, list[Any], list[str]]]:
    """Yield the launches of each part, with what could not be listed."""
    from benchmarks._gpu_models import MODELS
    from benchmarks.long._gpu_lines import Sizes, lines
    from benchmarks.long.gpu_suite.runs import HYBRID, RUNS
    from headrace.models.accounting.shape import Shape
    from headrace.models.attestation.calls import model_calls
    from headrace.models.attestation.plan import AttestationPlan
    from headrace.models.compilation.launches import list_launches
    from headrace.models.config.options.precision import PRECISIONS
    from headrace.models.kernels import NEXT, choice

    hybrid = MODELS["hybrid-1b"]
    yield ("attestation", *list_launches(hybrid, [], plan=AttestationPlan()))
    plan = AttestationPlan(kernels=NEXT, next_programs=NEXT)
    with choice.next_programs(NEXT):
        yield ("attestation of next programs", *list_launches(hybrid, [], plan=plan))
    for run in (*RUNS, HYBRID):
        config = run.load_model()
        precision = run.load_precision()
        shapes = [
            Shape(rows=run.tokens // length, seq_len=length, precision=precision, device="cuda")
            for length in run.lengths
        ]
        calls: list[Any] = []
        for shape in shapes:
            calls += [call for call in model_calls(config, shape) if call not in calls]
        plan = AttestationPlan(calls=calls, longest=max(run.lengths))
        yield (f"trainer run, {run.name}", *list_launches(config, shapes, plan=plan))
    sizes = Sizes(dry=False)
    steps = {(line.model, line.rows, line.tokens, line.precision) for line in lines()}
    for name, rows, tokens, precision in sorted(steps):
        shape = Shape(rows=rows, seq_len=tokens, precision=PRECISIONS[precision], device="cuda")
        label = f"{name}, {rows} x {tokens} tokens, {precision}"
        yield (label, *list_launches(sizes.model(name), [shape]))
    smoke = Shape(rows=1, seq_len=sizes.smoke_tokens, precision=PRECISIONS["bf16"], device="cuda")
    yield ("smoke", *list_launches(hybrid, [smoke]))
    yield ("times", *list_times())
    yield ("limits", *list_limits())


def list_times() -> tuple[list[Any], list[str]]:
    """Return the launches of the timed kernels."""
    import torch

    from benchmarks.long._kernel_peers import Size, timed
    from headrace.models.accounting.fake.trace import fake_tensors
    from headrace.models.compilation.launches import LaunchRecorder
    from headrace.models.kernels import NEXT, choice

    recorder, problems = LaunchRecorder(), []
    timed_kernels = timed(Size("cpu", torch.bfloat16, *SIDE))
    following = [(name, make) for name, make in timed_kernels.items() if name.split()[0] in NEXT]
    for number, (name, make) in enumerate((*timed_kernels.items(), *following)):
        next_programs = NEXT if number >= len(timed_kernels) else ()
        try:
            with (
                fake_tensors(torch.float32),
                choice.as_on_gpu(),
                choice.next_programs(next_programs),
            ):
                task = make()
                with recorder.recording():
                    outputs = task.ours(**task.inputs)
                    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                    leaves = [x for x in task.inputs.values() if x.requires_grad]
                    torch.autograd.grad(outputs, leaves, [torch.empty_like(y) for y in outputs])
        except Exception as error:  # compiled on the device
            problems.append(f"{name}: {type(error).__name__}: {error}"[:200])
    return list(recorder.launches), problems


def list_limits() -> tuple[list[Any], list[str]]:
    """Return the launches of the part `limits` (`_kernel_limits.py`), and of memcheck."""
    import torch

    from benchmarks.long._kernel_limits import FAR, ODD, ROWS, far_shape
    from benchmarks.long.gpu_suite.parts import MEMCHECK
    from headrace.models.accounting.fake.trace import fake_tensors
    from headrace.models.attestation.cases import all_cases
    from headrace.models.attestation.cases.case import InputShape
    from headrace.models.attestation.cases.compare import add_gaps, evaluate
    from headrace.models.compilation.launches import FakeDraw, LaunchRecorder
    from headrace.models.kernels import KERNELS

    recorder, problems = LaunchRecorder(), []
    draw = FakeDraw(torch.bfloat16, "cpu", 1)
    for kernel in KERNELS:
        cases = [case for case in all_cases() if case.kernel == kernel]
        plain = torch.Tensor.clone
        tries = [(cases[0], ODD, add_gaps), (cases[0], ODD, plain)]
        tries.append((cases[0], InputShape(1, 1, ODD.width), plain))
        tries.append((cases[0], InputShape(ODD.rows, ODD.length + 13, ODD.width), plain))
        if kernel in MEMCHECK:
            tries += [(case, case.tiny, plain) for case in cases]
        try:
            with fake_tensors(torch.float32):
                tries.append((cases[0], replace(far_shape(cases[0], draw), rows=ROWS), plain))
        except Exception as error:
            problems.append(f"{kernel}, {FAR}: {type(error).__name__}: {error}"[:200])
        for case, shape, prepare in tries:
            try:
                with fake_tensors(torch.float32), recorder.recording():
                    evaluate(case.run, case.make(draw, shape), draw, prepare)
            except Exception as error:  # compiled on the device
                problems.append(f"{kernel}, {shape}: {type(error).__name__}: {error}"[:200])
    return list(recorder.launches), problems


def pack(programs: Sequence[Any], cache: Path, out: Path) -> int:
    """Write the programs into an archive. Return their number."""
    packed = {}
    for program in programs:
        folder = cache / program.entry
        binary = folder / f"{program.name}.cubin"
        if not binary.exists():  # Triton could not compile it
            continue
        metadata = json.loads((folder / f"{program.name}.json").read_text())
        source = program.source
        text = name_program(source, program.settings)
        description = {
            "metadata": {key: metadata[key] for key in LAUNCH if key in metadata},
            "options": {option: getattr(program.settings, option) for option in OPTIONS},
            "signature": source.signature,
        }
        packed[name_entry(text)] = (json.dumps(description).encode(), binary.read_bytes())
    with tarfile.open(out, "w:xz", preset=6) as archive:
        for entry in sorted(packed):
            for ending, data in zip((".json", ".cubin"), packed[entry], strict=True):
                member = tarfile.TarInfo(f"{entry}{ending}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return len(packed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--names", type=Path, help="write the names alone, and compile nothing")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["TRITON_CACHE_DIR"] = str(options.cache.resolve())
    import torch

    from headrace.models.compilation.worker import compile_all, list_programs

    torch.set_num_threads(1)  # forks must have no other threads
    began, launches = time.monotonic(), {}
    for part, of_part, unknown in list_suite():
        launches.update(dict.fromkeys(of_part))
        print(f"{part}: {len(of_part)} launches, {time.monotonic() - began:.0f} s", flush=True)
        for reason in unknown:
            print(f"  not known before the launch: {reason}", flush=True)
    programs = list_programs(list(launches), options.arch)
    if options.names:
        names = sorted({name_program(program.source, program.settings) for program in programs})
        options.names.write_text("\n".join(names))
        return 0
    missing = [
        program
        for program in programs
        if not (options.cache / program.entry / f"{program.name}.cubin").exists()
    ]
    print(f"{len(programs)} programs, {len(missing)} to compile", flush=True)
    failed = seconds = 0.0
    for count, (number, taken, problem) in enumerate(
        compile_all(missing, options.arch, os.cpu_count() or 1), 1
    ):
        seconds += taken
        if problem is not None:
            failed += 1
            print(f"  {missing[number].name}: {problem}", flush=True)
        if count % 100 == 0 or count == len(missing):
            print(f"compiled {count} of {len(missing)}, {seconds:.0f} CPU s", flush=True)
    count = pack(programs, options.cache, options.out)
    print(f"{count} programs in {options.out}, {options.out.stat().st_size / 2**20:.1f} MiB")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
