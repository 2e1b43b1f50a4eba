"""Does the front page explain a symbol where a reader points at it, and does its map lead to the chapters?"""

import pytest
import test_browser
from selenium.webdriver import ActionChains

from ngpt_book import reading

pytestmark = pytest.mark.browser
address, browser, site = test_browser.address, test_browser.browser, test_browser.site

SAID = """const after = getComputedStyle(arguments[0], '::after'), box = arguments[0].getBoundingClientRect();
    return after.content === 'none' ? null : {words: after.content, top: parseFloat(after.top), under: box.bottom,
      bottom: innerHeight - parseFloat(after.bottom), width: parseFloat(after.width), wide: innerWidth};"""


@pytest.mark.parametrize("place", ["desktop", "phone"])
def test_a_symbol_is_explained(browser, address, place):
    (browser.desktop if place == "desktop" else browser.phone)()
    browser.open(f"{address}/intro.html")
    symbols = browser.find("table .symbol")
    assert len(symbols) > 12 and all(s.get_attribute("data-says") for s in symbols)
    symbol = next(s for s in symbols if s.get_attribute("data-says").startswith("τ_v"))
    assert browser.js(SAID, symbol) is None
    browser.js("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", symbol)
    if place == "desktop":
        ActionChains(browser.driver).move_to_element(symbol).perform()
        seen = browser.wait(SAID, 5, symbol)
        assert 0 <= seen["top"] - seen["under"] < 30  # right below the formula
    else:
        ActionChains(browser.driver).click(symbol).perform()  # a tap gives it the focus
        seen = browser.wait(SAID, 5, symbol)
        assert seen["bottom"] > browser.js("return innerHeight") - 40  # at the foot of the screen
    assert "threshold" in seen["words"] and seen["width"] < seen["wide"]


def test_every_place_on_the_map_leads_to_a_page(browser, address, site):
    browser.desktop()
    browser.open(f"{address}/intro.html")
    links = browser.js("return [...document.querySelectorAll('.book-map a')].map(a => a.getAttribute('href'))")
    assert sorted(links) == sorted(f"{name}.html" for name in reading.CHAPTERS)
    assert all((site / link).exists() for link in links)
    inside = browser.js("""return [...document.querySelectorAll('.book-map a')].every(a => {
        const box = a.querySelector('rect').getBoundingClientRect();
        return [...a.querySelectorAll('text')].every(t => t.getBoundingClientRect().width < box.width); })""")
    assert inside
