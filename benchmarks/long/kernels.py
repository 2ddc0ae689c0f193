"""The fused kernels on a GPU: first whether they are right, then how fast they are.

Each kernel has a process of its own, so that one that fails takes no other along. It is checked
with every option of tests/kernel_cases.py in bf16, fp16 and fp32, on fresh random inputs and
poisoned outputs, against its twin in fp64; then timed beside its peers, and as a share of what the
device can copy or multiply, measured in the same process. At last a whole model of a billion
parameters is timed beside a Transformer of the same size.

    python -m benchmarks long.kernels              all of it; needs one GPU, torch and triton
    python -m benchmarks.long.kernels --only modal
    python -m benchmarks.long.kernels --dry        the script itself, small, on a CPU by Triton's
                                                   interpreter; nothing is measured
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / ".root"), str(ROOT / "tests"), str(ROOT)]  # headrace, if not installed

BOUNDS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}
"""‖got − wanted‖ / ‖wanted‖, at most."""
SEEDS = (1, 2, 3)
MODEL = "a whole model"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="one kernel, or the whole model, in this process")
    parser.add_argument("--dry", action="store_true", help="try the script out on a CPU")
    options = parser.parse_args()
    if options.only:
        return (compare_models if options.only == MODEL else one_kernel)(options.only, options.dry)
    import torch
    import triton

    from headrace.models.kernels import KERNELS

    if not options.dry and not torch.cuda.is_available():
        print("there is no GPU here: nothing was checked and nothing measured", file=sys.stderr)
        return 1
    where = "a CPU, by the interpreter" if options.dry else torch.cuda.get_device_name()
    print(f"device: {where}; torch {torch.__version__}, triton {triton.__version__}", flush=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if options.dry:
        environment["TRITON_INTERPRET"] = "1"
    failed = []
    for name in (*KERNELS, MODEL):
        command = [sys.executable, __file__, "--only", name, *(["--dry"] * options.dry)]
        if subprocess.run(command, env=environment, check=False).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all kernels are right")
    return 1 if failed else 0


def one_kernel(kernel: str, dry: bool) -> int:
    wrong = list(check(kernel, dry))
    print(f"{kernel}: {'; '.join(wrong) or 'right, in every type and option'}")
    from _kernel_peers import timed

    for name, make in timed(size(dry)).items():
        if name.split()[0] == kernel:
            report(make(), dry)
    return 1 if wrong else 0


def check(kernel: str, dry: bool) -> Iterator[str]:
    """What is wrong with a kernel."""
    import torch
    from kernel_cases import TINY, Draw, Shape, all_cases, errors

    torch.use_deterministic_algorithms(True, warn_only=True)  # what is not written is NaN
    worst = dict.fromkeys(["float32"] if dry else BOUNDS, 0.0)
    for case in (case for case in all_cases() if case.kernel == kernel):
        for dtype in worst:
            for seed in SEEDS[:1] if dry else SEEDS:
                draw = Draw(getattr(torch, dtype), "cpu" if dry else "cuda", seed)
                try:
                    found = errors(case, draw, TINY if dry else Shape(2, 1531, 1040))
                except Exception as error:  # what one case runs into is no reason to skip others
                    found = {f"{type(error).__name__}: {error}"[:300]: float("inf")}
                worst[dtype] = max(worst[dtype], *found.values())
                for what, off in found.items():
                    if off > BOUNDS[dtype]:
                        yield f"WRONG [{case.name}] {dtype}, seed {seed}, {what}: {off:.1e}"
    torch.use_deterministic_algorithms(False)
    print(f"{kernel}: off by at most {', '.join(f'{w:.1e} in {t}' for t, w in worst.items())}")


def size(dry: bool) -> Any:
    import torch
    from _kernel_peers import Size

    if dry:
        return Size("cpu", torch.float32, 40, 32)
    return Size("cuda", torch.bfloat16, 1 << 17, 4096)


def report(timed: Any, dry: bool) -> None:
    """A line for each peer and each limit."""
    import torch

    def passes(run: Callable[..., Any]) -> tuple[float, float, float]:
        """Seconds of the forward and of the backward pass, and the bytes that both take."""
        output = run(**timed.inputs)
        outputs = output if isinstance(output, tuple) else (output,)
        leaves = [x for x in timed.inputs.values() if x.requires_grad]
        above = [torch.randn_like(y) for y in outputs]

        def forward() -> None:
            run(**timed.inputs)

        def backward() -> None:
            torch.autograd.grad(outputs, leaves, above, retain_graph=True)

        def both() -> None:
            again = run(**timed.inputs)
            again = again if isinstance(again, tuple) else (again,)
            torch.autograd.grad(again, leaves, above)

        return seconds(forward, dry), seconds(backward, dry), memory(both, dry)

    ours = passes(timed.ours)
    line = f"{timed.name}: {milliseconds(ours, dry)}"
    if timed.operations:
        share = timed.operations / (ours[0] + ours[1]) / rate(dry)
        line += f"; {number(share, dry)} of the matrix rate"
    else:
        parts = [
            moved / time / bandwidth(dry) for moved, time in zip(timed.moved, ours[:2], strict=True)
        ]
        line += f"; {number(parts[0], dry)} and {number(parts[1], dry)} of copy"
    print(line, flush=True)
    for name, peer in timed.peers.items():
        try:
            theirs = passes(peer)
        except Exception as error:
            print(f"  beside {name}: it failed: {type(error).__name__}: {error}"[:300])
            continue
        both = (theirs[0] + theirs[1]) / (ours[0] + ours[1])
        print(
            f"  beside {name}: {number(theirs[0] / ours[0], dry)}x forward,"
            f" {number(theirs[1] / ours[1], dry)}x backward, {number(both, dry)}x both, at"
            f" {number(ours[2] / theirs[2], dry)} of its memory ({milliseconds(theirs, dry)})",
            flush=True,
        )


def milliseconds(times: tuple[float, float, float], dry: bool) -> str:
    return f"{number(times[0] * 1e3, dry)} ms forward, {number(times[1] * 1e3, dry)} backward"


def number(value: float, dry: bool) -> str:
    """Where nothing is measured, none is shown."""
    return "—" if dry else f"{value:.2f}"


def seconds(run: Callable[[], None], dry: bool) -> float:
    """The median of many, behind a cleared cache."""
    run()
    if dry:
        return 1.0
    from triton.testing import do_bench

    median: float = do_bench(run, warmup=50, rep=300, return_mode="median")
    return median / 1e3


def memory(run: Callable[[], None], dry: bool) -> float:
    """Bytes that a run takes beside what is there before it."""
    if dry:
        run()
        return 1.0
    import torch

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return float(torch.cuda.max_memory_allocated() - before)


def bandwidth(dry: bool) -> float:
    """Bytes a second that a large copy reads and writes."""
    if dry:
        return 1.0
    import torch

    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source) and None, dry)


def rate(dry: bool) -> float:
    """Operations a second of a large product in bf16."""
    if dry:
        return 1.0
    import torch

    a, b = torch.randn(2, 8192, 8192, device="cuda").bfloat16()
    return 2 * 8192**3 / seconds(lambda: torch.mm(a, b) is None and None, dry)


def compare_models(_: str, dry: bool) -> int:
    """A step of the hybrid beside one of the Transformer: forward, loss and backward."""
    import torch

    lengths = (48,) if dry else (1 << 14, 1 << 15)
    for length in lengths:
        times: dict[str, float] = {}
        for name in ("hybrid", "hybrid in plain torch", "transformer"):
            torch.manual_seed(0)
            try:
                times[name] = seconds(model_step(name, length, dry), dry)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}"[:300])
            if not dry:
                torch.cuda.empty_cache()
        if "hybrid" not in times:
            return 1
        for name in times.keys() - {"hybrid"}:
            print(
                f"1B multi-hybrid at {length} tokens:"
                f" {number(times[name] / times['hybrid'], dry)}x the speed of the {name}"
                f" ({number(times['hybrid'] * 1e3, dry)} ms)",
                flush=True,
            )
    return 0


def model_step(name: str, length: int, dry: bool) -> Callable[[], None]:
    """configs/models/hybrid-1b and transformer-1b, written out: YAML has readers of its own."""
    import torch

    from headrace.models.config import ModelConfig
    from headrace.models.model import Model
    from headrace.models.operators import OPTIONS

    plain: dict[str, Any] = {"kernel": "torch"} if "plain" in name else {}
    if dry and not plain:
        plain = {"kernel": "triton"}
    width, hidden, heads, groups = (16, 24, 2, 4) if dry else (2048, 5504, 16, 128)
    sort = {
        "se": {"kind": "hyena-se", "groups": groups, "taps": 7},
        "mr": {"kind": "hyena-mr", "groups": groups, "filter_horizon": 8192, "taps": 128},
        "li": {"kind": "hyena-li"},
        "attention": {"kind": "attention", "heads": heads},
        "glu": {"kind": "glu", "hidden": hidden},
    }
    pattern = (
        "[attention] * 21" if name == "transformer" else "([se, mr, li] * 2 + [attention]) * 3"
    )
    if dry:
        pattern = "[attention]" if name == "transformer" else "[se, mr, li, attention]"
    used = [kind for kind in sort if kind in pattern or kind == "glu"]
    config = ModelConfig(
        vocab_size=50 if dry else 32000,
        width=width,
        pattern=pattern,
        mlp="glu",
        operators={kind: OPTIONS[str(sort[kind]["kind"])](**sort[kind], **plain) for kind in used},
        **plain,
    )
    device, dtype = ("cpu", torch.float32) if dry else ("cuda", torch.bfloat16)
    with torch.device(device):
        model = Model(config)
    model.init_weights(0)
    model.to(dtype)
    tokens = torch.randint(config.vocab_size, (1, length), device=device)
    weights = torch.ones(1, length, device=device)

    def step() -> None:
        total, _ = model.loss(model.hidden(tokens)[0], tokens, weights)
        (total / length).backward()
        model.zero_grad()

    return step


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
