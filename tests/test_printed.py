"""Does the book print: one PDF with links and page numbers, and a card whose numbers are the package's?"""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason='needs the book: pip install "ngpt-core[book]"')
pytest.importorskip("bs4")
import pypdf
import yaml

from ngpt_book.printed import card, chromium, whole
from ngpt_core.recipe import TABLE

PAGE = """<html><head><link rel="stylesheet" href="_static/book.css?v=1"></head><body><nav>not the article</nav>
<article class="bd-article"><section id="top"><h1>{title}<a class="headerlink" href="#top">#</a></h1>
<p id="here">See <a href="#here">here</a>, <a href="b.html#there">there</a>, <a href="b.html">all of b</a>,
<a href="c.html#x">another site's page</a> and <a href="_sources/b.ipynb">the notebook</a>.</p>
<details class="hide"><summary>Show code</summary><pre>hidden = 1</pre></details>
<details class="sd-dropdown"><summary>Why?</summary><p>folded text of {title}</p></details>
<svg><clipPath id="cut"><path d="M0 0H9V9Z"/></clipPath><g clip-path="url(#cut)"></g></svg>
<label for="i">a</label><input id="i" type="radio"><button>Go</button><script>let gone</script>
</section></article></body></html>"""


def article(title="A", name="a"):
    return whole.article(PAGE.format(title=title), name, {"a", "b"})


def test_ids_of_a_page_begin_with_its_name_and_links_stay_inside_the_book():
    found = article()
    assert [node["href"] for node in found.select("p a")] == ["#a--here", "#b--there", "#b", "c.html#x", "_sources/b.ipynb"]
    assert {node["id"] for node in found.select("[id]")} == {"a--top", "a--here", "a--cut"} and found["id"] == "a"
    assert found.select_one("g")["clip-path"] == "url(#a--cut)"


def test_what_only_a_screen_has_is_left_out_and_folds_are_open():
    found, text = article(), article().get_text()
    assert "hidden = 1" not in text and "let gone" not in text and "Go" not in text and "not the article" not in text
    assert found.select_one("details").has_attr("open") and "folded text of A" in text
    assert not found.select("input, button, script") and "○" in text
    assert whole.heading(found) == "A"


def test_a_page_without_an_article_is_refused():
    with pytest.raises(ValueError, match=r"a\.html has no article. Build the book first"):
        whole.article("<html><body></body></html>", "a", {"a"})


def test_every_page_of_the_book_is_printed_once():
    parts = whole.order(yaml.safe_load((whole.BOOK / "_toc.yml").read_text(encoding="utf-8")))
    names = [name for _, part in parts for name in part]
    assert len(set(names)) == len(names) and names[0] == "intro"
    assert set(names) == {path.stem for path in whole.BOOK.iterdir() if path.suffix in (".md", ".ipynb")}


def test_a_site_that_is_not_built_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"intro\.html is missing. Build it first: make book"):
        whole.make(tmp_path, tmp_path / "x.pdf")


def test_without_chromium_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(chromium.shutil, "which", lambda name: None)
    with pytest.raises(chromium.NotFound, match="apt-get install chromium"):
        chromium.pdf(tmp_path / "a.html", tmp_path / "a.pdf")


@pytest.mark.browser
def test_a_small_book_becomes_a_pdf_with_an_outline_and_the_pages_of_its_chapters(tmp_path):
    (tmp_path / "_static").mkdir()
    (tmp_path / "_static" / "book.css").write_text("")
    long = "<p>line</p>" * 120
    for name, title in (("a", "First"), ("b", "Second: a “quoted” title"), ("d", "Third")):
        page = PAGE.format(title=title).replace("</section>", f'<h2 id="there">Below</h2>{long}</section>')
        (tmp_path / f"{name}.html").write_text(page, encoding="utf-8")
    toc = tmp_path / "toc.yml"
    toc.write_text("root: a\nparts:\n  - caption: Chapters\n    chapters: [{file: b, sections: [{file: d}]}]\n")
    target = tmp_path / "book.pdf"
    pages = whole.make(tmp_path, target, toc)
    reader = pypdf.PdfReader(target)
    texts = [page.extract_text() for page in reader.pages]
    numbers = whole.page_numbers(target, ["a", "b", "d"])
    assert pages == len(texts) and numbers["a"] == 3 and numbers["a"] < numbers["b"] < numbers["d"]
    for name, title in (("a", "First"), ("b", "Second"), ("d", "Third")):
        assert title in texts[numbers[name] - 1]
        assert re.search(rf"{title}[^\n]*\s*{numbers[name]}\b", texts[1]), texts[1]  # the list of contents
    assert "folded text of First" in "".join(texts) and "hidden = 1" not in "".join(texts)
    outline = " ".join(str(getattr(entry, "title", entry)) for entry in reader.outline)
    assert "Contents" in outline and "First" in outline and "Third" in outline
    assert not (tmp_path / "whole-book.html").exists()


def test_each_parameter_of_ngpt_stands_in_one_row_of_the_card(monkeypatch):
    assert len(card.lines()) == len(card.ROWS)
    monkeypatch.setitem(TABLE, "Attention.new_proj", TABLE["Attention.q_proj"])
    with pytest.raises(ValueError, match=r"Attention\.new_proj"):
        card.lines()
    monkeypatch.delitem(TABLE, "Attention.new_proj")
    monkeypatch.setitem(TABLE, "Experts.down", replace(TABLE["Experts.down"], warmup=True))
    with pytest.raises(ValueError, match="experts, routed and shared"):
        card.lines()


def test_the_card_that_was_printed_says_what_the_package_does():
    stored = (card.ASSETS / "recipe_card.txt").read_text(encoding="utf-8")
    assert card.words() == stored, "the recipe's numbers or the card changed: cd book && python -m ngpt_book.printed.card"
    for number in ("0.975", "1.2e-3", "0.12", "0.05", "500"):
        assert number in stored
    reader = pypdf.PdfReader(card.ASSETS / "recipe_card.pdf")
    assert len(reader.pages) == 1 and "nGPT training recipe" in reader.pages[0].extract_text()
    assert (card.ASSETS / "recipe_card.png").stat().st_size < 600_000


def test_make_knows_how_to_print():
    root = Path(__file__).parents[1]
    shown = subprocess.run(["make", "-n", "pdf"], cwd=root, capture_output=True, text=True).stdout
    assert "ngpt_book.printed.whole" in shown and "training-ngpt.pdf" in shown
