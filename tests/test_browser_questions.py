"""Does every question of the book answer back, right and wrong, on a desktop from a server and on a phone from the disk?

The chapters are the built pages, one load each. The phone reads one page with all questions, made from the stored outputs.
"""

import json
import random
import re
import time
from pathlib import Path

import pytest
import test_browser
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.actions.action_builder import ActionBuilder

from ngpt_book import exercises
from ngpt_book.questions import page
from ngpt_book.questions.expression import FUNCTIONS, evaluate

pytestmark = pytest.mark.browser
browser, site, address = test_browser.browser, test_browser.site, test_browser.address
BOOK = Path(__file__).parents[1] / "book"


def stored(name: str) -> list[str]:
    """The questions of a notebook as HTML, from its stored outputs."""
    cells = json.loads((BOOK / f"{name}.ipynb").read_text())["cells"]
    outputs = [o for cell in cells for o in cell.get("outputs", [])]
    texts = ["".join(o.get("data", {}).get("text/html", "")) for o in outputs]
    return [text for text in texts if 'class="ngq"' in text]


CHAPTERS = [path.stem for path in sorted(BOOK.glob("*.ipynb"))]
NAMES = {name: [re.search(r'id="ngq-([a-z0-9-]+)"', text)[1] for text in stored(name)] for name in CHAPTERS}
OPEN = "return document.querySelectorAll('.ngq[data-state=open]').length === arguments[0]"
PLOT = """const pad = arguments[0], r = pad.getBoundingClientRect();
    const side = pad.dataset.margin * r.width / pad.getAttribute('width');
    return [r.left + side, r.top + side, r.width - 2 * side, r.height - 2 * side];"""


class Asked:
    """One question on the page, and what a reader does with it."""

    def __init__(self, browser, name: str):
        self.browser, self.name = browser, name
        (self.box,) = browser.find(f"#ngq-{name}")
        self.spec = json.loads(browser.js("return arguments[0].querySelector('.ngq-data').textContent", self.box))
        browser.js("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", self.box)

    def all(self, css: str) -> list:
        return self.browser.find(css, self.box)

    def click(self, css: str) -> None:
        (button,) = self.all(css)
        self.browser.js("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", button)
        button.click()

    @property
    def state(self) -> tuple[str, str | None]:
        return self.box.get_attribute("data-state"), self.box.get_attribute("data-verdict")

    @property
    def verdict_text(self) -> str:
        return self.browser.js("return arguments[0].querySelector('.ngq-verdict').textContent", self.box)

    def shows(self, css: str) -> bool:
        return any(e.is_displayed() for e in self.all(css))

    def draw(self, heights: list[float]) -> None:
        """A curve by real pointer events, from left to right."""
        (pad,) = self.all(".ngq-pad")
        self.browser.js("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", pad)
        left, top, width, height = self.browser.js(PLOT, pad)
        n = len(heights) - 1
        actions = ActionBuilder(self.browser.driver, duration=0)
        for i, v in enumerate(heights):
            actions.pointer_action.move_to_location(round(left + width * i / n), round(top + height * (1 - v)))
            if i == 0:
                actions.pointer_action.pointer_down()
        actions.pointer_action.pointer_up()
        actions.perform()

    def fill(self, right: bool) -> None:
        """Put in an answer, the right one or a wrong one."""
        spec = self.spec
        if spec["kind"] == "choice":
            inputs = self.all(".ngq-option input")
            chosen = [i for i, holds in enumerate(spec["right"]) if holds == right][: None if spec["many"] else 1]
            for i in chosen:
                inputs[i].click()
        elif spec["kind"] == "curve":
            self.draw(spec["truth"] if right else [0.95 if v < 0.5 else 0.05 for v in spec["truth"]])
        else:
            good = repr(spec["truth"]) if spec["kind"] == "number" else spec["answer"]
            bad = repr(spec["truth"] * 40 + 3) if spec["kind"] == "number" else f"({good}) * 3 + 1"
            (line,) = self.all(".ngq-line input")
            line.clear()
            line.send_keys(good if right else bad)

    def answer(self, right: bool) -> None:
        self.fill(right)
        self.click(".ngq-commit")


def ask_wrong_and_right(browser, name: str) -> None:
    question = Asked(browser, name)
    hidden = ".ngq-why" if question.spec["kind"] == "choice" else ".ngq-answer"
    assert question.state == ("open", None) and not question.shows(hidden), name
    question.click(".ngq-commit")  # nothing was answered
    assert question.state[0] == "open" and re.search(r"first\.$", question.verdict_text), f"{name}: {question.verdict_text}"

    question.answer(right=False)
    if question.spec["hints"]:  # an exercise hints before it tells
        assert question.state[0] == "open" and "Not yet." in question.verdict_text and "Hint" in question.verdict_text, name
        assert not question.shows(hidden)
    else:
        assert question.state == ("answered", "wrong") and "Not so." in question.verdict_text and question.shows(hidden), name
        assert len(question.verdict_text) > len("Not so. ") + 10
        question.click(".ngq-again")
    assert question.state[0] == "open"

    question.answer(right=True)
    assert question.state == ("answered", "right") and question.verdict_text.startswith("Right."), (
        f"{name}: {question.verdict_text}"
    )
    assert question.shows(hidden) and not question.shows(".ngq-commit, .ngq-show")
    kept = json.loads(browser.js(f"return localStorage.getItem('ngq.{name}')"))
    assert kept["verdict"] == "right" and kept["answer"]


@pytest.mark.parametrize("chapter", [name for name in CHAPTERS if NAMES[name]])
def test_every_question_of_a_chapter_answers_back(browser, address, chapter):
    browser.desktop()
    browser.open(f"{address}/{chapter}.html")  # every figure is drawn: nothing moves under the pointer
    browser.wait(OPEN, 30, len(NAMES[chapter]))
    for name in NAMES[chapter]:
        ask_wrong_and_right(browser, name)
    for name in NAMES[chapter]:
        Asked(browser, name).click(".ngq-again")
    assert browser.js("return Object.keys(localStorage).filter(k => k.startsWith('ngq.'))") == []
    for note in browser.find(".ngq-python"):  # an exercise whose answer is Python says so, and offers two ways to run it
        colab, download = note.find_elements("css selector", "a")
        assert f"{chapter}.ipynb" in colab.get_attribute("href")
        assert (download.get_attribute("href"), download.get_attribute("download")) == (
            f"{address}/_sources/{chapter}.ipynb",
            "",
        )
    assert browser.errors() == [] and [url for url in browser.requests() if not url.startswith(address)] == []


@pytest.mark.parametrize("chapter", [name for name in CHAPTERS if name[0].isdigit()])
def test_the_notebook_that_a_python_exercise_offers_is_there_and_no_stub_is_left(site, chapter):
    text, notebook = (site / f"{chapter}.html").read_text(), site / "_sources" / f"{chapter}.ipynb"
    assert (exercises.UNWRITTEN in notebook.read_text()) == ("ngq-python" in text)  # where an exercise asks for Python
    assert exercises.UNWRITTEN not in text


def test_most_chapters_ask_for_some_python(site):
    asking = [name for name in CHAPTERS if name[0].isdigit() and "ngq-python" in (site / f"{name}.html").read_text()]
    assert len(asking) >= 12


# ---- all questions on one page of our own, on a phone, from the disk ---------------------------------------------------
EVERY = [name for names in NAMES.values() for name in names]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("questions")
    (folder / "questions.js").write_text(page.script(book=True))
    (folder / "questions.css").write_text(page.style())
    head = '<!doctype html><html data-theme="light"><meta charset="utf-8"><link rel="icon" href="data:,"><title>All</title>'
    head += '<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="questions.css">'
    body = "".join(text for name in CHAPTERS for text in stored(name))
    (folder / "all.html").write_text(f'{head}<body>{body}<script src="questions.js" defer></script>')
    return (folder / "all.html").as_uri()


@pytest.fixture
def phone(browser, whole):
    browser.phone()
    browser.driver.get(whole)
    browser.js("localStorage.clear()")
    browser.driver.refresh()
    browser.wait(OPEN, 10, len(EVERY))
    yield browser
    browser.js("localStorage.clear()")
    browser.desktop()


def test_every_question_answers_back_on_a_phone_from_the_disk(phone):
    for name in EVERY:
        ask_wrong_and_right(phone, name)
    wide = "return [...document.querySelectorAll('.ngq, .ngq *')].filter(e => e.getBoundingClientRect().right > 390.5).length"
    assert phone.js("return document.documentElement.scrollWidth") <= 390 and phone.js(wide) == 0
    phone.driver.refresh()  # the answers are still there
    assert phone.js("return document.querySelectorAll('.ngq[data-state=answered][data-verdict=right]').length") == len(EVERY)
    for name in EVERY:
        assert Asked(phone, name).verdict_text == ""  # and nothing is announced again
    assert phone.errors() == []


def test_a_finger_scrolls_over_a_plot_until_it_is_tapped_and_then_draws(phone):
    name = next(n for n in EVERY if Asked(phone, n).spec["kind"] == "curve")
    phone.cdp("Emulation.setTouchEmulationEnabled", enabled=True)
    try:
        phone.driver.refresh()  # (pointer: coarse) is read at the start
        phone.wait(OPEN, 10, len(EVERY))
        question = Asked(phone, name)
        (pad,) = question.all(".ngq-pad")
        box = phone.js(PLOT, pad)

        def touch(kind: str, u: float = 0.0, v: float = 0.0) -> None:
            points = [] if kind == "touchEnd" else [{"x": box[0] + u * box[2], "y": box[1] + (1 - v) * box[3]}]
            phone.cdp("Input.dispatchTouchEvent", type=kind, touchPoints=points)

        def swipe(places) -> None:
            for i, (u, v) in enumerate(places):
                touch("touchMove" if i else "touchStart", u, v)
            touch("touchEnd")

        path = "return arguments[0].querySelector('.ngq-mine').getAttribute('d')"
        action, before = "return getComputedStyle(arguments[0]).touchAction", phone.js("return scrollY")
        swipe([(0.5, 0.2), (0.5, 0.5), (0.5, 0.9)])
        phone.wait("return scrollY > arguments[0] + 20", 10, before)  # the page moved, and nothing was drawn
        still = "const y = scrollY, was = window.ngqY; window.ngqY = y; return y === was"
        while not phone.js(still):
            time.sleep(0.2)
        assert phone.js(path, question.box) == "" and phone.js(action, pad) == "auto"
        assert "armed" not in phone.js("return {...arguments[0].dataset}", question.box)
        phone.js("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", question.box)
        box = phone.js(PLOT, pad)
        assert question.all(".ngq-invite")[0].text == "Tap, then draw"
        swipe([(0.5, 0.5)])
        phone.wait("return 'armed' in arguments[0].dataset", 10, question.box)
        assert phone.js(action, pad) == "none"
        phone.settled()
        n = len(question.spec["truth"]) - 1
        swipe([(i / n, v) for i, v in enumerate(question.spec["truth"])])
        assert len(phone.js(path, question.box)) > 300
        question.click(".ngq-commit")
        assert question.state == ("answered", "right")
    finally:
        phone.cdp("Emulation.setTouchEmulationEnabled", enabled=False)


def test_it_can_be_shown_anyway_and_hints_come_one_at_a_time(phone):
    for name in EVERY:
        question = Asked(phone, name)
        hints = question.spec["hints"]
        for k, words in enumerate(hints):
            question.click(".ngq-hint")
            assert question.verdict_text.endswith(re.sub("<.*?>", "", words)) and (
                len(hints) == 1 or f"{k + 1} of {len(hints)}" in question.verdict_text
            )
        if hints:
            question.click(".ngq-hint")
            assert "no more hints" in question.verdict_text and question.state[0] == "open"
        question.click(".ngq-show")
        assert question.state == ("answered", "shown") and question.shows(".ngq-why, .ngq-answer")
        if question.spec["kind"] == "choice":
            assert all(why.is_displayed() for why in question.all(".ngq-why"))
        if question.spec["kind"] == "curve":
            assert question.shows("path.ngq-true")


def test_by_keyboard_only_with_names_for_screen_readers(phone):
    for name in EVERY:
        question = Asked(phone, name)
        kind = question.spec["kind"]
        assert question.all("fieldset")[0].accessible_name.strip() and question.all(
            ".ngq-verdict[aria-live=polite][role=status]"
        )
        if kind == "curve":
            question.click(".ngq-handles summary")
            for k, handle in enumerate(question.all(".ngq-handles input")):
                assert handle.accessible_name.strip() and handle.aria_role == "slider"
                handle.send_keys(Keys.END if k % 2 else Keys.HOME)
                assert handle.get_attribute("aria-valuetext")
        elif kind == "choice":
            (first, *_) = inputs = question.all(".ngq-option input")
            assert all(i.accessible_name.strip() for i in inputs)
            first.send_keys(Keys.SPACE)
        else:
            (line,) = question.all(".ngq-line input")
            assert line.accessible_name.startswith("Your")
            line.send_keys("17", Keys.ENTER)
        if kind in ("curve", "choice"):
            ActionChains(phone.driver).send_keys(Keys.TAB).perform()
            question.all(".ngq-commit")[0].send_keys(Keys.ENTER)
        assert question.verdict_text, name  # something was judged
        assert question.state[0] == "answered" or question.spec["hints"]


def test_on_paper_and_without_scripts_the_answers_are_there(phone, whole):
    answers = """return [...document.querySelectorAll('.ngq')].map(e =>
        [...e.querySelectorAll('.ngq-why, .ngq-answer p, path.ngq-true')].filter(x => x.getClientRects().length).length)"""
    assert set(phone.js(answers)) == {0}
    phone.cdp("Emulation.setEmulatedMedia", media="print")
    assert min(phone.js(answers)) > 0 and not any(b.is_displayed() for b in phone.find(".ngq button"))
    phone.cdp("Emulation.setEmulatedMedia", media="")
    phone.cdp("Emulation.setScriptExecutionDisabled", value=True)
    try:
        phone.driver.get(whole)
        shown = [
            sum(e.is_displayed() for e in phone.find(".ngq-why, .ngq-answer p, path.ngq-true", box))
            for box in phone.find(".ngq")
        ]
        assert len(shown) == len(EVERY) and min(shown) > 0 and not any(b.is_displayed() for b in phone.find(".ngq button"))
    finally:
        phone.cdp("Emulation.setScriptExecutionDisabled", value=False)
        phone.driver.get(whole)


# ---- the checker -----------------------------------------------------------------------------------------------------
def random_formula(draw: random.Random, depth: int = 0) -> str:
    kind = draw.choice(["number", "symbol", "sum", "product", "power", "function", "minus", "group"][: 2 if depth > 4 else 8])

    def inner() -> str:
        return random_formula(draw, depth + 1)

    return {
        "number": lambda: draw.choice(["2", "0.5", "1e-3", ".25", "3.", "12"]),
        "symbol": lambda: draw.choice(["x", "beta2", "pi", "e"]),
        "sum": lambda: f"{inner()} {draw.choice('+-')} {inner()}",
        "product": lambda: f"{inner()}{draw.choice('*/')}{inner()}",
        "power": lambda: f"({inner()}){draw.choice(['^', '**'])}{draw.choice(['2', '-1', '0.5', '(1/3)'])}",
        "function": lambda: f"{draw.choice([*FUNCTIONS])}({inner()})",
        "minus": lambda: f"-{inner()}",
        "group": lambda: f"({inner()})",
    }[kind]()


def test_the_page_computes_a_formula_as_its_twin_in_python_does(phone):
    seed = random.randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    texts = [text for text in (random_formula(draw) for _ in range(600)) if len(text) <= 200]
    point = {"x": 0.7, "beta2": 2.5}
    values = "return arguments[0].map(t => window.ngq.formula(t, ['x', 'beta2'])(arguments[1]))"
    values += ".map(v => Number.isFinite(v) ? v : null)"
    finite = 0
    for text, got in zip(texts, phone.js(values, texts, point), strict=True):
        want = evaluate(text, point)
        if got is None or want != want:  # a value that Python cannot hold is infinite or NaN in the page
            assert got is None or abs(got) > 1e300 or want != want, text
            continue
        finite += 1
        assert got == pytest.approx(want, rel=1e-9, abs=1e-12), text
    assert finite > 300


@pytest.mark.parametrize(
    "text, words",
    [
        ("sqrt(x", "“)” is missing"),
        ("2 x", "operator is missing"),
        ("x)", "without its “(”"),
        ("y + 1", "“y” is not a symbol here; these are: x."),
        ("x +", "Something is missing at the end"),
        ("sin x", "parentheses"),
        ("alert(1)", "“alert” is not a symbol"),
        ("x; 1", "“;” does not belong"),
        ("window[0]", "does not belong"),
        ("constructor", "is not a symbol"),
        ("", "Type an answer"),
        ("(" * 60 + "x" + ")" * 60, "nested too deeply"),
        ("1+" * 150 + "1", "at most 200"),
    ],
)
def test_input_that_cannot_be_parsed_is_explained(phone, text, words):
    message = phone.js("try { window.ngq.formula(arguments[0], ['x']); return '' } catch (e) { return e.message }", text)
    assert words in message


@pytest.mark.parametrize(
    "text, value",
    [("1e-3", 1e-3), ("0,125", 0.125), ("1,5", 1.5), ("1,000", 1000), ("3/4", 0.75), ("12 %", 12), ("13.5°", 13.5),
     ("−2", -2), ("2·10^3", 2000), ("√16".replace("16", "(16)"), 4), ("5 B", 5)],
)  # fmt: skip
def test_a_number_may_be_typed_in_many_ways(phone, text, value):
    assert phone.js("return window.ngq.numberOf(arguments[0], 'B')", text) == pytest.approx(value)


def test_what_a_reader_types_is_never_html(phone):
    name = next(n for n in EVERY if Asked(phone, n).spec["kind"] == "expression")
    question = Asked(phone, name)
    question.all(".ngq-line input")[0].send_keys("<img src=x onerror=window.hacked=1>")
    question.click(".ngq-commit")
    assert "does not belong" in question.verdict_text and not question.all("img") and phone.js("return window.hacked") is None
