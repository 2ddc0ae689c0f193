"""End a rank: run all exit handlers, and do not finalize the interpreter.

While Python finalizes, it stops daemon threads that return from native code, by unwinding their
stacks. If torch's C++ is on such a stack, it calls std::terminate: a rank that has finished dies
with SIGABRT ("terminate called without an active exception"), and its run is reported as failed.
Threads in the loader, loggers, gloo and engines may be in native code then, and we cannot join all
of them. The system reclaims a process's resources, so nothing is lost.
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
    """Ends this process at its exit, after all exit handlers registered later."""

    def __init__(self) -> None:
        self.code: int | None = None
        """Exit code; None: Python ends as usual."""
        atexit.register(self._end)

    def leave(self, code: int) -> NoReturn:
        """End a fork of the process that created this object, as Python ends one, without unwinding
        the frames below the fork."""
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
