"""How does the book become one PDF?

    python -m ngpt_book.printed.whole _build/html _build/training-ngpt.pdf          (make pdf; needs Chromium)

The articles of the built pages, in the order of ``book/_toc.yml``, become one long page, which Chromium prints. What only a
screen has is left out: scripts, controls, the code behind figures. Explorers and animations show their stills, folded text is
open, links between pages lead to the place in the PDF. The list of contents needs the numbers of the printed pages, so the book
is printed twice.
"""

import argparse
import datetime
import html
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml
from bs4 import BeautifulSoup, Tag
from pypdf import PdfReader

import ngpt_core

from . import chromium

BOOK = Path(__file__).parents[2]
STYLE = Path(__file__).with_name("whole.css")
SHEET = re.compile(r'<link[^>]*href="(_static/[^"?]+\.css)[^"]*"[^>]*>')
# scripts, what hides the code of a figure, controls, and signs that mean something only on a screen
SCREEN = """script, style, noscript, details.hide, a.headerlink, .ngx-plot, .ngx-panel, .ngx-save, .ngm-controls,
    .ngm-narrow, .ngl-live, .ngq-handles, .ngq-pad, .ngq-buttons, .ngq-verdict, .ngq-invite, .ngq-mine, .ngq-python, button,
    template"""
REFERS = ("href", "xlink:href", "for", "aria-labelledby", "aria-describedby", "aria-controls")
URL = re.compile(r"url\(#([^)]+)\)")
TITLE, SUBTITLE = "Training nGPT", "Language models on the sphere: the recipe, to read and to run"


def order(toc: Mapping) -> list[tuple[str, list[str]]]:
    """The parts of the book, each with its pages: a caption, or "", and names in the order of reading.

    >>> order({"root": "intro", "parts": [{"caption": "Chapters", "chapters": [{"file": "a", "sections": [{"file": "b"}]}]}]})
    [('', ['intro']), ('Chapters', ['a', 'b'])]
    """

    def below(entries: list) -> list[str]:
        return [name for entry in entries for name in (entry["file"], *below(entry.get("sections", [])))]

    parts = [(part.get("caption", ""), below(part["chapters"])) for part in toc["parts"]]
    return [("", [toc["root"]]), *parts]


def article(page: str, name: str, pages: set[str]) -> Tag:
    """The article of one page as paper has it. Its ids begin with the page's name, so that no two pages share one."""
    found = BeautifulSoup(page, "html.parser").find("article", class_="bd-article")
    if not isinstance(found, Tag):
        raise ValueError(f"{name}.html has no article. Build the book first: make book")
    for node in found.select(SCREEN):
        node.decompose()
    for node in found.select("details"):
        node["open"] = ""
    for node in found.select("input"):  # a box to tick, or a line to write on
        node.replace_with("\N{WHITE CIRCLE} " if node.get("type") in ("radio", "checkbox") else "_" * 12)
    for node in found.find_all(True):
        for key, value in list(node.attrs.items()):
            if key == "id":
                node[key] = f"{name}--{value}"
            elif key in REFERS:
                node[key] = _target(value, name, pages) if key.endswith("href") else f"{name}--{value}"
            elif isinstance(value, str) and "url(#" in value:
                node[key] = URL.sub(rf"url(#{name}--\1)", value)
    found["id"] = name
    return found


def _target(address: str, name: str, pages: set[str]) -> str:
    """Where a link leads in the printed book: "#id" and "page.html#id" stay inside, others are as they were."""
    file, _, place = address.partition("#")
    page = file.removesuffix(".html") if file else name
    if page not in pages or (file and not file.endswith(".html")):
        return address
    return f"#{page}--{place}" if place else f"#{page}"


def heading(part: Tag) -> str:
    """The title of a chapter with its number, as text."""
    found = part.find("h1")
    return " ".join(found.get_text().split()) if found else ""


def contents(parts: list[tuple[str, list[str]]], articles: Mapping[str, Tag], numbers: Mapping[str, int]) -> str:
    rows = []
    for caption, names in parts:
        if caption:
            rows.append(f'<p class="part">{html.escape(caption)}</p>')
        for name in names:
            number = numbers.get(name, 0)
            rows.append(
                f'<p><a href="#{name}">{html.escape(heading(articles[name]))}</a><span></span><b>{number or ""}</b></p>'
            )
    return f'<nav class="contents"><h1>Contents</h1>{"".join(rows)}</nav>'


def document(site: Path, parts: list[tuple[str, list[str]]], numbers: Mapping[str, int]) -> str:
    """The whole book as one HTML page, to be stored beside the site's own pages."""
    names = [name for _, part in parts for name in part]
    pages = {name: (site / f"{name}.html").read_text(encoding="utf-8") for name in names}
    articles = {name: article(page, name, set(names)) for name, page in pages.items()}
    sheets = dict.fromkeys(sheet for page in pages.values() for sheet in SHEET.findall(page))
    links = "".join(f'<link rel="stylesheet" href="{sheet}">' for sheet in sheets)
    running = "".join(
        f'@page p{i} {{ @top-left {{ content: "{_quoted(heading(articles[name]))}"; }} }}\n[id="{name}"] {{ page: p{i}; }}\n'
        for i, name in enumerate(names)
    )
    date = datetime.date.today().strftime("%B %Y")
    picture = (BOOK / "_assets" / "walk.svg").read_text(encoding="utf-8")
    front = (
        f'<section class="front"><h1>{TITLE}</h1><p class="subtitle">{SUBTITLE}</p>{picture}'
        "<p>After the paper by Ilya Loshchilov and Boris Ginsburg</p>"
        f"<p>ngpt-core {ngpt_core.__version__}, {date}</p></section>"
    )
    body = "\n".join(str(articles[name]) for name in names)
    return (
        '<!doctype html><html lang="en" data-theme="light" data-mode="light"><head><meta charset="utf-8">'
        f"<title>{TITLE}</title>{links}<style>{STYLE.read_text(encoding='utf-8')}\n{running}</style></head>"
        f"<body>{front}{contents(parts, articles, numbers)}{body}</body></html>"
    )


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def page_numbers(printed: Path, names: list[str]) -> dict[str, int]:
    """The page on which each chapter begins, counted from 1."""
    reader = PdfReader(printed)
    places = reader.named_destinations
    found = {name: reader.get_destination_page_number(places[f"/{name}" if f"/{name}" in places else name]) for name in names}
    return {name: page + 1 for name, page in found.items() if page is not None}


def make(site: Path, target: Path, toc: Path = BOOK / "_toc.yml") -> int:
    """Write the PDF; the number of its pages."""
    parts = order(yaml.safe_load(toc.read_text(encoding="utf-8")))
    names = [name for _, part in parts for name in part]
    missing = [name for name in names if not (site / f"{name}.html").exists()]
    if missing:
        raise ValueError(f"{site} is not the whole book: {missing[0]}.html is missing. Build it first: make book")
    source, numbers = site / "whole-book.html", dict[str, int]()
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        for _ in range(2):  # the second time with the numbers of the pages
            source.write_text(document(site, parts, numbers), encoding="utf-8")
            chromium.pdf(source, target)
            numbers = page_numbers(target, names)
    finally:
        source.unlink(missing_ok=True)
    return len(PdfReader(target).pages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="the built book")
    parser.add_argument("target", type=Path, help="the PDF")
    args = parser.parse_args()
    try:
        pages = make(args.site, args.target.absolute())
    except (ValueError, chromium.NotFound) as error:
        sys.exit(f"pdf: {error}")
    print(f"{args.target}: {pages} pages, {args.target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
