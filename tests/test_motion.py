"""Is what the training animations show what was stored, and does what was stored say what the chapters claim?

tests/test_browser_motion.py plays them in a real browser.
"""

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("plotly", reason='ngpt_book needs plotly: pip install "ngpt-core[notebook]"')
from ngpt_book.data import FOLDER, make_motion, stored
from ngpt_book.figures import lgp, motion
from ngpt_book.motion import Animation, Axis, Bars, Curve, Panel, Ring, Shape, Words, animation, codec, still

NAMES = ("race", "rows", "growth", "spread", "experts", "writing")


@pytest.fixture(scope="module", params=NAMES)
def made(request) -> Animation:
    return getattr(motion, request.param)()


# ---- arrays as text --------------------------------------------------------------------------------------------------
def test_sixteen_bits_are_exact_to_half_a_step():
    rng = np.random.default_rng(0)
    for shape in ((7,), (5, 3), (2, 3, 4)):
        x = rng.normal(size=shape) * 10.0 ** rng.integers(-6, 6)
        found = codec.decode(codec.encode(x))
        assert found.shape == shape and np.abs(found - x).max() <= np.ptp(x) / 131070 * (1 + 1e-9)
    assert np.array_equal(codec.decode(codec.encode(np.full((2, 2), 3.5))), np.full((2, 2), 3.5))
    assert codec.decode(codec.encode([-1.0, 0.25, 2.0], 0.0, 1.0)).round(4).tolist() == [0.0, 0.25, 1.0]
    for wrong in ([], [np.nan], [np.inf, 1.0]):
        with pytest.raises(ValueError, match="finite numbers"):
            codec.encode(wrong)


# ---- the stored run --------------------------------------------------------------------------------------------------
def test_the_stored_file_is_the_one_that_its_script_describes():
    found, size = stored("motion"), (FOLDER / "motion.json").stat().st_size
    assert size < 100_000
    assert found["at"] == {name: list(steps) for name, steps in make_motion.AT.items()}
    about = found["about"]
    assert about["steps"] == make_motion.STEPS and about["seed"] == make_motion.SEED
    assert {k: tuple(v) for k, v in about["recipe"].items()} == make_motion.RECIPE
    assert about["matrix"] == make_motion.QUERIES and about["windows"] == make_motion.WINDOWS
    assert about["prompt"] == make_motion.PROMPT and about["bytes"] == make_motion.SEQUENCES * make_motion.LENGTH
    shapes = {name: found[name]["shape"] for name in ("load", "start", "end", "turn", "cap")}
    frames = {name: len(steps) for name, steps in found["at"].items()}
    assert shapes["load"] == [frames["load"], 3, 8] and shapes["start"] == shapes["end"] == [frames["start"], 64]
    assert shapes["turn"] == shapes["cap"] == [make_motion.STEPS]
    assert found["scales"]["share"]["shape"] == [frames["scales"], len(found["scales"]["edges"]) - 1]
    for which in ("gpt", "ngpt"):
        assert len(found[which]["loss"]) == frames["loss"] and len(found[which]["sample"]) == frames["sample"]
        assert all(text.startswith(about["prompt"]) for text in found[which]["sample"])


def test_the_runs_repeat_those_of_the_evidence():
    """Other kernels, other roundings, and so a slightly different loss; the seeds of chapter 9 differ by 0.01 to 0.02."""
    for which in ("gpt", "ngpt"):
        found = stored("motion")[which]
        assert abs(found["last"] - found["evidence"]) < 0.01
        assert abs(found["last"] - found["loss"][-1]) < 0.02  # over other windows


def test_the_stored_run_obeys_the_geometry():
    r = motion.run()
    assert (r["turn"] <= r["cap"] * (1 + 1e-3) + 1e-4).all()  # fp32 rows, sixteen bits
    assert np.allclose(r["cap"], np.minimum(1, np.arange(1, 2001) / 200), atol=1e-3)
    reached = np.concatenate([[0.0], r["cap"].cumsum()])[r["at"]["start"]]
    assert (r["start"] <= reached[:, None] + 0.01).all() and (r["start"] >= 0).all()  # a row is never beyond the ring
    assert np.allclose(r["start"][-1], r["end"][0], atol=0.01) and r["end"][-1].max() < 0.01
    triangle = np.abs(r["start"] - r["end"]) - r["start"][-1]
    assert triangle.max() < 0.01
    assert np.allclose(r["load"].mean(2), 1, atol=1e-3) and np.allclose(r["share"].sum(1), 1, atol=1e-3)


def test_the_map_keeps_both_distances():
    r = motion.run()
    xs, ys = motion._paths(r["start"], r["end"])
    assert np.allclose(np.hypot(xs, ys), r["start"], atol=1e-9)
    ends = np.radians(np.stack([xs[-1], ys[-1]]))
    for i in (3, 20, 60):  # on the sphere, the angle between a state and the end is the stored one
        a, c = np.radians(r["start"][i]), np.radians(r["start"][-1])
        bearing = np.arctan2(ys[i], xs[i]) - np.arctan2(*ends[::-1])
        angle = np.degrees(np.arccos((np.cos(a) * np.cos(c) + np.sin(a) * np.sin(c) * np.cos(bearing)).clip(-1, 1)))
        assert np.abs(angle - r["end"][i]).max() < 0.02


# ---- the pictures ----------------------------------------------------------------------------------------------------
def test_every_animation_is_whole_small_and_says_what_it_shows(made):
    html, data = made.to_html(bring=False), made.data()
    assert len(html) < 100_000
    assert 20 <= len(data["labels"]) == len(data["words"]) <= 120 and len(made.alt) > 40
    assert all(0 < len(w) < 170 for w in made.words)
    again = json.loads(re.search(r'class="ngm-data">(.*?)</script>', html)[1])
    assert again == json.loads(json.dumps(data))
    assert html.count('class="ngm-panel"') == 2 * len(made.panels)
    for layout in still.LAYOUTS:
        root = ElementTree.fromstring(made.to_svg(layout.name))
        assert root.get("role") == "img" and root.get("aria-label") == made.alt
        assert made.to_svg(layout.name) in html
        fonts = [float(e.get("font-size")) for e in root.iter() if e.get("font-size")]
        assert min(fonts) >= 10.5  # readable where the picture is shown at its own size, as on a phone
        for panel in root.iter("{http://www.w3.org/2000/svg}g"):
            if panel.get("class") == "ngm-panel":
                left, _, width, _ = map(float, panel.get("data-box").split())
                assert left >= 0 and left + width <= layout.width


def test_a_frame_of_a_curve_lies_where_its_data_lie():
    x, y = Axis(0, 10, "x", (0, 5, 10)), Axis(1, 100, "y", (1, 10, 100), log=True)
    curve = Curve([0, 5, 10], [1, 10, 100], "red", [1, 2, 2.5], "it")
    panel, box = Panel(x, y, [curve]), still.Box(100, 50, 200, 80)
    at = [still.mark(panel.specs[0], box, frame) for frame in range(3)]
    assert 'points="100.0,130.0"' in at[0]
    assert 'points="100.0,130.0 200.0,90.0"' in at[1]
    assert 'points="100.0,130.0 200.0,90.0 250.0,70.0"' in at[2]  # half way to the last point
    assert 'points="100.0,130.0 200.0,90.0 225.0,80.0"' in still.mark(panel.specs[0], box, 1.5)
    assert ">it</text>" in at[2] and 'cx="250.0" cy="70.0"' in at[2]
    hidden = Panel(x, y, [Curve([0, 5], [1, 10], "red", [0, 2])]).specs[0]
    assert 'visibility="hidden"' in still.mark(hidden, box, 0) and "hidden" not in still.mark(hidden, box, 1)


def test_other_marks_lie_where_their_data_lie():
    axis, box = Axis(0, 10), still.Box(0, 0, 100, 100)
    marks = [Bars([5], [[0], [10]], "red", 2), Ring(5, 5, [1, 3], "red"), Shape([[0, 1], [2, 3]], [[0, 0], [0, 10]], "red")]
    bars, ring, shape = (mark.spec(axis, axis) for mark in marks)
    assert '<rect x="40.0" y="50.0" width="20.0" height="50.0"/>' in still.mark(bars, box, 0.5)
    assert 'cx="50.0" cy="50.0" r="20.0"' in still.mark(ring, box, 0.5)
    assert 'points="10.0,100.0 20.0,50.0"' in still.mark(shape, box, 0.5)
    words = Words(0, 10, [["a < b"], ["c", "d"]]).spec(axis, axis)
    assert "a &lt; b" in still.mark(words, box, 0.9) and ">d</text>" in still.mark(words, box, 1)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"labels": ["one"], "words": ["one"]}, "two frames or more"),
        ({"words": ["one"]}, "2 labels, 1 words"),
        ({"alt": " "}, "describe the picture"),
        ({"panels": [Panel(Axis(0, 1), Axis(0, 1), [Bars([0], [[0]] * 3, "red", 1)])]}, "y of a mark of kind 'bars' has 3"),
    ],
)
def test_mistakes_are_explained(change, what):
    right = dict(name="n", title="t", labels=["a", "b"], panels=[], words=["a", "b"], alt="A picture.")
    Animation(**right)
    with pytest.raises(ValueError, match=re.escape(what)):
        Animation(**{**right, **change})


def test_outside_the_book_the_output_brings_its_script(made, monkeypatch):
    monkeypatch.delenv("NGPT_BOOK", raising=False)
    html = made._repr_mimebundle_()["text/html"]
    assert animation.BUNDLE.sub("", html) == made.to_html(bring=False) and animation.BUNDLE.findall(html)
    assert html.endswith("</script>") and "function gif(" in html
    monkeypatch.setenv("NGPT_BOOK", "1")
    assert made._repr_mimebundle_()["text/html"] == made.to_html(bring=False)
    assert not re.search(r"https?://(?!www\.w3\.org)", html)  # nothing from another host


def test_s_z_of_the_animation_is_that_of_the_chapter():
    run = lgp.small_runs()["log decay"]
    said = re.findall(r"fit so far is ([\d.]+) ln t − ([\d.]+):", motion.growth().words[-1])
    a, b, _ = lgp.log_fit(run["step"], run["seen"], motion.FIT_START)
    assert said == [(f"{b:.1f}", f"{-a:.1f}")]
