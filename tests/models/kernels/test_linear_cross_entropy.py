"""The loss whose vocabulary is divided among processes, by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from headrace.models.kernels.linear_cross_entropy import linear_cross_entropy
from headrace.models.loss import cross_entropy

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
torch.manual_seed(0)
hidden, matrix = torch.randn(20, 8), torch.randn(13, 8)
targets, weights = torch.randint(13, (20,)), torch.rand(20)
targets[3], weights[3] = -100, 0.0
wide = [x.double().requires_grad_() for x in (hidden, matrix)]
wanted, _ = cross_entropy(wide[0] @ wide[1].T, targets, weights, z_loss=0.01)
wanted.backward()
own = slice(0, 7) if rank == 0 else slice(7, 13)
ours = [x.clone().requires_grad_() for x in (hidden, matrix[own])]
group = dist.group.WORLD.group_name
total, *_ = linear_cross_entropy(*ours, targets, weights, 0.01, own.start, group, True)
total.backward()
alone = ours[0].grad.clone()
dist.all_reduce(ours[0].grad)
found = (total, ours[0].grad, ours[1].grad)
for one, other in zip(found, (wanted, wide[0].grad, wide[1].grad[own])):
    torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
assert (alone - ours[0].grad).abs().max() > 1e-2, "each has a part of the gradient alone"
"""


def test_a_vocabulary_divided_between_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said
