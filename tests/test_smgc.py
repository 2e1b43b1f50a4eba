"""Second-Moment Growth Clipping: the bound that it promises, and the formula that it is."""

import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ngpt_core as ng

quick = settings(max_examples=100, deadline=None)
beta = st.floats(0, 0.9999)


def f64(x: float) -> torch.Tensor:
    return torch.tensor([x], dtype=torch.float64)


floor = st.one_of(st.just(0.0), st.floats(1e-30, 1e-3))
moment = st.one_of(st.just(0.0), st.floats(1e-30, 1e6))


@quick
@given(st.floats(-1e6, 1e6), moment, st.integers(0, 10**6), beta, st.floats(1, 1e4), floor)
def test_the_next_second_moment_is_at_most_R_times_v_bar(g, v, k, beta2, R, s_min):
    clipped = float(ng.growth_clip(f64(g), f64(v), k, beta2, R, s_min))
    v_bar = max(v, (1 - beta2**k) * s_min**2)
    assert beta2 * v + (1 - beta2) * clipped**2 <= R * v_bar * (1 + 1e-12)
    assert abs(clipped) <= abs(g) and clipped * g >= 0


@quick
@given(st.floats(-1e6, 1e6), moment, st.integers(0, 10**6), beta, st.floats(1, 1e4), floor)
def test_it_is_the_papers_formula(g, v, k, beta2, R, s_min):
    clipped = float(ng.growth_clip(f64(g), f64(v), k, beta2, R, s_min))
    assert clipped == pytest.approx(reference.growth_clip(g, v, k, beta2, R, s_min), rel=1e-12, abs=1e-300)


def test_the_bound_is_reached_and_not_only_respected():
    v, beta2, R = torch.tensor([2.0], dtype=torch.float64), 0.975, 100.0
    g = ng.growth_clip(torch.tensor([-1e9], dtype=torch.float64), v, 1000, beta2, R)
    torch.testing.assert_close(beta2 * v + (1 - beta2) * g * g, R * v)
    assert g < 0


def test_a_gradient_within_the_bound_passes_bit_for_bit():
    g, v = torch.randn(100), torch.ones(100)
    assert torch.equal(ng.growth_clip(g, v, 10, 0.975), g)


def test_the_floor_grows_with_the_completed_steps_and_is_zero_before_the_first():
    g, v = torch.tensor([1.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    assert float(ng.growth_clip(g, v, 0, 0.9)) == 0
    for k in (1, 5, 500):
        expected = math.sqrt((100 - 0.9) / (1 - 0.9)) * math.sqrt(1 - 0.9**k) * 1e-10
        assert float(ng.growth_clip(g, v, k, 0.9)) == pytest.approx(expected, rel=1e-12)


def test_the_floor_survives_float32_where_its_square_would_not():
    g = ng.growth_clip(torch.ones(1), torch.zeros(1), 10**6, 0.975, R=1.0, s_min=1e-25)
    assert float(g) == pytest.approx(1e-25, rel=1e-5)


def test_a_counter_on_the_device_gives_the_same_as_an_integer():
    g, v = torch.randn(50), torch.zeros(50)
    on_device, on_host = ng.growth_clip(g, v, torch.tensor(7.0), 0.975), ng.growth_clip(g, v, 7, 0.975)
    torch.testing.assert_close(on_device, on_host, rtol=1e-5, atol=0)


@pytest.mark.parametrize("beta2", [0.0, 0.5, 0.975, 0.9999, 0.999999])
@pytest.mark.parametrize("k", [0, 1, 3, 500, 10**6])
def test_the_floor_of_a_counter_on_the_device_keeps_its_digits(k, beta2):
    g, v = torch.full((1,), 1e9), torch.zeros(1)
    on_host = ng.growth_clip(g, v, k, beta2, R=2.0, s_min=1.0)
    for counter in (torch.tensor(float(k)), torch.tensor(k)):
        torch.testing.assert_close(ng.growth_clip(g, v, counter, beta2, R=2.0, s_min=1.0), on_host, rtol=1e-6, atol=0)


def test_the_defaults_are_the_papers():
    assert ng.SMGC() == ng.SMGC(R=100.0, s_min=1e-10, start=500)  # section 3.3, item 10


def test_one_spike_changes_the_optimizers_second_moment_by_R_at_most():
    p = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = ng.GatedAdamW([p], lr=1e-3, smgc=ng.SMGC(R=10.0, start=20))
    for step in range(60):
        before = optimizer.state[p]["exp_avg_sq"].clone() if step else None
        p.grad = torch.randn(4, dtype=torch.float64) * (1e6 if step in (10, 40) else 1.0)
        optimizer.step()
        growth = None if before is None else (optimizer.state[p]["exp_avg_sq"] / before).max()
        if step == 10:
            assert growth > 1e6  # not yet started
        if step == 40:
            assert growth == pytest.approx(10.0)


@pytest.mark.parametrize("path", [{}, {"fused": False}, {"capturable": True, "fused": False}], ids=str)
def test_in_the_optimizer_the_floor_counts_the_completed_steps(path):
    """A coordinate wakes at the fourth step: three are completed, and it may grow to what the floor of k = 3 allows.

    Another wakes at the third, when clipping has not started yet.
    """
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = ng.GatedAdamW([p], lr=1e-3, betas=(0.5, 0.9), smgc=ng.SMGC(R=4.0, s_min=1e-3, start=3), **path)
    for grad in ([1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 1.0], [1.0, -1.0, 0.0]):
        p.grad = torch.tensor(grad)
        optimizer.step()
    clipped = -math.sqrt((4.0 - 0.9) / (1 - 0.9)) * math.sqrt(1 - 0.9**3) * 1e-3
    assert float(optimizer.state[p]["exp_avg"][1]) == pytest.approx(0.5 * clipped, rel=1e-5)
    assert float(optimizer.state[p]["exp_avg"][2]) == pytest.approx(0.5 * 0.5)
    assert float(optimizer.state[p]["exp_avg_sq"][1]) == pytest.approx(0.1 * clipped**2, rel=1e-5)


@pytest.mark.parametrize(
    "bad",
    [dict(R=0.99), dict(R=math.nan), dict(R=math.inf), dict(R="100"), dict(s_min=-1e-10), dict(s_min=None), dict(start=-1),
     dict(start=1.5), dict(start=math.inf), dict(start=math.nan)], ids=str,
)  # fmt: skip
def test_bad_settings_are_refused_with_the_value_they_had(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=rf"SMGC: {name} .*got {value!r}"):
        ng.SMGC(**bad)
    if name != "start":
        with pytest.raises(ValueError, match=rf"SMGC: {name} "):
            ng.growth_clip(torch.ones(2), torch.ones(2), 3, 0.9, **bad)


@pytest.mark.parametrize(("k", "beta2", "rule"), [(3, 1.0, "beta2"), (3, "0.9", "beta2"), (-1, 0.9, "k "), (1.5, 0.9, "k ")])
def test_a_bad_moment_or_step_is_refused_by_name(k, beta2, rule):
    with pytest.raises(ValueError, match=f"growth_clip: {rule}"):
        ng.growth_clip(torch.ones(2), torch.ones(2), k, beta2)


def test_numbers_in_place_of_tensors_are_refused():
    with pytest.raises(ValueError, match=r"growth_clip: g must be a tensor; got float"):
        ng.growth_clip(1.0, 2.0, 3, 0.9)


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 2)], ids=str)
def test_a_gradient_and_a_moment_of_two_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"g and v must have one shape; got \[2\], \["):
        ng.growth_clip(torch.ones(2), torch.ones(shape), 3, 0.9)


def test_one_moment_may_serve_all_coordinates():
    g = torch.tensor([5.0, -0.1])
    assert torch.equal(ng.growth_clip(g, torch.tensor(1e-4), 10, 0.9), ng.growth_clip(g, torch.full((2,), 1e-4), 10, 0.9))
