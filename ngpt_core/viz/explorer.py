"""What does a mechanism do when its parameters move?

    Explorer(fn, params, figure)

One object, two lives. On a page (the published book, Colab, VS Code) there is no Python: the function has been evaluated at
every combination of the sliders' values, the answers travel inside the page (``grid.py``) and a few lines of JavaScript
(``explorer.js``) draw the chosen cell. In JupyterLab, with a kernel, the same object is live: each move calls the function.

    fn       a pure function of the parameters that returns named arrays: fn(alpha=0.1) -> {"t": [n], "path": [n, 3], "gap": 0.2}
    params   name of the parameter -> Slider
    figure   a function from those arrays to a plotly figure (which it only draws, see ``binding.py``), or a ready figure together
             with ``bind``
    cell     one combination of the sliders' values
"""

import hashlib
import html
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import plotly.graph_objects as go

from . import binding, page
from .grid import Packed, pack
from .svg import to_svg
from .theme import styled

LIMIT = 1_000_000  # bytes of grid on a page; good ones stay under 300 kB
MOST_CELLS = 20_000


@dataclass(frozen=True)
class Slider:
    """One parameter: its values, and how it is shown.

    >>> Slider((0, 1, 5)).values
    (0.0, 0.25, 0.5, 0.75, 1.0)
    >>> Slider((2, 32, 5), log=True, default=8, label="d").values
    (2, 4, 8, 16, 32)
    >>> Slider(["linear", "cosine"]).texts
    ('linear', 'cosine')
    """

    values: Sequence
    """A tuple (start, stop, n) for n evenly spaced values, or a list of the values themselves (texts are allowed)."""
    default: float | int | str | None = None
    """One of the values; the middle one where it is left out."""
    label: str = ""
    """The paper's symbol, as HTML ("α", "s<sub>z</sub>"); the parameter's name where it is left out."""
    about: str = ""
    """A word or two beside the symbol ("step size")."""
    unit: str = ""
    log: bool = False
    """Evenly spaced in the logarithm (only for start, stop, n)."""
    format: str = ""
    """A Python format for the shown value, as ".2f"; three significant digits where it is left out."""

    def __post_init__(self):
        object.__setattr__(self, "values", self._spread() if isinstance(self.values, tuple) else tuple(map(_plain, self.values)))
        if len(self.values) < 2 or len(set(self.values)) < len(self.values):
            raise ValueError(f"A slider needs at least two different values, got {list(self.values)}.")
        default = self.values[len(self.values) // 2] if self.default is None else self.default
        near = [v for v in self.values if v == default or _close(v, default)]
        if not near:
            raise ValueError(f"default={default!r} is not one of the slider's values {list(self.values)}.")
        object.__setattr__(self, "default", near[0])

    def _spread(self) -> tuple:
        if len(self.values) != 3 or not isinstance(self.values[2], int):
            raise ValueError(f"A tuple means (start, stop, number of values), got {self.values}; write single values as a list.")
        start, stop, n = self.values
        if self.log and min(start, stop) <= 0:
            raise ValueError(f"A logarithmic slider runs between positive numbers, got {start} to {stop}.")
        points = [float(f"{x:.12g}") for x in (np.geomspace if self.log else np.linspace)(start, stop, n)]
        whole = isinstance(start, int) and isinstance(stop, int) and all(x.is_integer() for x in points)
        return tuple(int(x) if whole else x for x in points)

    @property
    def texts(self) -> tuple[str, ...]:
        """The values as they are shown, unit included."""
        return tuple(v if isinstance(v, str) else format(v, self.format or self._format()) + self.unit for v in self.values)

    def _format(self) -> str:
        if all(isinstance(v, int) for v in self.values):
            return "d"
        digits = next(d for d in range(3, 16) if d == 15 or len({format(v, f".{d}g") for v in self.values}) == len(self.values))
        return f".{digits}g"

    @property
    def index(self) -> int:
        return self.values.index(self.default)


def _plain(value):
    """numpy's and torch's numbers as Python's own."""
    return value.item() if hasattr(value, "item") else value


def _close(a, b) -> bool:
    return not isinstance(a, str) and not isinstance(b, str) and abs(a - b) <= 1e-9 * max(abs(a), abs(b))


class Explorer:
    """``Explorer(fn, params, figure)``: a figure with sliders that works with and without a kernel.

    >>> def parabola(a):
    ...     t = np.linspace(-1, 1, 50)
    ...     return {"t": t, "y": a * t**2, "top": a}
    >>> Explorer(parabola, {"a": Slider((0, 2, 11), default=1)}, lambda v: go.Figure(go.Scatter(x=v["t"], y=v["y"])),
    ...          readout="y(1) = {top:.1f}")
    Explorer parabola: a = 1.0; 11 cells, 2 kB
    """

    def __init__(
        self,
        fn: Callable[..., Mapping],
        params: Mapping[str, Slider | Sequence],
        figure: Callable[[dict], go.Figure] | go.Figure,
        *,
        bind: Mapping[str, str] | None = None,
        readout: str | Sequence[str] = (),
        alt: str = "",
        name: str = "",
    ):
        """
        bind     for a ready figure: {"trace name.attribute": array key}; by default every key is itself such an address
        readout  texts shown under the sliders, "gap {gap:.2f}°", with numbers of the function or values of sliders
        alt      what the figure shows, in words, for those who do not see it
        name     the Explorer's key in the page's address; by default the function's name
        """
        self.fn, self.name = fn, name or getattr(fn, "__name__", "explorer").strip("<>")
        self.params = {key: p if isinstance(p, Slider) else Slider(p) for key, p in params.items()}
        if not self.params:
            raise ValueError("An Explorer needs at least one slider; ng.viz.show(figure) draws a figure without any.")
        self.readout = [readout] if isinstance(readout, str) else list(readout)
        self.alt = alt
        if self.cells > MOST_CELLS:
            product = " × ".join(str(len(p.values)) for p in self.params.values())
            raise ValueError(f"{product} = {self.cells} cells are more than {MOST_CELLS}: use fewer values or fewer sliders.")

        first = binding.as_arrays(fn(**self.defaults), self._where(self.defaults))
        names = {*first, *self.params}
        if callable(figure):
            self._draw = lambda arrays: styled(figure(binding._given(arrays)))
            self._base = binding.tree_of(figure(binding._given(first)))
            self._bindings = binding.probe(figure, first)
            for end in (0, -1):
                corner = {key: p.values[end] for key, p in self.params.items()}
                binding.check(figure, binding.as_arrays(fn(**corner), self._where(corner)), self._bindings, self._base)
        else:
            self._base = binding.tree_of(figure)
            self._bindings = binding.from_dict(bind or {k: k if "." in k else f"0.{k}" for k in first}, figure, first)
            self._draw = lambda arrays: styled(self._bound(go.Figure(figure), arrays))
        if not self._bindings and not binding.templates(self._base, names):
            raise ValueError(f"Nothing in the figure comes from the function's arrays ({', '.join(first)}).")
        self._texts = binding.templates(self._base, names)
        self._readout = [binding.parse_template(text, names) or [text] for text in self.readout]
        for key, *_ in (part for parts in [*self._readout, *(p for _, p in self._texts)] for part in parts if isinstance(part, list)):
            if key in first and first[key].size != 1:
                raise ValueError(f"{{{key}}} stands in a text, but the function returns {first[key].size} numbers for it; a text takes one.")
        self._first = first
        self._packed = self._evaluate()

    # -- the grid ------------------------------------------------------------------------------------------------------

    @property
    def defaults(self) -> dict:
        return {key: p.default for key, p in self.params.items()}

    @property
    def cells(self) -> int:
        return int(np.prod([len(p.values) for p in self.params.values()]))

    @property
    def nbytes(self) -> int:
        """Bytes of grid on the page."""
        return sum(p.nbytes for p in self._packed.values())

    def grid(self) -> dict[str, np.ndarray]:
        """Every array over the whole grid, [n_1, ..., n_k, *shape], exactly as the page will decode it."""
        sizes = tuple(len(p.values) for p in self.params.values())
        return {
            key: np.broadcast_to(packed.decode(), sizes + packed.codes.shape[len(sizes) :]) for key, packed in self._packed.items()
        }

    def at(self, **values) -> dict[str, np.ndarray]:
        """The decoded arrays of one cell; sliders that are not named stand at their defaults."""
        chosen = {**self.defaults, **values}
        index = tuple(p.values.index(chosen[key]) for key, p in self.params.items())
        return {key: array[index] for key, array in self.grid().items()}

    def _where(self, values: Mapping) -> str:
        return "at " + ", ".join(f"{k}={v}" for k, v in values.items())

    def _evaluate(self) -> dict[str, Packed]:
        sizes = [len(p.values) for p in self.params.values()]
        used = {b.key for b in self._bindings}
        used |= {part[0] for parts in [*self._readout, *(p for _, p in self._texts)] for part in parts if isinstance(part, list)}
        grids = {key: np.empty((*sizes, *a.shape)) for key, a in self._first.items() if key in used}
        for index in itertools.product(*map(range, sizes)):
            values = {key: p.values[i] for (key, p), i in zip(self.params.items(), index)}
            arrays = binding.as_arrays(self.fn(**values), self._where(values))
            for key, grid in grids.items():
                if key not in arrays or arrays[key].shape != self._first[key].shape:
                    raise ValueError(
                        f"The array {key!r} has shape {self._first[key].shape} at the defaults and "
                        f"{arrays[key].shape if key in arrays else 'is missing'} {self._where(values)}: an Explorer's arrays keep "
                        "their shape (fill up with NaN, which is not drawn)."
                    )
                grid[index] = arrays[key]
        log = {b.key for b in self._bindings if self._on_log_axis(b.path)}
        packed = {key: pack(grid, len(sizes), key in log) for key, grid in grids.items()}
        if (total := sum(p.nbytes for p in packed.values())) > LIMIT:
            rows = "\n".join(f"  {key}: {p.arithmetic()}" for key, p in packed.items())
            raise ValueError(
                f"The grid of {self.name} would be {total / 1e6:.1f} MB, more than {LIMIT / 1e6:.0f} MB:\n{rows}\n"
                "Use fewer values on a slider or fewer points in an array. (What does not depend on a slider is stored once along it.)"
            )
        return packed

    def _on_log_axis(self, path: binding.Path) -> bool:
        if path[0] != "data" or path[2] not in ("x", "y", "z"):
            return False
        trace, layout = self._base["data"][path[1]], self._base["layout"]
        if "scene" in trace or trace["type"] in ("scatter3d", "surface", "mesh3d"):
            axis = layout.get(trace.get("scene", "scene"), {}).get(f"{path[2]}axis", {})
        else:
            axis = layout.get(trace.get(f"{path[2]}axis", path[2]).replace(path[2], f"{path[2]}axis"), {})
        return axis.get("type") == "log"

    # -- a page: no kernel ---------------------------------------------------------------------------------------------

    def _bound(self, figure: go.Figure, arrays: binding.Arrays) -> go.Figure:
        for b in self._bindings:
            target = figure
            for step in b.path[:-1]:
                target = target[step]
            leaf = b.take(arrays)
            target[b.path[-1]] = float(leaf) if leaf.ndim == 0 else leaf
        return figure

    def figure(self, **values) -> go.Figure:
        """The plotly figure at these values (by default the sliders' defaults), drawn from the function itself."""
        chosen = {**self.defaults, **values}
        arrays = binding.as_arrays(self.fn(**chosen), self._where(chosen))
        figure, said = self._draw(arrays), self._said(chosen, arrays)
        for path, parts in self._texts:
            target = figure
            for step in path[:-1]:
                target = target[step]
            target[path[-1]] = binding.fill(parts, said)
        return figure

    def _said(self, values: Mapping, arrays: binding.Arrays) -> dict[str, float | str]:
        """What a text may name: the sliders' values as they are shown, and the function's single numbers."""
        shown = {key: p.texts[p.values.index(values[key])] if values[key] in p.values else str(values[key]) for key, p in self.params.items()}
        return {**{key: float(a.reshape(-1)[0]) for key, a in arrays.items() if a.size == 1}, **shown}

    @cached_property
    def _id(self) -> str:
        """Stable from run to run: a hash of what the Explorer is, and a counter for a second one of the same kind."""
        told = json.dumps([self.name, [[k, p.texts] for k, p in self.params.items()], sorted(self._packed)])
        return page.unique_id(hashlib.sha1(told.encode()).hexdigest()[:8])

    def to_html(self) -> str:
        """The Explorer as a piece of HTML with everything in it but plotly.js."""
        spec = page.figure_spec(self._base, [b.path for b in self._bindings])
        spec |= {
            "key": self.name,
            "sliders": [
                {"name": key, "default": p.index, "texts": p.texts, "values": [str(v) for v in p.values]} for key, p in self.params.items()
            ],
            "bind": [*spec["bind"], *(b.spec() for b in self._bindings)],
            "texts": self._texts,
            "readout": self._readout,
        }
        spec["arrays"] |= {key: p.spec() for key, p in self._packed.items()}
        said = self._said(self.defaults, self._first)
        caption = [f"{p.label or html.escape(key)} = {html.escape(p.texts[p.index])}" for key, p in self.params.items()]
        caption += [binding.fill(parts, said) for parts in self._readout]
        return page.block(
            self._id,
            spec,
            still=to_svg(self.figure(), self.alt),
            caption=" · ".join(caption),
            alt=self.alt or f"Figure of {self.name} that follows the sliders below it",
            panel=page.panel(self._id, self.params, len(self._readout)),
        )

    # -- JupyterLab: a kernel ------------------------------------------------------------------------------------------

    def widget(self):
        """ipywidgets sliders around a plotly FigureWidget; every move calls the function."""
        import ipywidgets as widgets

        live = go.FigureWidget(self.figure())
        sliders = {
            key: widgets.SelectionSlider(
                options=list(zip(p.texts, p.values)), value=p.default, description=f"{p.label or key} {p.about}".strip(),
                description_allow_html=True, style={"description_width": "initial"}, layout={"width": "100%"},
            )
            for key, p in self.params.items()
        }
        told = widgets.HTML()
        reset = widgets.Button(description="Reset", icon="undo", layout={"width": "7em"})

        def move(_=None):
            values = {key: s.value for key, s in sliders.items()}
            arrays = binding.as_arrays(self.fn(**values), self._where(values))
            said = self._said(values, arrays)
            with live.batch_update():
                self._bound(live, arrays)
                for path, parts in self._texts:
                    target = live
                    for step in path[:-1]:
                        target = target[step]
                    target[path[-1]] = binding.fill(parts, said)
            told.value = "<br>".join(binding.fill(parts, said) for parts in self._readout)

        def back(_):
            for key, s in sliders.items():
                s.value = self.params[key].default

        for s in sliders.values():
            s.observe(move, "value")
        reset.on_click(back)
        move()
        return widgets.VBox([live, *sliders.values(), told, reset])

    def _repr_mimebundle_(self, include=None, exclude=None):
        bundle = {"text/plain": repr(self), "text/html": self.to_html()}
        if has_widgets():
            bundle |= self.widget()._repr_mimebundle_() or {}
        return bundle

    def __repr__(self) -> str:
        at = ", ".join(f"{k} = {p.texts[p.index]}" for k, p in self.params.items())
        return f"Explorer {self.name}: {at}; {self.cells} cells, {self.nbytes / 1e3:.0f} kB"


def has_widgets() -> bool:
    """Is this a JupyterLab (or Notebook 7) session whose front end draws FigureWidget?

    Colab and VS Code have open bugs there and get the page's life; while the book is built (NGPT_BOOK) no widget state may
    reach the stored notebooks. A kernel that a Jupyter server started knows its session's name.
    """
    session = os.environ.get("JPY_SESSION_NAME", "")
    if os.environ.get("NGPT_BOOK") or not session or "jvsc" in session or "VSCODE_PID" in os.environ or "google.colab" in sys.modules:
        return False
    from importlib.util import find_spec

    return all(find_spec(package) for package in ("ipywidgets", "anywidget"))
