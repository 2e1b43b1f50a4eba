"""Do the names of curves stand beside their curves, apart from each other, and does a legend stay where they cannot?"""

import numpy as np
import plotly.graph_objects as go
import pytest

from ngpt_book import Explorer, Slider
from ngpt_book.explorer import binding, labels, page

X = np.linspace(0, 1, 60)


def figure(*curves, **layout) -> go.Figure:
    lines = [go.Scatter(x=X, y=y, name=f"curve {i}", mode="lines", line_color="#2166f3") for i, y in enumerate(curves)]
    return go.Figure(lines, layout={"xaxis": {"range": [0, 1]}, "yaxis": {"range": [0, 1]}, **layout})


def pixels(places, tree) -> np.ndarray:
    shares = (places - [axis["range"][0] for axis in (tree["layout"]["xaxis"], tree["layout"]["yaxis"])]) / [
        np.ptp(axis["range"]) for axis in (tree["layout"]["xaxis"], tree["layout"]["yaxis"])
    ]
    return shares * [labels.WIDE, labels.HIGH]


@pytest.mark.parametrize("seed", range(5))
def test_names_touch_neither_curves_nor_each_other(seed):
    rng = np.random.default_rng(seed)
    curves = [np.clip(a + b * X + 0.1 * np.sin(c * X), 0.02, 0.98) for a, b, c in rng.uniform(0, [0.6, 0.4, 9], (4, 3))]
    drawn = figure(*curves)
    tree = binding.tree_of(drawn)
    found = labels.named(drawn, tree)
    if found is None:  # no room: the legend stays
        assert not drawn.layout.annotations and drawn.data[0].showlegend is None
        return
    places, free = found.places(tree)
    centers = pixels(places, tree)
    assert free
    for k, width in enumerate(found.widths):
        for j, curve in enumerate(curves):
            away = np.abs(centers[k] - np.stack([X * labels.WIDE, curve * labels.HIGH], 1)) - [width / 2, labels.HALF]
            assert np.hypot(*np.maximum(away, 0).T).min() > 0, (k, j)
        for other in range(k):
            apart = np.abs(centers[k] - centers[other]) - [(width + found.widths[other]) / 2, 2 * labels.HALF]
            assert (apart > 0).any()
    assert drawn.layout.showlegend is False and [n.font.color for n in drawn.layout.annotations] == ["#2166f3"] * 4


def test_without_room_the_legend_stays():
    drawn = figure(*(0.5 + 0.02 * np.sin(40 * X + k) for k in range(4)), yaxis={"range": [0.4, 0.6]})
    crowded = figure(*(np.full(60, y) for y in np.linspace(0.02, 0.98, 6)))
    crowded.add_traces([go.Scatter(x=X, y=np.full(60, y), name=f"more {y:.2f}", mode="lines") for y in (0.1, 0.3, 0.5)])
    for each in (drawn, crowded):
        before = each.to_json()
        if labels.named(each, binding.tree_of(each)) is None:
            assert each.to_json() == before
    assert labels.named(crowded, binding.tree_of(crowded)) is None  # more names than MOST


def test_a_name_follows_its_curve_and_disappears_with_it():
    explorer = Explorer(
        lambda height: {"y": np.full(60, height), "rest": np.full(60, 0.1)},
        {"height": Slider([0.2, 0.5, 0.8, 3.0], default=0.5)},
        lambda v: figure(v["y"], v["rest"]),
    )
    for height in (0.2, 0.5, 0.8):
        drawn = explorer.figure(height=height)
        assert abs(drawn.layout.annotations[0].y - height) < 0.12 and drawn.layout.annotations[0].visible
    assert not explorer.figure(height=3.0).layout.annotations[0].visible  # outside the axis
    assert "curve 0" in explorer.to_html()


def test_a_still_figure_has_names_too():
    drawn = page.Picture(figure(X, 1 - X), "Two lines that cross").figure
    assert [note.text for note in drawn.layout.annotations] == ["<b>curve 0</b>", "<b>curve 1</b>"]
    assert all(0 < note.x < 1 and 0 < note.y < 1 for note in drawn.layout.annotations)


def test_a_name_keeps_away_from_numbers_at_points_and_from_guides():
    drawn = figure(0.5 + 0.0 * X)
    drawn.add_scatter(x=X[::6], y=np.full(10, 0.56), mode="markers+text", text=["3.4%"] * 10, textposition="top center")
    drawn.add_scatter(x=[0, 1], y=[0.45, 0.45], mode="lines", line_dash="dash")  # a guide
    drawn.data[0].showlegend, drawn.data[1].showlegend, drawn.data[2].showlegend = True, False, False
    tree = binding.tree_of(drawn)
    ((_, y),), free = labels.named(drawn, tree).places(tree)
    assert free and min(abs(y - 0.45), abs(y - 0.60)) * labels.HIGH > labels.HALF


def test_a_name_keeps_away_from_the_figures_own_words():
    drawn = figure(X, 1 - X)
    before = labels.named(go.Figure(drawn), tree := binding.tree_of(drawn)).places(tree)[0]
    drawn.add_annotation(x=before[0, 0], y=before[0, 1], text="3.4%", showarrow=False)
    drawn.add_annotation(x=0.5, y=1.05, xref="paper", yref="paper", text="a title", showarrow=False)
    tree = binding.tree_of(drawn)
    found = labels.named(drawn, tree)
    places, free = found.places(tree)
    away = np.abs((places - before[0]) * [labels.WIDE, labels.HIGH]) - [found.widths[0] / 2 + 14, 2 * labels.HALF]
    assert free and (away > 0).any(1).all()


def test_a_name_keeps_away_from_a_rough_curve():
    rough = 0.5 + 0.2 * np.sign(np.sin(100 * np.linspace(0, 1, 600)))
    drawn = go.Figure(go.Scatter(x=np.linspace(0, 1, 600), y=rough, name="rough", mode="lines", showlegend=True))
    drawn.update_layout(xaxis_range=[0, 1], yaxis_range=[0, 1])
    tree = binding.tree_of(drawn)
    ((_, y),), free = labels.named(drawn, tree).places(tree)
    assert free and abs(y - 0.5) * labels.HIGH > 0.2 * labels.HIGH + labels.HALF


def test_a_figure_without_legend_and_title_has_no_room_for_them():
    plain, two, titled = figure(X), figure(0.1 + 0.0 * X, 0.9 + 0.0 * X), figure(X, title="A title")
    legend = go.Figure([go.Bar(y=[1, 2], name="a"), go.Bar(y=[2, 1], name="b")])
    tops = [page.Picture(each, "a picture").figure.layout.margin.t for each in (plain, two, titled, legend)]
    assert tops == [labels.TOP, labels.TOP, None, None]
