"""How do the book's figures look? Like those of ``ngpt report`` (``ngpt_core/tools/theme.py``), plus what only a page needs."""

import plotly.graph_objects as go

from ngpt_core.tools.theme import COLORS, DIVERGING, FONT, SEQUENTIAL, TEMPLATE

__all__ = ["COLORS", "DIVERGING", "FONT", "SEQUENTIAL", "TEMPLATE", "powers", "styled", "words"]


def powers(*exponents: int) -> dict:
    """Ticks of a logarithmic axis in the size of all others (plotly's powers are larger). The axis must extend past the last
    tick: a label that the edge would cut off is not shown."""
    names = {0: "1", 1: "10"}
    return {"tickvals": [10.0**p for p in exponents], "ticktext": [names.get(p, f"10<sup>{p}</sup>") for p in exponents]}


def words(color: str) -> str:
    """How words of an SVG look that have a curve's color: it is mixed with the page's ink, because a contrast of 3:1 is enough
    to see a curve, but not to read a word (4.5:1). explorer/paint.js does the same."""
    mixed = f' style="fill:color-mix(in srgb,{color} 70%,currentColor)"' if color.startswith("#") else ""
    return f'fill="{color}"{mixed}'


HOVER = {"scatter": "%{x}, %{y}", "bar": "%{x}, %{y}", "heatmap": "%{x}, %{y}: %{z:.3~g}"}  # text in the hover box


def styled(figure: go.Figure) -> go.Figure:
    """A copy of the figure in the book's template (the figure's own settings take precedence)."""
    figure = go.Figure(figure).update_layout(template=TEMPLATE)
    for trace in figure.data:
        if trace.type in HOVER and trace.hovertemplate is None and trace.hoverinfo is None:
            name = f"{trace.name}<br>" if trace.name else ""
            trace.hovertemplate = f"{name}{HOVER[trace.type]}<extra></extra>"  # one box: the second cuts names
    return figure
