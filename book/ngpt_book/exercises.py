"""Is the reader's function right? The book's exercises end in code, and this checks it."""

from collections.abc import Callable

import torch


def check(yours: Callable, truth: Callable, *cases: tuple, tolerance: float = 1e-6, name: str = "") -> bool:
    """Call both with each tuple of arguments and print a verdict: right, not written yet, or where ``yours`` differs.

    yours: the reader's function.
    truth: the package's function.
    cases: tuples of arguments, one call each.
    tolerance: how far they may differ, relative to the largest entry of the truth or to 1.
    name: the name of the reader's code, if ``yours`` only wraps it. Default: the name of ``yours``.

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
            print(f"{here}: it returns nothing yet.\nReplace the dots by your code and run it again.")
            return False
        try:
            got = torch.as_tensor(got, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            print(f"{here}: it returns {got!r}, and numbers are wanted.")
            return False
        if got.shape != expected.shape:
            print(f"{here}: the result has the shape {tuple(got.shape)}, and {tuple(expected.shape)} is right.")
            return False
        same = (got == expected) | (got.isnan() & expected.isnan())  # infinities too
        error = torch.where(same, 0.0, (got - expected).abs()).max().item() if got.numel() else 0.0
        if not error <= tolerance * max([1.0, *expected[expected.isfinite()].abs().tolist()]):
            print(f"{here}: not right yet. It is off by up to {error:.2g}; it should begin {expected.flatten()[:4].tolist()}")
            return False
    print(f"{name}: right, in {len(cases)} case{'s' if len(cases) > 1 else ''}.")
    return True
