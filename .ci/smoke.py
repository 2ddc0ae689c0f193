"""Check that the installed wheel contains every module of the source tree, and that all import.

python smoke.py SOURCE
"""

import importlib
import sys
import tokenize
import tomllib
from pathlib import Path

import headrace

source = Path(sys.argv[1])
installed = Path(headrace.__file__).parent
assert installed.is_relative_to(sys.prefix), f"headrace comes from {installed}, not from the wheel"
assert Path(tokenize.__file__).is_relative_to(sys.base_prefix), (
    "tokenize is not the standard library's"
)

settings = tomllib.loads((source / "pyproject.toml").read_text())["tool"]["setuptools"]
modules = []
for package in settings["packages"]:
    folder = Path(*package.split(".")[1:])
    for file in [*(source / folder).glob("*.py"), *(source / folder).glob("configs/**/*.yaml")]:
        name = file.relative_to(source)
        assert (installed / name).is_file(), f"{name} is not in the wheel"
        if file.suffix == ".py":
            modules.append(".".join(["headrace", *name.with_suffix("").parts]))
for module in modules:
    importlib.import_module(module.removesuffix(".__init__"))
configs = list((installed / "configs").rglob("*.yaml"))
assert len(configs) == len(list((source / "configs").rglob("*.yaml"))) > 0, configs
print(f"{len(modules)} modules import and {len(configs)} configurations are installed: {installed}")
