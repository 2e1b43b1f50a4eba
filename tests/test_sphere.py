"""The geometry: what Norm, projection, angle, cap and slerp promise, in every precision and along every axis."""

import math

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ngpt_core import sphere

seeds = st.integers(0, 2**31 - 1)
quick = settings(max_examples=60, deadline=None)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_unit_has_length_one_and_the_same_direction():
    x = draw(0, 5, 7)
    y = sphere.unit(x)
    torch.testing.assert_close(y.norm(dim=-1), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(y * x.norm(dim=-1, keepdim=True), x)


def test_unit_acts_along_the_dimension_asked_for():
    x = draw(0, 4, 5, 6)
    torch.testing.assert_close(sphere.unit(x, dim=1), sphere.unit(x.movedim(1, -1)).movedim(-1, 1))


def test_unit_of_a_zero_vector_is_zero_with_a_finite_gradient():
    x = torch.zeros(2, 3, requires_grad=True)
    y = sphere.unit(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 3))
    assert x.grad.isfinite().all() and x.grad.abs().max() <= 1


@pytest.mark.parametrize("length", [1e-8, 1e-13, 1e-16, 1e-18])
def test_unit_of_a_short_vector_has_its_exact_gradient(length):
    x, g = draw(3, 64) * (length / 8), draw(4, 64)
    want = torch.autograd.grad(sphere.unit(x.requires_grad_()), x, g)[0]
    short = x.detach().float().requires_grad_()
    (got,) = torch.autograd.grad(sphere.unit(short), short, g.float())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_unit_passes_gradcheck():
    assert torch.autograd.gradcheck(sphere.unit, draw(1, 3, 4).requires_grad_())


def test_unit_of_bfloat16_is_computed_wide_and_rounded_once():
    x = draw(0, 8, 300).bfloat16()
    assert torch.equal(sphere.unit(x), sphere.unit(x.float()).bfloat16())


@quick
@given(seeds, st.integers(2, 40), st.floats(1e-3, 1e3))
def test_tangent_is_orthogonal_and_idempotent(seed, d, scale):
    w, g = sphere.unit(draw(seed, 3, d)), scale * draw(seed + 1, 3, d)
    once = sphere.tangent(g, w)
    assert (w * once).sum(-1).abs().max() <= 1e-14 * scale * d
    torch.testing.assert_close(sphere.tangent(once, w), once, rtol=1e-12, atol=1e-14 * scale)


@quick
@given(seeds, st.floats(0.1, 10))
def test_tangent_is_the_twins_for_vectors_of_any_length(seed, norm):
    w, g = norm * draw(seed, 4, 6), draw(seed + 1, 4, 6)
    expected = np.stack([reference.tangent(gi, wi) for gi, wi in zip(g.numpy(), w.numpy())])
    np.testing.assert_allclose(sphere.tangent(g, w).numpy(), expected, rtol=1e-12, atol=1e-13)


def test_tangent_of_a_tiny_w_is_held_by_eps_proj():
    w, g = torch.tensor([1e-8, 0.0], dtype=torch.float64), torch.tensor([1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(sphere.tangent(g, w), torch.tensor([1 - 1e-16 / 1e-12, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tangent_of_half_precisions_is_computed_wide_and_rounded_once(dtype):
    w = sphere.unit(draw(0, 5, 64)).to(dtype)
    for g in (draw(1, 5, 64).to(dtype), torch.full((5, 64), 6e4, dtype=dtype)):  # <w, g> of the second is beyond float16
        assert torch.equal(sphere.tangent(g, w), sphere.tangent(g.float(), w.float()).to(dtype))
    ones = torch.ones(4, dtype=dtype)
    assert torch.equal(sphere.tangent(ones, torch.zeros(4, dtype=dtype)), ones)
    assert sphere.tangent(ones, torch.ones(4)).dtype == torch.float32


@pytest.mark.parametrize("phi", [1e-15, 1e-8, 1e-3, 0.5, 1.5, 2.0, 3.0, math.pi - 1e-6])
def test_angle_is_the_angle_turned_in_float32_however_small(phi):
    w = sphere.unit(torch.randn(16))
    u = sphere.unit(sphere.tangent(torch.randn(16), w))
    # 1 - cos(phi), written so that small angles keep their digits
    delta = -2 * math.sin(phi / 2) ** 2 * w + math.sin(phi) * u
    assert float(sphere.angle(w, delta)) == pytest.approx(phi, rel=3e-6, abs=0)


@quick
@given(seeds, st.floats(0.0, 3.1), st.floats(1e-6, 30.0))
def test_cap_angle_never_turns_further_than_the_cap(seed, cap, scale):
    w, delta = sphere.unit(draw(seed, 8, 5)), scale * draw(seed + 1, 8, 5)
    moved = sphere.cap_angle(w, delta, cap)
    assert (sphere.angle(w, moved - w) <= cap + 1e-7 * max(1.0, scale)).all()
    free = sphere.angle(w, delta) < cap - 1e-9
    assert torch.equal(moved[free], (w + delta)[free])


@quick
@given(seeds, st.floats(0.0, 3.1), st.floats(0.01, 30.0))
def test_cap_angle_is_the_papers_formula(seed, cap, scale):
    w, delta = draw(seed, 8, 5), scale * draw(seed + 1, 8, 5)  # w of any length
    expected = np.stack([reference.cap_angle(a, a + b, cap) for a, b in zip(w.numpy(), delta.numpy())])
    np.testing.assert_allclose(sphere.cap_angle(w, delta, cap).numpy(), expected, rtol=1e-9, atol=1e-12)


def test_cap_of_zero_degrees_returns_the_unit_vector_of_w():
    w, delta = 3 * draw(0, 4, 6), draw(1, 4, 6)
    torch.testing.assert_close(sphere.cap_angle(w, delta, 0.0), sphere.unit(w))


def test_cap_keeps_angles_beyond_ninety_degrees_and_their_direction():
    w, u = torch.eye(3, dtype=torch.float64)[0], torch.eye(3, dtype=torch.float64)[1]
    candidate = math.cos(2.5) * w + math.sin(2.5) * u
    torch.testing.assert_close(sphere.cap_angle(w, candidate - w, 2.0), math.cos(2.0) * w + math.sin(2.0) * u)
    torch.testing.assert_close(sphere.cap_angle(w, candidate - w, 2.6), candidate)


def test_cap_leaves_a_displacement_without_tangent_part_alone():
    w = sphere.unit(draw(0, 4, 6))
    for factor in (-0.5, 0.25, -3.0):  # shorter, longer, and through the origin to the other side
        torch.testing.assert_close(sphere.cap_angle(w, factor * w, 0.01), w + factor * w)


def test_cap_accepts_a_tensor_and_acts_along_any_dimension():
    w, delta = sphere.unit(draw(0, 5, 6), dim=0), draw(1, 5, 6)
    a = sphere.cap_angle(w, delta, torch.tensor(0.1), dim=0)
    torch.testing.assert_close(a, sphere.cap_angle(w.T, delta.T, 0.1).T, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_one_cap_or_fraction_per_vector_may_have_its_axis_or_not(dim):
    a, b = sphere.unit(draw(0, 5, 5), dim), sphere.unit(draw(1, 5, 5), dim)
    x = torch.tensor([0.0, 0.1, 0.2, 0.7, math.inf], dtype=torch.float64)
    for act, each in ((lambda x: sphere.cap_angle(a, b, x, dim), x), (lambda x: sphere.slerp(a, b, x, dim), x.clamp(max=1))):
        want = torch.stack([act(float(one)).select(1 - dim % 2, i) for i, one in enumerate(each)], 1 - dim % 2)
        assert torch.equal(act(each.unsqueeze(dim)), act(each))
        torch.testing.assert_close(act(each), want)


def test_slerp_gives_many_points_of_one_arc():
    a, b = sphere.unit(draw(0, 3)), sphere.unit(draw(1, 3))
    t = torch.linspace(0, 1, 7, dtype=torch.float64)
    torch.testing.assert_close(sphere.slerp(a, b, t[:, None]), torch.stack([sphere.slerp(a, b, float(x)) for x in t]))


@pytest.mark.parametrize("shape", [(3,), (4, 6), (6, 4), (4, 3)], ids=str)
def test_a_tensor_without_one_number_per_vector_is_an_error(shape):
    a, b = sphere.unit(draw(0, 4, 6)), sphere.unit(draw(1, 4, 6))
    for act in (sphere.cap_angle, sphere.slerp):
        with pytest.raises(ValueError, match=r"one per vector: \[4\] or \[4, 1\]; got \[" + ", ".join(map(str, shape))):
            act(a, b, torch.full(shape, 0.1))


@pytest.mark.parametrize("cap", [math.inf, 4.0, math.pi, torch.tensor(math.inf)], ids=str)
def test_a_cap_of_half_a_turn_or_more_is_none(cap):
    w, delta = sphere.unit(draw(0, 8, 5)).requires_grad_(), 3 * draw(1, 8, 5)
    moved = sphere.cap_angle(w, delta, cap)
    assert torch.equal(moved, w + delta)
    moved.sum().backward()
    assert torch.equal(w.grad, torch.ones_like(w))


@pytest.mark.parametrize("cap", [0.0, 0.1, 3.0])
def test_where_nothing_moves_cap_and_angle_have_finite_gradients(cap):
    w, delta = sphere.unit(draw(0, 4, 5)), torch.zeros(4, 5, dtype=torch.float64, requires_grad=True)
    sphere.cap_angle(w, delta, cap).sum().backward()
    assert torch.equal(delta.grad, torch.ones_like(delta))
    (grad,) = torch.autograd.grad(sphere.angle(w, delta).sum(), delta)
    assert torch.equal(grad, torch.zeros_like(delta))


def test_cap_angle_passes_gradcheck_within_the_cap_and_beyond():
    w, delta = sphere.unit(draw(0, 6, 4)).requires_grad_(), draw(1, 6, 4).requires_grad_()
    angles = sphere.angle(w, delta).detach()
    assert torch.autograd.gradcheck(lambda w, delta: sphere.cap_angle(w, delta, angles.median() + 1e-3), (w, delta))
    assert torch.autograd.gradcheck(sphere.angle, (w, delta))


def test_step_is_lerp_then_norm():
    h, s = sphere.unit(draw(0, 5)), sphere.unit(draw(1, 5))
    torch.testing.assert_close(sphere.step(h, s, 0.3), sphere.unit(0.7 * h + 0.3 * s))
    alpha = torch.rand(5, dtype=torch.float64)
    torch.testing.assert_close(sphere.step(h, s, alpha), sphere.unit((1 - alpha) * h + alpha * s))


@quick
@given(seeds, st.floats(0, 1))
def test_slerp_moves_at_constant_speed_along_the_arc(seed, t):
    a, b = sphere.unit(draw(seed, 4)), sphere.unit(draw(seed + 1, 4))
    phi = math.acos(max(-1.0, min(1.0, float(a @ b))))
    expected = (math.sin((1 - t) * phi) * a + math.sin(t * phi) * b) / math.sin(phi)
    torch.testing.assert_close(sphere.slerp(a, b, t), expected, rtol=1e-7, atol=1e-9)


def test_slerp_between_antipodes_and_to_itself_stays_on_the_sphere():
    a = sphere.unit(draw(0, 6))
    torch.testing.assert_close(sphere.slerp(a, -a, 1.0), -a)
    middle = sphere.slerp(a, -a, 0.5)
    assert float(middle.norm()) == pytest.approx(1) and abs(float(a @ middle)) < 1e-12  # a quarter of the circle away
    torch.testing.assert_close(sphere.slerp(a, a, 0.3), a)


@pytest.mark.parametrize("short", [1e-2, 1e-4, 1e-6])
def test_slerp_keeps_its_speed_close_to_the_antipode_in_float32(short):
    a = sphere.unit(draw(0, 50, 16)).float()
    b = -math.cos(short) * a + math.sin(short) * sphere.unit(sphere.tangent(draw(1, 50, 16).float(), a))
    for t in (0.25, 0.5, 0.75):
        cosines = (a.double() * sphere.slerp(a, b, t)).sum(-1)
        assert (cosines - math.cos(t * (math.pi - short))).abs().max() < 1e-6
    torch.testing.assert_close(sphere.slerp(a, b, 1.0), b, rtol=0, atol=3e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_slerp_of_half_precisions_arrives(dtype):
    a, b = sphere.unit(draw(0, 50, 16)).to(dtype), sphere.unit(draw(1, 50, 16)).to(dtype)
    for end in (b, -a, a):
        last_digit = torch.finfo(dtype).eps / 2  # of a coordinate below 1, where b's own length is not quite 1
        assert (sphere.slerp(a, end, 1.0).double() - end.double()).abs().max() <= last_digit
    assert torch.equal(sphere.slerp(a, b, 0.3), sphere.slerp(a.float(), b.float(), 0.3).to(dtype))


def test_random_points_are_unit_and_spread_evenly():
    x = sphere.random(20000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(20000, dtype=torch.float64))
    assert x.mean(0).abs().max() < 0.02
    torch.testing.assert_close(x.T @ x / 20000, torch.eye(3, dtype=torch.float64) / 3, rtol=0, atol=0.02)


@pytest.mark.parametrize("x", [[3.0, 4.0], 2.0, None, torch.tensor([3, 4])], ids=str)
def test_anything_but_a_floating_point_tensor_is_an_error(x):
    with pytest.raises(ValueError, match="Vectors must be tensors of floating-point numbers"):
        sphere.unit(x)
    for act in (sphere.tangent, lambda a, b: sphere.slerp(a, b, 0.5), lambda a, b: sphere.cap_angle(a, b, 0.5)):
        for pair in ((x, torch.ones(2)), (torch.ones(2), x)):
            with pytest.raises(ValueError, match="Vectors must be tensors of floating-point numbers"):
                act(*pair)


@pytest.mark.parametrize("angle", [-0.5, math.nan], ids=str)
def test_a_cap_below_zero_is_an_error(angle):
    w = torch.eye(2)
    with pytest.raises(ValueError, match=r"max_angle must be an angle >= 0, in radians; got"):
        sphere.cap_angle(w, torch.ones(2, 2), angle)
