"""Does the book's exercise checker tell right from wrong, and say why?"""

import json
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch

import ngpt_core as ng
from ngpt_book.exercises import HINTS, check

BOOK = Path(__file__).parent.parent / "book"


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
        (lambda x: "two", "numbers are wanted"),
        (lambda x: [[1], [1, 2]], "numbers are wanted"),
    ],
)
def test_the_verdict(yours, verdict, capsys):
    right = check(yours, double, (torch.ones(2),), (torch.arange(4.0),))
    assert verdict in capsys.readouterr().out
    assert right == (verdict == "right, in 2 cases")


def test_infinities_and_nans_may_be_right_and_an_empty_list_of_cases_is_an_error(capsys):
    odd = torch.tensor([1.0, math.inf, -math.inf, math.nan])
    assert check(lambda x: x, lambda x: x, (odd,)) and not check(lambda x: -x, lambda x: x, (odd,))
    assert check(partial(torch.mul, 2), double, (torch.ones(2),)) and "your function: right" in capsys.readouterr().out
    for call in (lambda: check(double, double), lambda: check(3, double, (1,))):
        with pytest.raises(ValueError, match="a function and at least one tuple"):
            call()


@pytest.mark.parametrize(
    "yours, verdict",
    [
        (lambda x: -2 * x, "All 4 entries are of the other sign."),
        (lambda x: 3 * x, "All 4 entries are off by the same factor, 1.5."),
        (lambda x: torch.where(x == 3, 0.0, 2 * x), "1 of 4 entries is too small, first at index 2."),
        (lambda x: 2 * x + torch.tensor([0.0, 1.0, -1.0, 0.0]), "2 of 4 entries are off, first at index 1."),
        (lambda x: torch.where(x > 2, math.nan, 2 * x), "2 of 4 entries are NaN and should not be."),
        (lambda x: 2 * x / (x - 1), "1 of 4 entries is infinite and should not be."),
    ],
)
def test_a_wrong_answer_is_described_before_the_right_one_is_shown(yours, verdict, capsys):
    assert not check(yours, double, (torch.arange(1.0, 5.0),), name=verdict)
    said = capsys.readouterr().out
    assert verdict in said and "nan" not in said and "should be" not in said and "[2.0, 4.0" not in said


def test_hints_come_one_per_try_and_the_numbers_last(capsys):
    case, said = (torch.arange(1.0, 4.0),), []
    for _ in range(3):
        assert not check(lambda x: x, double, case, name="hinted", hints=["think of two.", "multiply."])
        said.append(capsys.readouterr().out)
    assert "Hint 1 of 2: think of two." in said[0] and "Hint 2 of 2: multiply." in said[1]
    assert "[2.0, 4.0, 6.0]" in said[2] and not any("[2.0" in text for text in said[:2])
    assert check(double, double, case, name="hinted")  # and a right answer starts the count again
    capsys.readouterr()
    assert not check(lambda x: x, double, case, name="hinted", hints=["think of two.", "multiply."])
    assert "Hint 1 of 2" in capsys.readouterr().out


def test_without_hints_the_numbers_wait_for_the_third_try(capsys):
    for attempt in range(3):
        check(lambda x: x, double, (torch.ones(1),), name="bare")
        assert ("The result should be [2.0]." in capsys.readouterr().out) == (attempt == 2)


def test_every_python_exercise_of_the_book_has_hints_and_no_hint_is_left_over():
    stubs = set()
    for path in BOOK.glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "code" and "...  # your code" in text:
                stubs |= set(re.findall(r"def (\w+)\(.*\):\n    \.\.\.  # your code", text))
    assert stubs == set(HINTS) and all(len(hints) == 2 for hints in HINTS.values())


# ---- wrong answers that a chapter's own cases must find -----------------------------------------------------------------
def stub_cell(chapter: str, name: str, **names) -> dict:
    """What the stub of an exercise defines, its cases among it; ``names`` is what the chapter has imported by then."""
    cells = json.loads((BOOK / f"{chapter}.ipynb").read_text())["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    (stub,) = [text for text in code if f"def {name}(" in text and "...  # your code" in text]
    found = {"ng": ng, "torch": torch, "check": check, **names}
    exec(stub, found)
    return found


def test_chapter_5_rejects_the_gate_that_underflows():
    cases = stub_cell("05_gated_adamw", "my_gate")["cases"]
    assert not check(lambda d, a, eps: d**a / (d**a + eps**a), ng.gate, *cases)
    assert check(lambda d, a, eps: 1 / (1 + (eps / d) ** a), ng.gate, *cases)


def test_chapter_2_rejects_an_ordinary_attention():
    scaling = pytest.importorskip("ngpt_book.figures.scaling")
    cases = stub_cell("02_scaling", "my_attention", scaling=scaling)["cases"]
    truth = scaling.normalized_attention
    ordinary = torch.nn.functional.scaled_dot_product_attention

    def without_norm(q, k, v, s_qk):
        return ordinary(q * s_qk, k * s_qk, v)

    def scaled_once(q, k, v, s_qk):
        return truth(q, k, v, s_qk.sqrt())

    assert not check(without_norm, truth, *cases, tolerance=1e-5)
    assert not check(scaled_once, truth, *cases, tolerance=1e-5)


# The bound for positive gradients alone, and the floor without its factor 1 - beta2^k.
def clip_without_sign(g, v, k, beta2, R, s_min):
    return torch.minimum(g, ((R - beta2) / (1 - beta2)) ** 0.5 * v.clamp_min((1 - beta2**k) * s_min**2).sqrt())


def clip_without_k(g, v, k, beta2, R, s_min):
    bound = ((R - beta2) / (1 - beta2)) ** 0.5 * v.clamp_min(s_min**2).sqrt()
    return g.sign() * torch.minimum(g.abs(), bound)


@pytest.mark.parametrize("wrong", [clip_without_sign, clip_without_k])
def test_chapter_7_rejects_a_clip_with_a_mistake(wrong):
    assert not check(wrong, ng.growth_clip, *stub_cell("07_spikes_and_silence", "my_clip")["cases"])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda v, lr, strength, tau, xi: lr * strength / len(v) ** 0.5 * (v <= tau) * xi,  # v instead of its root
        lambda v, lr, strength, tau, xi: lr * strength * (v.sqrt() <= tau) * xi,  # c is missing
        lambda v, lr, strength, tau, xi: lr * strength / (v.sqrt() <= tau).sum() ** 0.5 * (v.sqrt() <= tau) * xi,  # not d
        lambda v, lr, strength, tau, xi: lr * strength / len(v) ** 0.5 * (v.sqrt() < tau) * xi,  # nothing at tau = 0
        lambda v, lr, strength, tau, xi: lr * strength / len(v) ** 0.5 * xi,  # everybody
    ],
)
def test_chapter_7_rejects_noise_with_a_mistake(wrong):
    spikes = pytest.importorskip("ngpt_book.figures.spikes")
    names = {"math": math, "pmen": spikes.pmen, "spikes": spikes}
    assert not check(wrong, spikes.row_noise, *stub_cell("07_spikes_and_silence", "my_noise", **names)["noise_cases"])


def test_chapter_8_rejects_a_decay_without_a_gradient(capsys):
    """With the mask after exp, the values are right, but the gradient is NaN where exp overflows."""
    mamba_moe = pytest.importorskip("ngpt_book.figures.mamba_moe")
    found = stub_cell("08_mamba2", "my_decay", mamba_moe=mamba_moe)

    def masked_behind(dt, A):
        log_a = (dt * A).cumsum(0)
        return torch.exp(log_a[:, None] - log_a).tril()

    assert check(masked_behind, mamba_moe.decay_matrix, *found["cases"])
    capsys.readouterr()
    assert not check(mamba_moe.with_gradient(masked_behind), found["right"], *found["cases"])
    assert "masked_behind, case 3 of 3: not right yet" in capsys.readouterr().out


def test_chapter_11_takes_a_number_of_steps_rounded_or_not():
    planning = pytest.importorskip("ngpt_book.figures.planning")
    found = stub_cell("11_train_for_real", "my_save_every", planning=planning)
    truth, cases = planning.save_every, found["save_cases"]
    for answer, right in ((truth, True), (lambda *x: round(truth(*x)), True), (lambda *x: truth(*x) / 2**0.5, False)):
        assert check(answer, truth, *cases, tolerance=1e-3) == right
