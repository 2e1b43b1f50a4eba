"""How does the book ask its readers something, and how does it answer?

    from ngpt_book.questions import Choice, Option, Number, Mistake, Curve, Axis, Sketch, Expression

    Choice("gate-below", "Is the step larger?", [Option("larger", holds=ours > adams, why="..."), Option(...), ...])

A question without ``hints`` is a prediction: the reader commits to an answer, and the page gives the true one at once. With
``hints`` it is an exercise: a wrong answer gets a reason and a hint, and the solution comes when it is found or asked for.
What is right is never typed in. An option carries a condition, and exactly one may hold; a number, a curve and an expression
carry what the package computes. So a question whose answer changes with the package fails when its cell runs.

forms.py        the four kinds of question, and what makes each of them well posed
expression.py   the value of a formula in the reader's grammar: the twin of checker.js
page.py         a question as HTML that works without Python; plot.py: the axes that a curve is drawn on
checker.js      reads numbers and formulas, without eval            questions.js, questions.css   what the reader sees
"""

from .forms import Axis, Choice, Curve, Expression, Mistake, Number, Option, Question, Sketch

__all__ = ["Axis", "Choice", "Curve", "Expression", "Mistake", "Number", "Option", "Question", "Sketch"]
