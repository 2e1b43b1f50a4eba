"""Are the first pictures, the map of the book, the stated times and the explained symbols what the chapters say today?"""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason='the figures need plotly: pip install "ngpt-core[notebook]"')

from ngpt_book import reading
from ngpt_book.figures import openings
from ngpt_book.sphinx.meanings import SYMBOLS, meanings

BOOK = Path(__file__).parent.parent / "book"


def texts(name: str) -> list[str]:
    cells = json.loads((BOOK / f"{name}.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]


FIRST = {name: texts(name)[0] for name in ("intro", *reading.CHAPTERS)}
STATED = {name: re.search(r"Short path: (\d+) minutes.* Everything: (\d+) minutes", text) for name, text in FIRST.items()}


@pytest.mark.parametrize("name", openings.PICTURES)
def test_a_stored_picture_is_the_drawn_one(name):
    stored, drawn = (openings.ASSETS / f"{name}.svg").read_text(encoding="utf-8"), openings.drawn(name)
    number = re.compile(r"-?\d+\.?\d*")
    assert number.sub("#", stored) == number.sub("#", drawn), "draw it again: python -m ngpt_book.figures.openings"
    ours, theirs = ([float(x) for x in number.findall(text)] for text in (stored, drawn))
    assert ours == pytest.approx(theirs, abs=0.2)  # processors differ in the last digit
    assert any(f"_assets/{name}.svg" in text for text in FIRST.values())
    assert min(float(size) for size in re.findall(r'<text[^>]*font-size="(\d+)', drawn)) >= 15


@pytest.mark.parametrize("name", [name for name, found in STATED.items() if found])
def test_the_times_at_the_top_are_those_of_the_text(name):
    found, counted = STATED[name], reading.minutes(BOOK / f"{name}.ipynb")
    assert int(found[1]) == pytest.approx(counted.short, abs=2), counted
    assert int(found[2]) == pytest.approx(counted.whole, abs=4), counted


def test_the_map_has_every_chapter_below_those_that_it_builds_on_and_each_links_to_them():
    listed = list(reading.numbers())
    assert sorted(reading.CHAPTERS) == sorted(listed)
    for name, (_, needs, (row, _)) in reading.CHAPTERS.items():
        text = "\n".join(texts(name))
        for other in needs:
            assert reading.CHAPTERS[other][2][0] < row
        linked = any(f"<{other}>" in text or f"({other}." in text for other in reading.CHAPTERS if other < name)
        assert linked or not needs, f"{name} names no chapter before it"
    assert len({place for _, _, place in reading.CHAPTERS.values()}) == len(listed)


def test_words_are_counted_without_markup():
    assert reading.words("A *state* $h_f$ of [length one](x.md).") == 6
    formula = "```{math}\n:label: x\na b c\n```"
    assert reading.words("See {doc}`chapter 1 <01_hypersphere>`.\n\n" + formula + "\n\n| a | b |\n|---|---|") == 5


def test_every_formula_of_the_front_page_is_explained():
    formulas = re.findall(r"\$([^$]+)\$", "\n".join(texts("intro")))
    assert len(formulas) > 20
    for tex in formulas:
        found, rest = meanings(tex)
        assert not rest and all(words for _, words in found), (tex, rest)
    assert meanings("q = 1")[0] != meanings("q, k")[0][:1] and meanings(r"\zeta")[1] == r"\zeta"
    assert all(words or symbol == "q" for symbol, words in SYMBOLS.values())
