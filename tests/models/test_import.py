"""headrace.models needs torch alone, and the configuration of a model not even that."""

import subprocess
import sys
from collections.abc import Iterable

import pytest

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {blocked}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Block())
"""
MODEL = """
from headrace.models.config.config import ModelConfig
from headrace.models.model.model import Model
from headrace.models.operators import OPERATORS

config = ModelConfig(
    vocab_size=17,
    width=8,
    pattern="[a]",
    operators={"a": OPERATORS["attention"].Options(kind="attention", heads=2)},
)
model = Model(config)
model.init_weights(0)
print(tuple(model(torch.zeros(1, 3, dtype=torch.long)).shape))
"""
CONFIG = """
from headrace.models.config.config import list_shipped_models, load_model_config

for name in list_shipped_models():
    load_model_config(name)
"""
BLOCKED = {
    "click", "datasets", "deepspeed", "fsspec", "matplotlib", "pyarrow", "pydantic", "s3fs",
    "safetensors", "streaming", "tokenizers", "transformers", "triton", "yaml",
}  # fmt: skip


def run(program: str, blocked: Iterable[str], before: str = "") -> subprocess.CompletedProcess[str]:
    program = before + BLOCK.format(blocked=sorted(blocked)) + program
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_models_run_with_torch_alone() -> None:
    done = run(MODEL, BLOCKED, "import torch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(1, 3, 17)"


def test_models_are_configured_without_torch() -> None:
    done = run(CONFIG, {"torch", "numpy"})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("program", "blocked"),
    [(MODEL, "headrace"), (CONFIG, "yaml"), (MODEL, "torch")],
)
def test_the_block_blocks(program: str, blocked: str) -> None:
    assert f"{blocked} is blocked" in run(program, [blocked]).stderr
