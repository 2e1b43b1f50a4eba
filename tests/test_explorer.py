"""Does an Explorer show what its function computes, on a page and with a kernel?"""

import base64
import itertools
import json
import math
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from docutils import nodes
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ngpt_core as ng
from ngpt_book import COLORS, Explorer, Slider, lazy, show
from ngpt_book.explorer import binding, labels, page, widget
from ngpt_book.explorer.grid import LEVELS, pack
from ngpt_book.sphinx import extension, light, mathematics, plotly_part


def wave(alpha, theta):
    t = np.linspace(0, 6, 40)
    return {
        "t": t,
        "path": torch.tensor(np.stack([np.sin(alpha * t), theta * np.cos(t)], 1)),  # tensors are welcome
        "gap": alpha * theta,
        "unused": np.arange(1000.0),
    }


def draw(a):
    lines = [go.Scatter(x=a["t"], y=a["path"][:, k], name=name) for k, name in enumerate(("sine", "cosine"))]
    return go.Figure(lines, layout={"title": "the gap is {gap:.2f}"})


PARAMS = {"alpha": Slider((0, 2, 9), default=0.5, label="α"), "theta": Slider((10, 90, 5), default=50, label="θ", unit="°")}


@pytest.fixture(scope="module")
def explorer():
    return Explorer(wave, PARAMS, draw, readout=["gap {gap:.1f}", "θ = {theta}"])


def cells(explorer):
    for index in itertools.product(*(range(len(p.values)) for p in explorer.params.values())):
        yield index, {key: p.values[i] for (key, p), i in zip(explorer.params.items(), index)}


# ---- the grid --------------------------------------------------------------------------------------------------------


def test_every_cell_of_the_grid_is_the_function_within_half_a_code(explorer):
    grid = explorer.grid()
    assert set(grid) == {"t", "path", "gap"}  # arrays in neither the figure nor a text stay off the page
    for index, values in cells(explorer):
        truth = {key: np.asarray(value) for key, value in wave(**values).items()}
        for key, decoded in grid.items():
            bound = np.ptp(grid[key]) / LEVELS / 2
            assert decoded[index].shape == truth[key].shape
            assert np.abs(decoded[index] - truth[key]).max() <= bound * (1 + 1e-9)


def test_what_does_not_depend_on_a_slider_is_stored_once_along_it(explorer):
    assert explorer._packed["t"].dims == (1, 1)
    assert explorer._packed["path"].dims == (9, 5)
    assert explorer.nbytes < 9 * 5 * 40 * 3 * 2 * 4 / 3


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(
        np.float64,
        hnp.array_shapes(min_dims=2, max_dims=4, max_side=5),
        elements=st.floats(-1e12, 1e12, allow_subnormal=False) | st.just(float("nan")),
    )
)
def test_packing_keeps_shape_and_gaps_and_loses_less_than_a_step(values):
    packed = pack(values, 1)
    decoded = np.broadcast_to(packed.decode(), values.shape)
    assert np.array_equal(np.isnan(decoded), np.isnan(values))
    finite = values[~np.isnan(values)]
    if finite.size:
        steps = LEVELS - np.isnan(values).any()
        bound = np.ptp(finite) / steps / 2 + 4 * np.finfo(float).eps * np.abs(finite).max()
        assert np.nanmax(np.abs(decoded - values)) <= bound


def test_single_numbers_are_exact_and_logarithmic_axes_keep_small_numbers():
    def falling(k):
        return {"x": np.arange(30), "y": 10.0 ** (-k * np.arange(30)), "last": 10.0 ** (-29 * k) / 3}

    figure = go.Figure(go.Scatter(), layout={"yaxis": {"type": "log"}})
    e = Explorer(falling, {"k": [0.1, 0.5, 1.0]}, figure, bind={"0.x": "x", "0.y": "y"}, readout="{last:.2e}")
    for k in (0.1, 0.5, 1.0):
        assert e.at(k=k)["last"] == falling(k)["last"]
        np.testing.assert_allclose(e.at(k=k)["y"], falling(k)["y"], rtol=1e-7)


def test_a_grid_that_would_be_too_large_shows_its_arithmetic():
    def heavy(a, b):
        return {"z": np.full((100, 100), float(a * b))}

    with pytest.raises(ValueError, match=r"z: 10 × 10 × 100 × 100 values × 2 bytes × 4/3 = 2667 kB"):
        Explorer(heavy, {"a": (0, 1, 10), "b": (0, 1, 10)}, lambda v: go.Figure(go.Heatmap(z=v["z"])))
    with pytest.raises(ValueError, match=r"200 × 200 = 40000 cells"):
        Explorer(heavy, {"a": (0, 1, 200), "b": (0, 1, 200)}, lambda v: go.Figure(go.Heatmap(z=v["z"])))


# ---- what moves in the figure ----------------------------------------------------------------------------------------


def test_a_figure_may_pick_slice_and_transpose():
    def fn(k):
        return {"m": k * np.arange(12.0).reshape(3, 4), "s": 2.0 * k}

    def figure(a):
        heat = go.Heatmap(z=a["m"].T, zmin=0, zmax=40)
        row = go.Scatter(x=a["m"][1], y=a["m"][:, ::2][2], marker={"color": a["m"][0].tolist()})
        return go.Figure([heat, row], layout={"shapes": [{"type": "line", "x0": a["s"], "x1": a["s"], "y0": 0, "y1": 1}]})

    e = Explorer(fn, {"k": [1, 2, 3]}, figure)
    got, want = e.figure(k=3), figure(fn(3))
    assert got.data[0].z.shape == (4, 3)
    for mine, its in ((got.data[0].z, want.data[0].z), (got.data[1].x, want.data[1].x), (got.data[1].y, want.data[1].y)):
        np.testing.assert_array_equal(mine, its)
    assert got.layout.shapes[0].x0 == 6.0 and list(got.data[1].marker.color) == [0, 3, 6, 9]


@pytest.mark.parametrize(
    "figure",
    [
        lambda a: go.Figure(go.Scatter(x=a["t"], y=2 * a["path"][:, 0], name="twice")),
        lambda a: go.Figure(go.Scatter(x=a["t"], y=a["t"], name=f"{a['gap']:.2f}")),
        lambda a: go.Figure(go.Scatter(x=a["t"], y=np.append(a["t"], a["gap"]), name="mixed")),
        lambda a: go.Figure([go.Scatter(x=a["t"], y=a["t"])] * (1 + (a["gap"] > 50))),
        lambda a: go.Figure([go.Scatter(x=a["t"], y=a["t"])] * (2 - (a["gap"] > 50))),
        lambda a: go.Figure(go.Scatter(x=a["t"], y=a["t"])).update_yaxes(range=[0, abs(a["gap"]) + 1]),
    ],
    ids=["computes", "f-string", "joins", "another trace", "a trace less", "a range"],
)
def test_a_figure_that_computes_is_an_error(figure):
    with pytest.raises(ValueError, match="compute it in the function"):
        Explorer(wave, PARAMS, figure)


def test_a_ready_figure_is_bound_by_trace_and_attribute():
    figure = go.Figure([go.Scatter(name="sine"), go.Scatter(name="still", x=[0, 1], y=[0, 1])])
    e = Explorer(lambda a: {"t": np.arange(5), "y": a * np.arange(5)}, {"a": [1, 2]}, figure, bind={"sine.x": "t", "0.y": "y"})
    np.testing.assert_array_equal(e.figure(a=2).data[0].y, 2.0 * np.arange(5))
    named = Explorer(lambda a: {"sine.y": a * np.arange(5)}, {"a": [1, 2]}, figure)  # keys as addresses
    np.testing.assert_array_equal(named.figure(a=2).data[0].y, 2.0 * np.arange(5))
    with pytest.raises(ValueError, match=r"no trace 'cosine'.*'sine\.y'"):
        Explorer(lambda a: {"y": [a, a]}, {"a": [1, 2]}, figure, bind={"cosine.y": "y"})
    with pytest.raises(ValueError, match=r"needs the array 'z'; the function returns y"):
        Explorer(lambda a: {"y": [a, a]}, {"a": [1, 2]}, figure, bind={"sine.y": "z"})


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda a: {"y": [1.0, float("inf")]}, "infinite"),
        (lambda a: {"y": ["a", "b"]}, "not numeric"),
        (lambda a: [1, 2], "must return a dict of arrays"),
        (lambda a: {"y": np.zeros(a)}, r"shape \(2,\) at the defaults and \(1,\) at a=1"),
        (lambda a: {"y": [1.0, 1j * a]}, "complex numbers"),
        (lambda a: {"y": ["1", "2"]}, "strings cannot be drawn"),
        (lambda a: {"y": [1 / (a - 3), 1]}, r"failed at a=3: ZeroDivisionError"),
        (lambda b: {"y": [1, 2]}, r"failed at a=2: TypeError"),
        (lambda a: {"y": [a, a]} if a < 3 else {"x": [a]}, r"'y' has shape \(2,\) at the defaults and none at a=3"),
    ],
)
def test_a_function_that_cannot_be_drawn_is_an_error_that_says_why(fn, words):
    with pytest.raises(ValueError, match=words):
        Explorer(fn, {"a": [1, 2, 3]}, go.Figure(go.Scatter()), bind={"0.y": "y"})


def test_texts_are_filled_from_numbers_and_sliders(explorer):
    assert explorer.figure(alpha=1.0, theta=90).layout.title.text == "the gap is 90.00"
    assert "gap 25.0 · θ = 50°" in explorer.to_html()
    with pytest.raises(ValueError, match="must be one number; the function returns 40"):
        Explorer(wave, PARAMS, draw, readout="{t:.1f}")
    with pytest.raises(ValueError, match="does not support the format"):
        Explorer(wave, PARAMS, draw, readout="{gap:>10}")


# ---- sliders ---------------------------------------------------------------------------------------------------------


def test_sliders_spread_their_values_and_write_them():
    assert Slider((0, 0.3, 4)).values == (0.0, 0.1, 0.2, 0.3)  # not 0.30000000000000004
    assert Slider((1, 1000, 4), log=True).values == (1, 10, 100, 1000)
    assert Slider((0, 1, 3), unit=" rad", format=".2f").texts == ("0.00 rad", "0.50 rad", "1.00 rad")
    assert Slider([0, 0.5, 1]).texts == ("0", "0.5", "1")
    assert len(set(Slider((0.999, 1.0, 5)).texts)) == 5  # enough digits to tell them apart
    assert Slider(["GPT", "nGPT"], default="nGPT").index == 1
    assert Slider(np.array([1.0, 2.0])).values == (1.0, 2.0)


def test_a_slider_that_changes_nothing_is_an_error():
    with pytest.raises(ValueError, match="slider 'idle' changes nothing"):
        Explorer(lambda a, idle: {"y": [a, a]}, {"a": [1, 2], "idle": [1, 2]}, go.Figure(go.Scatter()))


@pytest.mark.parametrize(
    ("values", "more", "words"),
    [
        ((0, 1, 11), {"default": 0.25}, "default=0.25 is not one of"),
        ((0, 1, 11), {"log": True}, "needs positive ends"),
        ((0, 1), {}, "start, stop, number of values"),
        ([3], {}, "at least two values, all different"),
        ([3, 3], {}, "at least two values, all different"),
        ([1, 2, 3], {"log": True}, "got a list"),
        ("abc", {}, "or a list of values; got 'abc'"),
        (5, {}, "or a list of values; got 5"),
        ([1, float("inf")], {}, "a finite number or a string; got inf"),
        ([None, 1], {}, "a finite number or a string; got None"),
        (("a", "b", 3), {}, "start, stop, number of values"),
        ([0.001, 0.002], {"format": ".1f"}, "look the same"),
        ([1, 2], {"default": [1]}, "is not one of"),
    ],
)
def test_an_invalid_slider_is_an_error_that_says_why(values, more, words):
    with pytest.raises(ValueError, match=words):
        Slider(values, **more)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"params": [1, 2]}, "params must be a dict"),
        ({"figure": None}, "figure must be a function or a plotly Figure"),
        ({"figure": lambda v: None}, "must return a plotly Figure; it returned NoneType"),
        ({"bind": {"0.y": "y"}}, "bind is only for a ready figure"),
        ({"readout": None}, "readout must be text"),
        ({"alt": None}, "alt must be text"),
        ({"readout": "gap {gpa:.2f}"}, r"names \{gpa:\.2f\}; it may name alpha, gap, path, t, theta, unused"),
        ({"readout": "gap {gap!r}"}, r"names \{gap!r\}"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_an_argument_of_the_wrong_type_is_an_error(change, words):
    arguments = {"fn": wave, "params": PARAMS, "figure": draw, **change}
    with pytest.raises(ValueError, match=words):
        Explorer(arguments.pop("fn"), arguments.pop("params"), arguments.pop("figure"), **arguments)


def test_an_unknown_slider_or_value_is_an_error(explorer):
    with pytest.raises(ValueError, match="There is no slider 'alfa'"):
        explorer.at(alfa=1)
    name = next(iter(explorer.params))
    for call in (explorer.at, explorer.figure):
        with pytest.raises(ValueError, match="is not one of the slider's values"):
            call(**{name: 0.1234567})


def test_numbers_that_differ_only_by_rounding_can_be_drawn():
    rows = ng.sphere.random(40, 16).norm(dim=-1).double().numpy()
    e = Explorer(lambda a: {"y": rows + a * 1e-15, "top": a}, {"a": [0.0, 1.0]}, lambda v: go.Figure(go.Scatter(y=v["y"])),
                 readout="{top}")  # fmt: skip
    np.testing.assert_allclose(e.figure(a=1.0).data[0].y, rows, rtol=1e-12)


def test_a_logarithmic_axis_keeps_numbers_beyond_float32():
    y = np.array([1e-60, 1.0, 1e200])
    figure = go.Figure(go.Scatter()).update_yaxes(type="log")
    e = Explorer(lambda a: {"y": a * y}, {"a": [1.0, 2.0]}, figure, bind={"0.y": "y"})
    np.testing.assert_allclose(e.at(a=2.0)["y"], 2 * y)


def test_short_still_arrays_stay_apart():
    text = page.Picture(go.Figure(go.Scatter(x=[1000001, 1000002, 1000003], y=[1 / 3, 2 / 3, 1.0])), "three").to_html()
    spec = json.loads(re.search(r'class="ngx-spec">(.*?)</script>', text)[1])
    assert spec["data"][0]["x"] == [1000001, 1000002, 1000003] and spec["data"][0]["y"] == [0.333333, 0.666667, 1.0]


# ---- the page --------------------------------------------------------------------------------------------------------


def test_texts_of_sliders_are_texts_and_no_markup_and_each_showing_has_its_own_id(monkeypatch):
    bold = "<b>1</b>"
    e = Explorer(lambda kind: {"y": [len(kind), 1.0], "gap": math.nan}, {"kind": ["a", bold]}, go.Figure(go.Scatter()),
                 readout="it is {kind}, {gap:d}", bind={"0.y": "y"})  # fmt: skip
    text = e.to_html()
    caption = re.search(r'class="ngx-setting">(.*?)</p>', text)[1]
    assert "&lt;b&gt;1&lt;/b&gt;" in caption and bold not in caption and "–" in caption  # the default is the second
    assert re.search(r'class="ngx" id="([\w-]+)"', text)[1] != re.search(r'class="ngx" id="([\w-]+)"', e.to_html())[1]


def unpack(array, index):
    """One cell of one array, read from the page's JSON as explorer.js does, written from the description in grid.py."""
    raw = np.frombuffer(base64.b64decode(array["data"]), {"u2": "<u2", "f4": "<f4", "f8": "<f8"}[array["kind"]])
    cell = raw.reshape(*array["dims"], array["size"])[tuple(i if n > 1 else 0 for i, n in zip(index, array["dims"]))]
    values = array["lo"] + cell.astype(float) * array["step"] if array["kind"] == "u2" else cell.astype(float)
    return np.where(cell == 65535, np.nan, values) if array["nan"] else values


def test_the_page_carries_the_grid_and_says_where_each_number_goes(explorer):
    text = explorer.to_html()
    spec = json.loads(re.search(r'class="ngx-spec">(.*?)</script>', text)[1])
    grid = explorer.grid()
    for index, _ in cells(explorer):
        for key, array in spec["arrays"].items():
            if key.startswith("label "):  # where a curve's name stands: tests/test_labels.py
                continue
            np.testing.assert_array_equal(unpack(array, index), grid[key][index].reshape(-1))
    second = next(b for b in spec["bind"] if b["path"] == ["data", 1, "y"])
    assert (second["key"], second["start"], second["strides"], second["shape"]) == ("path", 1, [2], [40])


def test_the_page_has_labeled_range_inputs_a_still_picture_and_no_plotly(explorer):
    text = explorer.to_html()
    assert len(re.findall(r'<label for="([\w-]+)">.*?<input type="range" id="\1"', text)) == 2
    assert 'aria-valuetext="50°"' in text and ">α</span>" in text
    assert text.count("<svg") == 1 and "application/vnd.jupyter.widget" not in text
    assert len(text) < explorer.nbytes + 40_000


def test_ids_are_the_same_in_every_run_and_different_within_one(monkeypatch):
    def two():
        monkeypatch.setattr(page, "_seen", type(page._seen)())
        return [Explorer(wave, PARAMS, draw).to_html() for _ in range(2)]

    first, second = two(), two()
    assert first == second
    assert re.search(r'id="(ngx-\w+-1)"', first[0]) and re.search(r'id="(ngx-\w+-2)"', first[1])


def test_angle_brackets_cannot_end_the_script():
    figure = go.Figure(go.Scatter(name="</script><b>"))
    text = Explorer(lambda a: {"y": [a, a]}, {"a": [1, 2]}, figure).to_html()
    assert text.count("</script>") == 2  # the specification's and the bundle's own


def test_show_requires_a_text_description():
    with pytest.raises(ValueError, match="screen readers"):
        show(go.Figure(), alt=" ")
    html = page.Picture(go.Figure(go.Scatter(y=np.arange(100.0))), "A line that rises").to_html()
    assert 'role="img" aria-label="A line that rises"' in html and 'data-kind="picture"' in html


# ---- JupyterLab ------------------------------------------------------------------------------------------------------


def test_the_widget_is_live_and_only_where_it_works(explorer, monkeypatch):
    box = explorer.widget()
    figure, alpha, theta, readout, reset = box.children
    alpha.value = 1.2345  # not one of the page's values: the function itself is called
    np.testing.assert_array_equal(figure.data[0].y, np.asarray(wave(1.2345, 50)["path"][:, 0]))
    alpha.value = 2.0
    np.testing.assert_array_equal(figure.data[0].y, np.asarray(wave(2.0, 50)["path"][:, 0]))
    assert figure.layout.title.text == "the gap is 100.00" and "gap 100.0" in readout.value
    theta.value = 90
    reset.click()
    assert (alpha.value, theta.value) == (0.5, 50) and "gap 25.0" in readout.value

    view = "application/vnd.jupyter.widget-view+json"
    for name in ("JPY_SESSION_NAME", "NGPT_BOOK", "VSCODE_PID"):
        monkeypatch.delenv(name, raising=False)
    assert view not in explorer._repr_mimebundle_()  # nbclient, nbval, a plain kernel
    monkeypatch.setenv("JPY_SESSION_NAME", "/book/01.ipynb")
    assert widget.has_widgets() and {"text/html", "text/plain", view} == set(explorer._repr_mimebundle_())
    monkeypatch.setenv("NGPT_BOOK", "1")  # while the book is built
    assert view not in explorer._repr_mimebundle_()
    monkeypatch.delenv("NGPT_BOOK")
    monkeypatch.setenv("JPY_SESSION_NAME", "/book/01.ipynb-jvsc-123")  # VS Code
    assert not widget.has_widgets()


# ---- colors ---------------------------------------------------------------------------------------------------------

_LINEAR = {  # what the three common deficiencies see (Machado, Oliveira, Fernandes 2009, severity 1), on linear RGB
    "all": np.eye(3),
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
_LMS = np.array(  # OKLab's two matrices
    [[0.41222147, 0.53633254, 0.05144599], [0.21190350, 0.68069955, 0.10739696], [0.08830246, 0.28171884, 0.62997870]]
)
_LAB = np.array(
    [[0.21045426, 0.79361779, -0.00407205], [1.97799850, -2.42859221, 0.45059371], [0.02590404, 0.78277177, -0.80867577]]
)


def linear(color):
    c = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(a, b):
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) + 0.05 for c in (a, b))
    return high / low


@pytest.mark.parametrize("page_color", ["#ffffff", "#121212"], ids=["light", "dark"])
def test_every_color_stands_out_from_the_page(page_color):
    assert min(contrast(color, page_color) for color in COLORS.values()) >= 3.0  # WCAG 1.4.11, graphical objects


@pytest.mark.parametrize("eye", _LINEAR)
def test_colors_remain_distinguishable_with_color_vision_deficiencies(eye):
    light = [np.clip(np.array(_LINEAR[eye]) @ linear(color), 0, 1) for color in COLORS.values()]
    seen = [_LAB @ np.cbrt(_LMS @ c) for c in light]
    nearest = min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2))
    assert nearest >= 0.09  # in OKLab, where 0.02 is a just noticeable difference


# ---- the Sphinx extension --------------------------------------------------------------------------------------------


def test_the_execution_cache_changes_with_the_package(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(extension, "PACKAGES", (tmp_path,))
    before = extension.package_hash()
    assert before == extension.package_hash()
    (tmp_path / "a.py").write_text("x = 2\n")
    assert extension.package_hash() != before


def test_the_bundle_of_an_output_is_found_whole(explorer):
    text = explorer.to_html()
    assert "cdn.plot.ly" in text  # Colab and VS Code need it
    bare = lazy.bundles("ngx").sub("", text)
    assert "cdn" not in re.sub(r'"data":"[^"]*"', "", bare) and "Plotly" not in bare and bare.endswith("</script></div>")
    assert "cdn.plot.ly" not in page.PART.script(book=True)


def test_plotly_is_cut_to_the_traces_that_are_asked_for():
    whole = plotly_part.SOURCE.read_text(encoding="utf-8")
    kinds = re.compile(r'moduleType:"trace",name:"(\w+)"')
    assert len(set(kinds.findall(whole))) > 40
    part = plotly_part.part()
    assert set(kinds.findall(part)) == set(plotly_part.TRACES) and len(part) < len(whole) / 4
    assert part.startswith(whole[:500]) and part.endswith(whole[-200:])
    with pytest.raises(ValueError, match="no trace candles"):
        plotly_part.cut(whole, ("scatter", "candles"))
    with pytest.raises(ValueError, match="wrapper of its modules"):
        plotly_part.cut("var Plotly = {};", ("scatter",))


def test_every_figure_of_the_book_finds_its_traces_in_the_bundle():
    drawn = set()
    for notebook in (extension.PACKAGES[1].parent).glob("*.ipynb"):
        for spec in re.findall(r'class=\\"ngx-spec\\">(.*?)</script>', notebook.read_text(encoding="utf-8")):
            traces = json.loads(json.loads(f'"{spec}"'))["data"]
            drawn |= {trace["type"] for trace in traces}
    assert drawn and drawn <= {*plotly_part.TRACES, *labels.SOLIDS}  # solids are drawn with scatter


@pytest.mark.skipif(not find_spec("py_mini_racer"), reason="formulas are rendered with mini-racer, which is not installed")
def test_a_formula_is_html_with_mathml_beside_it():
    drawn = mathematics.render(r"\alpha_A \ge \tfrac12")
    assert drawn.startswith("<mjx-container") and "mjx-c1D6FC" in drawn and "<mi>&#x3B1;</mi>" in drawn
    with pytest.raises(ValueError, match="MathJax does not understand"):
        mathematics.render(r"\frac{1")
    style = mathematics.style()
    short = light.characters(style, {"1D6FC"})
    assert "mjx-cA0::before" in light.characters(style, {"A0"}) and '"}"' not in light.characters(style, {"A0"})
    assert re.sub(r'"(?:\\.|[^"\\])*"', "", short).count("{") == re.sub(r'"(?:\\.|[^"\\])*"', "", short).count("}")
    assert ".mjx-c1D6FC" in short and len(short) < len(style) / 5 and short.count("@font-face") == style.count("@font-face")
    assert "mjx-container" in mathematics.in_outputs(r'<b><span class="math">\(x &lt; 1\)</span></b>')
    assert "mjx-c2DC" in mathematics.render(r"\tilde b_q")  # an accent above the letter, not an operator across it


@pytest.mark.skipif(not find_spec("py_mini_racer"), reason="formulas are rendered with mini-racer, which is not installed")
def test_a_process_that_rendered_a_formula_ends():
    program = "from ngpt_book.sphinx import mathematics; print(mathematics.key('d'), flush=True)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "d\n"


def test_icons_are_cut_out_of_the_installed_font_awesome():
    style = light.icons({"bars", "no-such-icon"})
    assert ".fa-bars { --icon: url(" in style and "no-such-icon" not in style and "--pst-icon-download" in style
    assert len(style) < 40_000
    assert ".note::after { content: url(" in light.icons(set(), ['.note::after {color: red; content: "\\f303"; top: 0}'])


def test_figures_are_numbered_by_chapter():
    app = SimpleNamespace(env=SimpleNamespace(toc_secnumbers={"05_gate": {"": (5,)}}))
    block = '<div><span class="ngpt-number"></span> words</div>'
    for docname, wanted in (("05_gate", ["Figure 5.1.", "Figure 5.2."]), ("intro", ["Figure 1.", "Figure 2."])):
        tree = nodes.container("", nodes.raw("", block, format="html"), nodes.raw("", block, format="html"))
        extension.number_figures(app, tree, docname)
        assert re.findall(r"Figure [\d.]+", "".join(n.astext() for n in tree.findall(nodes.raw))) == wanted


def test_colab_links_are_made_from_the_repository_address():
    assert extension.colab_url("https://github.com/o/n", "main", "book/1.ipynb").endswith("/github/o/n/blob/main/book/1.ipynb")
    assert "example.invalid/ngpt-core" in extension.colab_url("https://example.invalid/ngpt-core", "main", "book/1.ipynb")


def test_punctuation_stays_with_its_formula():
    formula = nodes.math("", "x")
    paragraph = nodes.paragraph(
        "", "", nodes.Text("a scale ("), formula, nodes.Text("), and "), nodes.math("", "y"), nodes.Text(" too")
    )
    extension.keep_together(None, paragraph, "page")
    assert [child.astext() for child in paragraph] == ["a scale ", "(x),", " and ", "y", " too"]
    assert paragraph[1]["classes"] == ["together"] and paragraph[1][1] is formula
    x, y = nodes.math("", "x"), nodes.math("", "y")
    same = [nodes.emphasis("", "a"), nodes.Text(", "), x, nodes.Text(", "), y, nodes.Text(".")]
    listed = nodes.paragraph("", "", *same)  # the comma after x is equal to the one before it
    extension.keep_together(None, listed, "page")
    assert [child.astext() for child in listed] == ["a", ", ", "x,", " ", "y.", ""]
    name, link = nodes.literal("", "", nodes.Text("f")), nodes.reference("", "", nodes.literal("", "", nodes.Text("g")))
    names = nodes.paragraph("", "", nodes.Text("see ("), name, nodes.Text(", "), link, nodes.Text(")."))  # names, linked or not
    extension.keep_together(None, names, "page")
    assert [child.astext() for child in names] == ["see ", "(f,", " ", "g).", ""] and link.parent["classes"] == ["together"]


def test_a_printed_sentence_wraps_and_a_table_does_not():
    texts = ("one sentence\n", "a  table\n1  2\n")
    sentence, table = (nodes.literal_block(text, text, classes=["output", "stream"]) for text in texts)
    source = nodes.literal_block("x = 1", "x = 1")
    extension.wrap_sentences(None, nodes.container("", sentence, table, source), "page")
    assert ["sentence" in block["classes"] for block in (sentence, table, source)] == [True, False, False]


def test_templates_leave_other_braces_alone():
    assert binding.parse_template("%{x} and {other} and {{", {"x"}) is None
    parts = binding.parse_template("{x:.1e}, {n:,d}", {"x", "n"})
    assert binding.fill(parts, {"x": 12345.0, "n": 12345.0}) == "1.2e+04, 12,345"


def test_long_constant_arrays_on_a_logarithmic_axis_keep_their_digits():
    x = np.geomspace(1e-16, 1e-2, 200)
    figure = go.Figure(go.Scatter(x=x, y=np.linspace(0, 1, 200))).update_xaxes(type="log")
    packed = next(a for a in page.figure_spec(binding.tree_of(figure))["arrays"].values() if a["kind"] == "f4")
    decoded = np.frombuffer(base64.b64decode(packed["data"]), "<f4")
    assert np.abs(decoded / x - 1).max() < 1e-6


def test_the_number_of_a_page_under_a_chapter_is_taken_back_before_the_next_build():
    """Sphinx's own numbers run again when a page changed, and fail on one that they did not give."""
    title = nodes.reference("", "", anchorname="")
    env = SimpleNamespace(
        titles={"09_does_it_work": nodes.title()},
        tocs={"09_does_it_work": nodes.bullet_list("", nodes.list_item("", title))},
        toc_secnumbers={},
    )
    app = SimpleNamespace(srcdir=Path(__file__).parent.parent / "book")
    assert extension.number_pages(app, env) == ["09_does_it_work"] and title["secnumber"] == (9, 1)
    assert extension.forget_numbers(app, env) == []
    assert "secnumber" not in title and "secnumber" not in env.titles["09_does_it_work"]
