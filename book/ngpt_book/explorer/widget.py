"""How does an Explorer live in JupyterLab, where there is a kernel?

As ipywidgets around a plotly FigureWidget; every move calls the function itself.
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
    """Is this a JupyterLab (or Notebook 7) session whose front end draws FigureWidget?

    Colab and VS Code have open bugs there and get the page's life. While the book is built (NGPT_BOOK) no widget state may
    reach the stored notebooks. A kernel that a Jupyter server started knows its session's name; VS Code signs its own "jvsc".
    """
    session = os.environ.get("JPY_SESSION_NAME", "")
    elsewhere = "jvsc" in session or "VSCODE_PID" in os.environ or "google.colab" in sys.modules
    if not session or elsewhere or os.environ.get("NGPT_BOOK"):
        return False
    return all(find_spec(package) for package in ("ipywidgets", "anywidget"))


def view(box) -> dict:
    """What a front end needs to show the widget."""
    return {"version_major": 2, "version_minor": 0, "model_id": box.model_id}


def widget(explorer: "Explorer"):
    """The Explorer as a VBox: the figure, a slider for each parameter, the readout, and a way back."""
    import ipywidgets as widgets

    figure = go.FigureWidget(explorer.figure())
    wide = {"style": {"description_width": "initial"}, "layout": {"width": "100%"}, "description_allow_html": True}
    sliders = {}
    for key, p in explorer.params.items():
        words = f"{p.label or html.escape(key)} {html.escape(p.about)}".strip()
        sliders[key] = widgets.SelectionSlider(options=list(zip(p.texts, p.values)), value=p.default, description=words, **wide)
    told, reset = widgets.HTML(), widgets.Button(description="Reset", layout={"width": "7em"})

    def move(_=None):
        values = {key: slider.value for key, slider in sliders.items()}
        arrays = explorer.evaluate(**values)
        with figure.batch_update():
            explorer.fill(figure, values, arrays)
        said = binding.escaped(explorer.said(values, arrays))
        told.value = "<br>".join(binding.fill(parts, said) for parts in explorer.readout)

    def back(_):
        for key, slider in sliders.items():
            slider.value = explorer.params[key].default

    for slider in sliders.values():
        slider.observe(move, "value")
    reset.on_click(back)
    move()
    return widgets.VBox([figure, *sliders.values(), told, reset])
