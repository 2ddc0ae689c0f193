"""Parser of a model's pattern: `[se, mr, li] * 3 + [attention]` → a list of layers.

    pattern := term ('+' term)*            joined
    term    := item ('*' number)*          repeated
    item    := '[' pattern, … ']' | '(' pattern ')' | layer
    layer   := [shared '>'] mixer [('/' | '&') mlp]

`attention` is a layer of that operator and of the model's default MLP, `attention/moe` has another
MLP, `mamba/none` has none, and in `block>mamba` the shared block `block` feeds the layer. In
`mamba&moe` the MLP stands beside the mixer: both read the residual stream before the layer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME = r"[A-Za-z_][A-Za-z0-9_.-]*"
TOKEN = re.compile(rf"\s*(?:(?P<layer>(?:{NAME}\s*>\s*)?{NAME}(?:\s*[/&]\s*{NAME})?)|(?P<mark>\S))")
NUMBER = re.compile(r"\s*([0-9]+)")
MAX_LAYERS = 10_000


@dataclass(frozen=True)
class Layer:
    """Names of a layer's operators: mixer, MLP, and the shared block that feeds the mixer."""

    mixer: str
    mlp: str | None = None
    shared: str | None = None
    parallel: bool = False
    """True if the MLP reads the same input as the mixer, not the sum of input and mixer."""

    @property
    def branches(self) -> list[str]:
        """Operators that add to the residual stream, in order."""
        return [self.mixer] if self.mlp is None else [self.mixer, self.mlp]

    @property
    def names(self) -> list[str]:
        """All operators of the layer."""
        return [*self.branches, *([self.shared] if self.shared is not None else [])]

    def __str__(self) -> str:
        before = f"{self.shared}>" if self.shared else ""
        return before + self.mixer + (f"&{self.mlp}" if self.parallel else "")


def parse_pattern(text: str, *, mlp: str | None) -> tuple[Layer, ...]:
    """Return the layers of a pattern; `mlp` follows each mixer that names no MLP itself."""
    parser = _Parser(text, mlp)
    layers = parser.sequence()
    if parser.rest():
        raise parser.error("the end")
    if not layers:
        raise ValueError("the pattern has no layer")
    return tuple(layers)


class _Parser:
    def __init__(self, text: str, mlp: str | None) -> None:
        self.text = text
        self.mlp = mlp
        self.place = 0

    def sequence(self) -> list[Layer]:
        layers = self.repeated()
        while self.take("+"):
            layers += self.repeated()
        return layers

    def repeated(self) -> list[Layer]:
        layers = self.item()
        while self.take("*"):
            number = NUMBER.match(self.text, self.place)
            if not number:
                raise self.error("a number after `*`")
            self.place = number.end()
            if len(layers) * int(number[1]) > MAX_LAYERS:
                raise ValueError(f"the pattern has more than {MAX_LAYERS} layers")
            layers *= int(number[1])
        return layers

    def item(self) -> list[Layer]:
        if self.take("["):
            layers: list[Layer] = []
            while not self.take("]"):
                layers += self.sequence()
                if not self.take(",") and self.peek() != "]":
                    raise self.error("`,` or `]`")
            return layers
        if self.take("("):
            layers = self.sequence()
            if not self.take(")"):
                raise self.error("`)`")
            return layers
        match = TOKEN.match(self.text, self.place)
        if not match or not match["layer"]:
            raise self.error("the name of an operator")
        self.place = match.end()
        return [self.layer(match["layer"])]

    def layer(self, text: str) -> Layer:
        before, _, after = text.rpartition(">")
        parallel = "&" in after
        mixer, mark, mlp = (word.strip() for word in after.partition("&" if parallel else "/"))
        if parallel and mlp == "none":
            raise ValueError(f"`{text}` has nothing beside its mixer: write `{mixer}/none`")
        own = (None if mlp == "none" else mlp) if mark else self.mlp
        return Layer(mixer, own, before.strip() or None, parallel)

    def rest(self) -> str:
        return self.text[self.place :].strip()

    def peek(self) -> str:
        return self.rest()[:1]

    def take(self, mark: str) -> bool:
        if self.peek() != mark:
            return False
        self.place = self.text.index(mark, self.place) + 1
        return True

    def error(self, expected: str) -> ValueError:
        actual = f"`{self.rest()[:20]}`" if self.rest() else "the end"
        return ValueError(f"syntax error in the pattern: expected {expected}, got {actual}")
