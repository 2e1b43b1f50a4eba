"""How does the front page explain a symbol to somebody who points at it, and how does it draw the map of the book?

Every formula in the text of the pages in ``PAGES`` gets the meaning of its symbols. It shows while a pointer or the keyboard's
focus is on the formula, or after a tap. A symbol without a meaning is a warning, which fails the build. The map is the
directive ``book-map``.
"""

import re
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from .. import reading

logger = logging.getLogger(__name__)
PAGES = ("intro",)

# the symbol in TeX -> the symbol as text, and its meaning; a longer one is looked for first
SYMBOLS = {
    r"\operatorname{Norm}": ("Norm", "divides a vector by its length, so that it has length one"),
    r"\sqrt{d_\text{model}}": ("√d_model", "the square root of the width: the number of coordinates of a hidden state"),
    r"d_\text{model}": ("d_model", "the width: the number of coordinates of a hidden state"),
    r"\sqrt{d_k}": ("√d_k", "the square root of the number of coordinates of a query or key"),
    r"\sqrt d": ("√d", "the square root of the number of coordinates of a weight vector"),
    r"s_{qk}": ("s_qk", "a learned scale: how sharply attention can look"),
    r"s_u": ("s_u", "a learned scale inside the MLP: how strongly each neuron speaks"),
    r"s_\text{mamba}": ("s_mamba", "a learned scale on the input of a Mamba-2 block"),
    r"s_\text{moe}": ("s_moe", "a learned scale on the input of a mixture of experts"),
    r"s_z": ("s_z", "a learned scale of each token's logit: how sure the model can be"),
    r"s_\text{min}": ("s_min", "a floor: growth clipping treats a coordinate's typical gradient as at least this large"),
    r"\tau_v": ("τ_v", "the threshold: a coordinate whose typical gradient is at most this receives noise"),
    r"\lambda_\text{noise}": ("λ_noise", "the strength of the exploration noise"),
    r"\beta_1": ("β₁", "how slowly the optimizer's average of gradients forgets"),
    r"\beta_2": ("β₂", "how slowly the optimizer's average of squared gradients forgets"),
    r"\alpha": ("α", "eigen learning rates: how far a block moves the hidden state, one learned number per coordinate"),
    r"\rho": ("ρ", "the shape of the learning-rate decay: the smaller, the earlier the rate falls"),
    r"\odot": ("⊙", "multiplication coordinate by coordinate"),
    r"h_f": ("h_f", "the suggestion of a block: its output, brought to length one"),
    r"h": ("h", "the hidden state of a token, a vector of length one"),
    r"q": ("q", ""),  # two meanings: see TWO
    r"k": ("k", "a key: what attention compares a query with"),
    r"a": ("a", "the sharpness of the optimizer's gate; 1 gives Adam"),
    r"c": ("c", "the size of the noise in one coordinate, before the strength and the learning rate"),
    r"C": ("C", "the constant of the peak learning rate"),
    r"R": ("R", "the most by which one step may multiply the average of a coordinate's squared gradients"),
}
TWO = {"q = 1": ("q", "the strength of Logit Gradient Preconditioning"), "q, k": ("q", "a query: what attention looks for")}
_ANY = re.compile(
    "|".join(r"(?<![a-zA-Z\\])" * s.isalpha() + re.escape(s) + r"(?![a-zA-Z])" * s[-1].isalpha() for s in SYMBOLS)
)
_PLAIN = re.compile(r"\\(?:bigl|bigr|leftarrow|frac|sqrt|text\{\w*\})|[\d\s.,;:=+()/^{}<>°-]+|\\,")


def meanings(tex: str) -> tuple[list[tuple[str, str]], str]:
    """What the symbols of a formula mean, in their order, and what is left of the formula that nothing explains.

    >>> meanings(r"s_{qk} = 1")
    ([('s_qk', 'a learned scale: how sharply attention can look')], '')
    """
    own = next((pair for phrase, pair in TWO.items() if tex.startswith(phrase)), SYMBOLS["q"])
    found = dict.fromkeys(own if symbol == "q" else SYMBOLS[symbol] for symbol in _ANY.findall(tex))
    return list(found), _PLAIN.sub("", _ANY.sub("", tex))


def explain(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Wrap each formula of the page in an element with the meaning of its symbols."""
    if docname not in PAGES:
        return
    for node in list(doctree.findall(nodes.math)):
        found, rest = meanings(node.astext())
        if rest or not all(words for _, words in found):
            logger.warning("symbols.py explains nothing for %r in the formula %s", rest, node.astext(), location=node)
        if found:
            says = escape("; ".join(f"{symbol}: {words}" for symbol, words in found), quote=True)
            linked = isinstance(node.parent, nodes.reference) or isinstance(node.parent.parent, nodes.reference)
            focus = "" if linked else ' tabindex="0"'  # a link has the keyboard's focus already
            start = f'<span class="symbol"{focus} data-says="{says}" aria-description="{says}">'
            i = node.parent.index(node)
            node.parent[i : i + 1] = [nodes.raw("", start, format="html"), node, nodes.raw("", "</span>", format="html")]


class BookMap(SphinxDirective):
    """``book-map``: which chapter builds on which, and how long each takes."""

    def run(self) -> list[nodes.Node]:
        """The picture; a chapter of the contents that it lacks is a warning."""
        numbers = reading.numbers(Path(self.env.srcdir) / "_toc.yml")
        if missing := sorted(set(numbers) ^ set(reading.CHAPTERS)):
            logger.warning("ngpt_book/reading.py::CHAPTERS and _toc.yml differ in %s", missing, location=self.get_location())
        names = [name for name in reading.CHAPTERS if (Path(self.env.srcdir) / f"{name}.ipynb").exists()]
        for name in names:
            self.env.note_dependency(str(Path(self.env.srcdir) / f"{name}.ipynb"))
        times = {name: reading.minutes(Path(self.env.srcdir) / f"{name}.ipynb") for name in names}
        addresses = {name: f"{name}.html" for name in names}
        return [nodes.raw("", reading.the_map(times, numbers, addresses), format="html")]


def setup(app: Sphinx) -> dict:
    app.add_directive("book-map", BookMap)
    app.connect("doctree-resolved", explain, priority=950)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
