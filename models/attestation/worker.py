"""A process that runs cases on a device: an illegal access ends it, and nothing else.

stdin has the plan and the device in its first line, then the number of a subject in each line. The
verdict on each is a line of stdout.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict
from typing import Any

import torch

from .plan import Plan, Subject
from .trials import Verdict, examine


def main() -> None:
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a compiler may write to stdout
    header = json.loads(sys.stdin.readline())
    subjects, device = Plan.from_json(header["plan"]).subjects(), header["device"]
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    for line in sys.stdin:
        verdict, usable = run(subjects[int(line)], device)
        answers.write(json.dumps({"verdict": asdict(verdict), "usable": usable}) + "\n")
        answers.flush()
        if not usable:
            os._exit(1)


def run(subject: Subject, device: str) -> tuple[Verdict, bool]:
    """Return the verdict, and whether the device is still usable by this process."""
    case, dtype, trials = subject
    try:
        return examine(case, dtype, device, trials), True
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".strip()[:2000]
        return Verdict(case.kernel, case.name, dtype, None, problem), _usable(device)


def _usable(device: str) -> bool:
    if device == "cpu":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except Exception:  # CUDA keeps the error of an illegal access
        return False
    return True


def arguments(plan: Plan, device: str) -> dict[str, Any]:
    """Return the first line of stdin."""
    return {"plan": plan.to_json(), "device": device}


if __name__ == "__main__":
    main()
