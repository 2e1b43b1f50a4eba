"""Is the reader's function right? Some exercises of the book end in Python, and this checks it.

A wrong answer first gets what can be said without giving it away: which case, how many entries, whether all are off by one
factor or have the other sign, and the exercise's own hints, one per try. The expected numbers come after that. The hints are
here and not in the notebooks, where they would be read before the first try.
"""

import html
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

UNWRITTEN = "it returns nothing yet."
TRIES = 2  # wrong runs of an exercise without hints before the expected numbers are shown

HINTS = {  # name of the reader's function -> what to say after the first and the second wrong run
    "my_slerp": (
        "the angle comes from the dot product of the two unit vectors.",
        "both weights are divided by the same sine, that of the whole angle.",
    ),
    "my_attention": (
        "Norm comes before the scale, and both act on q and on k.",
        "the softmax scale is the root of d_k, multiplied and not divided.",
    ),
    "my_gradient": (
        "the gradient of cross-entropy at the logits is p - y. What stands in front of it?",
        "p is the softmax of s_z * u with the whole s_z; only the factor in front is divided by the mean.",
    ),
    "my_scale": (
        "the area of the curve is an integral that can be done by parts.",
        "the area is 1/log(1 + 1/rho) - rho. Which constant makes it one half?",
    ),
    "my_gate": (
        "divide numerator and denominator by d^a.",
        "take the quotient eps_gate/d first, and the power afterwards.",
    ),
    "my_tangent": (
        "take the dot product of each row of g with the matching row of w.",
        "keepdim=True keeps the sums in a shape that can be multiplied with the rows.",
    ),
    "my_clip": (
        "a gradient may be negative: clip its size and keep its sign.",
        "(1 - beta2**k) * s_min**2 is a floor of v, not of its root.",
    ),
    "my_noise": (
        "the threshold is compared with the root of v, and a coordinate at the threshold is silent.",
        "c is one over the root of d, and d counts all coordinates of the row.",
    ),
    "my_decay": (
        "a product of decays is exp of a difference of cumulative sums.",
        "mask before exp: zero times infinity is NaN in the backward pass.",
    ),
    "share_on_sphere": (
        "a row of the table has a shape: count coordinates, not rows.",
        "unit_dim is None for what is not on the sphere; 0 and -1 are axes.",
    ),
    "token_ratio": (
        "the straight line is over log(tokens): interpolate there and take exp at the end.",
        "np.interp wants its x values to rise, and the losses fall.",
    ),
    "memory": (
        "w is the width over 768, and at most 1.",
        "beta1 = 0.975 remembers 40 steps: no memory is longer, and none is shorter than 2.5.",
    ),
    "my_tokens": (
        "first find the two neighbors whose losses enclose the given one.",
        "interpolate log(tokens), and take exp at the end.",
    ),
    "my_days": (
        "work divided by speed is seconds.",
        "a day has 86,400 seconds, and the speed is GPUs times peak times MFU.",
    ),
    "my_save_every": (
        "M is the time between failures of the whole job, in seconds.",
        "the best time is the root of 2 delta M. How many steps is that?",
    ),
    "make": (
        "which settings of the gate make it AdamW's epsilon? Three of them matter.",
        "the defaults differ too: torch's betas are 0.9 and 0.999, its weight decay 0.01.",
    ),
    "my_lr": (
        "how long is a step that moves d coordinates by lr each?",
        "the row turns by the arctangent of that length, since the step is perpendicular to it.",
    ),
}

_wrong: Counter[str] = Counter()  # name of an exercise -> wrong runs so far


def check(
    yours: Callable, truth: Callable, *cases: tuple, tolerance: float = 1e-6, name: str = "", hints: Sequence[str] | None = None
) -> bool:
    """Call both with each tuple of arguments and print a verdict: right, not written yet, or how ``yours`` differs.

    yours: the reader's function.
    truth: the package's function.
    cases: tuples of arguments, one call each.
    tolerance: how far they may differ, relative to the largest entry of the truth or to 1.
    name: the name of the reader's code, if ``yours`` only wraps it. Default: the name of ``yours``.
    hints: sentences for wrong runs, one each; once they are used up, the expected numbers are shown. Default: those of
        ``HINTS`` under the name.

    Returns whether every case was right.
    """
    if not callable(yours) or not cases:
        raise ValueError(f"check takes a function and at least one tuple of arguments; got {yours!r} and {len(cases)} cases.")
    name = name or getattr(yours, "__name__", "your function")
    for number, case in enumerate(cases, 1):
        here = f"{name}, case {number} of {len(cases)}"
        expected = torch.as_tensor(truth(*case), dtype=torch.float64)
        try:
            got = yours(*case)
        except Exception as error:
            print(f"{here}: it raised {type(error).__name__}: {error}")
            return False
        if got is None or got is ...:
            print(f"{here}: {UNWRITTEN}\nReplace the dots by your code and run it again.")
            return False
        try:
            got = torch.as_tensor(got, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            print(f"{here}: it returns {got!r}, and numbers are wanted.")
            return False
        if got.shape != expected.shape:
            print(f"{here}: the result has the shape {tuple(got.shape)}, and {tuple(expected.shape)} is right.")
            return False
        wrong = differs(got, expected, tolerance)
        if wrong.any():
            print(f"{here}: not right yet. {described(got, expected, wrong)}")
            _advise(name, expected, HINTS.get(name, ()) if hints is None else hints)
            return False
    _wrong.pop(name, None)
    print(f"{name}: right, in {len(cases)} case{'s' if len(cases) > 1 else ''}.")
    return True


def differs(got: Tensor, expected: Tensor, tolerance: float) -> Tensor:
    """Which entries are wrong. Infinities and NaNs may be right."""
    same = (got == expected) | (got.isnan() & expected.isnan())
    reach = tolerance * max([1.0, *expected[expected.isfinite()].abs().tolist()])
    return ~(same | ((got - expected).abs() <= reach))


def described(got: Tensor, expected: Tensor, wrong: Tensor) -> str:
    """What is wrong with the entries marked, without saying what they should be."""
    mine, right = got[wrong], expected[wrong]
    for found, word in ((mine.isnan() & ~right.isnan(), "NaN"), (mine.isinf() & right.isfinite(), "infinite")):
        if found.any():
            return f"{_count(int(found.sum()), got.numel())} {word} and should not be."
    if bool((right.isfinite() & (right != 0) & mine.isfinite()).all()):
        ratios = mine / right
        if ratios.numel() > 1 and bool(((ratios - ratios[0]).abs() <= 1e-4 * ratios[0].abs()).all()):
            if abs(float(ratios[0]) + 1) < 1e-4:
                return f"{_count(len(mine), got.numel())} of the other sign."
            return f"{_count(len(mine), got.numel())} off by the same factor, {float(ratios[0]):.3g}."
    first = tuple(wrong.nonzero()[0].tolist())
    where = f", first at index {list(first) if len(first) > 1 else first[0]}" if first else ""
    side = "too large" if bool((mine > right).all()) else "too small" if bool((mine < right).all()) else "off"
    return f"{_count(len(mine), got.numel())} {side}{where}."


def _count(some: int, all_: int) -> str:
    if all_ == 1:
        return "The result is"
    return f"All {all_} entries are" if some == all_ else f"{some} of {all_} entries {'is' if some == 1 else 'are'}"


def _advise(name: str, expected: Tensor, hints: Sequence[str]) -> None:
    _wrong[name] += 1
    tries = _wrong[name]
    if tries <= len(hints):
        print(f"Hint {tries} of {len(hints)}: {hints[tries - 1]}")
    elif tries > max(len(hints), TRIES):
        values = [float(f"{x:.6g}") for x in expected.flatten()[:4].tolist()]
        print(f"The result should {'begin' if expected.numel() > 4 else 'be'} {values}.")


def offer(colab: str, download: str) -> str:
    """What a page says where an exercise's answer is Python: it cannot run it, but these two can."""
    ways = f'<a href="{html.escape(colab)}">Open the chapter in Colab</a>'
    ways += f' or <a href="{html.escape(download)}" download>download the notebook</a>'
    text = "The answer to this exercise is a Python function, and a page does not run Python."
    then = "put your code in the place of the dots, and the cell tells you whether it is right."
    return f'<p class="ngq-python">{text} {ways}, {then}</p>'
