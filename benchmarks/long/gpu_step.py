"""Speed and memory of training on one GPU, beside peers in the same process.

    python -m benchmarks.long.gpu_step                all lines; needs a GPU, torch and triton
    python -m benchmarks.long.gpu_step --list         names of the lines
    python -m benchmarks.long.gpu_step hybrid-1b 'hybrid-1b, compiled'
    python -m benchmarks.long.gpu_step --dry          tiny models on a CPU: figures mean nothing

Each line is the real loop with the FSDP2 engine and AdamW: 23 steps of one or four micro-batches of
16,384 tokens. Rows hold documents of log-normal lengths (median 700), or one document. A line has
tokens/s (median of steps 5 to 19), MFU and HFU (products with weights, and the pairs of tokens that
attention computes), peak memory of these steps, launches a step and the shares of device time by
class (steps 20 to 22, traced), and the share of a step in which the device is idle.

A peer trains a model of the same size on rows of one document, with fused AdamW on bf16 weights and
without fp32 masters, which favours it: Llama and Mamba-2 of transformers, compiled, and a
Transformer by hand.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lines", nargs="*", metavar="LINE", help="names of lines; default: all")
    parser.add_argument("--list", action="store_true", help="print the names of the lines")
    parser.add_argument("--dry", action="store_true", help="test the script on a CPU")
    parser.add_argument("--weights", type=Path, help="folder of weights drawn before")
    parser.add_argument("--traces", type=Path, help="folder for the traces of packed rows")
    options = parser.parse_args()
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton decides at import
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no lines of the profiler among ours
    import torch

    from benchmarks.long._gpu_lines import Sizes, lines
    from benchmarks.long._gpu_peers import PEERS

    ours = {line.name: line for line in lines()}
    if options.list:
        print("\n".join([*ours, *PEERS]))
        return 0
    unknown = [name for name in options.lines if name not in (*ours, *PEERS)]
    if unknown:
        parser.error(f"unknown lines: {'; '.join(unknown)} (see --list)")
    if not options.dry and not torch.cuda.is_available():
        print("no GPU found: nothing was measured (try --dry)", file=sys.stderr)
        return 1
    from benchmarks.long import _gpu_run as gpu

    warnings.simplefilter("ignore")
    if options.dry:
        from support.kernels.bf16_interpreter import correct_bf16

        correct_bf16()
    sizes, failed = Sizes(options.dry), 0
    with tempfile.TemporaryDirectory() as folder:
        for name in options.lines or [*ours, *PEERS]:
            try:
                if name in PEERS:
                    text = PEERS[name](sizes)
                else:
                    kept = options.traces if ours[name].is_first else None
                    file = Path(kept or folder) / f"{ours[name].model}.json.gz"
                    text = gpu.measure(ours[name], sizes, file, options.weights)
            except Exception as error:  # a line that fails is a result; the others go on
                failed += 1
                text = f"failed: {type(error).__name__}: {' '.join(str(error).split())}"[:400]
            print(f"{name}: {text}", flush=True)
            try:
                gpu.clear(sizes.device)
            except RuntimeError as error:  # after a fault, the process can use the device no more
                print(f"the device is lost to this process: {error}"[:200], flush=True)
                return 1
    gpu.leave()
    return 1 if failed else 0


if __name__ == "__main__":
    # headrace, if it is not installed, the cases of the kernels, and the benchmarks
    sys.path[:0] = [str(ROOT / ".root"), str(ROOT / "tests"), str(ROOT)]
    sys.exit(main())
