"""`headrace doctor`: components of this machine, default settings, missing packages.

Packages are those that this installation declares as requirements, devices are those that torch
can use, and the defaults come from the code that chooses them.
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
from importlib.util import find_spec
from pathlib import Path

import click

from . import command
from .machine import cores, cpp_compiler, cpp_problem, memory
from .progress import format_bytes

SMALL_DISK = 10e9
"""Free bytes below which a dataset or a few checkpoints may fill the disk."""

EXTRAS = {
    "train": "for models and training",
    "ray": "for builds on a cluster, `tokenize build --engine ray`",
}
"""Extras of the package, and their use."""


@dataclass(frozen=True)
class MissingComponent:
    """A missing package, program, driver or resource, and a hint how to get it."""

    what: str
    hint: str
    needed: bool
    """False if headrace works without it."""


@dataclass
class MachineReport:
    """This machine: components, defaults, missing components."""

    found: dict[str, str] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)
    missing: list[MissingComponent] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if nothing that headrace needs is missing."""
        return not any(component.needed for component in self.missing)

    def lacks(self, component: str, hint: str, *, needed: bool = False) -> None:
        """Add a missing component."""
        self.missing.append(MissingComponent(component, hint, needed))


@click.command()
@click.option("--kernels", is_flag=True, help="Compare all fused kernels with plain torch.")
@click.option("--only", multiple=True, metavar="KERNEL", help="With --kernels: a kernel of these.")
@click.option(
    "--interpret", is_flag=True, help="With --kernels: in Triton's interpreter, at tiny sizes."
)
@click.option("--next", "next_programs", is_flag=True, help="With --kernels: their next programs.")
@command.json_option
@click.pass_context
def main(
    ctx: click.Context,
    kernels: bool,
    only: tuple[str, ...],
    interpret: bool,
    next_programs: bool,
    as_json: bool,
) -> None:
    """Check this machine: versions, devices, default settings, missing packages.

    Exits with 1 if something that headrace needs is missing, or if a kernel fails.

    \b
    Example:
      headrace doctor
      headrace doctor --kernels

    More: docs/first-hour.md, docs/gpu.md
    """
    if (only or interpret or next_programs) and not kernels:
        raise click.UsageError("--only, --interpret and --next need --kernels")
    if kernels:
        passed = _attest_kernels(
            only, interpret=interpret, next_programs=next_programs, as_json=as_json
        )
        ctx.exit(0 if passed else 1)
    report = examine()
    if as_json:
        command.emit({"ok": report.ok, **asdict(report)})
    else:
        click.echo(render(report))
    ctx.exit(0 if report.ok else 1)


def _attest_kernels(
    only: tuple[str, ...], *, interpret: bool, next_programs: bool, as_json: bool
) -> bool:
    """Compare the fused kernels with plain torch, and print the result. Return True if all pass."""
    by_hand = import_module("..models.attestation.by_hand", __package__)
    records = by_hand.attest_kernels(only, interpret=interpret, next_programs=next_programs)
    if as_json:
        command.emit([by_hand.summarize(record) for record in records])
    else:
        click.echo("\n\n".join(by_hand.render(record) for record in records))
    return not any(record.problems for record in records)


def examine() -> MachineReport:
    """Examine this machine."""
    report = MachineReport()
    _packages(report)
    _machine(report)
    _devices(report)
    _compiler(report)
    _kernel_tools(report)
    _credentials(report)
    _defaults(report)
    return report


def render(report: MachineReport) -> str:
    """Return the report as text."""
    width = max(len(name) for name in (*report.found, *report.used)) + 2
    lines = ["detected"]
    lines += [f"  {name:<{width}}{text}" for name, text in report.found.items()]
    lines += ["used by default"]
    lines += [f"  {name:<{width}}{text}" for name, text in report.used.items()]
    for title, needed in (("missing", True), ("missing, but optional", False)):
        components = [component for component in report.missing if component.needed == needed]
        lines += [title] if components else []
        for component in components:
            lines += [f"  {component.what}", f"    hint: {component.hint}"]
    if report.ok:
        lines += ["all requirements of headrace are installed"]
    return "\n".join(lines)


def _packages(report: MachineReport) -> None:
    """Add the requirements of this installation, with their versions."""
    from packaging.requirements import Requirement

    report.found["python"] = f"{platform.python_version()}, {sys.executable}"
    try:
        installed = importlib.metadata.distribution("headrace")
    except importlib.metadata.PackageNotFoundError:
        report.lacks("headrace itself is not installed", "pip install .", needed=True)
        return
    report.found["headrace"] = installed.version
    for requirement in map(Requirement, installed.requires or []):
        extras = [
            extra
            for extra in ("", *EXTRAS)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        ]
        if not extras:
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            report.found[requirement.name] = version
        elif extras[0]:
            package = f"{requirement.name} ({EXTRAS[extras[0]]})"
            hint = f"pip install 'headrace[{extras[0]}]'"
            report.lacks(package, hint)
        else:
            installed_version = f"; {version} is installed" if version else ""
            package = f"{requirement.name}{requirement.specifier}"
            hint = f"pip install '{package}'"
            report.lacks(f"{package}{installed_version}", hint, needed=True)


def _machine(report: MachineReport) -> None:
    report.found["cores"] = str(cores())
    with contextlib.suppress(OSError, ValueError, KeyError):
        free, total = memory("MemAvailable"), memory("MemTotal")
        report.found["memory"] = f"{format_bytes(free)} free of {format_bytes(total)}"
    disk = shutil.disk_usage(Path.cwd())
    report.found["disk"] = (
        f"{format_bytes(disk.free)} free of {format_bytes(disk.total)} in {Path.cwd()}"
    )
    if disk.free < SMALL_DISK:
        hint = "free some space, or work on a larger disk"
        report.lacks(f"disk space: only {format_bytes(disk.free)} are free in this folder", hint)


def _devices(report: MachineReport) -> None:
    """Add the GPUs that torch can use; a GPU that it cannot use is a missing component."""
    if find_spec("torch") is None:
        return  # _packages has said so
    try:
        import torch
    except (ImportError, OSError) as error:
        hint = "pip install --force-reinstall torch"
        report.lacks(f"torch cannot be imported: {error}", hint, needed=True)
        return
    report.found["torch"] = f"{torch.__version__}, " + (
        f"for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    )
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        report.found[f"gpu {number}"] = (
            f"{card.name}, {format_bytes(card.total_memory)}, compute {card.major}.{card.minor}"
        )
    if torch.cuda.is_available():
        return
    report.found["gpu"] = "none that torch can use"
    if Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi"):
        if torch.version.cuda is None:
            hint = "pip install --force-reinstall torch (the default build, not the CPU one)"
        else:
            hint = f"install a driver for CUDA {torch.version.cuda}; see `nvidia-smi`"
        report.lacks("torch cannot use the NVIDIA GPU of this machine", hint)


def _compiler(report: MachineReport) -> None:
    """Add the C++ compiler, which torch.compile on CPU and DeepSpeed's offloading need."""
    problem = cpp_problem()
    if problem is None:
        report.found["C++ compiler"] = shutil.which(cpp_compiler()) or cpp_compiler()
    else:
        compiler = (
            f"a C++ compiler (for torch.compile on CPU and DeepSpeed's offloading): {problem}"
        )
        report.lacks(compiler, "apt-get install g++ python3-dev")


def _kernel_tools(report: MachineReport) -> None:
    """Name what Triton lacks to compile the fused kernels for this machine's GPUs."""
    if not report.ok or find_spec("torch") is None:
        return
    problem = import_module("..models.compilation.tools", __package__).find_tool_problem()
    if problem is not None:
        component, _, hint = problem.partition("; ")
        report.lacks(component, f"{hint} (`kernel: torch` in a model needs none)", needed=True)


def _credentials(report: MachineReport) -> None:
    """Add where credentials for object stores stand, never their values."""
    home = Path.home()
    sources_by_scheme = {
        "s3": ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_ROLE_ARN", home / ".aws/credentials"),
        "gs": (
            "GOOGLE_APPLICATION_CREDENTIALS",
            home / ".config/gcloud/application_default_credentials.json",
        ),
        "az": ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME", home / ".azure"),
    }
    stores = []
    for scheme, sources in sources_by_scheme.items():
        for source in sources:
            if source.exists() if isinstance(source, Path) else os.environ.get(source):
                stores.append(f"{scheme}:// from {source}")
                break
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        stores.append(f"s3:// at {endpoint}")
    report.found["object stores"] = ", ".join(stores) or "no credentials"
    if not stores:
        credentials = "credentials of an object store (local datasets need none)"
        hint = "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... (or ~/.aws/credentials)"
        report.lacks(credentials, hint)


def _defaults(report: MachineReport) -> None:
    """Add this machine's defaults, from the code that chooses them."""
    if not report.ok or find_spec("torch") is None:
        return
    import torch

    with contextlib.redirect_stderr(io.StringIO()):
        run = import_module("..trainer.run.config", __package__).RunConfig()
        kernels = import_module("..models.kernels", __package__)
        precisions = import_module("..models.config.options.precision", __package__)
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    precision = precisions.default_precision("cuda" if cards else "cpu")
    fused = kernels.KERNELS if cards else ()
    report.used["device"] = f"cuda, {cards} ranks" if cards else f"cpu, {cores()} cores"
    masters = " with fp32 masters" if precision.separate_masters else ""
    report.used["precision"] = f"{precision}{masters}"
    report.used["engine"] = f"{run.engine.kind} (set `engine` in the run's YAML to change it)"
    report.used["kernels"] = ", ".join(fused) or "plain torch"
