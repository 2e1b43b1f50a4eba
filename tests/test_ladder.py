"""Do the ladder's fits recover known parameters, and are they optimal?"""

import numpy as np
import pytest

pytest.importorskip("plotly")

from ngpt_book.figures import ladder


@pytest.mark.parametrize("E, A, p", [(0.9, 4.0, 0.35), (0.0, 2.0, 0.12), (1.2, 0.5, 0.9)])
def test_a_fit_recovers_a_power_law_on_a_floor(E, A, p):
    law = ladder.fit(ladder.TOKENS, E + A * ladder.TOKENS**-p)
    assert law.E == pytest.approx(E, abs=2e-3) and law.p == pytest.approx(p, abs=1e-3) and law.rms < 1e-5
    given = ladder.fit(ladder.TOKENS, E + A * ladder.TOKENS**-p, E)
    assert given.A == pytest.approx(A, rel=1e-6) and given.p == pytest.approx(p, abs=1e-6)


@pytest.mark.parametrize("split", ladder.SPLITS)
def test_no_nearby_law_fits_the_table_better(split):
    rng = np.random.default_rng(0)
    for loss in ladder.losses(split):
        law = ladder.fit(ladder.TOKENS, loss)
        for E, A, p in np.array(law[:3]) * (1 + 0.02 * rng.standard_normal((2000, 3))):
            assert np.sqrt(np.mean((loss - E - A * ladder.TOKENS**-p) ** 2)) >= law.rms * (1 - 1e-3)


def test_a_floor_never_goes_below_zero():
    rising = 3.0 - 0.3 * np.log(ladder.TOKENS)  # bends the wrong way: the best floor would be negative
    assert ladder.fit(ladder.TOKENS, rising).E == 0.0


def test_a_position_is_exact_on_a_rung_and_refuses_to_extrapolate():
    gpt, ngpt = ladder.losses("validation")
    for i, loss in enumerate(gpt):
        assert ladder.position(loss, gpt) == i
        assert ladder.at(i, ladder.TOKENS) == pytest.approx(ladder.TOKENS[i])
    with pytest.raises(ValueError, match="not between"):
        ladder.position(ngpt[-1], gpt)
