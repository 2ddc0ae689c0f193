"""Settings and fixtures shared by the tests of several folders."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from support.data.small_data import random_documents, threads_of_loaders, write_dataset

# No deadlines: results must not depend on the machine's speed. The examples are the same in every
# run, so that all changes are judged by the same ones; `make test-all` draws new ones.
GENERAL = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("same", **GENERAL, derandomize=True)
settings.register_profile("others", **GENERAL)
settings.load_profile("same")

# Each process of `make test` keeps to its own core: libraries start as many threads as they see
# cores, and threads of two tests that wait for each other would take turns on both.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})

# A background job of a shell ignores Ctrl-C, and so would the commands that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Commands that tests start keep their bytecode, or each of them compiles all modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(trylast=True)  # after deselection
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin each half with its slow tests: `make test` gives a half to each of two processes, and
    one that is done takes tests from the end of the other's half."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    fast = [item for item in items if not item.get_closest_marker("slow")]
    a, b = len(slow) // 2, len(items) // 2 - len(slow) // 2
    items[:] = [*slow[:a], *fast[:b], *slow[a:], *fast[b:]]


def pytest_collection_finish() -> None:
    """Leave what was imported and collected, a million objects, out of later collections."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries report objects that outlive the interpreter


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """Fail a module that leaves torch's process group behind: the next module could make none, and
    which module is next depends on the order of the two processes of `make test`."""
    yield
    distributed = sys.modules.get("torch.distributed")
    assert distributed is None or not distributed.is_initialized()


@pytest.fixture(scope="module", autouse=True)
def _signals_keep_their_handlers() -> Iterator[None]:
    """Fail a module that leaves a handler behind: a signal would end the tests of another module
    with the exit code of a run."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == handlers


@pytest.fixture(scope="module", autouse=True)
def _transformers_keeps_its_own_classes() -> Iterator[None]:
    """Take fla's classes out of the Auto classes of transformers, which it replaces when it is
    imported: Mamba and Mamba-2 among them, by classes that need a GPU."""
    yield
    if "fla" not in sys.modules:
        return
    from transformers.models.auto import configuration_auto, modeling_auto

    for mapping in (*vars(configuration_auto).values(), *vars(modeling_auto).values()):
        extra = getattr(mapping, "_extra_content", None)
        if isinstance(extra, dict):
            for key in [key for key, value in extra.items() if is_of_fla(key, value)]:
                del extra[key]


def is_of_fla(*classes: object) -> bool:
    return any(getattr(kind, "__module__", "").startswith("fla.") for kind in classes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """End a test when the threads of its loaders have ended, before its fixtures do: a thread that
    still reads would find the store, the cache and the settings of the next test. A test that fails
    ends at `yield`: its traceback may hold a loader that is not closed."""
    yield
    assert not threads_of_loaders(60), "a loader was not closed"


@pytest.fixture(autouse=True)
def _random_numbers_of_its_own() -> None:
    """Seed torch for each test: its numbers do not depend on the tests before it."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)


@pytest.fixture
def dataset(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes a dataset of random documents and returns its URL."""

    def make(name: str, *, seed: int | None = None, count: int = 100, **options: object) -> str:
        url = str(tmp_path / name)
        number = sum(map(ord, name)) if seed is None else seed
        write_dataset(url, random_documents(number, count), **options)  # type: ignore[arg-type]
        return url

    return make


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A real read-only file system."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", place]).returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.fixture
def set_request_policy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the policy of all requests of this process, whose threads send
    some of them."""
    from headrace.dataplane.storage import remote

    def set_policy(**fields: float) -> None:
        policy = remote.RequestPolicy(**fields)  # type: ignore[arg-type]
        monkeypatch.setattr(remote, "POLICY", policy)

    return set_policy


@pytest.fixture
def no_aws_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
