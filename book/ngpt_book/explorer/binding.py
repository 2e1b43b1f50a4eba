"""Which numbers of a figure move with the sliders, and where do they come from?

An Explorer's figure is ordinary plotly code that receives the arrays of the Explorer's function:

    def draw(a):
        return go.Figure(go.Scatter(x=a["t"], y=a["path"][:, 0]))

It is called once with arrays of unique numbers, so that every number found in the figure reveals where it comes from. A figure
may select and slice (rows, columns, transposes). A page without Python could not update anything that the figure computes
itself, so that is an error.

    leaf      an array or a number somewhere in a figure, at a path such as ("data", 0, "marker", "color")
    binding   leaf <- key: element (i, j, ...) of the leaf is element start + i * strides[0] + j * strides[1] + ... of the array
    template  a text of the figure with names in braces, "gap {gap:.2f}°": the page fills in the numbers
"""

import html
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

Arrays = dict[str, np.ndarray]
Path = tuple[str | int, ...]

_FIELD = re.compile(r"(?<!%)\{(\w+)(?::([^{}]*))?\}")  # %{x} belongs to plotly
_FORMAT = re.compile(r"\+?,?(\.\d+)?[defg%]?")
_COMPUTED = (
    "changes with the sliders, but is not one of the function's arrays (or a slice of one). A page without Python "
    "cannot compute it: compute it in the function and let the figure only draw. To put numbers in a text, write "
    '"{name:.2f}" (a plain string, not an f-string).'
)
_PLOTLY_TEXT = {"hovertemplate", "texttemplate"}


@dataclass(frozen=True)
class Binding:
    """One leaf of the figure and the slice of an array that fills it."""

    path: Path
    key: str
    start: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]

    def take(self, arrays: Arrays) -> np.ndarray:
        """The leaf's values from the function's arrays."""
        index = self.start + sum(
            np.arange(n).reshape([-1 if k == axis else 1 for k in range(len(self.shape))]) * self.strides[axis]
            for axis, n in enumerate(self.shape)
        )
        return arrays[self.key].reshape(-1)[index]

    def spec(self) -> dict:
        return {"path": self.path, "key": self.key, "start": self.start, "strides": self.strides, "shape": self.shape}


def as_arrays(out: Mapping, where: str) -> Arrays:
    """The function's result in float64. Torch tensors, numpy arrays, lists and numbers are all accepted."""
    if not isinstance(out, Mapping) or not out:
        raise ValueError(f"An Explorer's function must return a dict of arrays; {where} it returned {type(out).__name__}.")
    arrays = {}
    for key, value in out.items():
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            value = (value if value.is_complex() else value.double()).numpy()
        try:
            if np.asarray(value).dtype.kind in "cMmSU":
                raise TypeError("complex numbers, dates and strings cannot be drawn along an axis")
            arrays[key] = np.array(value, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"The array {key!r} {where} is not numeric or has rows of different lengths: {error}.") from None
        if np.isinf(arrays[key]).any():
            raise ValueError(f"The array {key!r} {where} has an infinite number. Return NaN where nothing should be drawn.")
    return arrays


def walk(tree, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """Every leaf of a figure: arrays and lists of numbers count as one leaf."""
    if isinstance(tree, np.ndarray) and numeric(tree) is None:
        tree = tree.tolist()  # texts
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from walk(value, (*path, key))
    elif isinstance(tree, (list, tuple)) and numeric(tree) is None:
        for index, value in enumerate(tree):
            yield from walk(value, (*path, index))
    else:
        yield path, tree


def numeric(leaf) -> np.ndarray | None:
    """The leaf as float64 if it consists of numbers (None inside a list is a gap, NaN)."""
    if leaf is None or isinstance(leaf, (bool, str)):
        return None
    if isinstance(leaf, (list, tuple)) and (not len(leaf) or isinstance(leaf[0], (str, dict, bool))):
        return None
    try:
        return np.asarray(leaf, dtype=np.float64)
    except (TypeError, ValueError):
        return None


def tree_of(figure: go.Figure) -> dict:
    """The figure as plain dicts, lists and arrays, without its template."""
    layout = figure.layout.to_plotly_json()
    layout.pop("template", None)
    return {"data": [trace.to_plotly_json() for trace in figure.data], "layout": layout}


def name_of(path: Path, tree: dict) -> str:
    """A readable path: 'LERP.marker.color' rather than ("data", 1, "marker", "color")."""
    if path[0] == "data":
        trace = tree["data"][path[1]].get("name") or f"trace {path[1]}"
        return ".".join([trace, *map(str, path[2:])])
    return ".".join(map(str, path))


def given(arrays: Arrays) -> dict:
    """The arguments of the figure's function: single numbers become floats."""
    return {key: float(value) if value.ndim == 0 else value for key, value in arrays.items()}


def _marked(arrays: Arrays) -> Arrays:
    """Arrays of the same shapes and within the same bounds, in which every number is unique."""
    rng = np.random.default_rng(1)
    marked = {}
    for key, value in arrays.items():
        finite = value[~np.isnan(value)]
        lo, hi = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
        if hi - lo < 1e-6 * max(abs(lo), abs(hi)) or hi == lo:  # too few floats between them for unique numbers
            hi = lo + max(abs(lo), 1.0) * 1e-3
        marked[key] = rng.uniform(lo, hi, value.shape)
    return marked


def probe(draw: Callable[[dict], go.Figure], arrays: Arrays) -> list[Binding]:
    """The bindings of the figure that a function draws."""
    marked = _marked(arrays)
    origin = {x: (key, i) for key, value in marked.items() for i, x in enumerate(value.reshape(-1).tolist())}
    tree = tree_of(draw(given(marked)))
    bindings = []
    for path, leaf in walk(tree):
        found = numeric(leaf)
        if found is None or not found.size or found.reshape(-1)[0] not in origin:
            continue
        places = [origin.get(x, (None, -1)) for x in found.reshape(-1).tolist()]
        key, start = places[0]
        index = np.array([i for _, i in places]).reshape(found.shape)
        corner = [tuple(int(k == axis) for k in range(found.ndim)) for axis in range(found.ndim)]
        strides = tuple(int(index[at] - start) if found.shape[k] > 1 else 0 for k, at in enumerate(corner))
        binding = Binding(path, key, start, strides, found.shape)
        if {k for k, _ in places} == {key} and np.array_equal(binding.take(marked), found):
            bindings.append(binding)
    return bindings


def check(draw: Callable[[dict], go.Figure], arrays: Arrays, bindings: list[Binding], base: dict) -> None:
    """Reject a figure that computes: drawn from other arrays, it must differ from ``base`` only in its bound leaves."""
    tree = tree_of(draw(given(arrays)))
    bound = {b.path: b for b in bindings}
    before = dict(walk(base))
    now = {path for path, _ in walk(tree)}
    gone = [(path, None) for path in before if path not in now]
    for path, leaf in [*walk(tree), *gone]:
        if path not in now:
            same = False
        elif path in bound:
            same = np.array_equal(numeric(leaf), bound[path].take(arrays), equal_nan=True)
        elif path not in before:
            same = False
        else:
            a, b = numeric(leaf), numeric(before[path])
            same = leaf == before[path] if a is None or b is None else np.array_equal(a, b, equal_nan=True)
        if not same:
            raise ValueError(f"{name_of(path, tree if path in now else base)} {_COMPUTED}")


def on_log_axis(path: Path, tree: dict) -> bool:
    """Is this leaf drawn along a logarithmic axis?"""
    if path[0] != "data" or path[2] not in ("x", "y", "z"):
        return False
    trace, layout, letter = tree["data"][path[1]], tree["layout"], path[2]
    if trace["type"] in ("scatter3d", "surface"):
        axis = layout.get(trace.get("scene", "scene"), {}).get(f"{letter}axis", {})
    else:
        axis = layout.get(f"{letter}axis" + trace.get(f"{letter}axis", letter)[1:], {})
    return axis.get("type") == "log"


def from_dict(bind: Mapping[str, str], figure: go.Figure, arrays: Arrays) -> list[Binding]:
    """The bindings of a ready-made figure: {"trace name or number.attribute": array key}, or "layout.annotations.0.x"."""
    names = [trace.name for trace in figure.data]
    bindings = []
    for address, key in bind.items():
        if key not in arrays:
            raise ValueError(f"bind[{address!r}] needs the array {key!r}; the function returns {', '.join(arrays)}.")
        head, _, rest = address.partition(".")
        steps = [int(s) if s.isdigit() else s for s in rest.split(".")]
        if head == "layout":
            path = ("layout", *steps)
        elif rest and (head in names or (head.isdigit() and int(head) < len(names))):
            path = ("data", names.index(head) if head in names else int(head), *steps)
        else:
            raise ValueError(
                f"bind[{address!r}]: the figure has no trace {head!r}. Write 'name.attribute', as in "
                f"'{names[0] if names and names[0] else 0}.y'; its traces are {names}."
            )
        shape = arrays[key].shape
        strides = tuple(int(np.prod(shape[axis + 1 :], dtype=int)) for axis in range(len(shape)))
        bindings.append(Binding(path, key, 0, strides, shape))
    return bindings


def parse_template(text: str, names: set[str]) -> list | None:
    """'gap {gap:.2f}°' -> ['gap ', ['gap', '.2f'], '°']; None for a text without known names."""
    parts, end = [], 0
    for match in _FIELD.finditer(text):
        name, spec = match[1], match[2] or ""
        if name not in names:
            continue
        if not _FORMAT.fullmatch(spec):
            raise ValueError(f"The page does not support the format {spec!r} in {text!r}: use .2f, .1e, .3g, .0%, d or ,d.")
        parts += [text[end : match.start()], [name, spec]]
        end = match.end()
    return [*parts, text[end:]] if parts else None


def unknown_names(text: str, names: set[str]) -> str | None:
    """The first {...} of a text with an unknown name."""
    return next((found for found in re.findall(r"(?<!%)\{([^{}]*)\}", text) if found.partition(":")[0] not in names), None)


def escaped(values: Mapping[str, float | str]) -> dict[str, float | str]:
    """The values with strings escaped for HTML."""
    return {key: html.escape(value, quote=False) if isinstance(value, str) else value for key, value in values.items()}


def put(tree, path: Path, value) -> None:
    """Set one leaf of a figure (a plotly figure or plain dicts and lists)."""
    for step in path[:-1]:
        tree = tree[step]
    tree[path[-1]] = value


def fill(parts: list, values: Mapping[str, float | str]) -> str:
    """A template with its numbers filled in (a slider's value is the text that the slider shows)."""

    def one(part):
        value = values[part[0]]
        if isinstance(value, str):
            return value
        if not np.isfinite(value):
            return "–"  # as in explorer.js
        return format(int(value) if part[1].endswith("d") else value, part[1] or ".3g")

    return "".join(part if isinstance(part, str) else one(part) for part in parts)


def templates(tree: dict, names: set[str]) -> list[tuple[Path, list]]:
    """Every text of the figure with numbers to fill in."""
    texts = ((p, s) for p, s in walk(tree) if isinstance(s, str) and p[-1] not in _PLOTLY_TEXT)
    return [(path, parts) for path, text in texts if (parts := parse_template(text, names))]
