"""How does a drawing get onto a page that has no Python?

A drawing is one ``<div class="ngx">``: a still picture (SVG, for paper and browsers without JavaScript), a place for plotly,
the sliders of an Explorer, and a JSON specification. ``explorer.js`` finds such blocks and makes them interactive. Every output
brings a copy of it, so that Colab, VS Code and nbconvert work (plotly.js then comes from its CDN). In the book one copy, and a
small plotly.js, load from the site itself when a drawing comes into view (``lazy.py``). Until then there is the still
picture, in a box of the drawing's size.

``show(figure, alt="...")`` does the same for a figure without sliders.
"""

import hashlib
import html
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs_version

from .. import lazy
from ..theme import TEMPLATE, styled
from . import binding, labels
from .grid import pack
from .slider import MOST_CHOICES, Slider
from .svg import to_svg

HERE = Path(__file__).parent
SHORT = 24  # a still array up to this length is written out, a longer one is packed
SOURCES = ("grid.js", "text.js", "paint.js", "scene.js", "ghost.js", "save.js", "explorer.js")
NARROW = 340  # the height on a phone of a figure that does not choose its own: paint.js

_seen: Counter[str] = Counter()


def unique_id(digest: str) -> str:
    """ngx-<hash>-<count>: the same in every run, unique within a run."""
    _seen[digest] += 1
    return f"ngx-{digest}-{_seen[digest]}"


def _json(tree) -> str:
    """JSON that is safe inside <script>; NaN becomes null."""

    def plain(x):
        if isinstance(x, dict):
            return {k: plain(v) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            return [plain(v) for v in x]
        if isinstance(x, (np.ndarray, np.generic)):
            return plain(x.tolist())
        if isinstance(x, float):
            return None if np.isnan(x) else x
        return x

    return json.dumps(plain(tree), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def figure_spec(tree: dict, bound: Sequence[binding.Path] = ()) -> dict:
    """The figure for explorer.js: constant parts are written out, except long arrays, which are packed and bound."""
    spec = {"data": [{} for _ in tree["data"]], "layout": {}, "arrays": {}, "bind": []}
    for path, leaf in binding.walk(tree):
        numbers = binding.numeric(leaf)
        if path in bound:
            leaf = None
        elif numbers is not None and numbers.size > SHORT:
            key = f"_{len(spec['arrays'])}"
            spec["arrays"][key] = pack(numbers, 0, binding.on_log_axis(path, tree)).spec()
            strides = tuple(int(np.prod(numbers.shape[k + 1 :], dtype=int)) for k in range(numbers.ndim))
            spec["bind"].append(binding.Binding(path, key, 0, strides, numbers.shape).spec())
            leaf = None
        elif numbers is not None:
            leaf = _rounded(numbers).tolist() if numbers.size else []
        _put(spec, path, leaf)
    return spec


def _rounded(numbers: np.ndarray) -> np.ndarray:
    """Rounded to six digits, unless the numbers are closer together than that."""
    short = np.vectorize(lambda x: float(f"{x:.6g}"), otypes=[float])(numbers)
    finite = numbers[np.isfinite(numbers)]
    spread = np.ptp(finite) if finite.size > 1 else 0.0
    return numbers if spread and np.nanmax(np.abs(short - numbers)) > 1e-3 * spread else short


def _put(tree: dict, path: binding.Path, leaf) -> None:
    for step, following in pairwise(path):
        if isinstance(tree, list):
            while len(tree) <= step:
                tree.append([] if isinstance(following, int) else {})
            tree = tree[step]
        else:
            tree = tree.setdefault(step, [] if isinstance(following, int) else {})
    if isinstance(tree, list):
        tree.append(leaf)
    else:
        tree[path[-1]] = leaf


def _settings(book: bool) -> dict:
    """For the scripts: the template, and where plotly.js is. The book has its own and asks no other host."""
    whole = f"https://cdn.plot.ly/plotly-{get_plotlyjs_version()}.min.js"
    return {"template": TEMPLATE.to_plotly_json(), "plotly": None if book else whole}


PART = lazy.Part("ngx", tuple(HERE / name for name in SOURCES), HERE / "explorer.css", _settings)


def panel(ident: str, params: Mapping[str, Slider], readout: Sequence[str]) -> str:
    """The sliders, which wait until the drawing follows them: native range inputs, each connected to its label and the text of
    its value; a choice among a few words has buttons, and the input behind them is hidden."""
    rows = []
    for i, (name, p) in enumerate(params.items()):
        about = f'<span class="ngx-about">{html.escape(p.about)}</span>' if p.about else ""
        tied, shown, symbol = f"{ident}-{i}", html.escape(p.texts[p.index]), p.label or html.escape(name)
        buttons = _buttons(p, f"{name} {p.about}".strip()) if _is_choice(p) else ""
        hidden = " hidden" if buttons else ""
        rows.append(
            f'<div class="ngx-row"><label for="{tied}"><span class="ngx-symbol">{symbol}</span>{about}</label>{buttons}'
            f'<input type="range" id="{tied}" min="0" max="{len(p.values) - 1}" step="1" value="{p.index}"{hidden} '
            f'data-symbol="{html.escape(symbol)}" aria-valuetext="{shown}" autocomplete="off">'
            f'<output for="{tied}"{hidden}>{shown}</output></div>'
        )
    whole = (re.sub(r"[\d.]+e[-+]\d+", r"<span>\g<0></span>", text) for text in readout)  # as in explorer.js
    texts = "".join(f'<span class="ngx-reading">{text}</span>' for text in whole)
    return (
        f'<div class="ngx-panel" inert>{"".join(rows)}<div class="ngx-foot">'
        f'<div class="ngx-readout" role="status">{texts}</div>'
        '<div class="ngx-ghost"></div><button type="button" class="ngx-reset">Reset</button></div></div>'
    )


def _is_choice(p: Slider) -> bool:
    return len(p.values) <= MOST_CHOICES and any(isinstance(value, str) for value in p.values)


def _buttons(p: Slider, name: str) -> str:
    buttons = "".join(
        f'<button type="button" role="radio" aria-checked="{"true" if i == p.index else "false"}">{html.escape(text)}</button>'
        for i, text in enumerate(p.texts)
    )
    return f'<div class="ngx-choices" role="radiogroup" aria-label="{html.escape(name)}">{buttons}</div>'


def block(ident: str, spec: dict, *, still: str, alt: str, setting: str = "", panel: str = "") -> str:
    """The whole drawing as HTML. ``setting``: what the still picture shows, for paper and pages without scripts."""
    kind, key = ("explorer", html.escape(spec["key"])) if panel else ("picture", "figure")
    height = spec["layout"].get("height") or TEMPLATE.layout.height
    narrow = spec["layout"].get("height") or NARROW
    under = f'<p class="ngx-setting">{setting}</p>' if setting else ""
    keep = "".join(
        f'<button type="button" data-format="{form}" aria-label="Save the figure as {form.upper()}">{form.upper()}</button>'
        for form in ("png", "svg")
    )
    return (
        f'<div class="ngx" id="{ident}" role="figure" aria-labelledby="{ident}-words" data-kind="{kind}" data-key="{key}" '
        f'style="--tall:{height:g}px;--narrow:{narrow:g}px"><div class="ngx-box">'
        f'<div class="ngx-still">{still}</div><div class="ngx-plot" role="img" aria-label="{html.escape(alt)}"></div></div>'
        f'{under}{panel}<div class="ngx-caption"><span class="ngpt-number"></span> '
        f'<span class="ngx-words" id="{ident}-words">{html.escape(alt)}</span> <span class="ngx-save">{keep}</span></div>'
        f'<script type="application/json" class="ngx-spec">{_json(spec)}</script></div>{PART.bundle()}'
    )


class Picture:
    """A plotly figure for a page: local plotly.js in the book, a still picture where there is none."""

    def __init__(self, figure: go.Figure, alt: str):
        self.figure, self.alt = styled(figure), alt
        tree = binding.tree_of(self.figure)
        if placed := labels.named(self.figure, tree):
            for number, (x, y) in zip(placed.annotations, placed.places(tree)[0], strict=True):
                self.figure.layout.annotations[number].update(x=x, y=y)
        labels.tightened(self.figure)

    def to_html(self) -> str:
        ident = unique_id(hashlib.sha1(self.alt.encode()).hexdigest()[:8])
        spec = figure_spec(binding.tree_of(self.figure))
        return block(ident, spec, still=to_svg(self.figure, self.alt), alt=self.alt)

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": f"Figure: {self.alt}", "text/html": self.to_html()}


def show(figure: go.Figure, alt: str) -> None:
    """Display a figure in a notebook; ``alt`` describes it in words for screen readers."""
    from IPython.display import display

    if not isinstance(figure, go.Figure):
        raise ValueError(f"show takes a plotly Figure; got {type(figure).__name__}.")
    if not isinstance(alt, str) or not alt.strip():
        raise ValueError('show(figure, alt="..."): describe the figure in a sentence; screen readers read it aloud.')
    display(Picture(figure, alt))
