"""How does an animation get onto a page that has no Python?

Its output is one ``<div class="ngm">``: the last frame as two SVGs, one for a desktop and one for a phone; a sentence about
that frame; and all frames as data. motion.js adds play, pause, a slider and the buttons that save an image. Nothing moves until
the reader presses play: the text before an animation says what to look for and should be read first, moving pictures beside a
text disturb who reads it, and the last frame is the result for those who do not play.

The book's Sphinx extension serves the script and the style sheet once. Elsewhere (Colab, VS Code, JupyterLab) the output brings
both along.
"""

import html
import json
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .marks import Panel
from .still import LAYOUTS, picture

__all__ = ["BUNDLE", "Animation", "script", "style"]

HERE = Path(__file__).parent
SOURCES = ("marks.js", "gif.js", "motion.js")  # one after another, in one function
BUNDLE = re.compile(r'<style class="ngm-bundle">.*?</style><script class="ngm-bundle">.*?</script>', re.DOTALL)


@cache
def script() -> str:
    """The page's program."""
    text = "\n".join((HERE / name).read_text(encoding="utf-8") for name in SOURCES)
    once = "if (window.ngptMotion) return window.ngptMotion.scan();"  # a second output of a notebook brings a second copy
    return f'(function () {{\n"use strict";\n{once}\n{text}\n}})();\n'


@cache
def style() -> str:
    return (HERE / "motion.css").read_text(encoding="utf-8")


class Animation:
    """Stored frames of a run as an output of a notebook.

    name: the name of saved images, without an ending.
    title: over the picture.
    labels: one short text per frame, such as "step 100".
    panels: side by side on a desktop, stacked on a phone.
    words: what a frame shows, one sentence per frame; screen readers read it with the slider.
    alt: what the picture shows, in a sentence.
    source: the small print at the bottom of the picture, which saved images keep.
    seconds: how long it plays.
    """

    def __init__(
        self, name: str, title: str, labels: Sequence[str], panels: Sequence[Panel], words: Sequence[str], alt: str,
        source: str = "", seconds: float = 10.0,
    ):  # fmt: skip
        self.name, self.title, self.labels, self.panels = name, title, list(labels), list(panels)
        self.words, self.alt, self.source, self.seconds = list(words), alt, source, seconds
        self._check()

    def _check(self) -> None:
        n, words = len(self.labels), len(self.words)
        if n < 2 or words != n:
            raise ValueError(
                f"An animation needs two frames or more, each with a label and words; got {n} labels, {words} words."
            )
        if not self.alt.strip():
            raise ValueError('Animation(alt="..."): describe the picture in a sentence; screen readers read it aloud.')
        for panel in self.panels:
            for spec in panel.specs:
                for key in sorted(spec.keys() & {"x", "y", "r", "upto", "lines"}):
                    found, kind = spec[key], spec["kind"]
                    count = found["shape"][0] if isinstance(found, dict) else len(found) if isinstance(found, list) else 1
                    if count not in (1, n):
                        raise ValueError(f"Each mark needs one frame or all {n}; {key} of a mark of kind {kind!r} has {count}.")

    def data(self) -> dict[str, Any]:
        """What the page gets besides the pictures."""
        panels = [panel.specs for panel in self.panels]
        found = {"name": self.name, "title": self.title, "seconds": self.seconds, "labels": self.labels}
        return {**found, "words": self.words, "panels": panels}

    def to_svg(self, layout: str = "wide", frame: int = -1) -> str:
        """A frame as a picture: "wide", or "narrow" for a phone."""
        (wanted,) = (x for x in LAYOUTS if x.name == layout)
        frame = range(len(self.labels))[frame]
        return picture(self.panels, self.title, self.labels, self.source, self.alt, wanted, frame)

    def to_html(self, bring: bool = True) -> str:
        """HTML; ``bring``: with the script and the style sheet inside, for pages that are not the book's."""
        text = json.dumps(self.data(), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
        stills = "".join(self.to_svg(layout.name) for layout in LAYOUTS)
        body = (
            f'<div class="ngm" role="group" aria-label="Animation: {html.escape(self.title)}">'
            f'<div class="ngm-picture">{stills}</div><div class="ngm-controls"></div>'
            f'<p class="ngm-words">{html.escape(self.words[-1])}</p>'
            f'<p class="ngm-caption"><span class="ngpt-number"></span> {html.escape(self.alt)}</p>'
            f'<script type="application/json" class="ngm-data">{text}</script></div>'
        )
        bundle = f'<style class="ngm-bundle">{style()}</style><script class="ngm-bundle">{script()}</script>'
        return body + bundle if bring else body

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self.to_html(bring=os.environ.get("NGPT_BOOK") != "1")}

    def __repr__(self) -> str:
        return f"Animation: {self.title} ({len(self.labels)} frames). {self.alt}"
