"""Entry of a rank: the launcher starts `python -m headrace.trainer.launch.rank FOLDER OPTIONS`.

Signals are handled before the imports of a rank, which take seconds.
"""

from __future__ import annotations

import sys

from ...console import log
from ..cluster import ranks
from ..cluster.end import PlainEnd
from .options import StartOptions


def main() -> None:
    end, watched, asked = PlainEnd(), ranks.Watched(), ranks.StopAsked()
    folder, words = sys.argv[1:]
    options = StartOptions.from_json(words)
    log.setup(debug=options.debug)
    try:
        from ..folder import RunFolder
        from ..run import resolve
        from .worker import work

        code = work(resolve.load(RunFolder(folder)), watched, asked, options)
    except Exception as error:
        watched.fail(error)  # the launcher reports it
        code = 1
    end.code = code
    sys.exit(code)


if __name__ == "__main__":
    main()
