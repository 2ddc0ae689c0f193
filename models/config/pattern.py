"""Parser for model patterns: `[se, mr, li] * 3 + [attention]` → a list of layers.

    pattern := term ('+' term)*            joined
    term    := item ('*' number)*          repeated
    item    := '[' pattern, … ']' | '(' pattern ')' | layer
    layer   := [shared '>'] mixer ['|' mixer] [('/' | '&') mlp]

`attention` is a layer with that operator and the model's default MLP, `attention/moe` has another
MLP, `mamba/none` has none, and in `block>mamba` the shared block `block` feeds the layer. In
`mamba&moe` the MLP is parallel to the mixer: both read the residual stream before the layer. In
`attention|mamba` two mixers read one norm, and both add to the residual stream.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME = r"[A-Za-z_][A-Za-z0-9_.-]*"
TOKEN = re.compile(
    rf"\s*(?:(?P<layer>(?:{NAME}\s*>\s*)?{NAME}(?:\s*\|\s*{NAME})?(?:\s*[/&]\s*{NAME})?)|(?P<mark>\S))"
)
NUMBER = re.compile(r"\s*([0-9]+)")
MAX_LAYERS = 10_000


@dataclass(frozen=True)
class Layer:
    """A layer's operators by name: mixer, MLP, and the shared block that feeds the mixer."""

    mixer: str
    mlp: str | None = None
    shared: str | None = None
    parallel: bool = False
    """True if the MLP reads the mixer's input, not input + mixer."""
    second: str | None = None
    """A second mixer, which reads the same norm."""

    @property
    def mixers(self) -> list[str]:
        """The mixer, and the one beside it."""
        return [self.mixer] if self.second is None else [self.mixer, self.second]

    @property
    def branches(self) -> list[str]:
        """Operators that add to the residual stream, in order."""
        return self.mixers if self.mlp is None else [*self.mixers, self.mlp]

    @property
    def names(self) -> list[str]:
        """All operators, including the shared block."""
        return [*self.branches, *([self.shared] if self.shared is not None else [])]

    def __str__(self) -> str:
        call = f"{self.shared}>" if self.shared else ""
        return call + "|".join(self.mixers) + (f"&{self.mlp}" if self.parallel else "")


def parse_pattern(text: str, *, mlp: str | None) -> tuple[Layer, ...]:
    """Parse a pattern into layers; `mlp` follows every mixer without an explicit MLP."""
    parser = _PatternParser(text, mlp)
    layers = parser.parse_sequence()
    if parser.rest():
        raise parser.error("the end")
    if not layers:
        raise ValueError("the pattern has no layer")
    return tuple(layers)


class _PatternParser:
    def __init__(self, text: str, mlp: str | None) -> None:
        self.text = text
        self.mlp = mlp
        self.position = 0

    def parse_sequence(self) -> list[Layer]:
        layers = self.parse_repetition()
        while self.take_mark("+"):
            layers += self.parse_repetition()
        return layers

    def parse_repetition(self) -> list[Layer]:
        layers = self.parse_item()
        while self.take_mark("*"):
            number = NUMBER.match(self.text, self.position)
            if not number:
                raise self.error("a number after `*`")
            self.position = number.end()
            if len(layers) * int(number[1]) > MAX_LAYERS:
                raise ValueError(f"the pattern has more than {MAX_LAYERS} layers")
            layers *= int(number[1])
        return layers

    def parse_item(self) -> list[Layer]:
        if self.take_mark("["):
            layers: list[Layer] = []
            while not self.take_mark("]"):
                layers += self.parse_sequence()
                if not self.take_mark(",") and self.peek() != "]":
                    raise self.error("`,` or `]`")
            return layers
        if self.take_mark("("):
            layers = self.parse_sequence()
            if not self.take_mark(")"):
                raise self.error("`)`")
            return layers
        match = TOKEN.match(self.text, self.position)
        if not match or not match["layer"]:
            raise self.error("the name of an operator")
        self.position = match.end()
        return [self.parse_layer(match["layer"])]

    def parse_layer(self, text: str) -> Layer:
        shared, _, branches = text.rpartition(">")
        parallel = "&" in branches
        mixer, mark, mlp = (word.strip() for word in branches.partition("&" if parallel else "/"))
        if parallel and mlp == "none":
            raise ValueError(f"`{text}` has nothing beside its mixer: write `{mixer}/none`")
        layer_mlp = (None if mlp == "none" else mlp) if mark else self.mlp
        mixer, _, second = (word.strip() for word in mixer.partition("|"))
        return Layer(mixer, layer_mlp, shared.strip() or None, parallel, second or None)

    def rest(self) -> str:
        return self.text[self.position :].strip()

    def peek(self) -> str:
        return self.rest()[:1]

    def take_mark(self, mark: str) -> bool:
        if self.peek() != mark:
            return False
        self.position = self.text.index(mark, self.position) + 1
        return True

    def error(self, expected: str) -> ValueError:
        actual = f"`{self.rest()[:20]}`" if self.rest() else "the end"
        return ValueError(f"syntax error in the pattern: expected {expected}, got {actual}")
