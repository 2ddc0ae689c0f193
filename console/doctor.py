"""`headrace doctor`: what this machine has, what will be used of it, what is missing.

Nothing is guessed: packages are those that this installation declares, devices those that torch
can use, and what will be used is what the rooms would choose by default.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path

import click

from . import command
from .machine import cores

SMALL_DISK = 10e9
"""Bytes below which a dataset or a few checkpoints soon fill the disk."""

EXTRAS = {"ray": "builds on a cluster, `tokenize build --engine ray`"}
"""What only some need, and for what."""


@dataclass(frozen=True)
class Lack:
    """Something that is not there, and the command that fixes it."""

    what: str
    hint: str
    needed: bool
    """False: headrace works without it."""


@dataclass
class Report:
    found: dict[str, str] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)
    missing: list[Lack] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not any(lack.needed for lack in self.missing)


@click.command()
@command.json_option
@click.pass_context
def main(ctx: click.Context, as_json: bool) -> None:
    """Show what this machine has, what will be used, and what is missing.

    Exits with 1 if something is missing that headrace needs.
    """
    report = examine()
    if as_json:
        command.emit({"ok": report.ok, **asdict(report)})
    else:
        click.echo(render(report))
    ctx.exit(0 if report.ok else 1)


def examine() -> Report:
    report = Report()
    _packages(report)
    _machine(report)
    _devices(report)
    _compiler(report)
    _credentials(report)
    _choices(report)
    return report


def render(report: Report) -> str:
    width = max(len(name) for name in (*report.found, *report.used)) + 2
    lines = ["found"]
    lines += [f"  {name:<{width}}{text}" for name, text in report.found.items()]
    lines += ["will be used"]
    lines += [f"  {name:<{width}}{text}" for name, text in report.used.items()]
    for title, needed in (("missing", True), ("not there, and needed by some", False)):
        lacks = [lack for lack in report.missing if lack.needed == needed]
        lines += [title] if lacks else []
        for lack in lacks:
            lines += [f"  {lack.what}", f"    hint: {lack.hint}"]
    if report.ok:
        lines += ["nothing that headrace needs is missing"]
    return "\n".join(lines)


def _packages(report: Report) -> None:
    """Each requirement of this installation, with its version."""
    from packaging.requirements import Requirement

    report.found["python"] = f"{platform.python_version()}, {sys.executable}"
    try:
        installed = importlib.metadata.distribution("headrace")
    except importlib.metadata.PackageNotFoundError:
        report.missing.append(Lack("headrace itself is not installed", "pip install .", True))
        return
    report.found["headrace"] = installed.version
    for text in installed.requires or []:
        need = Requirement(text)
        asking = [
            extra
            for extra in ("", *EXTRAS)
            if need.marker is None or need.marker.evaluate({"extra": extra})
        ]
        if not asking:
            continue
        try:
            version = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is not None and need.specifier.contains(version, prereleases=True):
            report.found[need.name] = version
        elif asking[0]:
            what = f"{need.name} ({EXTRAS[asking[0]]})"
            report.missing.append(Lack(what, f"pip install 'headrace[{asking[0]}]'", False))
        else:
            has = f"; {version} is installed" if version else ""
            hint = f"pip install '{need.name}{need.specifier}'"
            report.missing.append(Lack(f"{need.name}{need.specifier}{has}", hint, True))


def _machine(report: Report) -> None:
    report.found["cores"] = str(cores())
    with contextlib.suppress(OSError, ValueError, KeyError):
        free, total = _memory("MemAvailable"), _memory("MemTotal")
        report.found["memory"] = f"{_gigabytes(free)} free of {_gigabytes(total)}"
    disk = shutil.disk_usage(Path.cwd())
    report.found["disk"] = (
        f"{_gigabytes(disk.free)} free of {_gigabytes(disk.total)} in {Path.cwd()}"
    )
    if disk.free < SMALL_DISK:
        hint = "work in a folder on a larger disk, or free some space"
        report.missing.append(
            Lack(f"disk: only {_gigabytes(disk.free)} are free here", hint, False)
        )


def _memory(name: str) -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return float(dict(line.split(":") for line in lines)[name].split()[0]) * 1024


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _devices(report: Report) -> None:
    """The GPUs that torch can use; those that are there and that it cannot use are a lack."""
    try:
        import torch
    except (ImportError, OSError) as error:
        report.missing.append(
            Lack(f"torch cannot be imported: {error}", "pip install --force-reinstall torch", True)
        )
        return
    report.found["torch"] = f"{torch.__version__}, " + (
        f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPU alone"
    )
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        report.found[f"gpu {number}"] = (
            f"{card.name}, {_gigabytes(card.total_memory)}, compute {card.major}.{card.minor}"
        )
    if torch.cuda.is_available():
        return
    report.found["gpu"] = "none that torch can use"
    if Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi"):
        if torch.version.cuda is None:
            hint = "pip install --force-reinstall torch (the ordinary build, not the one for CPU)"
        else:
            hint = f"install a driver for CUDA {torch.version.cuda}; `nvidia-smi` shows the present"
        report.missing.append(Lack("an NVIDIA GPU is here, and torch cannot use it", hint, False))


def _compiler(report: Report) -> None:
    """Nothing of headrace needs one; torch.compile on CPU and DeepSpeed's offloading do."""
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found:
        report.found["C++ compiler"] = found
    else:
        what = "a C++ compiler (torch.compile on CPU and DeepSpeed's offloading use one)"
        report.missing.append(Lack(what, "apt-get install g++", False))


def _credentials(report: Report) -> None:
    """Where credentials for object stores come from. Their values are never shown."""
    home = Path.home()
    places = {
        "s3": ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_ROLE_ARN", home / ".aws/credentials"),
        "gs": (
            "GOOGLE_APPLICATION_CREDENTIALS",
            home / ".config/gcloud/application_default_credentials.json",
        ),
        "az": ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME", home / ".azure"),
    }
    known = []
    for scheme, candidates in places.items():
        for place in candidates:
            if place.exists() if isinstance(place, Path) else os.environ.get(place):
                known.append(f"{scheme}:// from {place}")
                break
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        known.append(f"s3:// at {endpoint}")
    report.found["object stores"] = ", ".join(known) or "no credentials"
    if not known:
        what = "credentials for an object store (local datasets need none)"
        hint = "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... (or ~/.aws/credentials)"
        report.missing.append(Lack(what, hint, False))


def _choices(report: Report) -> None:
    """What the rooms would choose here; each is asked, nothing is repeated."""
    if not report.ok:
        return
    import torch

    with contextlib.redirect_stderr(io.StringIO()):
        run = import_module("..trainer.run.config", __package__).RunConfig()
        kernels = import_module("..models.kernels", __package__)
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    fused = kernels.KERNELS if cards else ()
    report.used["device"] = f"cuda, {cards} processes" if cards else f"cpu, {cores()} cores"
    report.used["precision"] = "bf16 with fp32 masters" if cards else "fp32"
    report.used["engine"] = f"{run.engine.kind} (a run's `engine` says otherwise)"
    report.used["kernels"] = ", ".join(fused) or "plain torch"
