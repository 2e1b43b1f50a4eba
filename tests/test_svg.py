"""Is the still picture of a figure well made, and are its points where the numbers say?"""

import base64
import re
import struct
import xml.etree.ElementTree as ET
import zlib

import numpy as np
import plotly.graph_objects as go
import pytest
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from ngpt_book.explorer.svg import WIDTH, to_svg
from ngpt_book.explorer.svg.axis import Axis
from ngpt_book.explorer.svg.pieces import path
from ngpt_book.explorer.svg.space import Space

SVG = "{http://www.w3.org/2000/svg}"
FRAME = {"margin": {"l": 60, "r": 20, "t": 40, "b": 50}, "height": 400}  # the plot spans 60..700 by 40..350


def parsed(figure) -> ET.Element:
    return ET.fromstring(to_svg(figure, "what it shows"))


def coordinates(d: str) -> np.ndarray:
    return np.array([[float(v) for v in pair.split(",")] for pair in re.split("[ML]", d)[1:]])


def strokes(root, color) -> list[np.ndarray]:
    return [coordinates(p.get("d")) for p in root.iter(f"{SVG}path") if p.get("stroke") == color]


def test_a_line_is_where_its_numbers_say():
    x, y = np.array([0.0, 1.0, 2.0, 4.0]), np.array([0.0, 5.0, 10.0, 2.5])
    figure = go.Figure(go.Scatter(x=x, y=y, mode="lines", line_color="#123456"), layout=FRAME)
    figure.update_xaxes(range=[0, 4]).update_yaxes(range=[0, 10])
    (line,) = strokes(parsed(figure), "#123456")
    np.testing.assert_allclose(line, np.stack([60 + x / 4 * 640, 350 - y / 10 * 310], 1), atol=0.05)


def test_a_logarithmic_axis_is_even_in_decades_and_drops_what_has_no_logarithm():
    figure = go.Figure(go.Scatter(x=[1, 10, 100, 0], y=[1, 2, 3, 4], mode="lines", line_color="#123456"), layout=FRAME)
    figure.update_xaxes(type="log", range=[0, 2])
    (line,) = strokes(parsed(figure), "#123456")
    np.testing.assert_allclose(line[:, 0], [60, 380, 700], atol=0.05)
    texts = [t.text for t in parsed(figure).iter(f"{SVG}text")]
    assert {"1", "10", "100"} <= set(texts)


@pytest.mark.parametrize("flat", [False, True], ids=["standing", "lying"])
def test_stacked_bars_stand_on_one_another(flat):
    places, first, second = ["a", "b"], [1.0, 3.0], [2.0, 4.0]
    figure = go.Figure(layout={**FRAME, "barmode": "stack"})
    for heights, color in ((first, "#000001"), (second, "#000002")):
        x, y = (heights, places) if flat else (places, heights)
        figure.add_bar(x=x, y=y, orientation="h" if flat else "v", marker_color=color)
    (figure.update_xaxes if flat else figure.update_yaxes)(range=[0, 7])
    boxes = {}
    for r in parsed(figure).iter(f"{SVG}rect"):
        start, size = (float(r.get(k)) for k in (("x", "width") if flat else ("y", "height")))
        low, scale = (start - 60, 640 / 7) if flat else (350 - start - size, 310 / 7)
        boxes.setdefault(r.get("fill"), []).append((low / scale, (low + size) / scale))
    np.testing.assert_allclose(boxes["#000001"], [(0, 1), (0, 3)], atol=0.01)
    np.testing.assert_allclose(boxes["#000002"], [(1, 3), (3, 7)], atol=0.01)


def test_two_subplots_share_the_width():
    figure = make_subplots(1, 2)
    for column in (1, 2):
        figure.add_scatter(x=[0, 1], y=[0, 1], mode="lines", line_color=f"#00000{column}", row=1, col=column)
    figure.update_layout(FRAME).update_xaxes(range=[0, 1]).update_yaxes(range=[0, 1])
    root = parsed(figure)
    left, right = strokes(root, "#000001")[0], strokes(root, "#000002")[0]
    assert left[0, 0] == 60 and right[1, 0] == 700 and left[1, 0] < right[0, 0]


def test_gaps_break_a_path():
    assert path([0, 1, 2, 3], [0, 1, np.nan, 3]) == "M0,0L1,1M3,3"
    assert path([0, 0.01, 5], [0, 0, 5]) == "M0,0L5,5"  # what falls on its neighbor is left out


def test_bars_stand_on_zero_and_have_their_heights():
    figure = go.Figure(go.Bar(x=["a", "b"], y=[4, -2], marker_color=["#000001", "#000002"]), layout=FRAME)
    figure.update_yaxes(range=[-5, 5])
    bars = {r.get("fill"): r for r in parsed(figure).iter(f"{SVG}rect")}
    up, down = bars["#000001"], bars["#000002"]
    zero = 350 - 5 / 10 * 310
    assert float(up.get("y")) + float(up.get("height")) == pytest.approx(zero, abs=0.2)
    assert float(up.get("height")) == pytest.approx(4 / 10 * 310, abs=0.2)
    assert float(down.get("y")) == pytest.approx(zero, abs=0.2)


def test_a_heat_map_is_a_picture_of_its_numbers():
    z = np.array([[0.0, 1.0, 2.0], [3.0, np.nan, 5.0]])
    image = next(parsed(go.Figure(go.Heatmap(z=z), layout=FRAME)).iter(f"{SVG}image"))
    data = base64.b64decode(image.get("href").removeprefix("data:image/png;base64,"))
    width, height = struct.unpack(">II", data[16:24])
    start = data.index(b"IDAT") + 4
    size = struct.unpack(">I", data[start - 8 : start - 4])[0]
    rows = np.frombuffer(zlib.decompress(data[start : start + size]), np.uint8).reshape(height, 1 + 4 * width)[:, 1:]
    pixels = rows.reshape(height, width, 4)
    assert (width, height) == (3, 2)
    want = [round(255 * c) for c in sample_colorscale("Viridis", [3 / 5], colortype="tuple")[0]]
    assert pixels[0, 0, :3].tolist() == want  # the first row of z is the lowest, so the last of the picture
    assert pixels[0, 1, 3] == 0 and pixels[1, 0, 3] == 255  # NaN is not drawn


def scene(**camera) -> Space:
    cube = {"type": "scatter3d", "x": [-1, 1], "y": [-1, 1], "z": [-1, 1]}
    return Space([cube], {"aspectmode": "cube", "camera": {"eye": camera}}, (0, 0, 400, 400))


def test_the_camera_looks_at_the_middle_and_shows_up_as_up():
    view = scene(x=2.0, y=0.0, z=0.0)
    x, y, depth = view.project(*np.array([[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]], dtype=float).T)
    assert (x[0], y[0]) == (200, 200)  # the middle
    assert y[1] < 200 and x[1] == pytest.approx(200)  # z is up
    assert x[2] > 200 and y[2] == pytest.approx(200)  # seen from +x, y points right
    assert depth[3] < depth[0]  # towards the eye


def test_what_is_nearer_is_larger():
    view = scene(x=2.0, y=0.0, z=0.0)
    near = np.ptp(view.project(np.ones(2), np.array([-0.5, 0.5]), np.zeros(2))[0])
    far = np.ptp(view.project(-np.ones(2), np.array([-0.5, 0.5]), np.zeros(2))[0])
    assert near > far > 0


def test_the_outline_of_a_sphere_is_a_disc():
    u, v = np.linspace(0, 2 * np.pi, 49), np.linspace(0, np.pi, 25)
    ball = go.Surface(x=np.outer(np.cos(u), np.sin(v)), y=np.outer(np.sin(u), np.sin(v)), z=np.outer(np.ones(49), np.cos(v)))
    ball.update(opacity=0.3, colorscale=[[0, "#808080"], [1, "#808080"]])
    hidden = {f"{axis}axis": {"visible": False} for axis in "xyz"}
    root = parsed(go.Figure(ball, layout={**FRAME, "scene": hidden}))
    corners = coordinates(next(p.get("d") for p in root.iter(f"{SVG}path")).replace("Z", ""))
    middle = corners.mean(0)
    radius = np.linalg.norm(corners - middle, axis=1).max()
    angles = np.degrees(np.arctan2(*(corners - middle)[np.linalg.norm(corners - middle, axis=1) > 0.93 * radius].T))
    assert np.diff(np.sort(angles)).max() < 25  # its edge goes all the way round


def test_ticks_are_round_numbers():
    def labels(**spec):
        return [label for _, label in Axis(spec, 0, 640).ticks()]

    assert labels(range=[0, 0.97]) == ["0", "0.2", "0.4", "0.6", "0.8"]
    assert labels(range=[-8, 2], type="log")[:2] == ["10<sup>-8</sup>", "10<sup>-6</sup>"]
    assert labels(range=[0, 1], tickvals=[0, 1], ticktext=["no", "yes"]) == ["no", "yes"]


def test_text_and_axes_follow_the_page_and_tags_become_spans():
    layout = {"xaxis": {"title": "s<sub>z</sub>"}, "showlegend": True}
    root = parsed(go.Figure(go.Scatter(x=[0, 1], y=[0, 1], name="a < b & c"), layout=layout))
    assert root.get("fill") == "currentColor" and root.get("role") == "img" and root.get("aria-label") == "what it shows"
    assert "a < b & c" in {"".join(t.itertext()) for t in root.iter(f"{SVG}text")}
    assert "z" in [s.text for s in root.iter(f"{SVG}tspan")]
    colors = {e.get(k) for e in root.iter() for k in ("fill", "stroke")} - {None, "none"}
    assert not colors & {"#000", "#000000", "black", "#fff", "#ffffff", "white"}


@pytest.mark.parametrize(("key", "word"), [("error_x", "H"), ("error_y", "V")])
def test_an_interval_is_a_line_from_end_to_end(key, word):
    error = {"array": [2.0, 1.0], "arrayminus": [1.0, 1.0], "color": "#7f8794"}
    figure = go.Figure(go.Scatter(x=[3, 5], y=[4, 6], mode="markers", **{key: error}))
    figure.update_xaxes(range=[0, 10]).update_yaxes(range=[0, 10])
    bars = [e.get("d") for e in parsed(figure).iter(f"{SVG}path") if e.get("stroke") == "#7f8794"]
    assert len(bars) == 2 and all(word in d for d in bars)
    length = [abs(float(d.split(word)[1]) - float(d[1:].split(word)[0].split(",")[word == "V"])) for d in bars]
    assert length[0] == pytest.approx(1.5 * length[1], rel=0.02)  # 3 units and 2


def test_everything_that_a_chapter_may_draw_is_drawn_within_the_picture():
    steps = {"fill": "tozeroy", "line": {"shape": "hv", "dash": "dot"}, "name": "steps"}
    dots = {"mode": "markers+text", "text": ["a", "b"], "error_y": {"array": [0.1, 0.2]}, "name": "dots"}
    cross = {"mode": "markers", "marker": {"symbol": "x", "size": 9, "color": [1.0]}, "name": "cross"}
    figure = go.Figure()
    figure.add_scatter(x=np.arange(30), y=np.sin(np.arange(30)), **steps)
    figure.add_scatter(x=[3, 9], y=[0.5, 0.2], **dots)
    figure.add_scatter(x=[5], y=[0], **cross)
    figure.add_hline(y=0.5, line_dash="dash")
    figure.add_vrect(x0=5, x1=8, fillcolor="#2166f3", opacity=0.2)
    figure.add_annotation(x=9, y=0.2, text="here", ax=30, ay=20)
    root = parsed(figure)
    height = float(root.get("height"))
    for mark in root.iter(f"{SVG}text"):
        assert 0 <= float(mark.get("x")) <= WIDTH and 0 <= float(mark.get("y")) <= height
    for stroke in root.iter(f"{SVG}path"):
        assert "nan" not in stroke.get("d") and "inf" not in stroke.get("d")


def test_what_cannot_be_drawn_is_reported():
    with pytest.raises(ValueError, match=r"cannot draw histogram; it supports scatter"):
        to_svg(go.Figure(go.Histogram(x=[1, 2, 2])))
