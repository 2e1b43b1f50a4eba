"""Do a symbol, its slider and its lines of code highlight one another, under a mouse, a finger and the keyboard?"""

import pytest
import test_browser
from selenium.webdriver import ActionChains, Keys

pytestmark = pytest.mark.browser
browser, site, address = test_browser.browser, test_browser.site, test_browser.address
COMPLETE = {  # page -> symbols with all three: an equation, a slider, a line of code
    "01_hypersphere": {"α"}, "02_scaling": {"s_qk"}, "03_lgp": {"q"}, "04_log_decay": {"ρ", "r"},
    "05_gated_adamw": {"a", "ε_gate", "ε_num"}, "06_geometry": {"θ_max"}, "07_spikes_and_silence": {"R", "b", "τ_v", "λ_noise"},
    "08_mamba2": {"A", "s_mamba", "Δ"}, "08_experts": {"k"}, "12_your_own_trainer": {"a", "ε_gate"},
}  # fmt: skip
PLACES = {"equation": "div.math", "slider": ".ngx-row", "code": "div.highlight .ngs-line"}
READY = "return document.readyState === 'complete' && !!document.querySelector('.ngs-tip')"
LIT = """const on = [...document.querySelectorAll('.ngs-on')];
    return Object.fromEntries(Object.entries(arguments[0]).map(([kind, css]) =>
        [kind, on.filter(e => e.closest(css)).length]))"""
FOUND = """const found = {};
    for (const [kind, css] of Object.entries(arguments[0]))
      for (const e of document.querySelectorAll('[data-means]'))
        if (e.closest(css)) for (const key of e.dataset.means.split(' ')) (found[key] ||= {})[kind] = true;
    return Object.entries(found).filter(([, kinds]) => Object.keys(kinds).length === 3).map(([key]) => key)"""


def first(browser, kind: str, key: str):
    found = browser.find(f'{PLACES[kind]} [data-means~="{key}"], {PLACES[kind]}[data-means~="{key}"]')
    browser.js("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", found[0])
    return found[0]


@pytest.mark.parametrize("name", COMPLETE)
def test_symbols_of_a_chapter_have_all_three_places(browser, site, name):
    browser.desktop()
    browser.driver.get((site / f"{name}.html").as_uri())
    browser.wait(READY, 30)
    assert COMPLETE[name] <= set(browser.js(FOUND, PLACES)) and browser.errors() == []


@pytest.mark.parametrize("way", ["http", "file"])
def test_a_pointer_over_one_place_highlights_the_other_two(browser, site, address, way):
    browser.desktop()
    browser.driver.get(f"{address}/05_gated_adamw.html" if way == "http" else (site / "05_gated_adamw.html").as_uri())
    browser.wait(READY, 30)
    for kind in PLACES:
        ActionChains(browser.driver).move_to_element(first(browser, kind, "ε_gate")).perform()
        lit = browser.js(LIT, PLACES)
        assert all(lit.values()), (kind, lit)
        browser.driver.find_element("tag name", "body").send_keys(Keys.ESCAPE)
        assert not any(browser.js(LIT, PLACES).values())
    ActionChains(browser.driver).move_to_element(first(browser, "equation", "ε_gate")).perform()
    slider, code = browser.find(".ngs-tip button")
    assert slider.text == "slider, Figure 5.2" and code.text.startswith("gate, line")
    slider.click()  # it leads there
    box = "const r = document.querySelector('.ngx-row.ngs-on').getBoundingClientRect();"
    browser.wait(f"{box} return r.top > 0 && r.bottom < innerHeight", 5)
    assert browser.errors() == []


def test_the_keyboard_and_a_finger_reach_it_too(browser, site):
    browser.phone()
    browser.cdp("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=1)
    try:
        browser.open((site / "05_gated_adamw.html").as_uri())
        first(browser, "slider", "ε_gate").find_element("css selector", "input").send_keys(Keys.ARROW_RIGHT)
        assert all(browser.js(LIT, PLACES).values()) and not browser.find(".ngs-tip")[0].is_displayed()
        symbol = first(browser, "equation", "ε_gate")
        x, y = browser.js(
            "const r = arguments[0].getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]", symbol
        )
        browser.cdp("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        browser.cdp("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        browser.wait("return !document.querySelector('.ngs-tip').hidden", 3)
        assert browser.js(test_browser.SPILLED) == []
        right = browser.js("return document.querySelector('.ngs-tip').getBoundingClientRect().right")
        assert right <= 390 and browser.errors() == []
    finally:
        browser.cdp("Emulation.setTouchEmulationEnabled", enabled=False)
        browser.desktop()
