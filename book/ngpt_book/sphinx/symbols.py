"""Which slider and which line of code belong to a symbol of an equation?

On a page of the book, a pointer over any of the three highlights the other two: the symbol in the equations, its row among the
sliders of an Explorer, and its lines in the listings (``symbols.js``). This module finds out what belongs together while the
book is built. Everything is compared under one key per symbol, such as "ε_gate" or "m^" (m with a hat):

    \\epsilon_\\text{gate}     in an equation: from MathJax's tree; a time index, as in d_t, does not count (``mathematics.py``)
    ε<sub>gate</sub>         the label of a slider
    eps_gate                 a name in a listing, if it is the symbol spelled out, or if the notation's table names it
"""

import json
import re
from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

from . import mathematics

__all__ = ["key_of_label", "key_of_name", "notation", "setup"]

HERE = Path(__file__).parent
NOTATION = HERE.parents[1] / "notation.md"
GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "eps": "ε", "epsilon": "ε", "eta": "η", "theta": "θ", "kappa": "κ",
    "lambda": "λ", "xi": "ξ", "rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "φ", "psi": "ψ",
}  # fmt: skip
SPELLED = {"θ_max": {"max_angle"}, "Δ": {"dt"}, "k": {"top_k"}}  # names that the notation has no row for
_ROW = re.compile(r"^\| (?P<symbol>.+?) \| .+? \| (?P<names>[^|]+?) \| [^|]+ \| [^|]+ \|$", re.MULTILINE)
_SLIDER = re.compile(r'data-symbol="([^"]*)"')
_SPEC = re.compile(r'<script type="application/json" class="ngx-spec">(.*?)</script>', re.DOTALL)


def key_of_label(label: str) -> str:
    """The key of a slider's label, or "" if the label is a word.

    >>> [key_of_label(label) for label in ("ε<sub>gate</sub>", "−A", "‖Δ‖", "s<sub>moe</sub> / √d", "warmup")]
    ['ε_gate', 'A', 'Δ', 's_moe', '']
    """
    plain = re.sub(r"<sub>(.*?)</sub>", r"_\1", label).lstrip("−‖|").split(" / ")[0].rstrip("‖|")
    return plain if re.fullmatch(r"[^\W\d_](_\w+)?", plain) else ""


def key_of_name(name: str) -> str:
    """The key of the symbol that a name in the code spells out, or "".

    >>> [key_of_name(name) for name in ("eps_gate", "m_hat", "beta1", "s_z", "alpha", "softmax")]
    ['ε_gate', 'm^', 'β_1', 's_z', 'α', '']
    """
    head, _, rest = name.partition("_")
    if found := re.fullmatch(r"([a-z]+)(\d)", head):
        head, rest = found[1], found[2]
    head = GREEK.get(head, head)
    if len(head) != 1:
        return ""
    return f"{head}^" if rest == "hat" else f"{head}_{rest}" if rest else head


@cache
def notation() -> dict[str, set[str]]:
    """The keys in the notation's table, and their names in the code."""
    found: dict[str, set[str]] = {}
    for row in _ROW.finditer(NOTATION.read_text(encoding="utf-8")):
        names = re.findall(r"`(\w+)`", row["names"])
        symbols = [s for part in re.findall(r"\$(.+?)\$", row["symbol"]) for s in re.split(r",\s+", part)]
        keys = [mathematics.key(symbol) for symbol in symbols]
        if not all(keys) or not names:
            continue
        for i, key in enumerate(keys):
            found.setdefault(key, set()).update(names[i : i + 1] if len(names) == len(keys) else names)
    return found


def collect(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Note the symbols of a page: key -> names in its listings, and slider's label -> key."""
    labels: dict[str, str] = {}
    words: set[str] = set()
    for node in doctree.findall(nodes.raw):
        for label in _SLIDER.findall(node.astext()):
            if key := key_of_label(label.replace("&lt;", "<").replace("&gt;", ">")):
                labels[label.replace("&lt;", "<").replace("&gt;", ">")] = key
    for node in doctree.findall(nodes.literal_block):
        if "source" in node:  # a literalinclude
            code = re.sub(r'""".*?"""|#[^\n]*', "", node.astext(), flags=re.DOTALL)
            words.update(re.findall(r"[A-Za-z_]\w*", code))
    names: dict[str, set[str]] = {key: set() for key in labels.values()}
    for word in words:
        if key := key_of_name(word):
            names.setdefault(key, set()).add(word)
    for key, known in [*notation().items(), *SPELLED.items()]:
        if known & words:
            names.setdefault(key, set()).update(known & words)
    if names:
        marks = {"keys": {key: sorted(found) for key, found in sorted(names.items())}, "labels": labels}
        app.env.metadata[docname]["symbols"] = json.dumps(marks, ensure_ascii=False)


def add(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    if marks := app.env.metadata.get(pagename, {}).get("symbols"):
        app.add_css_file("symbols.css")
        app.add_js_file("symbols.js", loading_method="defer", priority=903, **{"data-symbols": marks})


def copy(app: Sphinx) -> None:
    static = Path(app.outdir) / "_static"
    static.mkdir(parents=True, exist_ok=True)
    for name in ("symbols.js", "symbols.css"):
        (static / name).write_text((HERE / name).read_text(encoding="utf-8"), encoding="utf-8")


def setup(app: Sphinx) -> dict:
    app.connect("builder-inited", copy)
    app.connect("doctree-resolved", collect, priority=950)
    app.connect("html-page-context", add, priority=950)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
