"""Does a symbol have one key in an equation, at a slider and in a listing?"""

import re

import pytest

from ngpt_book.sphinx import mathematics, symbols


@pytest.mark.parametrize(
    "tex, label, name",
    [
        (r"\epsilon_\text{gate}", "ε<sub>gate</sub>", "eps_gate"),
        (r"\epsilon_{\text{gate}}", "ε<sub>gate</sub>", "eps_gate"),
        ("s_z", "s<sub>z</sub>", "s_z"),
        (r"\beta_1", "β<sub>1</sub>", "beta1"),
        (r"\rho", "ρ", "rho"),
        (r"\lambda_\text{noise}", "λ<sub>noise</sub>", "lambda_noise"),
        ("a", "a", "a"),
    ],
)
def test_one_key_in_all_three_places(tex, label, name):
    assert mathematics.key(tex) == symbols.key_of_label(label) == symbols.key_of_name(name) != ""


def test_a_time_index_does_not_count_and_a_formula_is_what_it_defines():
    assert mathematics.key("d_t") == mathematics.key("d_{t-1}") == mathematics.key(r"d_t = \sqrt{\hat v_t}") == "d"
    assert mathematics.key(r"\theta_\text{max}(t)") == "θ_max" and mathematics.key(r"\hat v_t") == "v^"
    assert mathematics.key(r"g - w\langle w, g\rangle") == mathematics.key(r"\gamma_t\odot\hat m_t") == ""


@pytest.mark.parametrize("label", ["noise / signal", "softmax scale", "warmup", "log<sub>10</sub>|g|", "s s"])
def test_a_word_is_not_a_symbol(label):
    assert symbols.key_of_label(label) == ""


def test_the_notation_names_what_the_code_does_not_spell_out():
    table = symbols.notation()
    assert table["θ_max"] == {"cap"} and table["γ"] >= {"gate"} and table["ε_num"] == {"eps_num"} and "alpha" in table["α_A"]
    assert len(table) > 40


def test_marks_are_in_the_drawing_and_only_those_asked_for():
    tex = r"\gamma_t = \frac{d_t^{\,a}}{d_t^{\,a} + \epsilon_\text{gate}^{\,a}}"
    marks = re.findall('data-means="([^"]*)"', mathematics.render(tex, True, ("γ", "d", "a", "ε_gate")))
    assert sorted(marks) == sorted(["γ", "d", "a", "d", "a", "ε_gate", "a"])
    assert re.findall('data-means="([^"]*)"', mathematics.render(tex, True, ("γ",))) == ["γ"]
    assert "data-means" not in mathematics.render(tex, True)
