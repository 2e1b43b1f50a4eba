"""Does the book's exercise checker tell right from wrong, and say why?"""

import pytest
import torch

from ngpt_core.viz.exercises import check


def double(x):
    return 2 * x


@pytest.mark.parametrize(
    "yours, verdict",
    [
        (lambda x: x + x, "right, in 2 cases"),
        (lambda x: None, "returns nothing yet"),
        (lambda x: x, "not right yet"),
        (lambda x: torch.zeros(3), "the shape"),
        (lambda x: 1 / 0, "ZeroDivisionError"),
        (lambda x: x * float("nan"), "not right yet"),
    ],
)
def test_the_verdict(yours, verdict, capsys):
    right = check(yours, double, (torch.ones(2),), (torch.arange(4.0),))
    assert verdict in capsys.readouterr().out
    assert right == (verdict == "right, in 2 cases")
