"""How does a drawing get onto a page that has no Python?

A drawing is one ``<div class="ngx">``: a still picture (SVG, for paper and browsers without JavaScript), a place for plotly,
the sliders of an Explorer, and a JSON specification. ``explorer.js`` finds such blocks and makes them interactive. Every output
contains a copy of it, so that Colab, VS Code and nbconvert work (plotly.js then comes from its CDN). The book's Sphinx
extension removes the copies and serves one, and one plotly.js, from the site itself.

``show(figure, alt="...")`` does the same for a figure without sliders.
"""

import hashlib
import html
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs_version

from ..theme import TEMPLATE, styled
from . import binding
from .grid import pack
from .slider import Slider
from .svg import to_svg

HERE = Path(__file__).parent
SHORT = 24  # a still array up to this length is written out, a longer one is packed
BUNDLE = re.compile(r'<script class="ngx-bundle">.*?</script>', re.DOTALL)

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


@cache
def script(book: bool = False) -> str:
    """explorer.js with its style sheet and the template; in the book it never loads plotly.js from another host."""
    settings = {
        "css": (HERE / "explorer.css").read_text(),
        "template": TEMPLATE.to_plotly_json(),
        "plotly": None if book else f"https://cdn.plot.ly/plotly-{get_plotlyjs_version()}.min.js",
    }
    source = (HERE / "explorer.js").read_text().replace("NGX_SETTINGS", _json(settings), 1)
    return re.sub(r"^\s*(//.*)?\n", "", source, flags=re.MULTILINE) if not book else source


def panel(ident: str, params: Mapping[str, Slider], readouts: int) -> str:
    """The sliders, hidden until they work: native range inputs, each connected to its label and the text of its value."""
    rows = []
    for i, (name, p) in enumerate(params.items()):
        about = f'<span class="ngx-about">{html.escape(p.about)}</span>' if p.about else ""
        tied, shown, symbol = f"{ident}-{i}", html.escape(p.texts[p.index]), p.label or html.escape(name)
        rows.append(
            f'<div class="ngx-row"><label for="{tied}"><span class="ngx-symbol">{symbol}</span>{about}</label>'
            f'<input type="range" id="{tied}" min="0" max="{len(p.values) - 1}" step="1" value="{p.index}" '
            f'aria-valuetext="{shown}" autocomplete="off"><output for="{tied}">{shown}</output></div>'
        )
    text = '<span class="ngx-told"></span>' * readouts
    return (
        f'<div class="ngx-panel" hidden>{"".join(rows)}<div class="ngx-foot">'
        f'<div class="ngx-readout" role="status">{text}</div><button type="button" class="ngx-reset">Reset</button></div></div>'
    )


def block(ident: str, spec: dict, *, still: str, alt: str, caption: str = "", panel: str = "") -> str:
    """The whole drawing as HTML."""
    kind = "explorer" if panel else "picture"
    under = f'<p class="ngx-caption">{caption}</p>' if caption else ""
    return (
        f'<div class="ngx" id="{ident}" data-kind="{kind}"><div class="ngx-still">{still}{under}</div>'
        f'<div class="ngx-plot" role="img" aria-label="{html.escape(alt)}" hidden></div>{panel}'
        f'<script type="application/json" class="ngx-spec">{_json(spec)}</script></div>'
        f'<script class="ngx-bundle">{script()}</script>'
    )


class Picture:
    """A plotly figure for a page: local plotly.js in the book, a still picture where there is none."""

    def __init__(self, figure: go.Figure, alt: str):
        self.figure, self.alt = styled(figure), alt

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
