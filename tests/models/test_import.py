"""headrace.models needs torch alone."""

import subprocess
import sys

PROGRAM = """
import sys
import torch

class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {blocked}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Block())
from headrace.models.config import ModelConfig
from headrace.models.model import Model
from headrace.models.operators import OPERATORS

config = ModelConfig(
    vocab_size=17,
    width=8,
    pattern="[a]",
    operators={{"a": OPERATORS["attention"].Options(kind="attention", heads=2)}},
)
model = Model(config)
model.init_weights(0)
print(tuple(model(torch.zeros(1, 3, dtype=torch.long)).shape))
"""
BLOCKED = {
    "click", "datasets", "deepspeed", "fsspec", "matplotlib", "pyarrow", "pydantic", "s3fs",
    "safetensors", "streaming", "tokenizers", "transformers", "triton", "yaml",
}  # fmt: skip


def test_models_run_with_torch_alone() -> None:
    program = PROGRAM.format(blocked=sorted(BLOCKED))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(1, 3, 17)"


def test_the_block_blocks() -> None:
    program = PROGRAM.format(blocked=["headrace"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "headrace is blocked" in done.stderr
