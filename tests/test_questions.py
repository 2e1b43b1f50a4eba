"""Are the book's questions well posed, are their answers computed and not typed in, and does each chapter ask enough?

tests/test_browser_questions.py answers them in a real browser.
"""

import ast
import json
import math
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("plotly", reason='ngpt_book needs plotly: pip install "ngpt-core[notebook]"')
from ngpt_book.questions import Axis, Choice, Curve, Expression, Mistake, Number, Option, Sketch, page
from ngpt_book.questions.expression import evaluate

BOOK = Path(__file__).parent.parent / "book"
NOTEBOOKS = sorted(BOOK.glob("*.ipynb"))
KINDS = ("Choice", "Number", "Curve", "Expression")


def asked(path: Path) -> list[tuple[str, ast.Call, str]]:
    """(kind, call, stored HTML) of each question in a notebook, in its order."""
    found = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and "ngpt_book.questions" in source:
            last = ast.parse(source).body[-1]
            assert isinstance(last, ast.Expr) and isinstance(last.value, ast.Call), source
            assert "remove-input" in cell["metadata"]["tags"]  # the page must not show the answer's source
            (output,) = cell["outputs"]
            found.append((last.value.func.id, last.value, "".join(output["data"]["text/html"])))
    return found


ASKED = {path.stem: asked(path) for path in NOTEBOOKS}
EVERY = [pytest.param(*q, id=q[1].args[0].value) for questions in ASKED.values() for q in questions]


# ---- the book --------------------------------------------------------------------------------------------------------
def test_every_chapter_asks_for_two_predictions_or_more_and_kinds_vary():
    exercises = {name: [("hints" in {k.arg for k in call.keywords}) for _, call, _ in q] for name, q in ASKED.items()}
    for name, of in exercises.items():
        least = 2 if name[0].isdigit() else 1
        assert of.count(False) >= least, f"{name} asks for {of.count(False)} predictions"
        assert not name[0].isdigit() or of.count(True) >= 1, f"{name} has no exercise that runs in the page"
    kinds = {name: {kind for kind, _, _ in q} for name, q in ASKED.items()}
    assert set(KINDS) == set().union(*kinds.values())
    assert sum("Curve" in k for k in kinds.values()) >= 4
    assert all(len(k) > 1 for name, k in kinds.items() if name[0].isdigit())


def test_every_name_is_used_once():
    names = Counter(call.args[0].value for questions in ASKED.values() for _, call, _ in questions)
    assert [name for name, n in names.items() if n > 1] == []


@pytest.mark.parametrize("kind, call, html", EVERY)
def test_what_is_right_is_computed_in_the_cell(kind, call, html):
    """No condition and no true value is a literal, or a literal in disguise: each names something that was computed."""

    def names(node: ast.AST) -> set[str]:
        return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - {"float", "abs", "True", "False", "bool"}

    if kind == "Choice":
        options = call.args[2].elts
        assert all(names(option.args[1]) for option in options)
    else:
        (truth,) = [k.value for k in call.keywords if k.arg == "truth"]
        assert names(truth)


class Balanced(HTMLParser):
    """Fails where a tag is not closed in the order in which it was opened."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag != "input":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


@pytest.mark.parametrize("kind, call, html", EVERY)
def test_the_stored_output_is_a_whole_form_with_its_answer(kind, call, html):
    parser = Balanced()
    parser.feed(html)
    assert parser.open == [] and html.count("<fieldset disabled>") == 1 and "ngq-bundle" not in html
    spec = json.loads(re.search(r'class="ngq-data">(.*?)</script>', html)[1])
    assert spec["name"] == call.args[0].value
    texts = [*re.findall(r'class="ngq-why">(.*?)</p>', html), *spec.get("why", []), *spec["hints"]]
    assert all(20 < len(re.sub("<.*?>", "", text)) < 420 for text in texts), "a reason is one or two plain sentences"
    assert not re.search(r"\\\(|\$", html)  # formulas are HTML: nothing here waits for MathJax


def test_in_a_notebook_the_output_brings_its_script_and_in_the_book_it_does_not(monkeypatch):
    question = Choice("sign", "Is -1 positive?", [Option("yes", -1 > 0, "no"), Option("no", -1 < 0, "right")])
    monkeypatch.delenv("NGPT_BOOK", raising=False)
    whole = question._repr_mimebundle_()["text/html"]
    monkeypatch.setenv("NGPT_BOOK", "1")
    bare = question._repr_mimebundle_()["text/html"]
    assert "window.ngq" in whole and ".ngq-option" in whole and page.BUNDLE.sub("", whole) == bare
    assert "css" in whole and '"css": null' in page.script(book=True)


# ---- questions that are not well posed -------------------------------------------------------------------------------
def line(x):
    return np.asarray(x)


AXIS = Axis("x", 0, 1)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Choice("a", "?", [Option("x", True, "w"), Option("y", True, "w")]), "exactly one option must hold"),
        (lambda: Choice("a", "?", [Option("x", False, "w"), Option("y", torch.tensor(False), "w")]), "exactly one option"),
        (lambda: Choice("a", "?", [Option("x", True, "w")]), "two to six"),
        (lambda: Choice("a", "?", [Option("x", True, "w"), Option("y", True, "w")], many=True), "2 options of 2 hold"),
        (lambda: Choice("a", "?", [Option("x", True, "w"), Option("y", False, " ")]), "needs its reason"),
        (lambda: Choice("A b", "?", []), "lowercase words"),
        (lambda: Number("n", "?", truth=math.nan, because="b"), "its answer is nan"),
        (lambda: Number("n", "?", truth=0.0, because="b"), "its answer is 0.0"),
        (lambda: Number("n", "?", truth=2.0, because="b", mistakes=[Mistake(2.01, "w")]), "would count as right"),
        (lambda: Curve("c", "?", truth=lambda x: x / 0 * 0, because="b", x=AXIS, y=AXIS), "not finite everywhere"),
        (lambda: Curve("c", "?", truth=line, because="b", x=AXIS, y=AXIS, sketches=[Sketch(line, "w")]), "only 0.00 of"),
        (lambda: Expression("e", "?", truth=lambda r: 2 * r, answer="3*r", symbols={"r": (1, 2)}), "3[*]r is"),
        (lambda: Expression("e", "?", truth=lambda e: e, answer="e", symbols={"e": (1, 2)}), "may not be named"),
        (
            lambda: Expression(
                "e", "?", truth=lambda r: 2 * r, answer="2*r", symbols={"r": (1, 2)}, mistakes=[Mistake("r + r", "w")]
            ),
            "the values of the truth",
        ),
    ],
)
def test_a_question_without_one_answer_is_refused(make, message):
    with np.errstate(all="ignore"), pytest.raises(ValueError, match=message):
        make()


# ---- the parts -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text, value",
    [
        ("1 + 2*3", 7.0),
        ("-x^2", -9.0),
        ("2^3^2", 512.0),
        ("2**-1", 0.5),
        ("sqrt(x)*sqrt(x)", 3.0),
        ("log(e)", 1.0),
        ("sin(pi/2)", 1.0),
        ("1e-3 + .5", 0.501),
        ("(1 - x)/(1 + x)", -0.5),
    ],
)
def test_a_formula_has_its_value(text, value):
    assert evaluate(text, {"x": 3.0}) == pytest.approx(value)


@pytest.mark.parametrize("text", ["1/0", "log(0)", "sqrt(-1)", "exp(1000)", "asin(2)"])
def test_a_formula_without_a_value_is_nan(text):
    assert math.isnan(evaluate(text, {}))


@pytest.mark.parametrize(
    "text", ["__import__('os')", "x.real", "lambda: 1", "[1][0]", "y", "open(x)", "1 if x else 2", "'a'", "True", "2x", ""]
)
def test_a_formula_is_never_code(text):
    with pytest.raises(ValueError, match=r"not understood|not a formula"):
        evaluate(text, {"x": 1.0})


def test_a_place_on_an_axis_and_its_value_are_inverse():
    for axis in (Axis("t", 2, 10), Axis("s", 1e-12, 1e-2, log=True)):
        share = np.linspace(0, 1, 7)
        assert np.allclose(axis.place(axis.at(share)), share)
        assert axis.place([axis.low / 1e3, axis.high * 1e3]).tolist() == [0.0, 1.0]


def test_a_mistake_near_the_truth_is_told_apart_from_it():
    mistakes = Number("n", "?", truth=100.0, because="b", tolerance=0.02, mistakes=[Mistake(103.0, "w")]).spec()["mistakes"]
    assert mistakes == [[103.0, 1.5]]  # its reach ends before that of the truth begins
