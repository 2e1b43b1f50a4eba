"""What does a shared page show: a title, a description, and a picture wherever the site's address is known?"""

import struct
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason='needs the book: pip install "ngpt-core[book]"')
from docutils import nodes, utils

from ngpt_book.motion import card
from ngpt_book.sphinx import social

ROOT = Path(__file__).parents[1]


def document(*paragraphs: str) -> nodes.document:
    found = utils.new_document("page")
    found += [nodes.paragraph("", text) for text in paragraphs]
    return found


def test_the_address_of_the_site():
    assert social.base_url("https://book.example.org/x", "https://github.com/o/n") == "https://book.example.org/x/"
    assert social.base_url("", "https://github.com/Owner/name") == "https://owner.github.io/name/"
    assert social.base_url("", "https://github.com/owner/owner.github.io") == "https://owner.github.io/"
    for unknown in ("https://example.invalid/ngpt-core", "https://git.example.org/owner/name"):
        assert social.base_url("", unknown) == ""


def test_the_description_is_the_first_real_paragraph_cut_after_a_word():
    first = "Where we stand. " + "The rows of every matrix are points on a sphere. " * 8
    found = social.description(document("Short.", first))
    assert found.startswith("The rows of every") and found.endswith("…") and 150 < len(found) <= social.LONGEST
    assert first.removeprefix("Where we stand. ").startswith(found[:-1] + " ")  # whole words
    assert social.description(document("One line that is long enough to describe a page.")) == (
        "One line that is long enough to describe a page."
    )
    assert social.description(document("Short.")) == ""
    cited = "Everything else is in the paper [1], as this long sentence says."
    assert social.description(document(cited)) == cited.replace(" [1]", "")


def test_tags_are_escaped_and_have_a_picture_only_with_a_full_address():
    with_base = social.tags('A "title"', "About <it> & more", "Book", "https://o.github.io/n/", "03_lgp")
    assert 'property="og:title" content="A &quot;title&quot;"' in with_base
    assert 'name="description" content="About &lt;it&gt; &amp; more"' in with_base
    assert 'property="og:image" content="https://o.github.io/n/_static/race.png"' in with_base
    assert 'property="og:url" content="https://o.github.io/n/03_lgp.html"' in with_base
    without = social.tags("T", "", "Book", "", "03_lgp")
    assert "og:image" not in without and "og:url" not in without and "description" not in without
    assert 'property="og:title" content="T"' in without


def test_the_card_is_a_small_png_of_the_promised_size():
    data = card.FILE.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) < card.LIMIT
    assert struct.unpack(">II", data[16:24]) == social.SIZE
    assert card.FILE.parent.name == "_assets" and social.CARD == f"_static/{card.FILE.name}"
    assert "book/_assets/race.png" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "GPT minus nGPT" in card.page() and card.TITLE in card.page()
