"""How does a model get onto a page that has no Python?

``Look()`` is what a cell of the book shows: the place of the view, and one stored example per model, which is drawn before any
weight is loaded. In the book the Sphinx extension serves the script and the weights, in pieces that load when the reader first
touches the view. Elsewhere (Colab, VS Code, JupyterLab) the output brings both along.
"""

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from . import pack, still
from .trace import rounded, sight

__all__ = ["EXAMPLE", "Look", "script"]

HERE = Path(__file__).parent
SOURCES = ("operators.js", "model.js", "trace.js", "map.js", "drawing.js", "view.js")  # one after another, in one function
BUNDLE = re.compile(r'<script class="ngl-bundle">.*?</script>', re.DOTALL)
EXAMPLE = "def __init__(self, name):\n    self.name = na"
SIZES = ("whole", "small")


@cache
def script() -> str:
    """The page's program, with its style sheet inside."""
    settings = {"css": (HERE / "live.css").read_text(), "pieces": {which: len(pack.pieces(which)) for which in pack.WHICH}}
    text = "\n".join((HERE / name).read_text() for name in SOURCES)
    once = "if (window.ngptLive) return window.ngptLive.scan();"  # a second output of a notebook brings a second copy
    return f'(function (settings) {{\n"use strict";\n{once}\n{text}\n}})({json.dumps(settings)});\n'


@cache
def examples() -> dict[str, Any]:
    return {which: rounded(sight(pack.model(which), EXAMPLE)) for which in pack.WHICH}


class Look:
    """The live models as an output of a notebook.

    size: "whole", or "small" for the first page: what comes next, and the walk that leads there.
    """

    def __init__(self, size: str = "whole"):
        if size not in SIZES:
            raise ValueError(f"size must be one of {', '.join(map(repr, SIZES))}; got {size!r}.")
        self.size = size

    def to_html(self, bring: bool = True) -> str:
        """HTML; ``bring``: with the script and all weights inside (5 MB), for pages that are not the book's."""
        data = {"blocks": {w: pack.model(w).config.pattern for w in pack.WHICH}, "examples": examples()}
        text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
        pattern = pack.model("ngpt").config.pattern
        alt = "The walk of the hidden state from the last byte of a text towards the next one, block by block."
        body = (
            f'<div class="ngl" data-size="{self.size}"><div class="ngl-still">'
            f"{still.walk(examples()['ngpt'], pattern, alt)}</div>"
            f'<script type="application/json" class="ngl-data">{text}</script></div>'
        )
        if not bring:
            return body
        weights = "".join(text for _, text in pack.scripts())
        return f'{body}<script class="ngl-bundle">{script()}{weights}ngptLive.scan();</script>'

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self.to_html(bring=os.environ.get("NGPT_BOOK") != "1")}

    def __repr__(self) -> str:
        return f"Look inside nGPT and GPT ({self.size}): type on the page of the book, or use live.model()"
