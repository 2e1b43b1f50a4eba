"""How does a question get onto a page that has no Python?

As a form of native controls with everything in it, the answer too: without JavaScript, and on paper, all of it is shown. The
script hides the answer on a screen, judges, and keeps the answers in the browser (localStorage) and nowhere else. In
the book the Sphinx extension serves one script and one style sheet; elsewhere (JupyterLab, Colab) each output brings them.
"""

import html
import json
import math
import os
import re
from functools import cache
from pathlib import Path

from . import plot
from .forms import Choice, Curve, Expression, Number, Question

HERE = Path(__file__).parent
BUNDLE = re.compile(r'<script class="ngq-bundle">.*?</script>', re.DOTALL)
HANDLES = 6  # sliders that set a curve without drawing


@cache
def style() -> str:
    return (HERE / "questions.css").read_text(encoding="utf-8")


@cache
def script(book: bool = False) -> str:
    """The page's program; outside the book with the style sheet inside."""
    source = "\n".join((HERE / name).read_text(encoding="utf-8") for name in ("checker.js", "questions.js"))
    settings = json.dumps({"css": None if book else style()})
    once = "if (window.ngq) return window.ngq.scan();"  # a second output of a notebook brings a second copy
    return f'(function (settings) {{\n"use strict";\n{once}\n{source}\n}})({settings.replace("<", chr(92) + "u003c")});\n'


def encoded(tree: object) -> str:
    """JSON that is safe inside <script>; NaN becomes null."""

    def plain(x: object) -> object:
        if isinstance(x, dict):
            return {k: plain(v) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            return [plain(v) for v in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(plain(tree), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


# ---- what the reader fills in, and the answer ------------------------------------------------------------------------
def _controls(question: Question, ident: str) -> str:
    match question:
        case Choice():
            kind = "checkbox" if question.many else "radio"
            rows = (
                f'<div class="ngq-option{" ngq-right" if option.holds else ""}"><label>'
                f'<input type="{kind}" name="{ident}" value="{i}" autocomplete="off"> <span>{option.text}</span></label>'
                f'<p class="ngq-why"><b>{"Right." if option.holds else "Not so."}</b> {option.why}</p></div>'
                for i, option in enumerate(question.options)
            )
            return "".join(rows)
        case Number():
            return _line(ident, "Your answer", question.unit, "decimal")
        case Expression():
            names = ", ".join(f"<code>{s}</code>" for s in question.symbols)
            use = f"Use {names}, numbers, + − * / ^ and sqrt, log, exp, sin, cos, asin, atan."
            return f'{_line(ident, "Your formula", "", "text")}<p class="ngq-note" id="{ident}-use">{use}</p>'
        case Curve():
            handles = "".join(
                f"<label>{question.x.title}: {_short(question.x.at(k / (HANDLES - 1)))} "
                '<input type="range" min="0" max="100" value="50" autocomplete="off"></label>'
                for k in range(HANDLES)
            )
            other = f'<details class="ngq-handles"><summary>Use sliders instead of drawing</summary>{handles}</details>'
            return f'<div class="ngq-plot">{plot.svg(question)}</div>{other}'
    raise TypeError(f"There is no form for a {type(question).__name__}.")


def _short(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 10 else f"{x:.3g}"


def _line(ident: str, label: str, unit: str, mode: str) -> str:
    rest = 'autocomplete="off" autocapitalize="off" spellcheck="false" maxlength="200"'
    use = f' aria-describedby="{ident}-use"' if mode == "text" else ""
    box = f'<input type="text" inputmode="{mode}" name="{ident}" {rest}{use}>'
    after = f" <span>{unit}</span>" if unit else ""
    return f'<p class="ngq-line"><label>{label} {box}{after}</label></p>'


def _answer(question: Question) -> str:
    """What is shown once the reader has committed to something; a choice says it beside its options."""
    match question:
        case Number():
            return f"<p><b>Answer: {question.answer()}.</b> {question.because}</p>"
        case Expression():
            return f"<p><b>Answer: <code>{html.escape(question.answer)}</code>.</b> {question.because}</p>"
        case Curve():
            return f"<p>{question.because}</p>"
    return ""


def to_html(question: Question, bring: bool = True) -> str:
    """The question as HTML; ``bring``: with the script inside, for pages that are not the book's."""
    ident = f"ngq-{question.name}"
    sort, commit = ("Exercise", "Check") if question.hints else ("Predict", "That is my answer")
    spec = {"kind": question.kind, "name": question.name, "hints": list(question.hints), **question.spec()}
    several = ' <span class="ngq-note">(More than one may be right.)</span>' if getattr(question, "many", False) else ""
    many = " data-many" if several else ""
    body = (
        f'<div class="ngq" id="{ident}" data-kind="{question.kind}"{many}><form autocomplete="off"><fieldset disabled>'
        f'<legend><span class="ngq-sort">{sort}</span> {question.ask}{several}</legend>{_controls(question, ident)}</fieldset>'
        f'<p class="ngq-buttons" hidden><button type="submit" class="ngq-commit">{commit}</button>'
        + ('<button type="button" class="ngq-hint">A hint</button>' if question.hints else "")
        + '<button type="button" class="ngq-show">Show it anyway</button>'
        "</p></form>"
        '<div class="ngq-verdict" role="status" aria-live="polite"></div>'
        f'<div class="ngq-answer">{_answer(question)}</div>'
        '<p class="ngq-buttons ngq-after" hidden><button type="button" class="ngq-again">Start over</button></p>'
        f'<script type="application/json" class="ngq-data">{encoded(spec)}</script></div>'
    )
    return f'{body}<script class="ngq-bundle">{script()}</script>' if bring else body


def bundle(question: Question) -> dict[str, str]:
    """The question as the output of a notebook."""
    return {"text/plain": repr(question), "text/html": to_html(question, bring=os.environ.get("NGPT_BOOK") != "1")}
