"""Cost of isolating packed documents: a training step with isolation, compared with one without.

python -m benchmarks.models_isolation [--rows 2] [--length 1024] [--document 200]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from headrace.models.config.config import load_model_config
from headrace.models.documents import Documents
from headrace.models.model.model import Model

PATTERNS = ("attention", "mamba", "se", "mr", "li", "freeform", "se, mr, li, mamba, attention")
FREEFORM = "operators.freeform={kind: hyena-li-freeform, filter_horizon: 2048}"


def step(model: Model, tokens: torch.Tensor, documents: Documents | None) -> float:
    started = time.perf_counter()
    model(tokens, documents).sum().backward()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--document", type=int, default=200, help="tokens, on average")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    shape = (options.rows, options.length)
    torch.set_num_threads(1)  # times of one core can be compared
    torch.manual_seed(0)
    total = options.rows * options.length
    cuts = torch.randint(0, total, (total // options.document,)).sort().values
    cu_seqlens = torch.cat([torch.tensor([0]), cuts, torch.tensor([total])]).int()
    tokens = torch.randint(0, 512, shape)
    for pattern in PATTERNS:
        config = load_model_config("tiny-hybrid", [FREEFORM, f"pattern='[{pattern}]'"])
        model = Model(config)
        model.init_weights(0)
        apart, together = [], []
        for _ in range(options.repeats):  # in turns: both meet the same load of the machine
            together.append(step(model, tokens, None))
            apart.append(step(model, tokens, Documents.build(cu_seqlens, shape)))
        ratio = statistics.median(apart) / statistics.median(together)
        print(
            f"isolation, {pattern}: {ratio:.2f}x the step without"
            f" ({shape[0]} x {shape[1]} tokens, documents of {options.document}, one CPU thread)"
        )


if __name__ == "__main__":
    main()
