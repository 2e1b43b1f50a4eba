"""How is a formula drawn on a page that loads no MathJax?

At build time: MathJax, from the package sphinx-mathjax-offline, runs inside V8, from the package mini-racer. A formula becomes
MathJax's own HTML, with MathML beside it for screen readers, and every page shares one style sheet and MathJax's fonts. Nothing
has to run on the page, and nothing moves after it was shown. Symbols with a place in a listing or at a slider are marked
(``symbols.py``).

``install`` makes this the renderer of all formulas in the text. Outputs of notebooks may contain formulas too:
``<span class="math">\\(\\alpha\\)</span>`` in their HTML is rendered in the same way (``in_outputs``).
"""

import atexit
import html
import json
import re
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ConfigError
from sphinx.util.fileutil import copy_asset
from sphinx.util.math import get_node_equation_number

MATHJAX = "sphinx-mathjax-offline"
PARTS = ("loader.js", "core.js", "adaptors/liteDOM.js", "input/tex.js", "input/tex/extensions/boldsymbol.js")
PARTS += ("input/tex/extensions/html.js", "output/chtml.js", "output/chtml/fonts/tex.js")
FONTS = "output/chtml/fonts/woff-v2"
OUTPUT = re.compile(r'<span class="math[^"]*">\\\((.+?)\\\)</span>', re.DOTALL)

_PROGRAM = r"""
const J = MathJax._, adaptor = J.adaptors.liteAdaptor.liteAdaptor(), STATE = J.core.MathItem.STATE;
J.handlers.html_ts.RegisterHTMLHandler(adaptor);
const font = new J.output.chtml.fonts.tex_ts.TeXFont({ fontURL: "mathjax" });
const output = new J.output.chtml_ts.CHTML({ font, adaptiveCSS: false });
const input = new J.input.tex_ts.TeX({ packages: ["base", "ams", "newcommand", "boldsymbol", "html"] });
const page = J.mathjax.mathjax.document("", { InputJax: input, OutputJax: output });
const visitor = new J.core.MmlTree.SerializedMmlVisitor.SerializedMmlVisitor();
// The key of a symbol (symbols.py), or null: "ε_gate", "m^"; a time index does not count.
const SPELLED = { "ϵ": "ε", "ϕ": "φ", "ϑ": "θ", "ˆ": "^", "∧": "^", "−": "-" };
const ROWS = ["TeXAtom", "mrow", "inferredMrow", "mstyle", "math"];
function keyOf(node) {
  if (!node) return null;
  const parts = node.childNodes || [];
  if (node.kind === "text") return node.getText();
  if (["mi", "mo", "mn", "mtext"].includes(node.kind)) return parts.map(keyOf).join("").replace(/./gu, (c) => SPELLED[c] || c);
  if (ROWS.includes(node.kind)) {
    const keys = parts.filter((part) => part && part.kind !== "mspace").map(keyOf);
    return keys.every((key) => key !== null) ? keys.join("") : null;
  }
  if (node.kind === "msub") return indexed(parts[0], parts[1]);
  if (node.kind === "mover") {
    const [base, mark] = parts.map(keyOf);
    return base !== null && ["^", "~", "¯"].includes(mark) ? base + mark : null;
  }
  return null;
}
function indexed(base, index) {
  const [letter, name] = [keyOf(base), keyOf(index)];
  if (letter === null || name === null) return null;
  return /^t(-1)?$/.test(name) ? letter : `${letter}_${name.replace(/,t$/, "")}`;
}
// The whole formula if it is a symbol, or what stands before its "=" or "(".
function symbol(tex) {
  const item = new page.options.MathItem(tex, input, false);
  item.start.node = adaptor.body(page.document);
  item.compile(page);
  let parts = [item.root];
  while (parts.length === 1 && ROWS.includes(parts[0].kind)) {
    parts = parts[0].childNodes.filter(Boolean);
  }
  const [head, next] = parts.map(keyOf).filter((key) => key !== "\u2061");  // the invisible "of" of Norm(x)
  return /^\p{L}+(_[\p{L}\d,]+)?[\^~¯]?$/u.test(head || "") && (parts.length === 1 || next === "=" || next === "(") ? head : "";
}
function mark(node, keys) {
  const key = keyOf(node), parts = node.childNodes || [], twice = node.kind === "msubsup";
  const whole = twice ? indexed(parts[0], parts[1]) : key;
  if (whole && keys.has(whole) && node.kind !== "math") {
    node.attributes.set("data-means", whole);
    if (twice) mark(parts[2], keys);
  } else parts.filter((part) => part && part.attributes).forEach((part) => mark(part, keys));
}
// The tilde of \tilde is drawn at the height of an accent, not at that of an operator.
function raise(node) {
  const parts = (node.childNodes || []).filter(Boolean);
  if (node.kind === "mover" && keyOf(parts[1]) === "~") parts[1].childNodes[0].setText("\u02DC");
  parts.forEach(raise);
}
function render(tex, display, keys) {
  const item = new page.options.MathItem(tex, input, display);
  item.start.node = adaptor.body(page.document);
  item.setMetrics(16, 8, 1e6, 1e6, 1);
  item.compile(page);
  const mathml = visitor.visitTree(item.root);
  if (keys.length) mark(item.root, new Set(keys));
  raise(item.root);
  item.typeset(page);
  return JSON.stringify([adaptor.outerHTML(item.typesetRoot), mathml]);
}
const style = () => adaptor.textContent(output.styleSheet(page));
"""
_HIDDEN = """
mjx-container { position: relative; }
mjx-assistive-mml { position: absolute !important; top: 0; left: 0; clip: rect(1px, 1px, 1px, 1px); padding: 1px 0 0 !important;
  border: 0 !important; display: block !important; width: auto !important; overflow: hidden !important; user-select: none; }
mjx-assistive-mml[display="block"] { width: 100% !important; }
"""


def _mathjax() -> Path:
    place = metadata.distribution(MATHJAX).locate_file(MATHJAX)  # not importable: its folder has a hyphen in its name
    return Path(str(place)) / "static" / "mathjax"


@cache
def _engine():
    """V8 with MathJax in it, once per build."""
    if find_spec("py_mini_racer") is None:
        raise ConfigError('The book renders its formulas with mini-racer, which is not installed: pip install -e ".[book]"')
    from py_mini_racer import MiniRacer

    engine = MiniRacer()
    atexit.register(engine.close)  # its thread must end before Python does: else Python 3.13 waits for it forever
    engine.eval(
        "var MathJax = { loader: { load: [] }, startup: {} }, document = { getElementById: () => null }; global = this;"
    )
    for part in PARTS:
        engine.eval(f"{(_mathjax() / part).read_text(encoding='utf-8')};document = undefined;0")  # its loader alone wants one
    engine.eval(_PROGRAM)
    return engine


@cache
def key(tex: str) -> str:
    """The key of a symbol, or of the one that a formula such as ``d_t = ...`` defines; "" if it is something else."""
    return str(_engine().call("symbol", tex))


@cache
def render(tex: str, display: bool = False, keys: tuple[str, ...] = ()) -> str:
    """A formula as HTML. ValueError if MathJax does not understand it. ``keys``: the symbols that get a data-means."""
    drawn, mathml = json.loads(_engine().call("render", tex, display, list(keys)))
    if "<merror" in mathml:
        reason = re.search(r'data-mjx-error="([^"]*)"', mathml)
        raise ValueError(f"MathJax does not understand {tex!r}: {html.unescape(reason[1]) if reason else 'no reason given'}")
    drawn = drawn.replace("<mjx-math ", '<mjx-math aria-hidden="true" ', 1)
    mathml = re.sub(r">\s+<", "><", mathml.strip())
    hidden = f'<mjx-assistive-mml unselectable="on" display="{"block" if display else "inline"}">{mathml}</mjx-assistive-mml>'
    return drawn.removesuffix("</mjx-container>") + hidden + "</mjx-container>"


def style() -> str:
    """The style sheet of all formulas. Its fonts are in ``mathjax/`` beside it."""
    return str(_engine().call("style")) + _HIDDEN


def copy_files(static: Path) -> None:
    """The style sheet and the fonts, from the installed package into the site."""
    copy_asset(str(_mathjax() / FONTS), str(static / "mathjax"))
    (static / "mathematics.css").write_text(style(), encoding="utf-8")


def in_outputs(text: str) -> str:
    """HTML of an output with its formulas rendered."""
    return OUTPUT.sub(lambda found: _span(html.unescape(found[1])), text)


def _span(tex: str, attributes: str = "") -> str:
    return f'<span class="math notranslate nohighlight" data-tex="{html.escape(tex)}"{attributes}>{render(tex)}</span>'


def _rendered(node: nodes.Node, tex: str, display: bool, keys: tuple[str, ...] = ()) -> str:
    try:
        return render(tex, display, keys)
    except ValueError as error:
        raise ConfigError(f"{node.source or 'a page'}, line {node.line}: {error}") from None


def _inline(self, node: nodes.math) -> None:
    tex = node.astext()
    _rendered(node, tex, False)
    self.body.append(_span(tex))
    raise nodes.SkipNode


def _block(self, node: nodes.math_block) -> None:
    """As Sphinx draws them: the number with a link to it, then the formula; lines that end in \\\\ are aligned at their &."""
    tex = node.astext().strip()
    if not (node.get("no-wrap") or node.get("nowrap")) and r"\\" in tex:
        tex = rf"\begin{{split}}{tex}\end{{split}}"
    self.body.append(self.starttag(node, "div", CLASS="math notranslate nohighlight"))
    if node["number"]:
        self.body.append(f'<span class="eqno">({get_node_equation_number(self, node)})')
        self.add_permalink_ref(node, "Link to this equation")
        self.body.append("</span>")
    marks = json.loads(self.builder.env.metadata.get(self.builder.current_docname, {}).get("symbols", '{"keys": {}}'))
    self.body.append(_rendered(node, tex, True, tuple(marks["keys"])) + "</div>")
    raise nodes.SkipNode


def install(app: Sphinx) -> None:
    app.add_html_math_renderer("built", inline_renderers=(_inline, None), block_renderers=(_block, None))
