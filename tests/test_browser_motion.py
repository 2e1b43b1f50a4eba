"""Can a reader play, pause, scrub and save every training animation, by mouse and by key, on a desktop and on a phone?

A page of our own with each animation of the book, from a server and from the disk, in headless Chromium. What the page draws is
compared with what Python draws.
"""

import base64
import functools
import http.server
import re
import threading
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import test_browser
from selenium.webdriver import ActionChains, Keys

from ngpt_book.figures import motion
from ngpt_book.motion import animation
from ngpt_book.motion.still import LAYOUTS

pytestmark = pytest.mark.browser
browser, site = test_browser.browser, test_browser.site
NAMES = ("race", "rows", "growth", "spread", "experts", "writing")
DARK = "@media (prefers-color-scheme: dark) { body { background: #121212; color: #ddd; } }"
MOVED = "return Number(document.querySelector('.ngm').dataset.frame)"
DRAWN = """const svg = [...document.querySelectorAll('.ngm-picture > svg')].find(s => s.getClientRects().length);
    return [svg.getAttribute('class'), [...svg.querySelectorAll('.ngm-mark *')].map(e =>
      [e.tagName, e.tagName === 'text' ? e.textContent : '',
       ['points', 'x', 'y', 'cx', 'cy', 'r', 'width', 'height'].map(n => e.getAttribute(n) ?? '').join(' ')])]"""


@functools.cache
def made(name: str) -> animation.Animation:
    return getattr(motion, name)()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("motion")
    (folder / "motion.js").write_text(animation.script(), encoding="utf-8")
    (folder / "motion.css").write_text(animation.style(), encoding="utf-8")
    for name in NAMES:
        head = '<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><link rel="stylesheet" href="motion.css">'
        head += f'<meta name="viewport" content="width=device-width"><style>body {{ font: 16px sans-serif; }} {DARK}</style>'
        body = f'{made(name).to_html(bring=False)}<p style="height: 3000px"></p><script src="motion.js" defer></script>'
        (folder / f"{name}.html").write_text(f"{head}<title>Motion</title><body>{body}</body>", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def address(folder):
    quiet = functools.partial(test_browser._Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module", params=[(name, place) for name in NAMES for place in ("desktop", "phone")], ids="-".join)
def page(request, browser, address, folder):
    """(the animation, where): on a desktop from the server, on a phone from the disk."""
    name, place = request.param
    open_page(browser, name, place, address, folder)
    return made(name), place


def open_page(browser, name: str, place: str, address: str, folder: Path) -> None:
    (browser.desktop if place == "desktop" else browser.phone)()
    browser.driver.get(f"{address}/{name}.html" if place == "desktop" else (folder / f"{name}.html").as_uri())
    browser.wait("return document.querySelector('.ngm').dataset.state === 'live'")


def frame(browser) -> float:
    return browser.js(MOVED)


def show(browser, to: float) -> None:
    browser.js("document.querySelector('.ngm').ngptMotion.show(arguments[0])", to)


def button(browser, css: str):
    return browser.find(f".ngm-controls {css}")[0]


# ---- drawing ---------------------------------------------------------------------------------------------------------
def elements(svg: str) -> list[list[str]]:
    """Like DRAWN, of a picture made by Python."""
    found = []
    for mark in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}g"):
        if mark.get("class") == "ngm-mark":
            for e in list(mark.iter())[1:]:
                tag = e.tag.split("}")[1]
                places = " ".join(e.get(n, "") for n in ("points", "x", "y", "cx", "cy", "r", "width", "height"))
                found.append([tag, e.text or "" if tag == "text" else "", places])
    return found


def test_the_page_draws_what_python_draws(browser, page):
    made, place = page
    layout = LAYOUTS[place == "phone"].name
    last = len(made.labels) - 1
    assert frame(browser) == last and browser.errors() == []
    for at in (last, 0, last // 3, last):
        show(browser, at)
        shown, drawn = browser.js(DRAWN)
        wanted = elements(made.to_svg(layout, at))
        assert shown == f"ngm-{layout}"
        assert [e[:2] for e in drawn] == [e[:2] for e in wanted]
        for (_, _, a), (_, _, b) in zip(drawn, wanted):
            a, b = ([float(x) for x in re.split(r"[ ,]+", text.strip()) if x] for text in (a, b))
            assert len(a) == len(b) and all(abs(x - y) < 0.11 for x, y in zip(a, b)), (at, a[:6], b[:6])
        assert browser.find(".ngm-words")[0].text == made.words[at].replace("s_z", "sz")  # the z is an index


def test_nothing_is_wider_than_the_screen_and_everything_has_a_name(browser, page):
    made, _ = page
    width = browser.js("return document.documentElement.clientWidth")
    assert browser.js("return document.documentElement.scrollWidth") <= width
    for css in (".ngm-picture svg text", ".ngm-controls button", ".ngm-controls input"):
        assert (
            browser.js(f"return Math.max(...[...document.querySelectorAll('{css}')].map(e => e.getBoundingClientRect().right))")
            <= width
        )
    slider = button(browser, "input")
    assert slider.aria_role == "slider" and slider.accessible_name == "Frame"
    assert slider.get_attribute("aria-valuetext") == f"{made.labels[-1]}: {made.words[-1]}"
    names = [b.accessible_name for b in browser.find(".ngm-controls button")]
    assert names == ["Play", "Save this frame as PNG", "Save the animation as GIF"]
    assert browser.find(".ngm")[0].accessible_name.startswith("Animation: ")
    assert sum(s.is_displayed() for s in browser.find(".ngm-picture > svg")) == 1
    show(browser, len(made.labels) - 1)
    before, after = browser.js(
        """const e = document.createElement('div');
           e.innerHTML = arguments[0];
           document.body.prepend(e);
           const heights = [...document.querySelectorAll('.ngm')].map(e => e.getBoundingClientRect().height);
           e.remove();
           return heights;""",
        made.to_html(bring=False),
    )
    assert abs(before - after) < 1, "the place of the controls is reserved before the script runs"


# ---- playing ---------------------------------------------------------------------------------------------------------
def test_it_plays_pauses_and_ends(browser, page):
    made, _ = page
    last, play = len(made.labels) - 1, button(browser, ".ngm-play")
    show(browser, last)
    time.sleep(0.2)
    assert frame(browser) == last, "nothing plays by itself"
    play.click()
    browser.wait("return arguments[0] < Number(document.querySelector('.ngm').dataset.frame)", 10, 0.4)
    assert play.accessible_name == "Pause" and frame(browser) < last
    play.send_keys(Keys.SPACE)
    assert play.accessible_name == "Play"
    stopped = frame(browser)
    time.sleep(0.2)
    assert 0 < stopped == frame(browser)
    browser.find(".ngm-picture")[0].click()  # the picture is a large play button
    browser.wait("return arguments[0] < Number(document.querySelector('.ngm').dataset.frame)", 10, stopped)
    browser.find(".ngm-picture")[0].click()
    show(browser, last - 1)
    play.send_keys(Keys.ENTER)
    browser.wait("return document.querySelector('.ngm').dataset.playing === 'false'", 10)
    assert frame(browser) == last and play.accessible_name == "Play"
    assert browser.errors() == []


def test_the_slider_scrubs_by_mouse_and_by_key(browser, page):
    made, _ = page
    last, slider = len(made.labels) - 1, button(browser, "input")
    show(browser, last)
    before = browser.js(DRAWN)
    ActionChains(browser.driver).move_to_element_with_offset(slider, -slider.size["width"] // 4, 0).click().perform()
    browser.settled()
    here = frame(browser)
    assert 0.1 * last < here < 0.4 * last and browser.js(DRAWN) != before
    slider.send_keys(Keys.ARROW_RIGHT)
    assert frame(browser) == here + 1
    slider.send_keys(Keys.HOME)
    assert frame(browser) == 0 and slider.get_attribute("aria-valuetext").startswith(made.labels[0])
    button(browser, ".ngm-play").click()
    browser.wait("return Number(document.querySelector('.ngm').dataset.frame) > 0")
    slider.send_keys(Keys.END)  # scrubbing ends playing
    browser.settled()
    assert frame(browser) == last and button(browser, ".ngm-play").accessible_name == "Play"


def test_it_pauses_off_the_screen(browser, page):
    show(browser, 0)
    button(browser, ".ngm-play").click()
    browser.js("window.scrollTo(0, 2500)")
    browser.wait("return document.querySelector('.ngm').dataset.playing === 'false'")
    assert frame(browser) < len(page[0].labels) - 1
    browser.js("window.scrollTo(0, 0)")


def test_reduced_motion_steps_without_easing(browser, page):
    collect = """const done = arguments[0], seen = [], e = document.querySelector('.ngm'), until = performance.now() + 1300;
        (function look() {
          seen.push(Number(e.dataset.frame));
          performance.now() < until ? requestAnimationFrame(look) : done(seen);
        })()"""
    found = {}
    try:
        for taste in ("no-preference", "reduce"):
            browser.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": taste}])
            show(browser, 0)
            button(browser, ".ngm-play").click()
            found[taste] = browser.driver.execute_async_script(collect)
            button(browser, "input").send_keys(Keys.HOME)
    finally:
        browser.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "no-preference"}])
    assert any(x % 1 for x in found["no-preference"])
    assert all(x % 1 == 0 for x in found["reduce"]) and 1 < len(set(found["reduce"])) <= 4


# ---- keeping ---------------------------------------------------------------------------------------------------------
def saved(browser, kind: str, folder: Path, name: str) -> bytes:
    """The file that a press of the button downloads."""
    browser.cdp("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    wanted = folder / f"{name}.{kind}"
    wanted.unlink(missing_ok=True)
    browser.js("delete document.querySelector('.ngm').dataset.saved")
    button(browser, f"[data-save={kind}]").click()
    browser.wait("return (document.querySelector('.ngm').dataset.saved ?? '').startsWith(arguments[0])", 120, kind)
    end, size = time.monotonic() + 20, int(browser.js("return document.querySelector('.ngm').dataset.saved").split()[1])
    while not wanted.exists() or wanted.stat().st_size < size:
        assert time.monotonic() < end, f"{wanted.name} was not downloaded"
        time.sleep(0.05)
    return wanted.read_bytes()


def corner(browser, data: bytes, kind: str) -> list[int]:
    """[width, height, the color of the first pixel] as the browser reads the image."""
    return browser.driver.execute_async_script(
        """const [text, kind, done] = arguments, image = new Image();
           image.onload = () => { const c = document.createElement('canvas'), x = c.getContext('2d');
             [c.width, c.height] = [image.width, image.height]; x.drawImage(image, 0, 0);
             done([image.width, image.height, ...x.getImageData(0, 0, 1, 1).data]); };
           image.src = `data:image/${kind};base64,${text}`;""",
        base64.b64encode(data).decode(),
        kind,
    )


def test_a_frame_is_saved_as_png_in_the_page_s_colors(browser, page, tmp_path):
    made, _ = page
    for scheme, light in (("light", True), ("dark", False)):
        browser.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        data = saved(browser, "png", tmp_path, made.name)
        width, height, *color = corner(browser, data, "png")
        assert width == 1400 and 400 < height < 1000
        assert color == ([255, 255, 255, 255] if light else [18, 18, 18, 255])
    browser.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    assert browser.errors() == []


FRAMES = """const [text, wanted, done] = arguments, data = Uint8Array.from(atob(text), c => c.charCodeAt(0));
    (async () => {
      const reader = new ImageDecoder({ data, type: 'image/gif' });
      await reader.tracks.ready;
      await reader.completed;
      const count = reader.tracks.selectedTrack.frameCount, worst = [];
      for (const at of wanted) {
        const { image } = await reader.decode({ frameIndex: at }), w = image.displayWidth, h = image.displayHeight;
        const c = new OffscreenCanvas(w, h), x = c.getContext('2d');
        x.drawImage(image, 0, 0);
        const found = x.getImageData(0, 0, w, h).data;
        const right = document.querySelector('.ngm').ngptMotion, truth = await right.paint(at);
        let sum = 0;
        truth.forEach((v, i) => { sum += Math.abs(v - found[i]); });
        worst.push(sum / truth.length);
      }
      done([count, worst, reader.tracks.selectedTrack.repetitionCount === Infinity]);
    })().catch(e => done(String(e)))"""


@pytest.mark.parametrize("name", NAMES)
def test_the_animation_is_saved_as_a_gif_that_a_browser_reads(browser, address, folder, tmp_path, name):
    open_page(browser, name, "desktop", address, folder)
    data = saved(browser, "gif", tmp_path, made(name).name)
    print(f"{name}: {len(data) / 1000:.0f} kB")
    assert data[:6] == b"GIF89a" and len(data) < 3_000_000
    last = len(made(name).labels) - 1
    count, apart, forever = browser.driver.execute_async_script(
        FRAMES, base64.b64encode(data).decode(), [0, 1, last // 2, last]
    )
    assert count == last + 1 and forever
    assert max(apart) < 2.5, apart  # of 255, for the palette
    assert button(browser, "[data-save=gif]").text == "GIF" and browser.errors() == []


# ---- without JavaScript ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", ["desktop", "phone"])
def test_without_javascript_the_last_frame_is_there_and_no_dead_button(browser, address, folder, place):
    (browser.desktop if place == "desktop" else browser.phone)()
    browser.cdp("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.driver.get((folder / "race.html").as_uri())
        shown = [s.get_attribute("class") for s in browser.find(".ngm-picture > svg") if s.is_displayed()]
        assert shown == [f"ngm-{LAYOUTS[place == 'phone'].name}"]
        assert not browser.find(".ngm-controls button") and not browser.find(".ngm-controls")[0].is_displayed()
        assert browser.find(".ngm-words")[0].text == made("race").words[-1]
    finally:
        browser.cdp("Emulation.setScriptExecutionDisabled", value=False)
        browser.forget()


# ---- the book --------------------------------------------------------------------------------------------------------
CHAPTERS = ("03_lgp", "05_gated_adamw", "06_geometry", "08_experts", "09_whole_recipe", "11_train_for_real")


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_book_s_pages_have_their_animation(browser, site, chapter):
    """On a phone, from the disk; in the dark no light sheet lies behind it."""
    browser.phone()
    browser.driver.get((site / f"{chapter}.html").as_uri())
    browser.wait("return [...document.querySelectorAll('.ngm')].every(e => e.dataset.state === 'live')", 30)
    (found,) = browser.find(".ngm")
    browser.js("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", found)
    browser.find(".ngm-play", found)[0].click()
    browser.wait("return Number(arguments[0].dataset.frame) > 0.5", 20, found)
    browser.find(".ngm-play", found)[0].click()
    assert browser.js("return arguments[0].getBoundingClientRect().right", found) <= 390
    assert browser.js("return document.querySelectorAll('script[src*=\"motion.js\"], .ngm-bundle').length") == 1
    browser.js("document.documentElement.dataset.theme = 'dark'")
    behind = "return getComputedStyle(arguments[0].closest('.output')).backgroundColor"
    assert browser.js(behind, found) == "rgba(0, 0, 0, 0)"
    assert browser.errors() == []


def test_pages_without_an_animation_do_not_load_the_script(site):
    for page in ("intro", "01_hypersphere", "glossary"):
        assert "motion.js" not in (site / f"{page}.html").read_text(encoding="utf-8")


def test_a_page_says_what_it_is_where_it_is_shared(site):
    text = (site / "09_whole_recipe.html").read_text(encoding="utf-8")
    for name in ('property="og:title"', 'property="og:description"', 'name="description"', 'property="og:site_name"'):
        assert text.count(name) == 1
    assert 'property="og:site_name" content="Training nGPT"' in text
    assert (site / "_static" / "race.png").exists()
    index = (site / "index.html").read_text(encoding="utf-8")
    assert 'content="0; url=intro.html"' in index and 'property="og:title" content="Training nGPT"' in index
