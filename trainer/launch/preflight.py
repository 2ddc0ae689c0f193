"""Preflight checks: every failure that can be predicted is reported before a run starts.

Nothing here writes files. A single configuration is checked when it is read; `resolve` checks that
a folder holds this run and no other.
"""

from __future__ import annotations

import shutil
from collections import Counter
from functools import partial

from ...console.errors import (
    LayoutError,
    MissingError,
    MisuseError,
    PlanError,
    RunError,
    StorageError,
    run_all,
)
from ...console.log import get_logger
from ...console.machine import cpp_problem, free_memory
from ...console.progress import format_bytes
from ...dataplane.storage import storage
from ...models.accounting.state import host_bytes
from ...models.config.options.recompute import Selective
from ..accounting.memory import checkpoint_bytes, state_memory
from ..accounting.memory import groups as parameter_groups
from ..checkpoints import store
from ..cluster.ranks import is_first, is_rank
from ..layout import checks as layout_checks
from ..layout.config import LayoutConfig
from ..loop import evaluate
from ..record import loggers
from ..run.job import Job
from ..weights import source as origins
from .kernels.attention import check_attention, check_flash4
from .kernels.scans import check_fla
from .options import StartOptions

log = get_logger(__name__)

DISK_RESERVE = 1 << 20


def check(job: Job) -> None:
    """Raise all errors that are known before the first step and do not depend on the machine."""
    checks = [
        _check_engine,
        _check_offload,
        _check_layout,
        _check_recompute,
        _check_compile,
        _check_fp8,
        check_attention,
        _check_vocabulary,
    ]
    checks += [
        _check_groups,
        _check_weights,
        _check_held_out,
        _check_controllers,
        _check_positions,
        _check_batches,
        _check_noise,
    ]
    checks += [_check_loggers, _check_store] * is_first()
    run_all(*(partial(check, job) for check in checks))


def check_machine(job: Job) -> None:
    """Raise if this machine cannot run the job: too few GPUs, too small a disk or memory, no
    compiler."""
    checks = (
        _check_devices,
        _check_fp8_units,
        check_flash4,
        check_fla,
        check_disk,
        check_host_memory,
    )
    run_all(*(partial(check, job) for check in (*checks, check_compiler, check_kernel_tools)))


def check_compiler(job: Job) -> None:
    """Raise if the engine compiles code for the CPU, and this machine has no C++ compiler."""
    engine = job.run.engine
    if not (engine.compile and engine.compile_backend == "inductor" and job.run.device == "cpu"):
        return
    problem = cpp_problem()
    if problem is not None:
        raise MissingError(
            f"engine.compile needs a C++ compiler on CPU: {problem}",
            hint="apt-get install g++ (and python3-dev), or name a compiler in the environment "
            "variable CXX; or set engine.compile=false",
        )


def check_kernel_tools(job: Job) -> None:
    """Raise if the model runs fused kernels, and Triton lacks what it needs to compile them."""
    if job.run.device != "cuda":
        return
    from ...models.compilation.compile import lacking
    from ...models.compilation.tools import find_tool_problem
    from .attestation import make_plan

    problem = find_tool_problem()
    if problem is not None and make_plan(job).calls:
        raise lacking(problem)


def check_disk(job: Job) -> None:
    """Raise if the folder is not writable, or if one more checkpoint does not fit on the disk."""
    need = checkpoint_bytes(job) + DISK_RESERVE
    root = job.folder.root.absolute()
    check_folder(job)
    free = shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists())).free
    if need > free:
        raise StorageError(
            f"{job.folder.root} has {format_bytes(free)} free, and one checkpoint takes "
            f"{format_bytes(need)}",
            hint="free some space, or choose another --out",
        )


def check_folder(job: Job) -> None:
    """Raise if the run's folder cannot be written to."""
    storage.check_writable(str(job.folder.root), label=f"to the run's folder {job.folder.root}")


def check_profile(job: Job, options: StartOptions) -> None:
    """Raise if the plan lacks the steps in --profile or --memory-snapshot, or if a snapshot lacks a
    GPU; warn if the run has already taken the steps."""
    if options.memory_snapshot is not None and job.run.device == "cpu":
        step = options.memory_snapshot
        raise MisuseError(
            "--memory-snapshot needs a GPU: torch records the history of CUDA's allocator alone",
            hint=f"--profile {step}:{step + 1} traces the memory of operations on the CPU too",
        )
    first, last = job.plan.first_step, job.plan.end_step - 1
    saved = store.committed(job.folder.checkpoints)
    for option, steps in options.traced_steps.items():
        if steps.start > last or steps.stop <= first:
            raise MisuseError(
                f"{option}: the plan has steps {first} to {last}",
                hint="choose steps of the plan, as in --profile 10:15 or --memory-snapshot 12",
            )
        if saved and store.parse_step(saved[-1]) >= steps.stop:
            log.warning("%s writes nothing: the run has taken these steps", option)


def _check_engine(job: Job) -> None:
    """Raise if the engine does not support the layout, or names layers that do not exist."""
    engine = job.run.engine
    engine.check(job.run.layout, job.processes, job.precision)
    layers = len(job.model.layers)
    for number, span in enumerate(engine.layer_shards):
        if span.layers[1] >= layers:
            raise LayoutError(
                f"engine.layers.{number}.layers={list(span.layers)}: the model has layers 0 to "
                f"{layers - 1}",
                hint="name the first and the last layer of each span",
            )


def _check_offload(job: Job) -> None:
    """Raise if the engine offloads an optimizer that runs on the device alone."""
    if job.run.engine.offloads and not job.run.optimizer.on_host:
        raise LayoutError(
            f"optimizer.kind={job.run.optimizer.kind} multiplies whole matrices, which the engine "
            "would do on the CPU: it offloads the optimizer",
            hint="use optimizer.kind=adamw, or an engine that does not offload",
        )


def check_host_memory(job: Job) -> None:
    """Raise if host memory is too small for the offloaded state."""
    if not job.run.engine.offloads:
        return
    stages = range(job.run.layout.pp)
    size = max(host_bytes(state) for stage in stages for state in state_memory(job, stage))
    ranks, free = job.local_ranks, free_memory()
    if size * ranks > free:
        raise LayoutError(
            f"the engine offloads {format_bytes(size)} of each rank's state, and this machine has "
            f"{format_bytes(free)} of host memory free for {ranks} rank{'s' * (ranks > 1)} "
            f"({format_bytes(size * ranks)})",
            hint="use more machines, which share the state, or an engine that does not offload",
        )


def _check_layout(job: Job) -> None:
    """Raise if the layout does not shard the model and its rows."""
    lengths = [phase.seq_len for phase in job.plan.phases] + [*filter(None, job.plan.lengths)]
    if job.run.evaluate is not None and job.run.evaluate.seq_len is not None:
        lengths.append(job.run.evaluate.seq_len)
    rows = min(phase.batch_rows for phase in job.plan.phases)

    def is_supported(layout: LayoutConfig) -> bool:
        """Return True if the engine supports the layout, and every data-parallel rank has a row."""
        try:
            job.run.engine.check(layout, job.processes, job.precision)
        except LayoutError:
            return False
        return layout.data_parallel(job.processes) <= rows

    layout_checks.check(job.run.layout, job.processes, job.model, lengths, is_supported)


def _check_recompute(job: Job) -> None:
    """Raise if the rules do not fit the model's layers or the engine."""
    saves = any(isinstance(rule, Selective) for rule in job.rules)
    if saves and job.run.engine.compile:
        raise LayoutError(
            "recompute.save chooses among the operations that torch runs, and a compiled block is "
            "one operation: its compiler chooses what is kept",
            hint="set engine.compile=false, or choose another form of recompute",
        )


def _check_compile(job: Job) -> None:
    """Raise if the engine's hooks would be inside a compiled block."""
    engine, shared = job.run.engine, [layer.shared for layer in job.model.layers if layer.shared]
    if engine.compile and shared:
        engine.check_compile(shared[0])


def _check_fp8(job: Job) -> None:
    """Raise if precision=fp8 would compute nothing in FP8."""
    settings = job.precision.fp8
    if settings is None:
        return
    from ...models.accounting.count import build_meta
    from ...models.transforms.fp8 import iterate_matrices

    reasons = [matrix.reason for matrix in iterate_matrices(build_meta(job.model), settings)]
    if None not in reasons:
        counts = Counter(filter(None, reasons)).most_common()
        raise LayoutError(
            "precision=fp8 computes no matrix of this model in FP8: "
            + ", ".join(f"{count} {reason}" for reason, count in counts),
            hint="choose another fp8.smallest, fp8.ends or fp8.matrices (`headrace models show "
            "MODEL --precision fp8 --fp8 smallest=256` lists the matrices), or precision=bf16",
        )


def _check_vocabulary(job: Job) -> None:
    if job.plan.vocab_size > job.model.vocab_size:
        raise PlanError(
            f"the mixture's tokenizer has {job.plan.vocab_size:,} ids, the model embeds "
            f"{job.model.vocab_size:,}",
            hint=f"override model.vocab_size={job.plan.vocab_size}, or take another model",
        )


def _check_groups(job: Job) -> None:
    """Raise if a pattern in optimizer.groups matches no parameter, or if a stage trains none."""
    parameter_groups(job)
    if any(group.lr == 0 for group in job.run.optimizer.groups):
        _check_trained(job)


def _check_trained(job: Job) -> None:
    """Raise if all parameters are frozen, in the model or on a stage."""
    from ...models.accounting.count import build_meta
    from ..engines import groups
    from ..layout.stages import list_chunks

    optimizer, layout = job.run.optimizer, job.run.layout
    model = build_meta(job.model)
    fp32 = model.full_precision(job.precision)
    groups.check_trained(groups.parameter_groups(model, optimizer, fp32))
    for stage in range(layout.pp) if layout.pp > 1 else ():
        stage_model = build_meta(job.model)
        stage_model.keep(job.cuts, list_chunks(layout, stage))
        parameters = dict(stage_model.named_parameters())
        stage_fp32 = [path for path in fp32 if path in parameters]
        stage_groups = groups.parameter_groups(stage_model, optimizer, stage_fp32)
        groups.check_trained(stage_groups, f" of stage {stage}")


def _check_positions(job: Job) -> None:
    """Raise if rows exceed the table of positions."""
    table = job.model.learned_positions
    longest = max(job.plan.phases, key=lambda phase: phase.seq_len)
    if table is not None and longest.seq_len > table:
        raise PlanError(
            f"phase {longest.name} has rows of {longest.seq_len:,} tokens, and the model's "
            f"position table (learned_positions) has {table:,}",
            hint=f"use rows of at most {table} tokens, or "
            f"model.learned_positions={longest.seq_len}",
        )


def _check_batches(job: Job) -> None:
    """Raise if a data-parallel rank has no row in a step. The error covers all phases, because the
    phase with the fewest rows limits the number of ranks."""
    shards = job.run.layout.shards
    dp = job.processes // shards  # _check_layout names a remainder
    small = [phase for phase in job.plan.phases if phase.batch_rows < dp]
    if not small:
        return
    rows = ", ".join(f"phase {phase.name} has {phase.batch_rows}" for phase in small)
    fewest = min(phase.batch_rows for phase in small)
    raise LayoutError(
        f"a step has fewer rows than there are data-parallel ranks ({dp}): {rows}",
        hint=f"use at most processes={fewest * shards}, or "
        f"{'a larger batch' if len(small) == 1 else 'larger batches'}",
    )


def _check_noise(job: Job) -> None:
    """Raise if the noise scale is measured in a phase with a single row per step."""
    single = [phase.name for phase in job.plan.phases if phase.batch_rows < 2]
    if job.run.watch.noise is not None and single:
        raise PlanError(
            "watch.noise compares the gradient of a part of a step's rows with that of all, and "
            f"phase {', '.join(single)} has 1 row in a step",
            hint="use a larger batch, or leave watch.noise out",
        )


def _check_weights(job: Job) -> None:
    """Raise if two sources of weights are named, or if the weights do not fit the model."""
    source = job.run.init_from
    if job.parent is not None and source is not None:
        raise RunError(
            "the mixture continues a run (`after`) and takes its weights, and init_from names "
            "other weights",
            hint="remove one of them",
        )
    origin = None if job.folder.begun else job.origin()
    if origin is not None:
        origins.check(origin, job.model, moments=source is not None and source.moments)


def _check_held_out(job: Job) -> None:
    if job.run.evaluate is not None and not job.held_out.exists():
        evaluate.plan_held_out(job.run.evaluate, job.plan)


def _check_controllers(job: Job) -> None:
    """Raise if a phase's controller decides from held-out losses that the run does not measure."""
    from ...dataplane.order.plan import Plan
    from ...mixtures.controllers import load_controller

    plan = job.plan
    if not isinstance(plan, Plan):
        return
    for phase in plan.phases:
        controller = load_controller(phase.control) if phase.control else None
        if controller is None or not controller.needs_evaluations:
            continue
        names = []
        if job.run.evaluate is not None:
            names = list(evaluate.held_out_datasets(job.run.evaluate, plan))
        if not names or controller.watched not in (None, *names):
            problem = "needs `evaluate`"
            if names:
                problem = f"watches the held-out loss of {controller.watched}, which has no rows"
            raise PlanError(
                f"the controller {controller.kind} of phase {phase.name} {problem}",
                hint=f"name one of {', '.join(names)}" if names else "add evaluate.every=500",
            )


def _check_devices(job: Job) -> None:
    from ..layout.devices import count_gpus

    gpus = count_gpus()
    if job.run.device == "cuda" and job.processes > gpus and not is_rank():
        raise LayoutError(
            f"{job.processes} processes need {job.processes} GPUs; this machine has {gpus}",
            hint=f"use processes={gpus}" if gpus else "set device=cpu, or use another machine",
        )


def _check_fp8_units(job: Job) -> None:
    """Raise if precision=fp8 and this machine's GPU lacks FP8 units."""
    from ..layout.devices import fp8_problem

    problem = fp8_problem() if job.run.device == "cuda" and job.precision.fp8 else None
    if problem is not None:
        raise LayoutError(
            f"precision=fp8 cannot run on this machine: {problem}",
            hint="use precision=bf16, or a GPU with FP8 (L4, L40S, H100, H200, B200, RTX 4090)",
        )


def _check_loggers(job: Job) -> None:
    loggers.check_loggers(job.run.watch)


def _check_store(job: Job) -> None:
    """Raise if checkpoints.url cannot be listed: no credentials, no such bucket."""
    if job.run.checkpoints.url is not None:
        storage.names(job.run.checkpoints.url)
