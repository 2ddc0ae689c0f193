"""Commands of headrace in forked processes: a server has imported their modules once.

    done = run([sys.executable, "-m", "headrace.trainer.cli", "run", …])

`trainer run` imports torch, which takes most of the time of a small run. Here a process of the fork
server becomes the command: processes, signals, files, messages and exit codes are those of the real
one. Tests of starts, signals and torchrun run the real one; under torchrun, ranks also hash texts
differently: forks of one process iterate over a set in one order.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.ranks.ranks import forkserver

NOTHING = Path(os.devnull)


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE WORD…`, as `subprocess.run` does."""
    return Command(command, **options).wait()


class Command:
    """A command that has been started. It imports the file `plugin` first, as Python imports
    `sitecustomize`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] = os.environ,
        cwd: Path | None = None,
        plugin: Path | None = None,
    ) -> None:
        self.command = command
        self.folder = tempfile.TemporaryDirectory()
        self.streams = [Path(self.folder.name, name) for name in ("stdout", "stderr")]
        arguments = (list(command), dict(env), cwd or Path.cwd(), *self.streams, plugin)
        self.process = forkserver().Process(target=_become, args=arguments)
        self.process.start()

    def wait(self, timeout: float = 580) -> subprocess.CompletedProcess[str]:
        self.process.join(timeout)
        ended = self.process.exitcode is not None
        self.process.kill()  # its ranks die with it
        self.process.join()
        assert self.process.exitcode is not None
        with self.folder:
            out, err = (path.read_text() for path in self.streams)
        if not ended:
            raise subprocess.TimeoutExpired(self.command, timeout, out.encode(), err.encode())
        return subprocess.CompletedProcess(self.command, self.process.exitcode, out, err)


def _become(
    command: Sequence[str],
    environment: dict[str, str],
    folder: Path,
    stdout: Path,
    stderr: Path,
    plugin: Path | None,
) -> None:
    if plugin is not None:
        sys.path.insert(0, str(plugin.parent))
        importlib.import_module(plugin.stem)
    with NOTHING.open() as nothing, stdout.open("w") as out, stderr.open("w") as err:
        become(command, environment, folder, [item.fileno() for item in (nothing, out, err)])


def become(
    command: Sequence[str], environment: dict[str, str], folder: Path, streams: Sequence[int]
) -> None:
    """Turn this process of the server into the command, with these standard streams."""
    gc.freeze()  # a collection would copy the pages of all objects of the server
    os.chdir(folder)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.environ.clear()
    os.environ.update(environment)
    python, flag, module, *words = command
    assert (python, flag) == (sys.executable, "-m")
    sys.argv = [module, *words]
    importlib.import_module(module).main()


@contextlib.contextmanager
def ended() -> Iterator[None]:
    """End this process with the exit code of the block, as Python ends."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
