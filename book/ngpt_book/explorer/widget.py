"""How does an Explorer work in JupyterLab, where there is a kernel?

As ipywidgets around a plotly FigureWidget. Every change calls the function, so its sliders need not stop at the values for
which the page has stored results: they are continuous wherever the function is.
"""

import html
import itertools
import math
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from . import binding
from .slider import MOST_CHOICES

if TYPE_CHECKING:
    from .explorer import Explorer


def has_widgets() -> bool:
    """Is this a JupyterLab (or Notebook 7) session, with a front end that supports FigureWidget?

    Colab and VS Code have open bugs with it and get the static page instead. While the book is built (NGPT_BOOK), no widget
    state may reach the stored notebooks. A Jupyter server tells its kernels the session's name; VS Code marks its own "jvsc".
    """
    session = os.environ.get("JPY_SESSION_NAME", "")
    elsewhere = "jvsc" in session or "VSCODE_PID" in os.environ or "google.colab" in sys.modules
    if not session or elsewhere or os.environ.get("NGPT_BOOK"):
        return False
    return all(find_spec(package) for package in ("ipywidgets", "anywidget"))


def view(box) -> dict:
    """The data that a front end needs to display the widget."""
    return {"version_major": 2, "version_minor": 0, "model_id": box.model_id}


STEPS = 400  # of a continuous slider
WIDE = 30  # the ratio from which a slider is logarithmic


def is_continuous(explorer: "Explorer", key: str) -> bool:
    """Can this slider stop between the page's values? It can if the function takes a value between two of them."""
    values = explorer.params[key].values
    if any(isinstance(value, str) for value in values) or list(values) != sorted(values):
        return False
    low, high = values[len(values) // 2 - 1 : len(values) // 2 + 1]
    between = (low + high) // 2 if isinstance(low, int) and isinstance(high, int) else (low + high) / 2
    try:
        arrays = explorer.evaluate(**{**explorer.defaults, key: between})
    except ValueError:
        return False
    return {k: a.shape for k, a in arrays.items()} == explorer.shapes


def control(explorer: "Explorer", key: str):
    """The widget of one parameter: buttons for a choice among words, a slider for numbers, continuous if possible."""
    import ipywidgets as widgets

    p = explorer.params[key]
    words = f"{p.label or html.escape(key)} {html.escape(p.about)}".strip()
    look = {
        "description": words,
        "description_allow_html": True,
        "style": {"description_width": "initial"},
        "layout": {"width": "100%"},
    }
    options = {"options": list(zip(p.texts, p.values)), "value": p.default}
    if any(isinstance(value, str) for value in p.values):
        return (widgets.ToggleButtons if len(p.values) <= MOST_CHOICES else widgets.Dropdown)(**options, **look)
    steps = [b - a for a, b in itertools.pairwise(p.values)]
    rugged = min(p.values) <= 0 and max(map(abs, steps)) > WIDE * min(map(abs, steps))  # 0, 1e-14, 1e-10
    if rugged or not is_continuous(explorer, key):
        return widgets.SelectionSlider(**options, **look)
    low, high = p.values[0], p.values[-1]
    if all(isinstance(value, int) for value in p.values):
        return widgets.IntSlider(min=low, max=high, value=p.default, **look)
    if low > 0 and high / low >= WIDE:
        ends = dict(zip(("min", "max", "step"), _steps(*map(math.log10, (low, high, p.default)))))
        return widgets.FloatLogSlider(**ends, value=p.default, readout_format=".3g", **look)
    ends = dict(zip(("min", "max", "step"), _steps(low, high, p.default)))
    return widgets.FloatSlider(**ends, value=p.default, readout_format=".3g", **look)


def _steps(low: float, high: float, default: float) -> tuple[float, float, float]:
    """The ends and the step of a continuous slider, on which the default is one of the places."""
    step = (high - low) / STEPS
    return low, high, (default - low) / max(1, round((default - low) / step)) or step


def widget(explorer: "Explorer"):
    """The Explorer as a VBox: the figure, a control per parameter, the readout, and a reset button."""
    import ipywidgets as widgets

    figure = go.FigureWidget(explorer.figure())
    controls = {key: control(explorer, key) for key in explorer.params}
    readout, reset = widgets.HTML(), widgets.Button(description="Reset", layout={"width": "7em"})

    def move(_=None):
        values = {key: each.value for key, each in controls.items()}
        try:
            arrays = explorer.evaluate(**values)
        except ValueError as error:  # a value between those of the page that the function does not take
            readout.value = html.escape(str(error))
            return
        with figure.batch_update():
            explorer.fill(figure, values, arrays)
        named = binding.escaped(explorer.text_values(values, arrays))
        readout.value = "<br>".join(binding.fill(parts, named) for parts in explorer.readout)

    def back(_):
        for key, each in controls.items():
            each.value = explorer.params[key].default

    for each in controls.values():
        each.observe(move, "value")
    reset.on_click(back)
    move()
    return widgets.VBox([figure, *controls.values(), readout, reset])
