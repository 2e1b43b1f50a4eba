"""How do the figures of a report and of the book look, on a light page and on a dark one?

One palette serves both: every color has a contrast of at least 3:1 against a white page and against the dark theme's
background, and any two remain distinguishable under the three common color-vision deficiencies (tests/test_explorer.py measures
both).
Text, axes and grid follow the page: the browser takes their color from the text around the figure.
"""

import plotly.graph_objects as go

COLORS = {
    "blue": "#2166f3",  # the hidden state, the main object
    "red": "#c9340f",  # what is compared with it
    "teal": "#1ea3a3",
    "magenta": "#b12fae",
    "gold": "#bd8b0a",
    "grey": "#63666c",  # reference lines, spheres, fixed objects
}
SEQUENTIAL = "Viridis"
DIVERGING = [[0.0, COLORS["blue"]], [0.5, "#d9dbe0"], [1.0, COLORS["red"]]]

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


INK = "#6f7785"  # text and lines where the page sets no color (live widgets): readable on white and on black
LINES = {"gridcolor": "rgba(127,135,148,0.2)", "linecolor": "rgba(127,135,148,0.7)", "zerolinecolor": "rgba(127,135,148,0.5)"}


def _axis() -> dict:
    look = {"showline": True, "ticks": "outside", "ticklen": 4, "zeroline": False, "exponentformat": "power"}
    return {**look, "automargin": True, "hoverformat": ".4~g", "title": {"standoff": 8}, **LINES}


def _scene_axis() -> dict:
    return {"showbackground": False, "zeroline": False, "showspikes": False, **LINES}


def _template() -> go.layout.Template:
    layout = {
        "font": {"family": FONT, "size": 13, "color": INK},
        "colorway": [color for name, color in COLORS.items() if name != "grey"],
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "height": 400,
        "margin": {"l": 56, "r": 16, "t": 40, "b": 48},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "hoverlabel": {"font": {"family": FONT}},
        "xaxis": _axis(),
        "yaxis": _axis(),
        "scene": {
            **{f"{x}axis": _scene_axis() for x in "xyz"},
            "aspectmode": "data",
            "dragmode": "turntable",
            "camera": {"eye": {"x": 1.25, "y": 1.05, "z": 0.75}},
        },
        "colorscale": {"sequential": SEQUENTIAL, "sequentialminus": SEQUENTIAL, "diverging": DIVERGING},
        "bargap": 0.15,
    }
    bare = {"colorbar": {"outlinewidth": 0, "thickness": 12}}
    data = {
        "heatmap": [{"colorscale": SEQUENTIAL, **bare}],
        "surface": [{"colorscale": SEQUENTIAL, **bare}],
        "scatter3d": [{"marker": {"size": 4}}],
    }
    return go.layout.Template(layout=layout, data=data)


TEMPLATE = _template()
