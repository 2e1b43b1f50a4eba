"""Are the models in the page what they claim to be: rounded as described, traced truly, drawn with their true angles?

tests/test_browser_live.py compares the page itself with these Python functions.
"""

import base64
import json
import math
import re
from itertools import pairwise

import numpy as np
import pytest
import torch

import ngpt_core as ng

pytest.importorskip("plotly", reason='ngpt_book needs plotly: pip install "ngpt-core[notebook]"')
import ngpt_book
from ngpt_book import live
from ngpt_book.live import pack, page, still, trace, train
from ngpt_core.nn.ssd import ssd_recurrent

WHICH = pack.WHICH
TEXT = "class Tank:\n    def fill(self, litres):\n        self.litres += "


@pytest.fixture(scope="module", params=WHICH)
def which(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(which) -> ng.LanguageModel:
    return live.model(which)


# ---- the weights -----------------------------------------------------------------------------------------------------
def test_the_models_are_twins_with_every_row_on_the_sphere_or_none():
    ngpt, gpt = map(ngpt_book.live.model, WHICH)
    ngpt.check()
    gpt.check()
    assert ngpt.config.normalized and not gpt.config.normalized
    assert {**ngpt.config.to_dict(), "normalized": False} == gpt.config.to_dict()
    assert not ngpt.training and not gpt.training
    assert set(ngpt.config.pattern) == set("ME*")  # a hybrid with experts


def test_eight_bits_turn_a_row_by_less_than_a_degree_and_keep_what_is_not_a_row():
    torch.manual_seed(0)
    for normalized in (True, False):
        model = ng.LanguageModel(ng.preset("pico", normalized=normalized))
        packed = pack.quantized(model)
        found, state = pack.dequantized(packed), model.state_dict()
        assert found.keys() == state.keys()
        for name, x in state.items():
            if x.ndim < 2 or x.shape[-1] != model.config.d_model:
                assert torch.equal(found[name], x), name
                continue
            assert packed[name].dtype == torch.int8 and int(packed[name].abs().max()) == 127
            step = x.abs().amax(-1, keepdim=True) / 127
            if normalized:
                angle = torch.rad2deg(ng.sphere.angle(x, found[name] - x))
                assert float(angle.max()) < 1.0
                torch.testing.assert_close(found[name].norm(dim=-1), torch.ones(x.shape[:-1]))
            else:
                assert bool(((found[name] - x).abs() <= 0.501 * step).all()), name


def test_rounding_cost_almost_nothing_and_the_run_is_on_record(which):
    facts = live.facts(which)
    assert abs(facts["val_loss_int8"] - facts["val_loss"]) < 0.01
    assert train.MODEL in facts["command"] and train.RUN in facts["command"] and train.SIDES[which] in facts["command"]
    assert pack.file(which).stat().st_size < 2e6


def test_the_loss_on_unseen_text_is_close_to_the_recorded_one(model, which):
    text = torch.tensor([list((TEXT + "litres\n        return self.litres\n").encode())])
    loss = float(model.loss(text[:, :-1], text[:, 1:]).detach())
    assert loss < live.facts(which)["val_loss"] + 1.0  # an untrained model has 5.5


def test_the_pieces_are_the_file(which):
    parts = [re.fullmatch(r'ngptLive\.piece\("(\w+)",(\d+),(\d+),"([\w+/=]+)"\);\n', text) for text in pack.pieces(which)]
    assert [(p[1], int(p[2]), int(p[3])) for p in parts] == [(which, i, len(parts)) for i in range(len(parts))]
    assert b"".join(base64.b64decode(p[4]) for p in parts) == pack.file(which).read_bytes()


@pytest.mark.parametrize("call", [lambda: live.model("bert"), lambda: live.facts("nGPT")])
def test_there_are_two_models(call):
    with pytest.raises(ValueError, match="'ngpt' and 'gpt'"):
        call()


# ---- the trace -------------------------------------------------------------------------------------------------------
@torch.no_grad()
def test_what_is_shown_is_what_the_model_does(model):
    s, c = trace.sight(model, TEXT), model.config
    data = list(TEXT.encode())
    tokens = torch.tensor([data])
    p = model(tokens)[0, -1].softmax(-1)
    assert s["bytes"] == data
    for n in s["next"]:
        assert n["p"] == pytest.approx(float(p[n["byte"]]), rel=1e-3)
        assert n["p"] / s["next"][0]["p"] == pytest.approx(
            math.exp(n["cos"] * n["scale"] - s["next"][0]["cos"] * s["next"][0]["scale"]), rel=1e-6
        )  # cos * scale is the logit
    assert sum(s["surprise"]) / len(s["surprise"]) == pytest.approx(float(model.loss(tokens[:, :-1], tokens[:, 1:])), rel=1e-4)
    h, states = model.embedding(tokens), []
    for block in model.blocks:
        states.append(h[0, -1])
        h = block(h)[0]
    states.append(h[0, -1])
    np.testing.assert_allclose(s["length"], [float(x.norm()) for x in states], rtol=1e-4)
    if c.normalized:
        turned = [math.degrees(ng.sphere.angle(a, b - a)) for a, b in pairwise(states)]
        np.testing.assert_allclose(s["turn"], turned, rtol=1e-3)
        np.testing.assert_allclose(s["length"], 1.0, rtol=1e-6)
    assert s["lens"][-1][0] == pytest.approx([s["next"][0]["byte"], s["next"][0]["p"]])
    for i, letter in enumerate(c.pattern):
        if letter == "E":
            assert all(sum(w for _, w in chosen) == pytest.approx(c.routed_scaling) for chosen in s["experts"][i])
        elif letter == "*":
            np.testing.assert_allclose(np.sum(s["attention"][i], 1), 1.0)
        else:
            left = np.array(s["left"][i])
            assert (left[:, -1] == 1).all() and (np.diff(left, axis=1) > 0).all()  # it only fades
    json.dumps(trace.rounded(s))


def test_what_is_left_in_the_state_is_the_derivative_of_the_state(model):
    """Of what a byte wrote into the state, measured on the recurrence itself: the state is linear in it."""
    c, n = model.config, 9
    seen = trace._Seen(trace._copy(model))
    with torch.no_grad():
        seen.model(torch.tensor([list(TEXT.encode())[:n]]))
    left = seen._left(0)
    mixer, h = seen.model.blocks[0].mixer, seen.inputs[0]
    h = h if mixer.s_mamba is None else h * mixer.s_mamba()
    dt = torch.nn.functional.softplus(h @ mixer.in_proj[-c.mamba_heads :].T + mixer.dt_bias)[None].detach()
    x = torch.zeros(1, n, c.mamba_heads, 1, dtype=torch.float64)
    B = torch.ones(1, n, c.groups, 1, dtype=torch.float64)
    for s in (0, n // 2, n - 1):
        written = x.clone()
        written[:, s] = 1 / dt[:, s, :, None]
        _, state = ssd_recurrent(written, dt, -mixer.A_log.exp().detach(), B, B)
        torch.testing.assert_close(state[0, :, 0, 0], left[:, s].detach())


def test_an_empty_text_has_no_last_byte(model):
    with pytest.raises(ValueError, match="empty"):
        trace.sight(model, "")


# ---- the map ---------------------------------------------------------------------------------------------------------
def test_on_the_map_every_distance_from_the_center_and_every_step_is_true():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10, 136))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    w, states = x[0], [x[1]]
    for suggestion in x[2:]:
        h = states[-1] + 0.3 * (suggestion - states[-1])
        states.append(h / np.linalg.norm(h))
    to = [math.degrees(math.acos(h @ w)) for h in states]
    turn = [math.degrees(math.acos(a @ b)) for a, b in pairwise(states)]
    lon = still.longitudes(to, turn)
    points = [
        np.array([math.sin(math.radians(t)) * math.cos(u), math.sin(math.radians(t)) * math.sin(u), math.cos(math.radians(t))])
        for t, u in zip(to, lon)
    ]
    np.testing.assert_allclose([math.degrees(math.acos(a @ b)) for a, b in pairwise(points)], turn, rtol=1e-9)
    assert (np.diff(lon) < 0).all() and lon[0] + lon[-1] == pytest.approx(math.pi)  # one way round, its middle up
    line = still.great_circle((to[0], lon[0]), (to[1], lon[1]))
    for (angle, longitude), k in ((line[0], 0), (line[-1], 1)):
        assert angle == pytest.approx(to[k]) and math.cos(longitude - lon[k]) == pytest.approx(1.0)


# ---- the page --------------------------------------------------------------------------------------------------------
def test_in_the_book_an_output_has_the_examples_and_neither_script_nor_weights(monkeypatch):
    monkeypatch.setenv("NGPT_BOOK", "1")
    html = live.Look()._repr_mimebundle_()["text/html"]
    assert len(html) < 60_000 and "ngl-bundle" not in html and "<svg" in html
    data = json.loads(re.search(r'class="ngl-data">(.*?)</script>', html)[1])
    assert data["examples"].keys() == data["blocks"].keys() == set(WHICH)
    assert bytes(data["examples"]["ngpt"]["bytes"]).decode() == page.EXAMPLE


def test_elsewhere_an_output_brings_both(monkeypatch):
    monkeypatch.delenv("NGPT_BOOK", raising=False)
    html = live.Look("small")._repr_mimebundle_()["text/html"]
    assert html.count("ngptLive.piece(") == sum(len(pack.pieces(which)) for which in WHICH)
    assert "ngl-bundle" not in page.BUNDLE.sub("", html)
    with pytest.raises(ValueError, match="'whole', 'small'"):
        live.Look("large")
