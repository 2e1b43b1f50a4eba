"""What does a page show where somebody shares its address? OpenGraph tags: title, description, and the race as a picture.

The description is the page's first paragraph; search engines show it too. A picture needs a full address: ``html_baseurl`` if
it is set, otherwise that of GitHub Pages if the repository is on GitHub (address.py). Without either there is no picture, and
the other tags stay. ``motion/card.py`` makes the picture.
"""

import html
import re
from urllib.parse import urlparse

from docutils import nodes
from sphinx.application import Sphinx

from . import address

__all__ = ["base_url", "description", "setup", "tags"]

CARD, SIZE = "_static/race.png", (1200, 630)
ALT = "Held-out loss of GPT and nGPT against the text that they have read: nGPT is ahead."
LONGEST = 200  # characters of a description


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
        words = re.sub(r"\s+", " ", paragraph.astext()).strip()
        if len(words) > 40:
            words = words.removeprefix("Where we stand. ")
            return words if len(words) <= LONGEST else words[: LONGEST - 1].rsplit(" ", 1)[0].rstrip(",;:") + "…"
    return ""


def tags(title: str, about: str, site: str, base: str, page: str) -> str:
    """The tags of a page, as HTML."""
    named = {"description": about, "twitter:card": "summary_large_image"}
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
    found = tags(title, description(doctree), app.config.project, base, pagename)
    context["metatags"] = context.get("metatags", "") + "\n" + found


def setup(app: Sphinx) -> dict:
    app.connect("html-page-context", add)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
