"""The end of a rank: all exit handlers run, and the interpreter is not taken down.

While Python ends, it stops each daemon thread that comes back from native code, by unwinding the
thread's stack. If torch's C++ is on that stack, it calls std::terminate: a rank that has done its
work dies with SIGABRT ("terminate called without an active exception"), and its run is reported as
failed. Threads of the loader, of loggers, of gloo and of engines may be in native code then, and
not all of them are ours to join. The system takes back all that a process holds: nothing is lost.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from typing import NoReturn


class PlainEnd:
    """Ends this process at its exit, after all exit handlers that are registered later."""

    def __init__(self) -> None:
        self.code: int | None = None
        """Exit code; None: Python ends as usual."""
        atexit.register(self._end)

    def leave(self, code: int) -> NoReturn:
        """End a fork of the process that made this, as Python ends one; the frames below the fork
        are not unwound."""
        self.code = code
        with contextlib.suppress(BaseException):  # the last handler ends the process
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        os._exit(code)

    def _end(self) -> None:
        if self.code is None:
            return
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # its reader has gone
                stream.flush()
        os._exit(self.code)
