"""Entry point for a rank: a fork of the template, or `python -m …launch.rank FOLDER OPTIONS`.

Signals are handled before the rank's imports, which take seconds in a new process.
"""

from __future__ import annotations

import sys

from ...console import log
from ..cluster import ranks
from ..cluster.end import PlainEnd
from .options import StartOptions


def main() -> int:
    """Train, and return the exit code."""
    watched, asked = ranks.Watched(), ranks.StopRequest()
    folder, words = sys.argv[1:]
    options = StartOptions.from_json(words)
    log.setup(debug=options.debug)
    try:
        from ..folders.folder import RunFolder
        from ..run import resolve
        from .worker import work

        return work(resolve.load(RunFolder(folder)), watched, asked, options)
    except Exception as error:
        watched.fail(error)  # the launcher reports it
        return 1


if __name__ == "__main__":
    end = PlainEnd()
    end.code = main()
    sys.exit(end.code)
