"""Do the figures of chapters 9.1 and 13 show what they say?"""

import cmath
import math

import numpy as np
import pytest

pytest.importorskip("plotly", reason='the figures need plotly: pip install "ngpt-core[notebook]"')
from ngpt_book.figures import evidence, left_open


def test_a_comparison_of_the_second_round_is_on_the_map(monkeypatch):
    new = {
        "model": "hybrid-0.5M", "group": "context-512.ngpt", "context": 512, "active": 485_000, "tokens": 4_700_000,
        "tokens_per_parameter": 9.7, "seeds": 3, "difference": -0.04, "ratio": 0.7, "low": None, "high": 0.8, "bound": "",
        "gpt": 1.31, "ngpt": 1.27, "places": {"gpt": [[16, 1.7], [32, 1.4]], "ngpt": [[16, 1.6], [32, 1.1]]},
    }  # fmt: skip
    unknown = {**new, "group": "context-2048.ngpt", "context": 2048, "ratio": None, "bound": "< 0.50"}
    monkeypatch.setitem(evidence.DATA, "second", {"finished": 28, "planned": 269, "comparisons": [new, unknown]})
    found = evidence.mapped("context", "hybrid", "second round")
    assert found["n"] == 2 and found["least"] == 0.5
    assert list(found["x0.5M"][:2]) == [512, 2048] and np.isnan(found["x0.5M"][2:]).all()
    assert list(found["ends0.5M"][:2]) == [0.7, 0.8] and np.isnan(found["below0.5M"][0]) and found["below0.5M"][1] < 0.5
    assert len(evidence.map_figure(found).data) == 3 * len(evidence.SIZES)
    _, first, second = evidence.second_table()
    assert first.endswith("512  1.310 1.270 0.70 (...-0.80)") and "< 0.50" in second
    monkeypatch.setitem(evidence.LONGER, "512", new)
    v = evidence.places("512")
    assert list(v["x"][:2]) == [8, math.sqrt(16 * 32)] and v["first"] == pytest.approx(0.1) and v["lead"] == pytest.approx(0.3)


def test_every_ratio_of_the_first_round_is_on_the_map_once():
    shown = [evidence.mapped("parameters", kind, numbers)["n"] for kind in ("hybrid", "dense") for numbers in "AB"]
    assert sum(shown) == sum(f["ratio"] is not None for f in evidence.COMPARISONS.values())


@pytest.mark.parametrize("angle, beta", [(1.0, 0.975), (4.0, 0.9), (0.1, 0.6)])
def test_a_turning_moment_has_its_closed_form(angle, beta):
    v = left_open.turning(angle, beta)
    phi = math.radians(angle)
    end = (1 - beta) / (1 - beta * cmath.exp(-1j * phi))  # along the path, and out of the plane
    late = beta**left_open.STEPS  # what is left of the start
    assert v["not_transported"][-1] == pytest.approx(end.real, abs=3 * late + 1e-9)
    assert v["lean_not_transported"] == pytest.approx(-math.degrees(cmath.phase(end)), abs=200 * late + 1e-9)
    assert v["transported"] == pytest.approx(1.0) and v["lean_transported"] == pytest.approx(0.0, abs=1e-9)
    assert v["projected"][-1] == pytest.approx((1 - beta) / (1 - beta * math.cos(phi)), abs=3 * late + 1e-9)


@pytest.mark.parametrize("q", [0.0, 0.25, 1.0, 1.5])
def test_the_factors_are_the_papers_two_formulas(q):
    s_z = 10 * left_open.factors(1.0, "ratio", 2.0).numpy()  # times any mean
    ratio, power = (left_open.factors(q, form, 2.0).numpy() for form in ("ratio", "power"))
    assert ratio == pytest.approx((s_z / s_z.mean()) ** q) and power == pytest.approx(s_z**q / (s_z**q).mean())


def test_a_gate_at_the_median_is_half_open_for_half_of_the_coordinates():
    for median in (1e-9, 1e-4):
        v = left_open.threshold("median", median, 0.5)
        assert v["eps_x"][0] == pytest.approx(median, rel=0.3) and v["mean"] == pytest.approx(0.5, abs=0.03)
    assert left_open.threshold("1e-8", 1e-4, 0.5)["mean"] > 0.95


def test_the_small_runs_have_three_seeds_and_differences_from_the_default():
    runs, base = left_open.RUNS["loss"], left_open.RUNS["loss"]["default"]
    assert left_open.WORDS.keys() <= left_open.DIFFERENCES.keys()
    for name, (gap, deviation) in left_open.DIFFERENCES.items():
        gaps = np.subtract(runs[name], base)
        assert len(gaps) == 3 and gap == pytest.approx(gaps.mean(), abs=6e-4)
        assert deviation == pytest.approx(gaps.std(ddof=1), abs=6e-4)
