"""A process that lists the programs of a model, and compiles them in forks of itself.

stdin has a pickled request. Each line of stdout is an event: a `count` of programs, one that is
`compiled`, the `result`. Importing torch and Triton takes longer than to compile most programs, so
it happens once, before the forks.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from typing import Any
from unittest import mock

from ..accounting.shape import Shape
from ..attestation.plan import AttestationPlan
from ..config.config import ModelConfig
from ..kernels import choice
from . import cache, tools
from .launches import Launch, list_launches

WARP = 32
"""Threads of a warp of NVIDIA's."""


@dataclass(frozen=True, kw_only=True)
class Request:
    config: ModelConfig
    shapes: Sequence[Shape]
    """Micro-batches: packed and not, each is a step of the model."""
    arch: int
    """Compute capability, as in sm_90."""
    processes: int
    z_loss: float = 0.0
    next_programs: Sequence[str] = ()
    """Kernels whose next programs run."""
    plan: AttestationPlan | None = None
    """What is attested before the first step; None: nothing."""


@dataclass(kw_only=True)
class Compilation:
    """What was compiled."""

    cache: str
    """Folder of Triton's cache."""
    programs: int = 0
    """Programs of the model, with those that the cache had."""
    compiled: dict[str, float] = field(default_factory=dict)
    """CPU seconds of each program that was compiled, by name and entry."""
    damaged: Sequence[str] = ()
    """Programs whose entries were damaged."""
    list_damaged: bool = False
    version: str | None = None
    """Another version of Triton that wrote the cache."""
    unknown: Sequence[str] = ()
    """What could not be listed; a run compiles it when it is launched."""
    problems: dict[str, str] = field(default_factory=dict)
    """Programs that Triton cannot compile, and why."""
    tool: str | None = None
    """What Triton lacks to compile."""
    seconds: float = 0.0

    def remarks(self) -> list[str]:
        """Return sentences about the cache, and about programs that are not in it."""
        again = "compiled again"
        remarks = []
        if self.version is not None and self.compiled:
            remarks.append(f"Triton {self.version} wrote the cache in {self.cache}: {again}")
        if self.list_damaged:
            remarks.append(f"the list of the programs in {self.cache} was damaged: written again")
        if self.damaged:
            names = ", ".join(dict.fromkeys(self.damaged))
            remarks.append(
                f"{len(self.damaged)} of the programs in {self.cache} were damaged: {again} "
                f"({names})"
            )
        remarks += [f"Triton cannot compile {name}: {why}" for name, why in self.problems.items()]
        remarks += [f"not known before the step: {why}" for why in self.unknown]
        return remarks

    def __str__(self) -> str:
        if not self.compiled:
            return f"all {self.programs} programs are in {self.cache}"
        return (
            f"compiled {len(self.compiled)} of {self.programs} programs in {self.seconds:.1f}s "
            f"({sum(self.compiled.values()):.0f} CPU s) into {self.cache}"
        )


@dataclass(frozen=True)
class Program:
    """A program with what Triton compiles it for."""

    name: str
    entry: str
    """Name of its entry in the cache."""
    source: Any
    settings: Any
    """The backend's options, defaults included."""
    options: dict[str, Any]


class _Driver:
    """Names the GPU that is compiled for, which need not be there."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def list_programs(launches: Sequence[Launch], arch: int) -> list[Program]:
    """Return the programs of launches, each once, those of backward passes first: they take
    longest."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime import driver
    from triton.runtime.cache import _base32 as encode_name
    from triton.runtime.cache import get_cache_key
    from triton.runtime.jit import JITFunction

    target = GPUTarget("cuda", arch, WARP)
    backend, environment = make_backend(target), get_cache_invalidating_env_vars()
    driver.set_active(_Driver(target))
    programs: dict[str, Program] = {}

    def note(program: Any, key: Any, signature: Any, device: Any, *compiled_for: Any) -> None:
        constants, options, attributes, _ = compiled_for
        source = program.ASTSource(program, signature, constants, attributes)
        settings = backend.parse_options({**options.__dict__, **source.parse_options()})
        text = get_cache_key(source, backend, settings, environment)
        entry = encode_name(hashlib.sha256(text.encode()).hexdigest())
        programs[entry] = Program(program.fn.__name__, entry, source, settings, options.__dict__)

    with mock.patch.object(JITFunction, "_do_compile", note):
        for launch in launches:
            launch.program.run(*launch.arguments, grid=(1,), warmup=True, **dict(launch.options))
    return sorted(programs.values(), key=lambda program: "backward" not in program.name)


_PROGRAMS: list[Program] = []
"""Programs to compile, for the forks."""


def _compile(number: int, arch: int) -> tuple[int, float, str | None]:
    """Compile a program, in a fork. Return its number, the CPU seconds, and what failed."""
    import triton
    from triton.backends.compiler import GPUTarget

    program, began = _PROGRAMS[number], _cpu_seconds()
    problem = None
    try:
        triton.compile(program.source, GPUTarget("cuda", arch, WARP), program.options)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return number, _cpu_seconds() - began, problem


def _cpu_seconds() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def run(request: Request) -> Iterator[dict[str, Any]]:
    """Compile the programs that the cache lacks, and yield what happens."""
    import triton

    began = time.monotonic()
    with choice.next_programs(request.next_programs):
        launches, unknown = list_launches(
            request.config, request.shapes, request.z_loss, request.plan
        )
    if launches and (problem := tools.find_assembler_problem(request.arch)):
        # Its version is a part of each entry's name.
        yield {"result": asdict(Compilation(cache=str(cache.folder()), tool=problem))}
        return
    programs = list_programs(launches, request.arch)
    known = cache.ProgramCache.read(cache.folder())
    states = {program.entry: known.examine(program.entry, program.name) for program in programs}
    missing = [program for program in programs if states[program.entry] != "whole"]
    damaged = [program for program in programs if states[program.entry] == "damaged"]
    result = Compilation(
        cache=str(known.root),
        programs=len(programs),
        damaged=sorted(program.name for program in damaged),
        list_damaged=known.damaged,
        version=known.triton if known.triton not in (None, triton.__version__) else None,
        unknown=unknown,
    )
    yield {"count": len(missing)}
    for program in damaged:
        known.remove(program.entry)
    for number, seconds, problem in compile_all(missing, request.arch, request.processes):
        program = missing[number]
        configuration = f"{program.name} {program.entry[:8]}"
        result.compiled[configuration] = round(seconds, 2)
        if problem is not None:
            result.problems[configuration] = problem
        yield {"compiled": program.name}
    for program in missing:
        known.examine(program.entry, program.name)  # and note its digest
    known.write(triton.__version__)
    result.seconds = round(time.monotonic() - began, 1)
    yield {"result": asdict(result)}


def compile_all(
    programs: Sequence[Program], arch: int, processes: int
) -> Iterator[tuple[int, float, str | None]]:
    """Compile programs in forks, and yield the number, CPU seconds and problem of each."""
    if not programs:
        return
    _PROGRAMS[:] = programs
    processes = min(processes, len(programs))
    remaining = set(range(len(programs)))
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        futures = [pool.submit(_compile, number, arch) for number in range(len(programs))]
        try:
            for future in as_completed(futures):
                outcome = future.result()
                remaining.discard(outcome[0])
                yield outcome
        except BrokenProcessPool:  # the compiler crashed, and took the other forks with it
            for number in sorted(remaining):
                yield number, 0.0, "a process of the compiler has crashed"


def main() -> None:
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a compiler may write to stdout
    request: Request = pickle.load(sys.stdin.buffer)
    import torch

    torch.set_num_threads(1)  # forks must have no other threads
    for event in run(request):
        answers.write(json.dumps(event) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
