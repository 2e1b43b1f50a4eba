"""What would a page load that it does not need? 2.6 MB, which are left out when all pages are written.

1. Font Awesome: a script of 1.4 MB and a font of 156 kB draw a dozen icons. Their outlines are taken from that script, of the
   installed theme, into a style sheet with only the icons that the site has, and those that the theme's styles name. The
   theme's own style no longer declares the fonts: a browser may load them for the height of a line.
2. The index of the search, on every page: only search.html searches.
3. The styles of thousands of characters of formulas (mathematics.py): those that occur stay.
4. The script of tabs, on pages without tabs.

And one thing that is too much: the theme repeats a page's title, as a second h1, for paper only.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

import pydata_sphinx_theme
from sphinx.application import Sphinx

from . import mathematics

THEME = Path(pydata_sphinx_theme.__file__).parent / "theme/pydata_sphinx_theme/static"
_FONT_AWESOME = re.compile(r'\s*<script[^>]*src="[^"]*fontawesome\.js[^"]*"[^>]*></script>')
_FONT = re.compile(r"@font-face\s*\{[^}]*Font Awesome[^}]*\}")
_SEARCH = re.compile(r'\s*<script[^>]*src="[^"]*(?:searchtools|language_data|searchindex)\.js[^"]*"[^>]*></script>')
_TITLE_AGAIN = re.compile(r'(<div id="jb-print-docs-body" class="onlyprint">\s*)<h1>.*?</h1>', re.DOTALL)
_TABS = re.compile(r'\s*<script[^>]*src="[^"]*design-tabs\.js[^"]*"[^>]*></script>')
_ICON = re.compile(r"\bfa-([a-z][a-z0-9-]*)")
_CHARACTER = re.compile(r"\bmjx-c([0-9A-F]+)\b")
_RULE = re.compile(r'([^{}]+)\{(?:"(?:\\.|[^"\\])*"|[^{}"])*\}\s*')  # a string may be a brace
_OUTLINE = re.compile(r'[{,]"?([a-z][a-z0-9-]*)"?:\[(\d+),(\d+),\[[^\]]*\],"([0-9a-f]+)",("[^"]*")\]')
_VARIABLE = re.compile(r'(--pst-[a-z-]+): ?"([\ue000-\uf8ff])"')  # characters that only Font Awesome draws
_LITERAL = re.compile(r'([^{}/@]+)\{[^{}]*content: ?"\\(f[0-9a-f]{3})"[^{}]*\}')
OURS = {"icons.css", "mathematics.css", "pydata-sphinx-theme.css"}
BY_SCRIPTS = {"xmark"}  # icons that the theme's scripts add
_ICON_STYLE = """:is(i, span)[class*="fa-"] { display: inline-block; width: 1em; height: 1em; vertical-align: -.125em;
  background: currentColor; mask: var(--icon) center / contain no-repeat; }
:is(i, span)[class*="fa-"]::before { content: none !important; }
:is(i, span).fa-lg:not(.theme-switch) { width: 1.25em; height: 1.25em; vertical-align: -.2em; }
"""


def _outlines() -> dict[str, str]:
    """The name and the code of each solid icon -> its SVG. (The file has brands and regular ones first.)"""
    source, found = (THEME / "scripts" / "fontawesome.js").read_text(encoding="utf-8"), {}
    for name, width, height, code, path in _OUTLINE.findall(source):
        svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" SIZE><path d={path}/></svg>'
        found[name] = found[code] = svg
    return found


def _url(svg: str, size: str = "") -> str:
    return f'url("data:image/svg+xml,{quote(svg.replace(" SIZE", size))}")'


def icons(names: set[str], sheets: Iterable[str] = ()) -> str:
    """A style sheet for these icons of Font Awesome, those that it has, and for those behind the theme's variables and
    those that other style sheets name by their codes."""
    outlines, rules = _outlines(), [_ICON_STYLE]
    rules += [f".fa-{name} {{ --icon: {_url(outlines[name])}; }}\n" for name in sorted(names & outlines.keys())]
    size = ' width="14" height="14" fill="#7f8794"'  # an image in a text does not take its color
    styles = (THEME / "styles" / "pydata-sphinx-theme.css").read_text(encoding="utf-8")
    named = [(variable, outlines.get(f"{ord(sign):x}")) for variable, sign in _VARIABLE.findall(styles)]
    rules.append("html {" + " ".join(f"{variable}: {_url(svg, size)};" for variable, svg in named if svg) + "}\n")
    for sheet in sheets:
        for selector, code in _LITERAL.findall(sheet):
            if code in outlines:
                rules.append(f"{selector.strip()} {{ content: {_url(outlines[code], size)} !important; }}\n")
    return "".join(rules)


def characters(style: str, used: set[str]) -> str:
    """The style sheet of formulas without the rules of characters that do not occur."""

    def kept(rule: re.Match) -> str:
        named = _CHARACTER.findall(rule[1])
        return rule[0] if not named or used & set(named) else ""

    head, fonts, rest = style.partition("@font-face")  # nested braces are before them, or not at all
    return head + fonts + _RULE.sub(kept, rest) if fonts else _RULE.sub(kept, style)


def lighten(app: Sphinx, exception: Exception | None) -> None:
    """Take out of all written pages what they do not need, and write the style sheets of what they do."""
    if exception or app.builder.format != "html":
        return
    folder, names, found = Path(app.outdir), set(BY_SCRIPTS), set[str]()
    for path in sorted(folder.rglob("*.html")):
        before = path.read_text(encoding="utf-8")
        text = _TITLE_AGAIN.sub(r"\1", _FONT_AWESOME.sub("", before))
        if path.name != "search.html":
            text = _SEARCH.sub("", text)
        if "sd-tab-set" not in text:
            text = _TABS.sub("", text)
        if text != before:
            path.write_text(text, encoding="utf-8")
        names.update(_ICON.findall(text))
        found.update(_CHARACTER.findall(text))
    static = folder / "_static"
    theme = static / "styles" / "pydata-sphinx-theme.css"
    theme.write_text(_FONT.sub("", theme.read_text(encoding="utf-8")), encoding="utf-8")
    sheets = [path.read_text(encoding="utf-8") for path in static.rglob("*.css") if path.name not in OURS]
    (static / "icons.css").write_text(icons(names, sheets), encoding="utf-8")
    (static / "mathematics.css").write_text(characters(mathematics.style(), found), encoding="utf-8")
