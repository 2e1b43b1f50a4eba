"""What does a page show where somebody shares its address? OpenGraph tags: title, description, and the race as a picture.

The description is the page's first paragraph; search engines show it too. A picture needs a full address: ``html_baseurl`` if
it is set, otherwise that of GitHub Pages if the repository is on GitHub (address.py). Without either there is no picture, and
the other tags stay. ``motion/card.py`` makes the picture. index.html only leads to the first page and
has the tags of that one.
"""

import html
import re
from pathlib import Path
from urllib.parse import urlparse

from docutils import nodes
from sphinx.application import Sphinx

from . import address

__all__ = ["base_url", "description", "setup", "tags"]

CARD, SIZE = "_static/race.png", (1200, 630)
ALT = "Held-out loss of GPT and nGPT against the text that they have read: nGPT is ahead."
LONGEST = 200  # characters of a description
TAG = re.compile(r'<meta (?:name="(?:description|twitter:card)"|property="og:)[^>]*>')


def base_url(configured: str, repository: str) -> str:
    """The address of the site with a slash at its end, or "" if it is unknown.

    >>> base_url("", "https://github.com/owner/name")
    'https://owner.github.io/name/'
    """
    if configured:
        return configured.rstrip("/") + "/"
    place = urlparse(repository)
    if place.hostname != "github.com" or not address.is_real(repository):
        return ""
    owner, name = place.path.strip("/").split("/", 1)
    return f"https://{owner.lower()}.github.io/" + ("" if name.lower() == f"{owner.lower()}.github.io" else f"{name}/")


def description(doctree: nodes.document) -> str:
    """The first paragraph, cut after a word."""
    for paragraph in doctree.findall(nodes.paragraph):
        words = re.sub(r"\s+", " ", re.sub(r"\s\[\d+\]", "", paragraph.astext())).strip()  # without citations
        if len(words) > 40:
            words = words.removeprefix("Where we stand. ")
            return words if len(words) <= LONGEST else words[: LONGEST - 1].rsplit(" ", 1)[0].rstrip(",;:") + "…"
    return ""


def tags(title: str, about: str, site: str, base: str, page: str) -> str:
    """The tags of a page, as HTML."""
    named = {"description": about, "twitter:card": "summary_large_image" if base else "summary"}
    graph = {"og:type": "article", "og:site_name": site, "og:title": title, "og:description": about}
    if base:
        width, height = SIZE
        graph |= {"og:url": f"{base}{page}.html", "og:image": base + CARD, "og:image:type": "image/png"}
        graph |= {"og:image:width": str(width), "og:image:height": str(height), "og:image:alt": ALT}
    lines = [f'<meta name="{name}" content="{html.escape(text)}" />' for name, text in named.items() if text]
    lines += [f'<meta property="{name}" content="{html.escape(text)}" />' for name, text in graph.items() if text]
    return "\n".join(lines)


def add(app: Sphinx, pagename: str, templatename: str, context: dict, doctree: nodes.document | None) -> None:
    if doctree is None:  # the index, the search
        return
    title = re.sub(r"<[^>]*>", "", html.unescape(context.get("title", "")))
    base = base_url(app.config.html_baseurl, app.config.ngpt_repository)
    found = tags(title, description(doctree), app.config.html_title, base, pagename)
    context["metatags"] = context.get("metatags", "") + "\n" + found


def lead(app: Sphinx, error: Exception | None) -> None:
    """Write index.html, which a shared address of the whole site asks for, with the tags of the first page."""
    first, index = Path(app.outdir) / f"{app.config.root_doc}.html", Path(app.outdir) / "index.html"
    if error is None and first != index and first.exists():
        found = "\n".join(TAG.findall(first.read_text(encoding="utf-8")))
        refresh = f'<meta http-equiv="Refresh" content="0; url={first.name}" />'
        head = (
            f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8" />\n<title>{html.escape(app.config.html_title)}</title>'
        )
        index.write_text(f"{head}\n{found}\n{refresh}\n</html>\n", encoding="utf-8")


def setup(app: Sphinx) -> dict:
    app.connect("html-page-context", add)
    app.connect("build-finished", lead, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
