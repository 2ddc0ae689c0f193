"""Unpacks a bundle on the device: wheels into a folder of modules, programs into Triton's cache.

Before this, nothing of headrace can be imported; it needs the standard library, pip, and the torch
and Triton of the device.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAMS, WHEELS, MANIFEST = "programs.tar.xz", "wheels", "manifest.json"
GROUP = "__grp__"
"""Prefix of the file that lists the files of an entry of Triton's cache."""
LAUNCHERS = 16
"""C compilers at a time."""


def environment(work: Path) -> dict[str, str]:
    """Return the variables with which all processes of the suite start."""
    paths = [work / "site", ROOT / ".root", ROOT / "tests", ROOT]
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([inherited] if inherited else [])]),
        "TRITON_CACHE_DIR": str(work / "triton"),
        "XDG_CACHE_HOME": str(work / "cache"),
        "PYTHONUNBUFFERED": "1",
    }


def install(bundle: Path, work: Path, dry: bool) -> str:
    """Install a bundle, and say what was installed."""
    site, manifest = work / "site", json.loads((bundle / MANIFEST).read_text())
    if not site.exists():
        unfinished = work / "site.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        install_wheels(sorted((bundle / WHEELS).glob("*.whl")), unfinished)
        shutil.copyfile(Path(__file__).with_name("carried.py"), unfinished / "sitecustomize.py")
        name_compiler(manifest["triton"], unfinished)
        unfinished.rename(site)
    command = [sys.executable, "-m", __spec__.name, str(bundle), str(work), *["--dry"] * dry]
    done = subprocess.run(command, env=environment(work), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the bundle was not installed: {done.stderr.strip()[-1500:]}")
    return f"{manifest['commit']}, {done.stdout.strip()}"


def name_compiler(version: str, site: Path) -> None:
    """Let headrace read the version of the Triton that compiled the programs: known faults are
    those of a compiler."""
    information = site / f"triton-{version}.dist-info"
    information.mkdir()
    information.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: triton\nVersion: {version}\n"
    )
    # Triton finds its own backends by them.
    points = importlib.metadata.distribution("triton").read_text("entry_points.txt")
    information.joinpath("entry_points.txt").write_text(points or "")


def install_wheels(wheels: list[Path], target: Path) -> None:
    words = ("--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(target))
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--root-user-action=ignore", *words, *map(str, wheels)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"pip refused the wheels: {done.stderr.strip()[-800:]}")


def install_programs(archive: Path, cache: Path, dry: bool) -> str:
    """Write the programs into Triton's cache, and compile their launchers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    if not dry:
        import torch

        major, minor = torch.cuda.get_device_capability()
        assert (major, minor) == (9, 0), f"the programs are for sm_90, not sm_{major}{minor}"
    target = GPUTarget("cuda", 90, 32)
    backend, launchers, count = make_backend(target), {}, 0
    with tarfile.open(archive) as members:
        for member in members:
            entry, _, ending = member.name.partition(".")
            data = members.extractfile(member).read()  # type: ignore[union-attr]
            folder = cache / entry
            folder.mkdir(parents=True, exist_ok=True)
            if ending == "json":
                description = json.loads(data)
                launch = description["metadata"]
                options = backend.parse_options(dict(description["options"])).__dict__
                name, count = launch["name"], count + 1
                metadata = {"hash": entry, "target": target, **options, **launch}
                metadata["triton_version"] = triton.__version__
                (folder / f"{name}.json").write_text(json.dumps(metadata, default=vars))
                files = {
                    f"{name}{kind}": str(folder / f"{name}{kind}") for kind in (".json", ".cubin")
                }
                (folder / f"{GROUP}{name}.json").write_text(json.dumps({"child_paths": files}))
                types = tuple(description["signature"].values())
                launchers[types] = description["signature"]
            else:
                (folder / f"{name}.cubin").write_bytes(data)
    compiled = 0 if dry else compile_launchers(list(launchers.values()))
    return f"{count} programs for Triton {triton.__version__}, {compiled} launchers compiled"


def compile_launchers(signatures: list[dict[str, str]]) -> int:
    """Compile the C launcher of each list of types, as Triton will ask for it."""
    from concurrent.futures import ThreadPoolExecutor
    from types import SimpleNamespace

    from triton.backends.nvidia import driver

    if not hasattr(driver, "make_launcher"):  # later versions have one for all types
        return 0
    metadata = dict.fromkeys(
        ("global_scratch_size", "global_scratch_align", "profile_scratch_size"), 0
    )
    metadata |= {"profile_scratch_align": 1, "launch_cooperative_grid": False, "launch_pdl": False}

    def compile_launcher(signature: dict[str, str]) -> None:
        source = SimpleNamespace(signature=signature, constants={})
        driver.CudaLauncher(source, SimpleNamespace(**metadata))

    compile_launcher(signatures[0])  # and what all share, once
    with ThreadPoolExecutor(LAUNCHERS) as pool:
        list(pool.map(compile_launcher, signatures[1:]))
    return len(signatures)


if __name__ == "__main__":
    bundle, work, *rest = sys.argv[1:]
    print(install_programs(Path(bundle) / PROGRAMS, Path(work) / "triton", bool(rest)))
