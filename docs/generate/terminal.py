"""The two commands of the README and their output, from a real demo: `make pictures`.

    headrace demo --out runs/pictures/demo 2>&1 | tee demo.log
    python -m docs.generate.terminal demo.log

The text between the markers in README.md is replaced by these lines of the output.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- terminal: from `make pictures` -->\n", "<!-- terminal: end -->"
BEFORE = (r"\$ trainer run .*--stop-after", r"\[.*parameters, .*steps")
STEP = re.compile(r"^step +[1-9].* loss .*", re.MULTILINE)
"""Lines of steps; the last before the interruption is shown: a slow machine prints more."""
RESUMED = "$ trainer resume"
AFTER = (
    re.escape(RESUMED),
    r"\$ mixtures audit",
    r"the \d+ rows of step",
    r"row \d+ ",
    r"  tokens 0 to ",
)
"""The beginnings of the lines that are shown, in their order; the first that fits is taken."""
MAKE_RUN = "$ make run     # install, then go from corpus to trained model in runs/demo"
"""The command that prints the lines below it."""
MAKE_TEST = "$ make test    # run the tests"
WIDE = 96
"""Characters of a line; a longer one ends in `…`."""


def main(log: Path) -> None:
    text = README.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{README} has no text between {BEGIN.strip()} and {END}")
    README.write_text(before + begin + block(log.read_text()) + end + after)
    print(README)


def block(output: str) -> str:
    """Return the block of the page, from the output of a demo."""
    return "\n".join(["```console", MAKE_RUN, *shown(output), MAKE_TEST, "```\n"])


def shown(output: str) -> Iterator[str]:
    """Yield the lines of the output of a demo that the page shows."""
    before, _, after = output.partition("\n" + RESUMED)
    steps = STEP.findall(before)[-1:]
    for line in (*_found(before, BEFORE), *steps, *_found(RESUMED + after, AFTER)):
        line = re.sub(r"\S*/configs/\w+/", "", line)  # the shipped files, by their names
        line = re.sub(r", corpora/.*", ", …", line)  # copies of the demo
        yield line if len(line) <= WIDE else line[: WIDE - 1].rstrip() + "…"


def _found(output: str, wanted: Sequence[str]) -> Iterator[str]:
    """Yield the first line with each beginning, in their order."""
    rest = iter(output.splitlines())
    for beginning in wanted:
        line = next((line for line in rest if re.match(beginning, line)), None)
        if line is None:
            raise SystemExit(f"no line begins with {beginning!r}: it needs the output of a demo")
        yield line


if __name__ == "__main__":
    main(Path(sys.argv[1]))
