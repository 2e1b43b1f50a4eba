"""How does the code of a figure get onto a page: late, once, and from the page's own site?

A ``Part`` of the book that draws with JavaScript has a name, a script and a style sheet:

    MOTION = lazy.Part("ngm", sources=(HERE / "motion.js",), css=HERE / "motion.css")

Its blocks are ``<div class="ngm">...</div>`` followed by ``MOTION.bundle()``, and its script says how a block starts:

    ngptLazy.define("ngm", (element) => { ... });

In the book the Sphinx extension takes the bundles out, links the style sheet on the pages that have such blocks, and
``lazy.js`` loads ``_static/ngm.js`` when the first block comes near the reader's view. Elsewhere (Colab, JupyterLab, VS Code)
the bundle brings everything along. Until a block is alive it shows what its HTML holds: a still picture of the
same size, so that nothing moves.

Any element ``<span class="ngpt-number"></span>`` of an output is numbered by the extension: "Figure 5.2.".
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LOADER = Path(__file__).with_name("lazy.js")
PARTS: dict[str, "Part"] = {}


@dataclass(frozen=True)
class Part:
    """A part of the book that draws with JavaScript: ``_static/NAME.js`` and ``_static/NAME.css``, for blocks of class NAME."""

    name: str
    sources: tuple[Path, ...]
    """Scripts, one after another, inside one function with the argument ``settings``."""
    css: Path
    settings: Callable[[bool], dict] = lambda book: {}
    """What the script gets from Python, as JSON data; ``book``: for the book's own pages."""

    def __post_init__(self):
        if not re.fullmatch(r"[a-z]+", self.name):
            raise ValueError(f"The name of a part becomes a class and a file: use lowercase letters; got {self.name!r}.")
        PARTS[self.name] = self

    def script(self, book: bool = False) -> str:
        text = "\n".join(source.read_text(encoding="utf-8") for source in self.sources)
        settings = json.dumps(self.settings(book), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
        return f'(function (settings) {{\n"use strict";\n{text}\n}})({settings});\n'

    def bundle(self) -> str:
        """Everything that a block needs outside the book; in the book it is taken out again."""
        once = f"if (!window.ngptLazy?.{self.name}) {{\n{_short(self.script())}\nwindow.ngptLazy.{self.name} = true; }}"
        return (
            f'<style class="{self.name}-bundle">{self.css.read_text(encoding="utf-8")}</style>'
            f'<script class="{self.name}-bundle">'
            f"{_short(LOADER.read_text(encoding='utf-8'))}\n{once}\nngptLazy.scan();</script>"
        )


def _short(script: str) -> str:
    """Without the lines that are comments: every output of a notebook carries it."""
    return re.sub(r"^\s*(//.*)?\n", "", script, flags=re.MULTILINE)


def bundles(name: str) -> re.Pattern:
    """What ``Part(name).bundle()`` wrote into an output."""
    return re.compile(rf'<(script|style) class="{name}-bundle">.*?</\1>', re.DOTALL)
