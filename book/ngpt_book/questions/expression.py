"""What is the value of a formula, as a reader would type it?

    sum      = product {("+" | "-") product}
    product  = signed {("*" | "/") signed}
    signed   = ("+" | "-") signed | power
    power    = atom [("^" | "**") signed]
    atom     = number | name | function "(" sum ")" | "(" sum ")"

``checker.js`` reads this grammar in the page. This is its slow twin: it lets Python's own parser read the text (the two agree
about precedence) and walks the tree; a test compares both on random formulas. Nothing is ever evaluated as code.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping

FUNCTIONS: dict[str, Callable[[float], float]] = {
    "sqrt": math.sqrt, "log": math.log, "ln": math.log, "exp": math.exp, "abs": abs,
    "sin": math.sin, "cos": math.cos, "tan": math.tan, "asin": math.asin, "acos": math.acos, "atan": math.atan,
}  # fmt: skip
CONSTANTS = {"pi": math.pi, "e": math.e}
OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: math.pow,
    ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip


def evaluate(text: str, symbols: Mapping[str, float]) -> float:
    """The value of a formula; NaN where it has none (a logarithm of zero).

    >>> evaluate("sqrt(rho*(1 + rho)) - rho^2", {"rho": 3.0})
    -5.535898384862246
    """
    try:
        tree = ast.parse(text.replace("^", "**").strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not a formula: {error.msg}.") from None
    return _value(tree.body, symbols, text)


def _value(node: ast.AST, symbols: Mapping[str, float], text: str) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.Name(id=name) if name in symbols or name in CONSTANTS:
            return float(symbols[name] if name in symbols else CONSTANTS[name])
        case ast.UnaryOp(op=op, operand=x) if type(op) in OPERATORS:
            return _applied(OPERATORS[type(op)], _value(x, symbols, text))
        case ast.BinOp(left=x, op=op, right=y) if type(op) in OPERATORS:
            return _applied(OPERATORS[type(op)], _value(x, symbols, text), _value(y, symbols, text))
        case ast.Call(func=ast.Name(id=name), args=[x], keywords=[]) if name in FUNCTIONS:
            return _applied(FUNCTIONS[name], _value(x, symbols, text))
    names = ", ".join([*symbols, *CONSTANTS, *FUNCTIONS])
    raise ValueError(f"In {text!r}, {ast.unparse(node)!r} is not understood. A formula has numbers, + - * / ^ and {names}.")


def _applied(function: Callable[..., float], *values: float) -> float:
    """The function's value, NaN outside its domain or beyond the largest float."""
    try:
        return function(*values)
    except (ValueError, ZeroDivisionError, OverflowError):
        return math.nan
