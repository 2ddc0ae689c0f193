"""All kernels beside their twins: `headrace doctor --kernels`, with more workers at a time.

python -m benchmarks.long.gpu_suite.attest [--dry] [--next] --seconds N --out OUT
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path

WORKERS = 12
"""Each takes half a gigabyte of the device, and one core."""
TIMEOUT = {False: 60.0, True: 600.0}
"""Seconds of a case, by whether the run is dry."""
DRY_KERNELS = ["glu", "rope"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="no case begins after them")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--next", action="store_true", help="next programs in place of the others")
    options = parser.parse_args()
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton decides at import
    from headrace.models.attestation.attest import Attestation
    from headrace.models.attestation.by_hand import make_plan, render, summarize
    from headrace.models.attestation.plan import AttestationPlan
    from headrace.models.attestation.record import describe_machine, make_record
    from headrace.models.attestation.trials import Verdict
    from headrace.models.kernels import NEXT

    device = "cpu" if options.dry else "cuda:0"
    next_programs = list(NEXT) if options.next else []
    if options.dry:
        kernels = next_programs[:1] or DRY_KERNELS
        plan = AttestationPlan(
            kernels=kernels, dtypes=["float32"], next_programs=next_programs, tiny=True
        )
    elif options.next:
        plan = AttestationPlan(kernels=next_programs, next_programs=next_programs)
    else:
        plan = make_plan([], device)

    def report(verdict: Verdict, count: int, total: int) -> None:
        if not verdict.passed:
            problem = " ".join(str(verdict.problem).split())[:300]
            print(f"WRONG {verdict.kernel} [{verdict.case}] {verdict.dtype}: {problem}", flush=True)
        if count == total or count % 100 == 0:
            print(f"{count} of {total} cases compared", flush=True)

    began = time.monotonic()
    attestation = Attestation(
        plan,
        device,
        num_workers=2 if options.dry else WORKERS,
        timeout=TIMEOUT[options.dry],
        report=report,
    )
    timer = threading.Timer(options.seconds, attestation.drop)
    timer.start()
    try:
        verdicts = attestation.verdicts()
    finally:
        timer.cancel()
        attestation.close()
    record = make_record(describe_machine(device), plan, verdicts, time.monotonic() - began)
    name = "attestation-next.json" if options.next else "attestation.json"
    (options.out / name).write_text(json.dumps(summarize(record), indent=1))
    print(render(record), flush=True)
    if missing := len(attestation.subjects) - len(verdicts):
        print(f"the time was up before {missing} of {len(attestation.subjects)} cases", flush=True)
    return 1 if record.problems or missing else 0


if __name__ == "__main__":
    sys.exit(main())
