"""Does the built book work in a real browser: every page, every slider, without a kernel and without a network?

Headless Chromium, driven by selenium. The pages are those of ``book/_toc.yml``: a new chapter is tested without a change here.
NGPT_BOOK_HTML names a site that is already built; otherwise one is built from the notebooks' stored outputs. Without Chromium
the tests are skipped, or fail where NGPT_REQUIRE_BROWSER=1 says that it must be there.
"""

import functools
import gzip
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
import yaml
from selenium import webdriver
from selenium.webdriver import ActionChains, Keys

from ngpt_book import Explorer, Slider
from ngpt_book.explorer import page
from ngpt_book.explorer.svg.space import Space
from ngpt_book.printed.whole import order
from ngpt_book.sphinx import plotly_part

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[1]
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync
    --disable-component-update --disable-default-apps --disable-dev-shm-usage --enable-unsafe-swiftshader --mute-audio
    --hide-scrollbars --window-size=1200,1000""".split()


PAGES = [name for _, part in order(yaml.safe_load((ROOT / "book" / "_toc.yml").read_text())) for name in part]

ALIVE = "e.dataset.state === 'live' && e.querySelector('.ngx-plot')._fullLayout && e.querySelector('.ngx-plot svg')"
SEEN = """return [...document.querySelectorAll('.ngx')].map(e => ['.ngx-still svg', '.ngx-plot', '.ngx-panel']
    .map(css => e.querySelector(css)).map(x => !!x && x.getClientRects().length > 0))"""
PLACES = "return [...document.querySelectorAll('.ngx-row input')].map(e => e.value)"
SPILLED = """return [document.documentElement, ...document.querySelectorAll('.ngx, .ngx-panel, .ngx-plot .main-svg')]
    .filter(e => Math.max(e.getBoundingClientRect().right, e === document.documentElement ? e.scrollWidth : 0) > 390.5)
    .map(e => e.className || e.tagName)"""
SHOWN = "filter(t => t.textContent.trim() && t.checkVisibility({ visibilityProperty: true }))"
CUT = f"""return [...document.querySelectorAll('.ngx-box, .ngm-picture, .ngq-plot')].flatMap(box => {{
    const edge = (box.closest('.ngq') || box).getBoundingClientRect();
    return [...box.querySelectorAll('.main-svg text, .ngm-picture text, .ngq-plot text')].{SHOWN}
      .map(t => [t.textContent, t.getBoundingClientRect()]).filter(([, r]) => r.width
        && (r.left < edge.left - 1 || r.right > edge.right + 1 || r.top < edge.top - 2 || r.bottom > edge.bottom + 2))
      .map(([t]) => t); }})"""
CLASHES = f"""return [...document.querySelectorAll('.ngq-plot svg')].flatMap(svg => {{
    const texts = [...svg.querySelectorAll('text')].{SHOWN}.map(t => [t.textContent, t.getBoundingClientRect()]);
    return texts.flatMap(([a, r], i) => texts.slice(i + 1).filter(([, s]) => r.left < s.right - 1 && s.left < r.right - 1
      && r.top < s.bottom - 3 && s.top < r.bottom - 3).map(([b]) => `${{a}} | ${{b}}`)); }})"""
CONTRASTS = """const light = (c) => { const v = c.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255)
        .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
      return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2] + 0.05; };
    return [...document.querySelectorAll('.ngx-plot')].map(p => {
      let e = p, ground;
      do { ground = getComputedStyle(e).backgroundColor; e = e.parentElement; }
      while (e && /, 0\\)|transparent/.test(ground));
      const [a, b] = [light(p.layout.template.layout.font.color), light(ground)];
      return Math.max(a, b) / Math.min(a, b); });"""

WORDS = """const channels = (c) => (c.startsWith("color(srgb") ? c.slice(10).match(/[\\d.]+/g).map(x => 255 * x)
      : c.match(/[\\d.]+/g).map(Number)).slice(0, 3);
    const light = (c) => { const v = c.map(x => x / 255).map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
      return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2] + 0.05; };
    return [...document.querySelectorAll('.ngx-plot .annotation-text, .ngx-plot .textpoint text, .ngm-picture text')]
      .filter(t => t.getClientRects().length && t.textContent.trim() && !t.closest(".hovertext")).map(t => {
        let e = t.closest(".ngx, .ngm"), ground;
        do { ground = getComputedStyle(e).backgroundColor; e = e.parentElement; }
        while (e && /, 0\\)|transparent/.test(ground));
        const [a, b] = [channels(getComputedStyle(t).fill), channels(ground)].map(light);
        return [Math.max(a, b) / Math.min(a, b), t.textContent]; }).filter(([ratio]) => ratio < 4.5);"""


# ---- a site, a server, a browser -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    if given := os.environ.get("NGPT_BOOK_HTML"):
        return (ROOT / given).resolve()
    folder = tmp_path_factory.mktemp("book")
    tool = Path(sys.executable).with_name("jupyter-book")
    command = [tool, "build", "book", "--config", "_config.yml", "--path-output", folder, "-n", "-W", "--keep-going", "-q"]
    build = subprocess.run(command, cwd=ROOT, env={**os.environ, "NGPT_BOOK_EXECUTE": "off"}, capture_output=True, text=True)
    assert build.returncode == 0, build.stderr
    return folder / "_build" / "html"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="session")
def address(site):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Browser:
    """A driver with what these tests ask of it."""

    def __init__(self, driver):
        self.driver = driver
        self.js = driver.execute_script

    def cdp(self, command: str, **arguments):
        return self.driver.execute_cdp_cmd(command, arguments)

    def forget(self) -> None:
        self.driver.get("about:blank")
        for log in ("browser", "performance"):
            self.driver.get_log(log)

    def desktop(self) -> None:
        self.cdp("Emulation.clearDeviceMetricsOverride")
        self.cdp("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": "light"}])
        self.forget()

    def phone(self) -> None:
        self.desktop()
        self.cdp("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)

    def open(self, url: str) -> None:
        """Load a page (again, even if only its hash differs) and wait until everything on it is drawn."""
        self.driver.get("about:blank")
        self.driver.get(url)
        self.wait("return document.readyState === 'complete'", 30)
        self.js("window.ngptLazy?.wake()")  # all, wherever they are: a reader would have to come near
        self.wait(f"return [...document.querySelectorAll('.ngx')].every(e => {ALIVE})", 60)

    def wait(self, script: str, seconds: float = 10, *arguments):
        end = time.monotonic() + seconds
        while not (answer := self.js(script, *arguments)):
            assert time.monotonic() < end, f"{self.driver.current_url}: waited {seconds} s for: {script}"
            time.sleep(0.03)
        return answer

    def errors(self) -> list[str]:
        """What the console complains of. /favicon.ico is the browser's own wish, on the page that only redirects."""
        severe = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        return [message for message in severe if "/favicon.ico " not in message]

    def requests(self) -> list[str]:
        """The addresses that were asked for since the last question."""
        events = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [u for u in urls if not u.startswith(("data:", "blob:", "about:", "chrome:"))]

    def drawing(self, explorer) -> int:
        """A hash of all that the figure shows: its data, and the texts and shapes of its layout."""
        return self.js(
            """const plot = arguments[0].querySelector(".ngx-plot"), all = JSON.stringify(
                 [plot.data.filter(t => t.meta !== 'ghost'), plot.layout.annotations, plot.layout.shapes, plot.layout.title],
                 (k, v) => ArrayBuffer.isView(v) ? [...v] : v);
               let hash = 0;
               for (let i = 0; i < all.length; i++) hash = (hash * 31 + all.charCodeAt(i)) | 0;
               return hash;""",
            explorer,
        )

    def settled(self) -> None:
        """Let the frame that a move asked for be drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 20)));"
        )

    def find(self, css: str, within=None):
        return (within or self.driver).find_elements("css selector", css)


def _absent(words: str):
    if os.environ.get("NGPT_REQUIRE_BROWSER") == "1":
        pytest.fail(words, pytrace=False)
    pytest.skip(words)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    binary = next((found for name in names if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver") or shutil.which("chromium.chromedriver")
    if not binary or not driver:
        _absent("The browser tests need Chromium and its driver. On Debian: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    # No name but localhost has an address: a request that leaves fails, and is seen.
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield Browser(chrome)
    finally:
        chrome.quit()


# ---- every page ------------------------------------------------------------------------------------------------------
#
# Loading is what costs (plotly.js, and 3-D without a graphics card), so a chapter is opened twice: once on the desktop from the
# server, for all tests that take it as ``chapter``, in the order in which they stand here; and once on a phone from the disk.


@pytest.fixture(scope="module", params=PAGES)
def chapter(request, browser, address) -> str:
    """The page, open in a light window of the desktop, its sliders where they were put."""
    browser.desktop()
    browser.open(f"{address}/{request.param}.html")
    return request.param


def test_a_page_logs_nothing_and_asks_no_other_host(browser, address, chapter):
    assert [url for url in browser.requests() if not url.startswith(address)] == []
    assert browser.errors() == []
    assert browser.js("return !document.querySelector('.ngx-bundle, script[src*=thebe], script[src*=embed-amd]')")
    if browser.js("return !!document.querySelector('.math')"):
        formulas = "document.querySelectorAll('.math mjx-container mjx-assistive-mml math').length"
        assert browser.js(f"return {formulas} === document.querySelectorAll('.math').length")


def test_a_page_has_one_title(browser, chapter):
    assert len(browser.find("h1")) == 1


def test_every_slider_and_figure_has_a_name_for_screen_readers(browser, chapter):
    for group in browser.find(".ngx-choices"):
        assert group.accessible_name.strip() and group.aria_role == "radiogroup"
    for slider in browser.find(".ngx-row input:not([hidden])"):
        assert slider.accessible_name.strip() and slider.aria_role == "slider"
        assert slider.get_attribute("aria-valuetext")
    for plot in browser.find(".ngx-plot"):
        assert plot.accessible_name.strip()


def test_on_paper_there_is_a_still_picture(browser, chapter):
    assert all(kinds[:2] == [False, True] for kinds in browser.js(SEEN))
    browser.cdp("Emulation.setEmulatedMedia", media="print")
    assert all(kinds == [True, False, False] for kinds in browser.js(SEEN))
    browser.cdp("Emulation.setEmulatedMedia", media="")


def test_the_dark_page_is_drawn_in_light_ink(browser, chapter):
    ink = "[...document.querySelectorAll('.ngx-plot')].map(p => p.layout.template.layout.font.color)"
    before = browser.js(f"return {ink}")
    browser.js("document.documentElement.dataset.theme = 'dark'")
    browser.wait(f"return {ink}.every((c, i) => c !== arguments[0][i])", 10, before)
    assert min(browser.js(CONTRASTS), default=21) >= 7 and browser.js(WORDS) == []
    browser.js("document.documentElement.dataset.theme = 'light'")
    browser.wait(f"return {ink}.every((c, i) => c === arguments[0][i])", 10, before)
    assert min(browser.js(CONTRASTS), default=21) >= 7 and browser.js(WORDS) == []


def test_every_slider_moves_its_drawing_by_mouse_and_by_key(browser, chapter):
    for explorer in browser.find(".ngx[data-kind=explorer]"):
        plot, reset = browser.find(".ngx-plot", explorer)[0], browser.find(".ngx-reset", explorer)[0]
        start = browser.drawing(explorer)
        for row in browser.find(".ngx-row", explorer):
            if buttons := browser.find("[role=radio]", row):
                _every_button(browser, explorer, buttons, start, f"{chapter}, {browser.find('label', row)[0].text!r}")
                continue
            slider, shown = browser.find("input", row)[0], browser.find("output", row)[0]
            what = f"{chapter}, slider {browser.find('label', row)[0].text!r}"
            browser.js("arguments[0].scrollIntoView({block: 'end', behavior: 'instant'})", explorer)
            last, first = int(slider.get_attribute("max")), int(slider.get_attribute("value"))
            picture, words = plot.screenshot_as_png, shown.text
            far = 0 if first > last / 2 else last
            key, step, jump = (Keys.ARROW_LEFT, -1, Keys.HOME) if far else (Keys.ARROW_RIGHT, 1, Keys.END)

            # the mouse drags the handle to the far end
            width = slider.size["width"]
            here, there = ((place / last - 0.5) * (width - 16) for place in (first, far))
            hand = ActionChains(browser.driver, duration=50).move_to_element_with_offset(slider, here, 0)
            hand.click_and_hold().move_by_offset(there - here, 0).release().perform()
            browser.settled()
            assert slider.get_attribute("value") == str(far), f"{what} does not follow the mouse"
            moved = browser.drawing(explorer)
            assert moved != start, f"{what} leaves the figure's data alone"
            assert shown.text != words and slider.get_attribute("aria-valuetext") == shown.text
            _changes(plot, picture, what)

            # the keyboard takes it a step back, and then to the other end
            slider.send_keys(key)
            assert slider.get_attribute("value") == str(far + step), f"{what} does not follow the keyboard"
            slider.send_keys(jump)
            browser.settled()
            assert slider.get_attribute("value") == str(last - far)
            assert browser.drawing(explorer) != moved, f"{what} leaves the figure's data alone"

            reset.click()
            browser.settled()
            assert int(slider.get_attribute("value")) == first and shown.text == words
            assert browser.drawing(explorer) == start and browser.js("return location.hash") == ""
    assert browser.errors() == []


def _every_button(browser, explorer, buttons, start: int, what: str) -> None:
    """The buttons of a choice, by mouse and by key: each draws something else, and the first choice comes back."""
    (first,) = [i for i, button in enumerate(buttons) if button.get_attribute("aria-checked") == "true"]
    browser.js("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", buttons[0])
    drawings = []
    for button in buttons:
        button.click()
        browser.settled()
        assert button.get_attribute("aria-checked") == "true", what
        drawings.append(browser.drawing(explorer))
    assert drawings[first] == start and len(set(drawings)) > 1, f"{what} leaves the figure's data alone"
    buttons[-1].send_keys(Keys.HOME)
    browser.settled()
    assert browser.drawing(explorer) == drawings[0], f"{what} does not follow the keyboard"
    browser.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    browser.settled()
    assert browser.drawing(explorer) == drawings[1], f"{what} does not follow the keyboard"
    browser.find(".ngx-reset", explorer)[0].click()
    browser.settled()
    assert browser.drawing(explorer) == start


def _changes(plot, picture: bytes, what: str) -> None:
    """What is on the screen is another picture, not only other data."""
    end = time.monotonic() + 10
    while plot.screenshot_as_png == picture:
        assert time.monotonic() < end, f"{what} does not change what is seen"
        time.sleep(0.05)


def test_a_shared_view_opens_from_the_disk_on_a_phone_without_a_network(browser, address, site, chapter):
    """The second load: the link of a view in which every slider was moved, as a file, 390 pixels wide, offline."""
    for explorer in browser.find(".ngx[data-kind=explorer]"):  # all of them: each keeps its own keys in the address
        for row in browser.find(".ngx-row", explorer):
            far = Keys.HOME if int(browser.find("input", row)[0].get_attribute("value")) else Keys.END
            browser.find("input:not([hidden]), [role=radio][aria-checked=true]", row)[0].send_keys(far)
    browser.settled()
    hash_, places = browser.js("return location.hash"), browser.js(PLACES)
    drawings = [browser.drawing(e) for e in browser.find(".ngx[data-kind=explorer]")]
    assert hash_.count("=") == len(places)

    browser.forget()
    browser.phone()
    browser.cdp("Network.enable")
    browser.cdp("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
    try:
        browser.open((site / f"{chapter}.html").as_uri() + hash_)
        explorers = browser.find(".ngx[data-kind=explorer]")
        assert browser.js(PLACES) == places and [browser.drawing(e) for e in explorers] == drawings
        assert all(url.startswith("file:") for url in browser.requests())
        assert browser.js(SPILLED) == [], "wider than a phone"
        assert browser.js(CUT) == [], "words that a figure cuts off"
        assert browser.js(CLASHES) == [], "words on the drawing pad of a question"
        if explorers:
            sight = "const r = arguments[0].getBoundingClientRect(); return r.bottom > 0 && r.top < innerHeight"
            assert any(browser.js(sight, e) for e in explorers)  # the link leads to it
            browser.js("location.hash = ''")  # going back takes the sliders back
            browser.settled()
            assert browser.js(PLACES) == browser.js(PLACES.replace(".value", ".defaultValue"))
            assert [browser.drawing(e) for e in explorers] != drawings
        assert browser.errors() == []
    finally:
        browser.cdp("Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1)


def test_without_scripts_there_is_a_still_picture(browser, address, chapter):
    browser.desktop()
    browser.cdp("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.driver.get(f"{address}/{chapter}.html")
        stills = browser.find(".ngx-still svg")
        assert len(stills) == len(browser.find(".ngx"))
        assert all(still.is_displayed() and still.size["width"] > 300 for still in stills)
        assert not any(panel.is_displayed() for panel in browser.find(".ngx-panel"))
    finally:
        browser.cdp("Emulation.setScriptExecutionDisabled", value=False)
        browser.forget()


@pytest.mark.parametrize("name", ["index", "search", "genindex"])
def test_the_other_pages_log_nothing_either(browser, address, name):
    browser.phone()
    browser.open(f"{address}/{name}.html")
    assert [url for url in browser.requests() if not url.startswith(address)] == []
    assert browser.errors() == [] and browser.js(SPILLED) == []


def test_the_search_finds_a_chapter(browser, address):
    browser.desktop()
    browser.open(f"{address}/search.html?q=sphere")
    browser.wait("return document.querySelectorAll('#search-results li a').length > 0")
    assert not browser.errors()


def test_the_words_that_were_searched_are_marked_on_the_page(browser, address):
    browser.desktop()
    for query in ("softmax+scale", "tangent+projection"):
        browser.open(f"{address}/search.html?q={query}")
        browser.wait("return document.querySelectorAll('#search-results li p').length > 0")  # with their excerpts
        assert "\\" not in browser.js("return document.getElementById('search-results').innerText")
    browser.open(f"{address}/06_geometry.html")
    browser.wait("return document.querySelectorAll('.bd-article .highlighted').length > 5")
    assert not browser.errors()


# ---- a light page ----------------------------------------------------------------------------------------------------
BUDGET = 1e6  # bytes with gzip, before the reader does anything
SHIFTS = """window.shifts = []; new PerformanceObserver((list) => list.getEntries().forEach((e) =>
    shifts.push([e.value, e.sources.map((s) => s.node?.className || s.node?.nodeName || "?").join()])))
    .observe({ type: "layout-shift", buffered: true });"""
CONTENTS = "toc-entry"  # the list of contents at the side opens the section that is being read, and closes the others


@pytest.mark.parametrize("device", ["desktop", "phone"])
def test_a_page_is_small_and_its_layout_does_not_shift(browser, site, address, page_of_the_book, device):
    """What crosses the wire before the first touch, and how much moves while it loads and while the reader scrolls."""
    getattr(browser, device)()
    script = browser.cdp("Page.addScriptToEvaluateOnNewDocument", source=SHIFTS)["identifier"]
    try:
        browser.driver.get(f"{address}/{page_of_the_book}.html")
        browser.wait("return document.readyState === 'complete'", 30)
        browser.wait("return ![...document.querySelectorAll('[data-state=waiting]')].length", 60)
        urls = {url.split("?")[0] for url in browser.requests()}
        files = [site / url.removeprefix(f"{address}/") for url in urls]
        weight = sum(len(gzip.compress(file.read_bytes(), 6)) for file in files if file.is_file())
        assert weight < BUDGET, f"{page_of_the_book}: {weight / 1e3:.0f} kB"
        names = {file.name for file in files}
        assert not names & {"plotly.min.js", "fontawesome.js", "tex-chtml.js", "searchindex.js", "fa-solid-900.woff2"}
        down = "const before = scrollY; scrollBy({top: innerHeight * 0.9, behavior: 'instant'}); return scrollY > before + 1"
        while browser.js(down):
            browser.settled()
        browser.wait("return ![...document.querySelectorAll('[data-state=waiting]')].length", 60)
        shifts = browser.js("return window.shifts")
        assert sum(value for value, sources in shifts if CONTENTS not in sources) < 0.1, shifts
    finally:
        browser.cdp("Page.removeScriptToEvaluateOnNewDocument", identifier=script)


@pytest.fixture(scope="module", params=PAGES)
def page_of_the_book(request) -> str:
    return request.param


# ---- explorer.js itself, on a page of our own ------------------------------------------------------------------------


def spiral(turns, height, kind):
    t = np.linspace(0, 1, 60)
    x = np.cos(2 * np.pi * turns * t) if kind == "smooth" else np.sign(np.cos(2 * np.pi * turns * t))
    y = np.where(t > 0.9, np.nan, np.sin(2 * np.pi * turns * t))
    return {"p": np.stack([x, y, height * t], 1), "m": np.outer(t[:7], t[:5]) * turns, "h": height / 3}


def spiral_figure(a):
    line = go.Scatter3d(x=a["p"][:, 0], y=a["p"][:, 1], z=a["p"][:, 2], mode="lines", name="spiral")
    fixed = go.Scatter3d(x=np.zeros(40), y=np.zeros(40), z=np.linspace(0, 0.1, 40), mode="lines", name="no slider moves it")
    return go.Figure([line, go.Surface(z=a["m"].T), fixed], layout={"title": "h/3 = {h:.4f}, {kind}"})


@pytest.fixture(scope="module")
def bench(browser, tmp_path_factory) -> Explorer:
    """A page as Colab sees it: two Explorers of one kind with their scripts inside, plotly.js from what stands for its CDN."""
    params = {"turns": Slider((1, 3, 3), label="n"), "height": Slider((0.5, 2, 4), default=0.5), "kind": ["smooth", "square"]}
    explorers = [Explorer(spiral, params, spiral_figure) for _ in range(2)]
    folder = tmp_path_factory.mktemp("bench")
    shutil.copy(plotly_part.SOURCE, folder)
    body = "".join(e.to_html() for e in explorers)
    body += page.Picture(go.Figure(go.Scatter(y=np.arange(40.0) ** 2)), "a parabola").to_html()
    body = re.sub(r"https://cdn\.plot\.ly/plotly-[\d.]+\.min\.js", "plotly.min.js", body)
    head = '<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">'
    head += '<meta name="viewport" content="width=device-width">'
    (folder / "bench.html").write_text(f"{head}<body>{body}</body>")
    browser.desktop()
    browser.open((folder / "bench.html").as_uri())
    return explorers[0]


EYE = (-0.4, -0.4, 0.4, 0.4)  # the window through which a scene is seen: its axes


def test_the_page_draws_what_python_decodes_as_the_camera_sees_it(browser, bench):
    for values in ({}, {"turns": 3, "height": 2.0, "kind": "square"}, {"turns": 1, "height": 1.5}):
        browser.js("location.hash = arguments[0]", "&".join(f"{bench.name}.{k}={v}" for k, v in values.items()))
        browser.settled()
        data, title = browser.js(
            "const p = document.querySelector('.ngx-plot'); return [JSON.parse(JSON.stringify(p.data,"
            " (k, v) => ArrayBuffer.isView(v) ? [...v] : v)), p.layout.title.text]"
        )
        want = bench.at(**values)
        space = Space([{"type": "scatter3d", **dict(zip("xyz", want["p"].T))}, {"type": "surface", "z": want["m"].T}], {}, EYE)
        seen = np.array([[np.nan if v is None else v for v in data[0][c]] for c in "xy"])
        x, y, _ = space.project(*want["p"].T)
        np.testing.assert_allclose(seen, [x, -y], rtol=1e-9, atol=1e-12)
        rows, columns = want["m"].T.shape  # of a surface in many colors, its rows and then its columns
        x, y, _ = space.project(*np.broadcast_arrays(np.arange(columns)[None], np.arange(rows)[:, None], want["m"].T))
        np.testing.assert_allclose(data[1]["x"][:columns], x[0], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(data[1]["y"][-rows - 1 : -1], -y[:, -1], rtol=1e-9, atol=1e-12)
        assert title == bench.figure(**values).layout.title.text
    assert browser.errors() == []


def test_a_mouse_turns_a_scene_and_reset_turns_it_back(browser, bench):
    explorer, plot = browser.find(".ngx")[0], browser.find(".ngx-plot")[0]
    browser.find(".ngx-reset", explorer)[0].click()
    browser.settled()
    seen = "return ['x', 'y'].map(c => arguments[0].data[0][c].slice(0, 50))"
    before = np.array(browser.js(seen, plot))
    hand = ActionChains(browser.driver, duration=50).move_to_element(plot).click_and_hold()
    hand.move_by_offset(80, 40).release().move_by_offset(50, 0).perform()  # once it is released, it turns nothing
    browser.settled()
    angles = np.pi * np.array([-80, 40]) / browser.js("return arguments[0].clientWidth", plot)
    x, y, z = np.array([1.25, 1.05, 0.75])
    far, side, up = np.sqrt(x * x + y * y + z * z), np.arctan2(y, x) + angles[0], np.arctan2(z, np.hypot(x, y)) + angles[1]
    eye = far * np.array([np.cos(up) * np.cos(side), np.cos(up) * np.sin(side), np.sin(up)])
    want = bench.at()
    traces = [{"type": "scatter3d", **dict(zip("xyz", want["p"].T))}, {"type": "surface", "z": want["m"].T}]
    x, y, _ = Space(traces, {"camera": {"eye": dict(zip("xyz", eye))}}, EYE).project(*want["p"].T)
    turned = np.array(browser.js(seen, plot))
    np.testing.assert_allclose(turned, [x[:50], -y[:50]], rtol=1e-9, atol=1e-12)
    assert np.abs(turned - before).max() > 0.02
    browser.find(".ngx-reset", explorer)[0].click()
    browser.settled()
    np.testing.assert_array_equal(browser.js(seen, plot), before)
    assert browser.errors() == []


def test_two_explorers_of_one_function_keep_their_own_keys(browser, bench):
    browser.js("location.hash = arguments[0]", f"{bench.name}-2.turns=3&{bench.name}.height=2.0")
    browser.settled()
    places = "[...document.querySelectorAll('.ngx')].map(e => [...e.querySelectorAll('input')].map(i => +i.value))"
    first, second, _ = browser.js(f"return {places}")
    assert (first, second) == ([1, 3, 1], [2, 0, 1])


def test_a_link_to_a_section_or_a_strange_address_moves_no_slider(browser, bench):
    browser.js("location.hash = arguments[0]", f"{bench.name}.turns=3")
    browser.settled()
    before = browser.js(PLACES)
    for strange in ("a-section", f"{bench.name}.turns=%E0%A4%A", f"{bench.name}.turns=17&&=&{bench.name}.turns=3"):
        browser.js("location.hash = arguments[0]", strange)
        browser.settled()
        assert browser.js(PLACES) == before, strange
    browser.js("location.hash = 'a-section'")
    slider = browser.find(".ngx-row input")[4]  # the second Explorer's height: the address now refers to both again
    slider.send_keys(Keys.ARROW_RIGHT)
    assert browser.js("return location.hash") == f"#{bench.name}.turns=3&{bench.name}-2.height=1.0"
    assert browser.errors() == []


def test_numbers_are_written_as_python_writes_them(browser, bench):
    rng = np.random.default_rng(0)
    numbers = [0.0, 1.0, -1.0, 12345.678, 1e-7, 999.96, 0.000123456, 1e6]
    numbers += (rng.normal(size=30) * 10.0 ** rng.integers(-9, 9, 30)).tolist()
    for spec in (".2f", ".0f", ".3g", ".5g", ".1e", ".1%", ",.0f", ",.2f", "+.2f", "+.3g", "d", ",d"):
        got = browser.js("return arguments[0].map(v => window.ngx.format(v, arguments[1]))", numbers, spec)
        assert got == [format(int(v) if spec.endswith("d") else float(v), spec) for v in numbers], spec


def test_the_previous_state_stays_as_a_ghost(browser, bench):
    explorer, (slider, *_) = browser.find(".ngx")[0], browser.find(".ngx-row input")
    data = "return document.querySelector('.ngx-plot').data.map(t => [t.meta || '', t.x && [...t.x].join()])"
    browser.find(".ngx-reset", explorer)[0].click()
    browser.settled()
    before = [x for _, x in browser.js(data)]
    slider.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)  # a run of keys is one move
    browser.settled()
    (_, now), _surface, _fixed, (mark, then) = browser.js(data)
    assert mark == "ghost" and then == before[0] != now
    assert browser.find(".ngx-ghost", explorer)[0].text.startswith("dotted: n = 2")
    browser.find(".ngx-reset", explorer)[0].click()
    browser.settled()
    assert [mark for mark, _ in browser.js(data)] == ["", "", ""] and not browser.find(".ngx-ghost", explorer)[0].text


def test_a_figure_can_be_saved_as_a_file(browser, bench, tmp_path):
    browser.cdp("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    for form, start in (("png", b"\x89PNG"), ("svg", b"<svg")):
        browser.find(f".ngx-save [data-format={form}]")[2].click()  # the parabola
        end = time.monotonic() + 20
        while not (found := list(tmp_path.glob(f"*.{form}"))):
            assert time.monotonic() < end, f"no {form} arrived"
            time.sleep(0.1)
        time.sleep(0.2)
        assert found[0].read_bytes().startswith(start)
    assert "a parabola" in found[0].read_text()  # with its caption


def test_a_swipe_over_a_scene_scrolls_the_page_and_one_to_the_side_turns_the_scene(browser, bench):
    """With the browser's own touch events: a finger that moves 150 pixels up moves the page."""
    url = browser.driver.current_url.split("#")[0]
    browser.phone()
    browser.cdp("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=1)
    try:
        browser.open(url)
        scene = browser.find(".ngx-plot")[0]
        browser.js("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", scene)
        browser.settled()
        middle = "const r = arguments[0].getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]"
        where, looked = browser.js("return scrollY"), browser.drawing(browser.find(".ngx")[0])

        def swipe(dx: int, dy: int) -> None:
            x, y = browser.js(middle, scene)
            browser.cdp("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
            for i in range(1, 11):
                points = [{"x": x + dx * i / 10, "y": y + dy * i / 10}]
                browser.cdp("Input.dispatchTouchEvent", type="touchMove", touchPoints=points)
                time.sleep(0.02)
            browser.cdp("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
            time.sleep(0.5)

        swipe(5, -150)
        scrolled = browser.js("return scrollY") - where
        assert scrolled > 100 and browser.drawing(browser.find(".ngx")[0]) == looked, scrolled
        browser.js("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", scene)
        browser.settled()
        where = browser.js("return scrollY")
        swipe(100, 20)
        assert browser.drawing(browser.find(".ngx")[0]) != looked and browser.js("return scrollY") == where
        assert browser.errors() == []
    finally:
        browser.cdp("Emulation.setTouchEmulationEnabled", enabled=False)
        browser.desktop()
