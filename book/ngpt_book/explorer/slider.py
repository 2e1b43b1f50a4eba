"""Which values can a reader give to a parameter, and how are they displayed?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_CHOICES = 8  # drawn as buttons


@dataclass(frozen=True)
class Slider:
    """One parameter: its values, and how it is shown.

    >>> Slider((0, 1, 5)).values
    (0.0, 0.25, 0.5, 0.75, 1.0)
    >>> Slider((2, 32, 5), log=True, default=8).values
    (2, 4, 8, 16, 32)
    >>> Slider(["linear", "cosine"]).texts
    ('linear', 'cosine')
    """

    values: Sequence
    """A tuple (start, stop, n) for n evenly spaced values, or a list of values (strings are allowed)."""
    default: float | int | str | None = None
    """One of the values; by default the middle one."""
    label: str = ""
    """The paper's symbol, as HTML (``"α"``, ``"s<sub>z</sub>"``); by default the parameter's name."""
    about: str = ""
    """A word or two beside the symbol (``"step size"``)."""
    unit: str = ""
    """What follows the number, including a space if needed (``"°"``, ``" steps"``)."""
    log: bool = False
    """Space the values evenly in the logarithm (only for start, stop, n)."""
    format: str = ""
    """A Python format for the displayed value, such as ".2f"; by default with enough digits to tell the values apart."""

    def __post_init__(self):
        if isinstance(self.values, str) or not hasattr(self.values, "__iter__"):
            raise ValueError(f"A slider needs (start, stop, number of values) or a list of values; got {self.values!r}.")
        spread = isinstance(self.values, tuple)
        if self.log and not spread:
            raise ValueError(f"log needs (start, stop, number of values); got a list: {list(self.values)}.")
        values = self._spread() if spread else tuple(map(_plain, self.values))
        for value in values:
            if not isinstance(value, str) and not (isinstance(value, int | float) and math.isfinite(value)):
                raise ValueError(f"A slider's value must be a finite number or a string; got {value!r}.")
        object.__setattr__(self, "values", values)
        if len(self.values) < 2 or len(set(self.values)) < len(self.values):
            raise ValueError(f"A slider needs at least two values, all different; got {list(self.values)}.")
        default = self.values[len(self.values) // 2] if self.default is None else self.default
        near = [v for v in self.values if v == default or _close(v, default)]
        if not near:
            raise ValueError(f"default={default!r} is not one of the slider's values {list(self.values)}.")
        object.__setattr__(self, "default", near[0])
        if len(set(self.texts)) < len(values):
            raise ValueError(f"Two values of a slider look the same, in {list(self.texts)}: choose another format.")

    def _spread(self) -> tuple:
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values)
        if len(self.values) != 3 or not numbers or not isinstance(self.values[2], int):
            raise ValueError(f"A tuple means (start, stop, number of values); got {self.values}. Put single values in a list.")
        start, stop, n = self.values
        if self.log and min(start, stop) <= 0:
            raise ValueError(f"A logarithmic slider needs positive ends; got {start} to {stop}.")
        points = [float(f"{x:.12g}") for x in (np.geomspace if self.log else np.linspace)(start, stop, n)]
        whole = isinstance(start, int) and isinstance(stop, int) and all(x.is_integer() for x in points)
        return tuple(int(x) if whole else x for x in points)

    @property
    def texts(self) -> tuple[str, ...]:
        """The values as displayed, including the unit."""
        return tuple(self.text(v) for v in self.values)

    def text(self, value: float | int | str) -> str:
        """A value as displayed, also one between two of ``values`` (with a kernel, sliders are continuous)."""
        if isinstance(value, str):
            return value
        form = self.format or self._format()
        return format(value, ".3g" if form.endswith("d") and not isinstance(value, int) else form) + self.unit

    def _format(self) -> str:
        numbers = [v for v in self.values if not isinstance(v, str)]
        if all(isinstance(v, int) for v in numbers):
            return "d"
        for digits in range(3, 17):  # the fewest that tell the values apart
            if len({format(v, f".{digits}g") for v in numbers}) == len(numbers):
                break
        return f".{digits}g"

    @property
    def index(self) -> int:
        """The index of the default among the values."""
        return self.values.index(self.default)


def _plain(value):
    """numpy's and torch's numbers as Python numbers."""
    return value.item() if hasattr(value, "item") else value


def _close(a, b) -> bool:
    return isinstance(a, int | float) and isinstance(b, int | float) and abs(a - b) <= 1e-9 * max(abs(a), abs(b))
