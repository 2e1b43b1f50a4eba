"""What does a mechanism do when its parameters change?

    Explorer(fn, params, figure)

One object, two modes. A page (the published book, Colab, VS Code) has no Python: the function was evaluated at every
combination of the sliders' values, the results are stored inside the page (``grid.py``), and a few lines of JavaScript
(``explorer.js``) draw the chosen cell. In JupyterLab, with a kernel, the same object is live (``widget.py``): every change
calls the function, between the page's values too.

    fn       a pure function of the parameters that returns arrays: fn(alpha=0.1) -> {"t": [n], "path": [n, 3], "gap": 0.2}
    params   name of the parameter -> Slider (``slider.py``)
    figure   a function from those arrays to a plotly figure, which it only draws (``binding.py``); or a figure, with ``bind``
    cell     one combination of the sliders' values
"""

import copy
import hashlib
import html
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod

import numpy as np
import plotly.graph_objects as go

from ..theme import styled
from . import binding, labels, page, widget
from .grid import Packed, pack
from .slider import Slider
from .svg import to_svg

LIMIT = 1_000_000  # bytes of grid on a page; good ones stay under 300 kB
MOST_CELLS = 20_000


class Explorer:
    """A figure with sliders that works with and without a kernel.

    fn: a pure function of the sliders' values that returns a dict of arrays and numbers, of the same shapes everywhere.
    params: the name of each parameter of ``fn`` and its ``Slider`` (or just its values).
    figure: a function from that dict to a plotly figure, which only draws what it is given; or a ready figure, with ``bind``.
    bind: for a ready figure: ``{"trace name.attribute": array key}``. By default every key is itself such an address (just
        "y" is the first trace's).
    readout: texts shown under the sliders, such as ``"gap {gap:.2f}°"``, with numbers of the function or values of sliders;
        HTML, like a slider's label.
    alt: what the figure shows, in words, for screen readers.
    name: the Explorer's key in the page's address; by default the function's name.

    >>> def parabola(a):
    ...     t = np.linspace(-1, 1, 50)
    ...     return {"t": t, "y": a * t**2, "top": a}
    >>> def draw(v):
    ...     line = go.Scatter(x=v["t"], y=v["y"])
    ...     return go.Figure(line)
    >>> sliders = {"a": Slider((0, 2, 11), default=1)}
    >>> text = "y(1) = {top:.1f}"
    >>> Explorer(parabola, sliders, draw, readout=text)
    Explorer parabola: a = 1; 11 cells, 2 kB
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
        _check_kinds(fn, params, figure, bind, readout, alt)
        self.fn, self.alt = fn, alt
        self.name = name or getattr(fn, "__name__", "explorer").strip("<>")
        self.params = {key: p if isinstance(p, Slider) else Slider(p) for key, p in params.items()}
        if not self.params:
            raise ValueError("An Explorer needs at least one slider; show(figure, alt=...) draws a figure without any.")
        if self.cells > MOST_CELLS:
            product = " × ".join(str(n) for n in self.sizes)
            raise ValueError(f"{product} = {self.cells} cells are more than {MOST_CELLS}: use fewer values or fewer sliders.")

        self._first = first = self.evaluate(**self.defaults)
        self._draw = figure if callable(figure) else None
        if self._draw is not None:
            self._frame = figure(binding.given(first))
            if not isinstance(self._frame, go.Figure):
                raise ValueError(f"figure() must return a plotly Figure; it returned {type(self._frame).__name__}.")
            self._bindings = binding.probe(figure, first)
        else:
            self._frame = figure
            self._bindings = binding.from_dict(bind or {k if "." in k else f"0.{k}": k for k in first}, figure, first)
        self._label()
        names = {*first, *self.params}
        self._texts = binding.templates(self._tree, names)
        texts = [readout] if isinstance(readout, str) else readout
        for text in texts:
            if unknown := binding.unknown_names(text, names):
                raise ValueError(f"The readout {text!r} names {{{unknown}}}; it may name {', '.join(sorted(names))}.")
        self.readout = [binding.parse_template(text, names) or [text] for text in texts]
        self._check_texts()
        self._packed = self._pack()

    # -- the grid ------------------------------------------------------------------------------------------------------

    @property
    def defaults(self) -> dict:
        """The initial values of the sliders."""
        return {key: p.default for key, p in self.params.items()}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of values of each slider."""
        return tuple(len(p.values) for p in self.params.values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each of the function's arrays, the same everywhere."""
        return {key: a.shape for key, a in self._first.items()}

    @property
    def cells(self) -> int:
        """The number of combinations of the sliders' values: the function was called once for each."""
        return prod(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of grid on the page."""
        return sum(p.nbytes for p in self._packed.values())

    def evaluate(self, **values) -> binding.Arrays:
        """The function's result at these values, in float64."""
        try:
            answer = self.fn(**values)
        except Exception as error:
            raise ValueError(f"The function {self.name} failed {_where(values)}: {type(error).__name__}: {error}.") from error
        return binding.as_arrays(answer, _where(values))

    def _chosen(self, values: Mapping) -> dict:
        """The values of all sliders; those not named have their defaults."""
        for key, value in values.items():
            if key not in self.params:
                raise ValueError(f"There is no slider {key!r}; there are {', '.join(self.params)}.")
            if value not in self.params[key].values:
                raise ValueError(f"{key}={value!r} is not one of the slider's values {list(self.params[key].values)}.")
        return {**self.defaults, **values}

    def grid(self) -> dict[str, np.ndarray]:
        """Every array in the figure or a text, over the whole grid: [n_1, ..., n_k, *shape], exactly as the page decodes it."""
        k = len(self.sizes)
        found = {key: p for key, p in self._packed.items() if key in self._first}
        return {key: np.broadcast_to(p.decode(), self.sizes + p.codes.shape[k:]) for key, p in found.items()}

    def at(self, **values) -> dict[str, np.ndarray]:
        """The decoded arrays of one cell; sliders not named have their defaults."""
        chosen = self._chosen(values)
        index = tuple(p.values.index(chosen[key]) for key, p in self.params.items())
        return {key: array[index] for key, array in self.grid().items()}

    def _label(self) -> None:
        """Give the lines their names, beside them instead of in the legend; the grid stores where each name stands."""
        self._plain = self._tree = binding.tree_of(self._frame)  # without the names: what the figure's function draws
        frame, shown = go.Figure(self._frame), self._with(self._first)
        self._labels = labels.named(frame, shown)
        self._moved: list[binding.Binding] = []
        self._known: dict[bytes, np.ndarray] = {}  # what a cell draws -> places
        labels.tightened(frame)
        self._frame, self._tree = frame, binding.tree_of(frame)
        if self._labels is None:
            return
        self._like = self._labels.shares(shown, self._labels.places(shown)[0])
        for number in self._labels.annotations:
            for letter in "xy":
                path = ("layout", "annotations", number, letter)
                self._moved.append(binding.Binding(path, f"label {number} {letter}", 0, (), ()))

    def _with(self, arrays: binding.Arrays) -> dict:
        """The figure as a tree, with these arrays in it."""
        tree = copy.deepcopy(self._plain)
        for b in self._bindings:
            binding.put(tree, b.path, b.take(arrays))
        return tree

    def _places(self, arrays: binding.Arrays) -> dict[str, float]:
        """Where the names of the lines stand when the figure shows these arrays."""
        if self._labels is None:
            return {}
        tree = self._with(arrays)
        if (state := self._labels.depend_on(tree)) not in self._known:
            self._known[state] = self._labels.places(tree, self._like)[0]
        places = self._known[state]
        return {b.key: float(place) for b, place in zip(self._moved, places.reshape(-1), strict=True)}

    def _names_in_texts(self) -> set[str]:
        """The names that occur in texts."""
        return {part[0] for parts in [*self.readout, *(p for _, p in self._texts)] for part in parts if isinstance(part, list)}

    def _check_texts(self) -> None:
        for key in self._names_in_texts() & set(self._first):
            if self._first[key].size != 1:
                raise ValueError(f"The {{{key}}} in a text must be one number; the function returns {self._first[key].size}.")
        if not self._bindings and not self._texts:
            raise ValueError(f"Nothing in the figure comes from the function's arrays ({', '.join(self._first)}).")

    def _samples(self) -> set[tuple[int, ...]]:
        """Cells at which to check that the figure only draws: both ends of each slider, all ends at once, and some in between
        (drawing is the slowest part)."""
        at = tuple(p.index for p in self.params.values())
        ends = [(0, n - 1) for n in self.sizes]
        cells = {(*at[:k], end, *at[k + 1 :]) for k, both in enumerate(ends) for end in both} | {*zip(*ends)}
        every = list(itertools.product(*map(range, self.sizes)))
        return cells | {*every[:: max(1, len(every) // 8)]}

    def _pack(self) -> dict[str, Packed]:
        used = {b.key for b in self._bindings} | self._names_in_texts()
        grids = {key: np.empty((*self.sizes, *a.shape)) for key, a in self._first.items() if key in used}
        places: dict[str, np.ndarray] = {}
        checked = self._samples()
        for index in itertools.product(*map(range, self.sizes)):
            values = {key: p.values[i] for (key, p), i in zip(self.params.items(), index)}
            arrays = self.evaluate(**values)
            for key, first in self._first.items():
                shape = arrays[key].shape if key in arrays else "none"
                if shape != first.shape:
                    raise ValueError(
                        f"The array {key!r} has shape {first.shape} at the defaults and {shape} {_where(values)}: "
                        "an Explorer's arrays must keep their shape (pad with NaN, which is not drawn)."
                    )
            for key, grid in grids.items():
                grid[index] = arrays[key]
            if self._draw is not None and index in checked:
                binding.check(self._draw, arrays, self._bindings, self._plain)
            for key, place in self._places(arrays).items():
                places.setdefault(key, np.empty(self.sizes))[index] = place
        grids |= places
        log = {b.key for b in self._bindings if binding.on_log_axis(b.path, self._tree)}
        packed = {key: pack(grid, len(self.sizes), key in log) for key, grid in grids.items()}
        for axis, name in enumerate(self.params):
            if name not in self._names_in_texts() and all(p.dims[axis] == 1 for p in packed.values()):
                raise ValueError(f"The slider {name!r} changes nothing in the figure or its texts: draw what it changes.")
        total = sum(p.nbytes for p in packed.values())
        if total > LIMIT:
            rows = "\n".join(f"  {key}: {p.arithmetic()}" for key, p in packed.items())
            raise ValueError(
                f"The grid of {self.name} would be {total / 1e6:.1f} MB on the page, more than {LIMIT / 1e6:.0f} MB:\n{rows}\n"
                "Use fewer values on a slider, or fewer points. (What does not depend on a slider is stored once along it.)"
            )
        return packed

    # -- the figure at some values -------------------------------------------------------------------------------------

    def text_values(self, values: Mapping, arrays: binding.Arrays) -> dict[str, float | str]:
        """The values that a text can name: the function's single numbers, and the sliders' values as shown."""
        shown = {key: p.text(values[key]) for key, p in self.params.items()}
        return {**{key: float(a.reshape(-1)[0]) for key, a in arrays.items() if a.size == 1}, **shown}

    def fill(self, figure: go.Figure, values: Mapping, arrays: binding.Arrays) -> None:
        """Put a cell's numbers and texts into the figure."""
        arrays = {**arrays, **{key: np.float64(place) for key, place in self._places(arrays).items()}}
        for b in [*self._bindings, *self._moved]:
            leaf = b.take(arrays)
            binding.put(figure, b.path, leaf if leaf.ndim else float(leaf))
        for b in self._moved:
            figure.layout.annotations[b.path[2]].visible = bool(np.isfinite(arrays[b.key]))
        named = self.text_values(values, arrays)
        for path, parts in self._texts:
            binding.put(figure, path, binding.fill(parts, named))

    def figure(self, **values) -> go.Figure:
        """The plotly figure at these values of the sliders; those not named have their defaults."""
        chosen = self._chosen(values)
        figure = styled(self._frame)
        self.fill(figure, chosen, self.evaluate(**chosen))
        return figure

    # -- page and widget -----------------------------------------------------------------------------------------------

    @cached_property
    def _digest(self) -> str:
        """A hash of the Explorer's name, sliders and arrays, the same in every run."""
        identity = json.dumps([self.name, [[k, p.texts] for k, p in self.params.items()], sorted(self._packed)])
        return hashlib.sha1(identity.encode()).hexdigest()[:8]

    def to_html(self) -> str:
        """The Explorer as HTML with everything except plotly.js. The id differs every time."""
        ident = page.unique_id(self._digest)
        bindings = [*self._bindings, *self._moved]
        spec = page.figure_spec(self._tree, [b.path for b in bindings])
        spec["arrays"] |= {key: p.spec() for key, p in self._packed.items()}
        spec["bind"] += [b.spec() for b in bindings]
        spec |= {"key": self.name, "texts": self._texts, "readout": self.readout}
        spec["sliders"] = [
            {"name": key, "default": p.index, "texts": p.texts, "values": [str(v) for v in p.values]}
            for key, p in self.params.items()
        ]
        named = binding.escaped(self.text_values(self.defaults, self._first))
        setting = [f"{p.label or html.escape(key)} = {html.escape(p.texts[p.index])}" for key, p in self.params.items()]
        readout = [binding.fill(parts, named) for parts in self.readout]
        return page.block(
            ident,
            spec,
            still=to_svg(self.figure(), self.alt),
            setting=" · ".join([*setting, *readout]),
            alt=self.alt or f"Figure of {self.name} that follows the sliders below it",
            panel=page.panel(ident, self.params, readout),
        )

    def widget(self):
        """ipywidgets around a plotly FigureWidget; every change calls the function."""
        return widget.widget(self)

    def _repr_mimebundle_(self, include=None, exclude=None):
        bundle = {"text/plain": repr(self), "text/html": self.to_html()}
        if widget.has_widgets():
            bundle |= {"application/vnd.jupyter.widget-view+json": widget.view(self.widget())}
        return bundle

    def __repr__(self) -> str:
        at = ", ".join(f"{k} = {p.texts[p.index]}" for k, p in self.params.items())
        return f"Explorer {self.name}: {at}; {self.cells} cells, {self.nbytes / 1e3:.0f} kB"


def _check_kinds(fn: object, params: object, figure: object, bind: object, readout: object, alt: object) -> None:
    """ValueError unless every argument has the right type."""
    texts = [readout] if isinstance(readout, str) else readout
    for holds, text in (
        (callable(fn), f"fn must be a function of the sliders' values; got {fn!r}."),
        (isinstance(params, Mapping), f"params must be a dict from a parameter's name to its Slider; got {params!r}."),
        (callable(figure) or isinstance(figure, go.Figure), f"figure must be a function or a plotly Figure; got {figure!r}."),
        (bind is None or not callable(figure), "bind is only for a ready figure: a figure's function receives the arrays."),
        (isinstance(texts, Sequence) and all(isinstance(t, str) for t in texts), f"readout must be text; got {readout!r}."),
        (isinstance(alt, str), f"alt must be text that says what the figure shows; got {alt!r}."),
    ):
        if not holds:
            raise ValueError(f"Explorer: {text}")


def _where(values: Mapping) -> str:
    return "at " + ", ".join(f"{k}={v}" for k, v in values.items())
