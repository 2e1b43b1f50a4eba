"""Which kinds of question are there, and when is one well posed?

Choice       some options; each carries the condition under which it is right
Number       a number, right within a tolerance, with the numbers of common mistakes
Curve        a curve that the reader draws over given axes, an Axis each, with the shapes of common mistakes
Expression   a formula, compared with the true one by its values at random points

Texts are HTML, like a slider's label; what a reader types is never put into the page as HTML.
"""

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from .expression import CONSTANTS, FUNCTIONS, evaluate

COLUMNS = 61  # points of a curve
POINTS = 12  # at which two formulas are compared
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def _require(holds: bool, question: str, message: str) -> None:
    if not holds:
        raise ValueError(f"The question {question!r}: {message}")


@dataclass(frozen=True)
class Option:
    """An answer to choose: its text, whether it is right (computed), and what to say to whoever chooses it."""

    text: str
    holds: object
    """A truth value, from Python, numpy or torch."""
    why: str


@dataclass(frozen=True)
class Mistake:
    """A common mistake: the number, or the function, that it leads to, and where it comes from."""

    value: Any
    why: str


@dataclass(frozen=True)
class Sketch:
    """A curve that readers often draw instead of the true one: its values, and what is wrong with them."""

    values: Any
    why: str


@dataclass(frozen=True)
class Question:
    """What all kinds have in common.

    name: its key in the reader's browser, unique in the book: "gate-below".
    ask: the question, as HTML.
    hints: with hints it is an exercise; they are given one at a time, after wrong answers.
    """

    kind: ClassVar[str]
    name: str
    ask: str
    hints: Sequence[str] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        _require(bool(NAME.fullmatch(self.name)), self.name, "the name consists of lowercase words joined by hyphens.")
        _require(bool(self.ask.strip()), self.name, "it asks nothing.")
        self.check()

    def check(self) -> None:
        """ValueError unless the question has one answer and every mistake is a mistake."""
        raise NotImplementedError

    def spec(self) -> dict:
        """What questions.js needs to judge an answer."""
        raise NotImplementedError

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        from .page import bundle

        return bundle(self)

    def __repr__(self) -> str:
        return f"{'Exercise' if self.hints else 'Prediction'} {self.name} ({self.kind})"


@dataclass(frozen=True, repr=False)
class Choice(Question):
    """One of several options, or with ``many`` a set of them.

    >>> Choice("sign", "Is 2 - 3 positive?", [Option("yes", 2 - 3 > 0, "3 is larger."), Option("no", 2 - 3 < 0, "It is -1.")])
    Prediction sign (choice)
    """

    kind: ClassVar[str] = "choice"
    options: Sequence[Option]
    many: bool = False

    def check(self) -> None:
        _require(2 <= len(self.options) <= 6, self.name, f"it has {len(self.options)} options; two to six can be read.")
        right = [o.text for o in self.options if bool(o.holds)]
        if self.many:
            _require(0 < len(right) < len(self.options), self.name, f"{len(right)} options of {len(self.options)} hold.")
        else:
            _require(len(right) == 1, self.name, f"exactly one option must hold; these do: {right}.")
        _require(all(o.why.strip() for o in self.options), self.name, "every option needs its reason.")

    def spec(self) -> dict:
        return {"many": self.many, "right": [bool(o.holds) for o in self.options]}


@dataclass(frozen=True, repr=False)
class Number(Question):
    """A number.

    truth: what the package computes.
    because: the reason, shown with the answer.
    tolerance: how far an answer may be off, as a share of the truth; ``within`` says it absolutely instead.
    mistakes: numbers that common mistakes lead to.
    shown: the answer as text; by default three digits.
    """

    kind: ClassVar[str] = "number"
    truth: Any
    because: str
    unit: str = ""
    tolerance: float = 0.02
    within: float | None = None
    mistakes: Sequence[Mistake] = ()
    shown: str = ""

    def reach(self, value: float) -> float:
        """How far from a value an answer still counts as that value."""
        return self.within if self.within is not None else self.tolerance * abs(value)

    def check(self) -> None:
        truth = float(self.truth)
        _require(math.isfinite(truth) and self.reach(truth) > 0, self.name, f"its answer is {truth} +- {self.reach(truth)}.")
        for mistake in self.mistakes:
            apart = abs(float(mistake.value) - truth) > 1.0001 * self.reach(truth)
            _require(apart, self.name, f"the mistake {float(mistake.value):g} would count as right (the answer is {truth:g}).")

    def answer(self) -> str:
        return self.shown or f"{float(self.truth):.3g}{'' if self.unit in '°%' else ' '}{self.unit}".strip()

    def spec(self) -> dict:
        truth = float(self.truth)
        mistakes = [[float(s.value), min(self.reach(float(s.value)), abs(float(s.value) - truth) / 2)] for s in self.mistakes]
        return {"truth": truth, "reach": self.reach(truth), "mistakes": mistakes, "why": [s.why for s in self.mistakes]}


@dataclass(frozen=True, repr=False)
class Axis:
    """One side of a plot: its title, its two ends, whether it is logarithmic, and its labeled ticks."""

    title: str
    low: float
    high: float
    ticks: Mapping[float, str] = field(default_factory=dict)
    log: bool = False

    def place(self, values: Any) -> np.ndarray:
        """Where values stand between the ends, from 0 to 1."""
        ends = np.array([self.low, self.high], dtype=float)
        values = np.asarray(values, dtype=float)
        if self.log:
            ends, values = np.log10(ends), np.log10(np.maximum(values, 1e-300))
        return np.clip((values - ends[0]) / (ends[1] - ends[0]), 0.0, 1.0)

    def at(self, share: Any) -> Any:
        """The inverse of ``place``."""
        if self.log:
            return 10 ** (np.log10(self.low) + share * (np.log10(self.high) - np.log10(self.low)))
        return self.low + share * (self.high - self.low)


@dataclass(frozen=True, repr=False)
class Curve(Question):
    """A curve that the reader draws.

    truth: the package's function, from the [61] values of x to as many values of y.
    x, y: the axes.
    sketches: what readers often draw, as functions like ``truth``.
    given: the name of a curve that is drawn from the start, to compare with, and its function.
    tolerance: the mean distance that still counts as right, as a share of the height.
    """

    kind: ClassVar[str] = "curve"
    truth: Callable[[np.ndarray], Any]
    because: str
    x: Axis
    y: Axis
    sketches: Sequence[Sketch] = ()
    given: tuple[str, Callable[[np.ndarray], Any]] | None = None
    tolerance: float = 0.09

    def drawn(self, values: Any) -> np.ndarray:
        """The heights, from 0 to 1, of a function over the columns of the plot."""
        return self.y.place(values(self.x.at(np.linspace(0, 1, COLUMNS))))

    def check(self) -> None:
        truth = self.drawn(self.truth)
        _require(truth.shape == (COLUMNS,) and bool(np.isfinite(truth).all()), self.name, "its curve is not finite everywhere.")
        for sketch in self.sketches:
            far = float(np.abs(self.drawn(sketch.values) - truth).mean())
            _require(far > self.tolerance, self.name, f"a mistake is only {far:.2f} of the height away from the true curve.")

    def spec(self) -> dict:
        def short(values: np.ndarray) -> list[float]:
            return [round(float(v), 4) for v in values]

        sketches = [short(self.drawn(s.values)) for s in self.sketches]
        axes = {n: {"low": a.low, "high": a.high, "log": a.log} for n, a in (("x", self.x), ("y", self.y))}
        truth = short(self.drawn(self.truth))
        why = [s.why for s in self.sketches]
        return {"truth": truth, "sketches": sketches, "why": why, "tolerance": self.tolerance, "axes": axes}


@dataclass(frozen=True, repr=False)
class Expression(Question):
    """A formula.

    truth: the package's function of the symbols, by keyword.
    answer: the formula as a reader could type it; it must agree with ``truth``.
    symbols: each name as it is typed, and the range from which its values are drawn.
    mistakes: functions, or formulas, that common mistakes lead to.
    """

    kind: ClassVar[str] = "expression"
    truth: Callable[..., Any]
    answer: str
    symbols: Mapping[str, tuple[float, float]]
    because: str = ""
    mistakes: Sequence[Mistake] = ()

    def points(self) -> list[dict[str, float]]:
        """The points at which formulas are compared: drawn by the question's name, so the same in every run."""
        draw = random.Random(self.name)
        return [{s: round(draw.uniform(*ends), 4) for s, ends in self.symbols.items()} for _ in range(POINTS)]

    def values(self, formula: Callable[..., Any] | str) -> list[float]:
        """A function's or a formula's values at the points."""
        if isinstance(formula, str):
            return [evaluate(formula, point) for point in self.points()]
        return [float(formula(**point)) for point in self.points()]

    def check(self) -> None:
        taken = {*FUNCTIONS, *CONSTANTS} & {*self.symbols}
        _require(bool(self.symbols) and not taken, self.name, f"symbols may not be named {sorted(taken)}.")
        truth, answer = self.values(self.truth), self.values(self.answer)
        agree = all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-9) for a, b in zip(truth, answer, strict=True))
        _require(agree, self.name, f"{self.answer} is {answer[0]:g} where the package's function is {truth[0]:g}.")
        for mistake in self.mistakes:
            pairs = zip(self.values(mistake.value), truth, strict=True)
            apart = any(not math.isclose(a, b, rel_tol=1e-3) for a, b in pairs)
            _require(apart, self.name, f"the mistake {mistake.value!r} has the values of the truth.")

    def spec(self) -> dict:
        mistakes = [self.values(s.value) for s in self.mistakes]
        return {
            "symbols": list(self.symbols), "points": self.points(), "truth": self.values(self.answer), "mistakes": mistakes,
            "why": [s.why for s in self.mistakes], "answer": self.answer,
        }  # fmt: skip
