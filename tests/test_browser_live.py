"""Do the models in the page compute what the package computes, and does the view react to everything that a reader does?

A page of our own with the script of the book, in headless Chromium, from a server and from the disk. Every run draws other
texts and prints their seed.
"""

import functools
import http.server
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import test_browser
import torch
from selenium.webdriver import ActionChains, Keys

import ngpt_core as ng
from ngpt_book import live
from ngpt_book.live import pack, page, trace

pytestmark = pytest.mark.browser
browser = test_browser.browser
WHICH = pack.WHICH
READY = "return document.querySelector('.ngl').dataset.ready === arguments[0]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A site with the view in both sizes, and one whose weights are missing."""
    folder = tmp_path_factory.mktemp("live")
    for part in ("site", "bare"):
        (folder / part / "live").mkdir(parents=True)
        (folder / part / "live.js").write_text(page.script())
        for size in page.SIZES:
            head = '<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">'
            head += '<meta name="viewport" content="width=device-width">'
            body = f'{live.Look(size).to_html(bring=False)}<script src="live.js" defer></script>'
            (folder / part / f"{size}.html").write_text(f"{head}<title>Live</title><body>{body}</body>")
    for name, text in pack.scripts():
        (folder / "site" / "live" / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def address(folder):
    quiet = functools.partial(test_browser._Quiet, directory=str(folder / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def loaded(browser, address):
    """The whole view, with both models loaded through the public names."""
    browser.desktop()
    browser.driver.get(f"{address}/whole.html")
    browser.wait("return !!window.ngptLive")
    for which in WHICH:
        browser.driver.execute_async_script(
            "const done = arguments[1]; ngptLive.ready(arguments[0]).then(() => done(1))", which
        )
    return browser


def texts(count: int) -> list[str]:
    seed = random.randrange(2**32)
    print(f"texts of seed {seed}")
    rng = random.Random(seed)
    letters = [*"abcdefghijklmnopqrstuvwxyz_()[]:=+-*/,.'\"# \n\t0123456789ABCXYZ", *"éß∑漢字🙂\u0301\xa0"]
    drawn = ["".join(rng.choices(letters, k=rng.randrange(2, 60))) for _ in range(count - 2)]
    return [*drawn, rng.choice(letters), "def walk(self, h):\n    return self.step(h)\n" * rng.randrange(2, 5)]


@torch.no_grad()
def logits(model: ng.LanguageModel, text: str) -> np.ndarray:
    return model.double()(torch.tensor([list(text.encode())]))[0, -1].numpy()


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference, relative to the range."""
    return float(np.abs(a - b).max() / np.ptp(b))


# ---- the numbers -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("which", WHICH)
def test_the_logits_are_those_of_the_package(loaded, which):
    model, worst = live.model(which), 0.0
    for text in texts(12):
        found = np.array(loaded.js("return [...ngptLive.logits(arguments[0], arguments[1])]", which, text))
        assert found.shape == (256,)
        worst = max(worst, apart(found, logits(model, text)))
    print(f"{which}: largest difference {worst:.1e} of the range")
    assert worst < 1e-5  # the page promises 1e-3
    assert loaded.js("return ngptLive.logits(arguments[0], 'a') instanceof Float32Array", which)


@torch.no_grad()
def turned(which: str, knobs: dict) -> ng.LanguageModel:
    """The package's model with the same knobs turned by hand."""
    model = live.model(which).double()
    for i, factor in knobs.get("blocks", {}).items():
        block, mixer = model.blocks[i], model.blocks[i].mixer
        outputs = {"M": ["out_proj"], "*": ["o_proj"], "E": ["experts.down", "shared.down"]}[model.config.pattern[i]]
        for w in [block.alpha.weight] if which == "ngpt" else map(mixer.get_parameter, outputs):
            w.mul_(factor)
    for name, w in model.named_parameters():
        for scale in ("s_qk", "s_mamba", "s_moe", "s_z"):
            if name.endswith(f"{scale}.weight"):
                w.mul_(knobs.get(scale, 1.0))
    return model


BLOCKS = len(live.model("ngpt").config.pattern)
KNOBS = [
    *({"blocks": {i: factor}} for i in range(BLOCKS) for factor in (0, 2.35)),
    *({scale: factor} for scale in ("s_qk", "s_mamba", "s_moe", "s_z") for factor in (0.3, 3.0)),
    {"blocks": {0: 0.5, 3: 0, 5: 1.7}, "s_qk": 1.5, "s_z": 0.8, "s_mamba": 1.2, "s_moe": 0.7},
]


@pytest.mark.parametrize("which", WHICH)
def test_the_logits_agree_after_every_knob_too(loaded, which):
    text = texts(3)[0] + "def f(x):"
    plain = logits(live.model(which), text)
    for knobs in KNOBS:
        found = np.array(loaded.js("return [...ngptLive.logits(arguments[0], arguments[1], arguments[2])]", which, text, knobs))
        assert apart(found, logits(turned(which, knobs), text)) < 1e-5, knobs
        felt = which == "ngpt" or "blocks" in knobs  # GPT has no scales
        assert (apart(found, plain) > 1e-4) == felt, knobs


@pytest.mark.parametrize("which", WHICH)
def test_what_is_drawn_is_what_python_finds(loaded, which):
    for text in texts(4):
        want = trace.sight(live.model(which), text)
        _same(loaded.js("return ngptLive.sight(arguments[0], arguments[1])", which, text), want)


def _same(found, want, where: str = "") -> None:
    if isinstance(want, dict):
        assert found.keys() == {str(k) for k in want}, where
        for key, value in want.items():
            _same(found[str(key)], value, f"{where}.{key}")
    elif isinstance(want, list | tuple):
        assert len(found) == len(want), where
        for a, b in zip(found, want):
            _same(a, b, where)
    elif want is None:
        assert found is None, where
    else:
        assert found == pytest.approx(want, rel=1e-4, abs=1e-6), where


def test_an_empty_text_and_a_model_that_is_not_loaded_are_errors(loaded, address):
    catch = "try { ngptLive.logits(arguments[0], arguments[1]); return ''; } catch (e) { return e.message; }"
    assert "empty" in loaded.js(catch, "ngpt", "")
    refuse = "const done = arguments[0]; ngptLive.ready('bert').catch((e) => done(e.message))"
    assert "bert" in loaded.driver.execute_async_script(refuse)


def test_its_speed(loaded):
    measure = """const t = performance.now(); ngptLive.logits(arguments[0], 'x = 1\\n'.repeat(50));
        return (performance.now() - t) / 300"""
    for which in WHICH:
        print(f"{which}: {loaded.js(measure, which):.2f} ms per byte")  # printed, not asserted: machines differ


# ---- the view --------------------------------------------------------------------------------------------------------
def drawing(browser) -> str:
    return browser.js("return ['.ngl-nexts', '.ngl-map'].map(c => document.querySelector(c).innerHTML).join()")


def press(browser, css: str) -> None:
    browser.js("arguments[0].scrollIntoView({block: 'center'})", element := browser.find(css)[0])
    element.click()


def slide(browser, css: str, key: str = Keys.ARROW_RIGHT, times: int = 4) -> None:
    browser.js("arguments[0].scrollIntoView({block: 'center'})", element := browser.find(css)[0])
    element.send_keys(key * times)


def status(browser) -> str:
    return browser.js("return document.querySelector('.ngl-status').innerText")


def type_text(browser, text: str) -> None:
    """Replace the text, as a reader does, and wait until the model has read it."""
    area = browser.find("textarea")[0]
    browser.js("document.querySelector('.ngl').dataset.ready = ''")
    area.send_keys(Keys.CONTROL + "a")
    area.send_keys(text)
    browser.wait(
        """const n = new TextEncoder().encode(document.querySelector('textarea').value).length;
        return document.querySelectorAll('.ngl-bytes [data-at]').length === n
            && document.querySelector('.ngl').dataset.ready""",
        30,
    )


@pytest.mark.parametrize("size", page.SIZES)
def test_a_stored_example_is_drawn_before_any_weight_is_asked_for(browser, address, size):
    browser.desktop()
    browser.driver.get(f"{address}/{size}.html")
    browser.wait("return document.querySelectorAll('.ngl-leg').length > 5")
    time.sleep(0.3)
    assert not [url for url in browser.requests() if "/live/" in url]
    assert "stored example" in status(browser) and not browser.find(".ngl-still svg")[0].is_displayed()
    assert len(browser.find(".ngl-next")) == trace.NEXT
    assert browser.errors() == []


@pytest.mark.parametrize("where", ["http", "file"])
def test_a_reader_types_and_the_prediction_follows(browser, address, folder, where):
    browser.desktop()
    browser.driver.get(f"{address}/whole.html" if where == "http" else (folder / "site" / "whole.html").as_uri())
    browser.wait("return document.querySelectorAll('.ngl-leg').length > 5")
    before = drawing(browser)
    type_text(browser, "import num")
    assert "nGPT is running" in status(browser) and drawing(browser) != before
    likely = browser.js("return [...document.querySelectorAll('.ngl-next .ngl-glyph')].map(e => e.textContent)")
    p = logits(live.model("ngpt"), "import num")
    assert likely[0] == chr(int(p.argmax()))
    asked = [url for url in browser.requests() if "/live/" in url]
    assert len(asked) == len(pack.pieces("ngpt")) and all("/live/ngpt-" in url for url in asked)  # GPT's stay where they are

    loss = browser.js("return document.querySelector('.ngl-loss').textContent")
    tokens = torch.tensor([list(b"import num")])
    want = float(live.model("ngpt").loss(tokens[:, :-1], tokens[:, 1:]).detach())
    assert f"{want:.3f}" in loss
    press(browser, "[data-which=gpt]")
    browser.wait(READY, 30, "gpt")
    assert "GPT is running" in status(browser) and "length" in browser.js(
        "return document.querySelector('.ngl-side-title').innerText"
    )
    assert browser.errors() == []


def test_every_knob_moves_the_prediction_and_the_loss_and_comes_back(browser, address):
    browser.desktop()
    browser.driver.get(f"{address}/whole.html")
    type_text(browser, "for row in rows:\n    print(ro")
    start = drawing(browser)
    moved = "return document.querySelector('.ngl-moved').textContent"
    assert "as it was trained" in browser.js(moved)
    knobs = [f"[data-knob='{i}']" for i in (0, BLOCKS // 2, BLOCKS - 1)]
    knobs += [f"[data-scale={name}]" for name in ("s_qk", "s_mamba", "s_moe", "s_z")]
    for css in knobs:
        slide(browser, css)
        browser.wait("return document.querySelector('.ngl-moved').textContent.startsWith('Loss')", 20)
        assert drawing(browser) != start, css
        press(browser, ".ngl-reset")
        browser.wait("return document.querySelector('.ngl-moved').textContent.includes('as it was trained')", 20)
        assert drawing(browser) == start, css
    press(browser, "[data-switch='2']")
    browser.wait("return document.querySelector('.ngl-moved').textContent.startsWith('Loss')", 20)
    assert browser.js("return document.querySelector('[data-knob=\"2\"]').value") == "0"
    assert browser.js("return document.querySelectorAll('.ngl-turn')[2].textContent") == "0.0°"  # h does not move
    assert browser.errors() == []


def test_it_continues_the_text_and_stops(browser, address):
    browser.desktop()
    browser.driver.get(f"{address}/whole.html")
    type_text(browser, "def ")
    slide(browser, ".ngl-heat input", Keys.HOME, 1)  # temperature 0: the most likely byte, always
    press(browser, ".ngl-go")
    browser.wait("return document.querySelector('textarea').value.length >= 24", 30)
    press(browser, ".ngl-go")
    time.sleep(0.3)
    text = browser.js("return document.querySelector('textarea').value")
    time.sleep(0.5)
    assert browser.js("return document.querySelector('textarea').value") == text and text.startswith("def ")
    tokens = torch.tensor([list(b"def ")])
    want = live.model("ngpt").generate(tokens, len(text.encode()) - 4, temperature=0.0)[0].tolist()
    assert bytes(want).decode() == text
    assert browser.errors() == []


def test_a_byte_a_block_and_a_candidate_can_be_chosen_by_mouse_and_keyboard(browser, address):
    browser.desktop()
    browser.driver.get(f"{address}/whole.html")
    text = "naïve = open('x')"
    type_text(browser, text)
    press(browser, "[data-at='5']")
    want = trace.sight(live.model("ngpt"), "naïve")
    browser.wait("return document.querySelector('.ngl-here').dataset.at === '5'", 20)
    shown = browser.js("return [...document.querySelectorAll('.ngl-next .ngl-number')].map(e => e.textContent)")
    assert len(want["bytes"]) == 6 and shown[0].rstrip("%<") == f"{100 * want['next'][0]['p']:.0f}"
    browser.find(".ngl-bytes")[0].send_keys(Keys.ARROW_RIGHT)
    browser.wait("return document.querySelector('.ngl-here').dataset.at === '6'", 20)
    map_ = "return document.querySelector('.ngl-map').innerHTML"
    before = browser.js(map_)
    press(browser, "[data-target='3']")
    assert browser.js(map_) != before
    assert browser.js("return document.activeElement.dataset.target") == "3"  # the keyboard stays where it was
    rows = len(browser.find(".ngl-names > *"))
    press(browser, "[data-choose='1']")
    assert len(browser.find(".ngl-names > *")) == rows - 4 + 8  # eight experts in place of four heads
    assert browser.find(".ngl-leg.ngl-chosen")[0].get_attribute("data-block") == "1"
    ActionChains(browser.driver).send_keys(Keys.TAB).perform()  # and goes on from there
    assert browser.js("return document.activeElement.dataset.knob") == "1"
    assert browser.errors() == []


def test_everything_has_a_name_for_screen_readers(browser, address):
    browser.desktop()
    browser.driver.get(f"{address}/whole.html")
    for element in browser.find(".ngl-live button, .ngl-live input, .ngl-live textarea, .ngl-live svg[role=img]"):
        assert (element.accessible_name or "").strip(), element.get_attribute("outerHTML")[:100]


@pytest.mark.parametrize("size", page.SIZES)
def test_on_a_phone_it_is_no_wider_than_the_screen(browser, folder, size):
    browser.phone()
    browser.driver.get((folder / "site" / f"{size}.html").as_uri())
    type_area = browser.find("textarea")[0]
    type_area.send_keys(" and a")
    browser.wait(READY, 30, "ngpt")
    assert browser.js("return document.documentElement.scrollWidth") <= 390
    wide = """return [...document.querySelectorAll('.ngl-live *')].filter(e => !e.closest('.ngl-scroll')
        && e.getBoundingClientRect().right > 390.5).length"""
    assert browser.js(wide) == 0
    assert browser.errors() == []
    browser.desktop()


def test_missing_weights_are_reported_and_can_be_tried_again(browser, folder):
    browser.desktop()
    browser.driver.get((folder / "bare" / "small.html").as_uri())
    browser.find("textarea")[0].send_keys("x")
    browser.wait("return document.querySelector('.ngl-status').innerText.includes('could not be loaded')", 10)
    for name, text in pack.scripts():
        (folder / "bare" / "live" / name).write_text(text)
    browser.find("textarea")[0].send_keys("y")
    browser.wait(READY, 30, "ngpt")
    browser.forget()


def test_what_colab_gets_works_on_its_own(browser, tmp_path):
    browser.desktop()
    (tmp_path / "colab.html").write_text(f'<meta charset="utf-8"><body>{live.Look("small").to_html()}</body>')
    browser.driver.get((tmp_path / "colab.html").as_uri())
    browser.find("textarea")[0].send_keys("x")
    browser.wait(READY, 30, "ngpt")
    assert [url for url in browser.requests() if not url.startswith("file:")] == [] and browser.errors() == []
