"""How does an Explorer work in JupyterLab, where there is a kernel?

As ipywidgets around a plotly FigureWidget; every change calls the function.
"""

import html
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from . import binding

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


def widget(explorer: "Explorer"):
    """The Explorer as a VBox: the figure, one slider per parameter, the readout, and a reset button."""
    import ipywidgets as widgets

    figure = go.FigureWidget(explorer.figure())
    wide = {"style": {"description_width": "initial"}, "layout": {"width": "100%"}, "description_allow_html": True}
    sliders = {}
    for key, p in explorer.params.items():
        words = f"{p.label or html.escape(key)} {html.escape(p.about)}".strip()
        sliders[key] = widgets.SelectionSlider(options=list(zip(p.texts, p.values)), value=p.default, description=words, **wide)
    readout, reset = widgets.HTML(), widgets.Button(description="Reset", layout={"width": "7em"})

    def move(_=None):
        values = {key: slider.value for key, slider in sliders.items()}
        arrays = explorer.evaluate(**values)
        with figure.batch_update():
            explorer.fill(figure, values, arrays)
        named = binding.escaped(explorer.text_values(values, arrays))
        readout.value = "<br>".join(binding.fill(parts, named) for parts in explorer.readout)

    def back(_):
        for key, slider in sliders.items():
            slider.value = explorer.params[key].default

    for slider in sliders.values():
        slider.observe(move, "value")
    reset.on_click(back)
    move()
    return widgets.VBox([figure, *sliders.values(), readout, reset])
