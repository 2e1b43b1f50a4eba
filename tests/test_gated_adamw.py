"""GatedAdamW: the paper's algorithm over hundreds of steps with every switch, AdamW as its special case, and the manners of a
torch optimizer: groups, state, errors, precision."""

import copy
import io
import math
import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ngpt_core as ng
from ngpt_core import sphere
from ngpt_core.optim import Diagnostics, algorithm
from ngpt_core.optim.pmen import signs

F64 = torch.float64
quick = settings(max_examples=60, deadline=None)


def wild(shape, t, dtype=F64, seed=0):
    """Gradients as training has them: zeros, dead coordinates, tiny values, and a spike now and then."""
    rng = np.random.default_rng([seed, t])
    g = rng.standard_normal(shape) * 10.0 ** rng.uniform(-13, 0, shape)
    g[rng.random(shape) < 0.2] = 0
    g[..., 0] = 0  # never a gradient: second moment exactly zero
    if t % 37 == 0:
        g *= 1e6
    return torch.tensor(g, dtype=dtype)


def parameter(*shape, dtype=F64, seed=1):
    return torch.nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype))


# ---- the gate --------------------------------------------------------------------------------------------------------


@quick
@given(st.floats(1e-30, 1e3), st.floats(0.05, 12), st.floats(1e-12, 1.0))
def test_both_forms_of_the_gate_are_the_twins(d, a, eps_gate):
    expected = reference.gate(d, a, eps_gate)
    for form in (ng.gate, algorithm.gate_power):
        assert float(form(torch.tensor(d, dtype=F64), a, eps_gate)) == pytest.approx(expected, rel=1e-10, abs=1e-290)


def test_the_gate_is_zero_at_zero_half_at_the_threshold_and_one_far_above():
    d = torch.tensor([0.0, 1e-8, 1e20])
    for a in (0.25, 0.5, 1.0, 4.0, 9.0):
        for form in (ng.gate, algorithm.gate_power):
            torch.testing.assert_close(form(d, a, 1e-8), torch.tensor([0.0, 0.5, 1.0]), rtol=1e-4, atol=0)


def test_both_forms_have_the_papers_defaults():
    d = torch.tensor([1e-11, 1e-9, 1e-8, 3e-7], dtype=F64)
    for form in (ng.gate, algorithm.gate_power):
        assert torch.equal(form(d), form(d, 0.5, 1e-8))


def test_a_smaller_a_opens_the_gate_below_the_threshold_and_closes_it_above():
    below, above = torch.tensor(1e-10), torch.tensor(1e-6)
    assert ng.gate(below, 0.5) > ng.gate(below, 1.0) and ng.gate(above, 0.5) < ng.gate(above, 1.0)


@pytest.mark.parametrize("form", [ng.gate, algorithm.gate_power])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gate_of_half_precisions_is_computed_wide_and_rounded_once(form, dtype):
    """In float16 neither d / eps_gate nor 1 / d stays in range."""
    d = torch.tensor([0.0, 1e-6, 8e-4, 3.0], dtype=dtype)
    assert torch.equal(form(d, a=0.1), form(d.float(), a=0.1).to(dtype))


@quick
@given(st.floats(1e-20, 10), st.floats(-1, 1), st.floats(0.05, 9), st.floats(1e-12, 1e-2))
def test_the_gated_direction_is_gate_times_m_over_d(d, m, a, eps_gate):
    got = float(algorithm.gated(torch.tensor(m, dtype=F64), torch.tensor(d, dtype=F64), a, eps_gate))
    assert got == pytest.approx(reference.gate(d, a, eps_gate) * m / d, rel=1e-9, abs=1e-280)


@pytest.mark.parametrize("a, at_zero", [(0.5, 0.0), (1.0, 3e7), (2.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_at_zero_second_moment_the_direction_is_its_limit_and_never_nan(a, at_zero, dtype):
    got = algorithm.gated(torch.tensor([0.3, 0.0], dtype=dtype), torch.zeros(2, dtype=dtype), a, 1e-8)
    torch.testing.assert_close(got, torch.tensor([at_zero, 0.0], dtype=dtype))


def test_a_sharp_gate_stays_finite_in_float32():
    d = torch.tensor([0.0, 1e-20, 1e-12, 1e-8, 1e-3, 1e3])
    got = algorithm.gated(torch.ones(6), d, 9.0, 1e-8)
    expected = torch.tensor([0, 0, reference.gate(1e-12, 9, 1e-8) / 1e-12, 0.5e8, 1e3, 1e-3])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-18)


def test_the_bias_correction_of_a_counter_on_the_device_keeps_its_digits():
    for beta in (0.0, 0.9, 0.975, 0.9999):
        for t in (1, 2, 1000):
            got = float(algorithm.bias_correction(beta, torch.tensor(float(t))))
            assert got == pytest.approx(algorithm.bias_correction(beta, t), rel=1e-6)


# ---- Algorithm 1 and what surrounds it, against the float64 twin -----------------------------------------------------

SMGC_EARLY = dict(R=4.0, s_min=1e-9, start=20)
STEP = dict(strength=3.0, tau=1e-9, profile="step", b=2.0, reference="row", start=1, every=1, seed=5)
SMOOTH = dict(strength=0.5, tau=1e-6, profile="smooth", b=1.5, reference="adam", start=4, every=3, seed=6)

SWITCHES = {
    "coordinates": dict(unit=False, a=1.0),
    "coordinates, gate 0.5, decay": dict(unit=False, a=0.5, weight_decay=0.1),
    "coordinates, decay eta": dict(unit=False, a=0.7, weight_decay=0.1, decay="eta"),
    "coordinates, clipped": dict(unit=False, a=0.5, smgc=SMGC_EARLY),
    "coordinates, eps_num 0": dict(unit=False, a=0.5, eps_num=0.0),
    "coordinates, a 3, eps_num 0": dict(unit=False, a=3.0, eps_num=0.0),
    "rows": dict(unit=True),
    "rows, no projection": dict(unit=True, tangent=False),
    "rows, decay": dict(unit=True, weight_decay=0.3, tangent=False),
    "rows, clipped": dict(unit=True, smgc=SMGC_EARLY),
    "rows, noise": dict(unit=True, pmen=STEP),
    "rows, smooth noise": dict(unit=True, pmen=SMOOTH),
    "rows, noise where v is zero": dict(unit=True, pmen=STEP | dict(tau=0.0)),
    "rows, capped": dict(unit=True, cap=0.01),
    "rows, cap from zero": dict(unit=True, cap="ramp", pmen=STEP),
    "everything": dict(unit=True, smgc=SMGC_EARLY, pmen=STEP, cap="ramp", weight_decay=0.05, decay="eta"),
    "everything, smooth": dict(unit=True, smgc=SMGC_EARLY, pmen=SMOOTH, cap=0.02, tangent=False, betas=(0.8, 0.99)),
    "no momentum": dict(unit=True, betas=(0.0, 0.9), pmen=STEP, cap=0.05),
    "coordinates, median gate": dict(unit=False, eps_gate=dict(quantile=0.5, every=7)),
    "rows, quantile gate": dict(unit=True, eps_gate=dict(quantile=0.2, every=3), pmen=STEP, cap=0.02),
    "rows, gate by function": dict(unit=True, eps_gate=lambda t: 1e-8 * t, cap=0.02),
    "rows, projected moment": dict(unit=True, transport="project", lr=0.05),
    "rows, transported moment": dict(unit=True, transport="parallel", lr=0.05),
    "rows, transported, not tangent": dict(unit=True, transport="parallel", tangent=False, weight_decay=0.1, cap="ramp"),
    "everything new": dict(unit=True, smgc=SMGC_EARLY, pmen=STEP | dict(tau=0.0), cap="ramp", transport="parallel",
                           eps_gate=dict(quantile=0.5, every=10)),
    "everything new, projected": dict(unit=True, smgc=SMGC_EARLY, pmen=SMOOTH, cap=0.02, transport="project",
                                      eps_gate=dict(quantile=0.9, every=5), betas=(0.8, 0.99), a=0.3),
}  # fmt: skip
NEW = [name for name in SWITCHES if "gate" in name.replace("gate 0.5", "") or "moment" in name or "new" in name]


def both(shape, steps, dtype=F64, lr=0.02, check_every=1, tolerance=1e-10, ours=None, **switches):
    """Run GatedAdamW and the twin side by side on the same gradients; compare parameters and moments."""
    switches = dict(betas=(0.975, 0.975), eps_gate=1e-8, eps_num=1e-14, a=0.5) | switches
    unit, cap, decay = switches.pop("unit"), switches.pop("cap", None), switches.pop("decay", "lr")
    p = parameter(*shape, dtype=dtype)
    twin = reference.GatedAdamW(
        p.detach().double().numpy(), unit=unit, name="w", alpha=lr if decay == "eta" else None, **switches
    )
    switches["smgc"] = ng.SMGC(**switches["smgc"]) if switches.get("smgc") else None
    switches["pmen"] = ng.PMEN(**switches["pmen"]) if switches.get("pmen") else None
    gate = switches["eps_gate"]
    if callable(gate):
        switches["eps_gate"] = lambda t, group: gate(t) if group["unit_dim"] == -1 else 1.0
    elif isinstance(gate, dict):
        switches["eps_gate"] = ng.AutoGate(**gate)
    optimizer = ng.GatedAdamW([("w", p)], lr=lr, unit_dim=-1 if unit else None, decay=decay, **switches, **(ours or {}))
    for t in range(1, steps + 1):
        now, cap_now = lr * (1 - t / (2 * steps)), cap if cap != "ramp" else 0.03 * min(1.0, (t - 1) / (0.3 * steps))
        optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["cap"] = now, cap_now
        g = wild(shape, t, dtype)
        p.grad = g.clone()
        optimizer.step()
        twin.step(g.double().numpy(), now, cap_now)
        if t % check_every == 0:
            np.testing.assert_allclose(p.detach().double().numpy(), twin.theta, rtol=0, atol=tolerance, err_msg=f"step {t}")
    state = optimizer.state[p]
    np.testing.assert_allclose(state["exp_avg"].double().numpy(), twin.m, rtol=1e-6 if dtype == F64 else 1e-3, atol=tolerance)
    np.testing.assert_allclose(
        state["exp_avg_sq"].double().numpy(), twin.v, rtol=1e-6 if dtype == F64 else 1e-3, atol=tolerance
    )
    assert int(state["step"]) == steps
    return p, optimizer


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_it_is_the_twin_over_200_steps(switches):
    both((3, 5), 200, **switches)


@pytest.mark.parametrize("name", ["coordinates, gate 0.5, decay", "rows, noise where v is zero", "everything", *NEW])
@pytest.mark.parametrize("ours", [{}, dict(fused=False), dict(foreach=True), dict(capturable=True)], ids=str)
def test_every_path_is_the_twin_in_float32(name, ours):
    switches = SWITCHES[name] | dict(smgc=None, lr=0.002)  # a clipped spike amplifies float32's rounding; tested in float64
    both((3, 5), 200, torch.float32, tolerance=3e-4, ours=ours, **switches)


@pytest.mark.parametrize("ours", [dict(foreach=True), dict(capturable=True), dict(capturable=True, foreach=True)], ids=str)
@pytest.mark.parametrize("name", ["everything", "everything, smooth", "everything new", "everything new, projected"])
def test_stacked_and_capturable_steps_are_the_twin_in_float64(ours, name):
    both((3, 5), 200, ours=ours, tolerance=2e-7 if "capturable" in ours else 1e-10, **SWITCHES[name])


# ---- transport of the first moment -----------------------------------------------------------------------------------


def carry(m, w, new, way):
    products = [(a * b).sum(-1, keepdim=True) for a, b in ((w, m), (new, m), (w, new), (w, w))]
    return algorithm.carried(m, w, new, *products, way)


@quick
@given(st.integers(2, 30), st.integers(0, 10**6), st.floats(-6, 0.4))
def test_parallel_transport_is_the_rotation_of_the_step(d, seed, size):
    """It keeps lengths, takes tangent vectors to tangent vectors and w to its new place, and the way back undoes it."""
    rng = torch.Generator().manual_seed(seed)
    w, m, other = torch.randn(3, 4, d, generator=rng, dtype=F64)
    w = sphere.unit(w)
    new = sphere.unit(w + 10**size * sphere.tangent(other, w))
    moved = carry(m, w, new, "parallel")
    for got, expected in (
        (moved.norm(dim=-1), m.norm(dim=-1)),
        ((new * moved).sum(-1), (w * m).sum(-1)),
        (carry(w, w, new, "parallel"), new),
        (carry(moved, new, w, "parallel"), m),
        (carry(m, 3 * w, new, "parallel"), moved),  # only the direction of w matters
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
    projected = carry(m, w, new, "project")
    torch.testing.assert_close(projected, sphere.tangent(m, new), rtol=0, atol=1e-12)


@pytest.mark.parametrize("ours", [dict(fused=False), dict(fused=None), dict(foreach=True)], ids=str)
@pytest.mark.parametrize(("way", "length"), [("project", 1.0), ("parallel", 1.0), ("parallel", 2.0)])
def test_a_row_that_stays_keeps_its_moment_or_has_it_projected(way, ours, length):
    p = parameter(3, 8, dtype=torch.float32)
    optimizer = ng.GatedAdamW([p], lr=0.0, unit_dim=-1, tangent=False, betas=(0.0, 0.9), transport=way, **ours)
    p.data.mul_(length)
    p.grad = wild((3, 8), 1, torch.float32) + 1
    w, g = p.detach().clone(), p.grad.clone()
    optimizer.step()
    m = optimizer.state[p]["exp_avg"]
    assert torch.equal(p, w)
    if way == "parallel":
        assert torch.equal(m, g)
    else:
        torch.testing.assert_close(m, sphere.tangent(g, w), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ours", [dict(fused=False), dict(fused=None), dict(foreach=True)], ids=str)
@pytest.mark.parametrize("way", ["project", "parallel"])
def test_only_the_direction_counts_of_a_row_that_left_the_sphere(way, ours):
    p = parameter(3, 8, dtype=torch.float32)
    optimizer = ng.GatedAdamW([p], lr=0.5, unit_dim=-1, tangent=False, betas=(0.0, 0.9), transport=way, **ours)
    p.data.mul_(2)
    p.grad = torch.randn(3, 8, generator=torch.Generator().manual_seed(3))
    w, g = p.detach().double(), p.grad.double()
    optimizer.step()
    expected = carry(g, w, p.detach().double(), way)
    torch.testing.assert_close(optimizer.state[p]["exp_avg"].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ours", [dict(fused=False), dict(fused=None), dict(foreach=True)], ids=str)
def test_at_the_antipode_there_is_no_great_circle_and_the_moment_stays(ours):
    """A decay of 2 takes w to -w."""
    p = parameter(3, 8, dtype=torch.float32)
    optimizer = ng.GatedAdamW(
        [p], lr=1e-12, weight_decay=2e12, unit_dim=-1, tangent=False, betas=(0.0, 0.9), transport="parallel", **ours
    )
    p.grad = wild((3, 8), 1, torch.float32) + 1
    w, g = p.detach().clone(), p.grad.clone()
    optimizer.step()
    torch.testing.assert_close(p.detach(), -w)
    assert torch.equal(optimizer.state[p]["exp_avg"], g)


def one_step(w, g, pmen=None, tangent=True, **settings):
    """``algorithm.update`` from zero moments, without an optimizer around it."""
    rule = algorithm.Rule(
        lr=0.1, decay=0.0, beta1=0.9, beta2=0.9, eps_gate=1e-8, eps_num=1e-14, a=0.5, dim=-1, length=w.shape[-1], pmen=pmen,
        tangent=tangent,
    )  # fmt: skip
    return algorithm.run(algorithm.update(w, g, torch.zeros_like(w), torch.zeros_like(w), 1, rule, **settings))


@pytest.mark.parametrize("norm", [1e-3, 1.1e-6, 0.7e-6, 1e-8])
def test_the_projection_divides_by_the_squared_norm_or_1e_12(norm):
    """Appendix B's eps: a vector this short is nowhere in training, but the formula is the formula."""
    w, g = norm * sphere.unit(torch.randn(3, 5, dtype=F64)), torch.randn(3, 5, dtype=F64)
    _, m, _ = one_step(w, g)
    ww, wg = (w * w).sum(-1, keepdim=True), (w * g).sum(-1, keepdim=True)
    torch.testing.assert_close(m, 0.1 * (g - w * wg / ww.clamp_min(1e-12)), rtol=1e-12, atol=0)


def test_without_a_key_the_noise_is_that_of_key_zero():
    w, index = sphere.unit(torch.randn(3, 5, dtype=F64)), torch.arange(15).reshape(3, 5)
    noisy, _, _ = one_step(w, torch.zeros_like(w), ng.PMEN(strength=1.0), index=lambda: index)
    torch.testing.assert_close(noisy, sphere.unit(w + 0.1 / math.sqrt(5) * signs(0, 1, index).double()), rtol=0, atol=1e-14)


def test_experts_in_three_dimensions_are_the_twin():
    both((2, 3, 4), 60, **SWITCHES["everything"])


def test_a_vector_may_lie_along_any_dimension():
    a, b = parameter(6, 4), parameter(6, 4)
    b.data = b.data.T.contiguous()
    kwargs = dict(lr=0.05, cap=0.02, smgc=ng.SMGC(R=4.0, start=3))
    first, second = ng.GatedAdamW([a], unit_dim=-1, **kwargs), ng.GatedAdamW([b], unit_dim=0, **kwargs)
    for t in range(20):
        a.grad = wild((6, 4), t)
        b.grad = a.grad.T.contiguous()
        first.step(), second.step()
        torch.testing.assert_close(a.detach(), b.detach().T, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dim", [-1, 0])
def test_foreach_and_one_by_one_agree_to_the_bit_with_many_tensors(dim):
    def train(**path):
        params = [(f"p{i}", parameter(3, 4, seed=i)) for i in range(5)] + [("q", parameter(2, 4))]
        optimizer = ng.GatedAdamW(params, lr=0.05, unit_dim=dim, pmen=ng.PMEN(tau=1e-2), cap=0.1, fused=False, **path)
        for t in range(6):
            for i, (_, p) in enumerate(params):
                p.grad = None if t < 2 and i == 3 else wild(p.shape, t, seed=i)  # p3 joins late: another counter
            optimizer.step()
        return [p.detach() for _, p in params]

    for a, b in zip(train(), train(foreach=True)):
        assert torch.equal(a, b)


def test_the_angle_of_a_step_is_at_most_the_cap_and_zero_degrees_hold_everything():
    p = parameter(8, 6)
    optimizer = ng.GatedAdamW([p], lr=1.0, unit_dim=-1, pmen=ng.PMEN(), cap=0.0)
    for cap in (0.0, 0.01, 1.0, 2.0):
        optimizer.param_groups[0]["cap"] = cap
        for t in range(10):
            before, p.grad = p.detach().clone(), wild(p.shape, t)
            optimizer.step()
            assert sphere.angle(before, p.detach() - before).max() <= cap + 1e-7
            torch.testing.assert_close(p.detach().norm(dim=-1), torch.ones(8, dtype=F64), rtol=0, atol=1e-14)


def test_the_rows_of_every_precision_stay_unit():
    for dtype, tolerance in ((torch.float32, 3e-7), (torch.bfloat16, 4e-3), (F64, 1e-15)):
        for fused in (None, False):
            p = parameter(5, 300, dtype=dtype)
            optimizer = ng.GatedAdamW([p], lr=0.1, unit_dim=-1, pmen=ng.PMEN(), cap=0.05, fused=fused)
            for t in range(30):
                p.grad = wild(p.shape, t, dtype)
                optimizer.step()
            assert (p.detach().double().norm(dim=-1) - 1).abs().max() < tolerance
            assert optimizer.state[p]["exp_avg"].dtype == (F64 if dtype == F64 else torch.float32)


def test_bfloat16_parameters_move_as_their_float32_twins_rounded():
    p, q = parameter(4, 16, dtype=torch.bfloat16), parameter(4, 16, dtype=torch.bfloat16)
    q.data = q.data.float()
    a, b = ng.GatedAdamW([p], lr=0.01, fused=False), ng.GatedAdamW([q], lr=0.01, fused=False)
    p.grad = wild(p.shape, 1, torch.bfloat16)
    q.grad = p.grad.float()
    a.step(), b.step()
    assert torch.equal(p.detach(), q.detach().bfloat16())
    assert torch.equal(a.state[p]["exp_avg_sq"], b.state[q]["exp_avg_sq"])


# ---- AdamW, the special case -----------------------------------------------------------------------------------------


# torch rounds 1 - lr*lambda to float32 before it multiplies; the plain path does the same, a kernel may be more exact.
PRECISIONS = [(None, torch.float32, 1e-5), (False, torch.float32, 1e-6), (None, F64, 1e-14)]


@pytest.mark.parametrize("fused, dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize("maximize", [False, True])
def test_with_a_one_and_eps_num_zero_it_is_torchs_adamw(fused, dtype, tolerance, maximize):
    mine, theirs = parameter(7, 9, dtype=dtype), parameter(7, 9, dtype=dtype)
    kwargs = dict(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, maximize=maximize)
    a = ng.GatedAdamW([mine], a=1.0, eps_num=0.0, eps_gate=1e-8, fused=fused, **kwargs)
    b = torch.optim.AdamW([theirs], eps=1e-8, **kwargs)
    for t in range(200):
        mine.grad = wild(mine.shape, t, dtype)
        theirs.grad = mine.grad.clone()
        a.step(), b.step()
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    assert not a.state[mine]["exp_avg_sq"][:, 0].any()  # and coordinates whose second moment is exactly zero were among them


def test_it_is_adamw_where_the_second_moment_underflows_but_the_first_does_not():
    mine, theirs = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    a = ng.GatedAdamW([mine], lr=0.1, betas=(0.9, 0.95), a=1.0, eps_num=0.0, eps_gate=1e-15, fused=False)
    b = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), eps=1e-15, weight_decay=0)
    for _ in range(5):
        mine.grad = torch.tensor([1e-24, 0.0, -1e-25])
        theirs.grad = mine.grad.clone()
        a.step(), b.step()
    assert not a.state[mine]["exp_avg_sq"].any()
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-7)


def test_decay_eta_is_lr_over_alpha_and_alpha_survives_a_checkpoint():
    p = torch.nn.Parameter(torch.ones(2, dtype=F64))
    optimizer = ng.GatedAdamW([p], lr=0.5, weight_decay=0.1, decay="eta")
    for lr in (0.5, 0.25):
        optimizer.param_groups[0]["lr"] = lr
        before, p.grad = p.detach().clone(), torch.zeros(2, dtype=F64)
        optimizer.step()
        torch.testing.assert_close(p.detach(), before * (1 - 0.1 * lr / 0.5))
    other = ng.GatedAdamW([torch.nn.Parameter(torch.ones(2, dtype=F64))], lr=0.25, weight_decay=0.1, decay="eta")
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["alpha"] == 0.5


# ---- a step that must change nothing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
@pytest.mark.parametrize("path", [dict(), dict(fused=False), dict(foreach=True), dict(capturable=True)], ids=str)
def test_lr_zero_and_zero_gradients_change_no_bit(dtype, path):
    rows, free = parameter(4, 7, dtype=dtype), parameter(5, dtype=dtype)
    free.data[0], free.data[1] = -0.0, 0.0
    groups = [dict(params=[rows], unit_dim=-1, pmen=ng.PMEN(), cap=0.01), dict(params=[free], weight_decay=0.1)]
    optimizer = ng.GatedAdamW(groups, lr=0.1, smgc=ng.SMGC(start=0), **path)
    before = [p.detach().clone().view(torch.int8) for p in (rows, free)]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(3):
        rows.grad, free.grad = torch.zeros_like(rows), torch.zeros_like(free)
        optimizer.step()
    assert all(torch.equal(p.detach().view(torch.int8), old) for p, old in zip((rows, free), before))


@pytest.mark.parametrize("fused", [None, False])
def test_lr_zero_keeps_the_sign_of_a_zero_whatever_the_gradient(fused):
    p = torch.nn.Parameter(torch.tensor([-0.0, -0.0, 0.0, 0.0]))
    optimizer = ng.GatedAdamW([p], lr=0.0, fused=fused)
    p.grad = torch.tensor([1.0, -1.0, 1.0, -1.0])
    optimizer.step()
    assert p.detach().signbit().tolist() == [True, True, False, False]


def test_a_state_created_by_a_zero_step_leaves_no_trace_after_loading():
    def train(steps, prime):
        p = parameter(3, 6)
        optimizer = ng.GatedAdamW([p], lr=0.05, unit_dim=-1, pmen=ng.PMEN(tau=1e-3, every=2))
        if prime:  # as distributed checkpointing does before it loads
            from torch.distributed.checkpoint.state_dict import _init_optim_state

            _init_optim_state(optimizer)
            saved_p, saved = prime
            p.data.copy_(saved_p)
            optimizer.load_state_dict(saved)
        for t in steps:
            p.grad = wild(p.shape, t)
            optimizer.step()
        return p.detach().clone(), copy.deepcopy(optimizer.state_dict())

    whole, _ = train(range(9), None)
    resumed, _ = train(range(4, 9), train(range(4), None))
    assert torch.equal(whole, resumed)


def test_a_row_that_does_not_move_keeps_its_bits_and_the_others_move():
    p = parameter(6, 50, dtype=torch.float32)
    optimizer = ng.GatedAdamW([p], lr=0.01, unit_dim=-1, cap=0.1)
    before = p.detach().clone()
    p.grad = torch.randn(6, 50)
    p.grad[::2] = 0
    optimizer.step()
    assert torch.equal(p.detach()[::2], before[::2])
    assert (p.detach()[1::2] != before[1::2]).any(dim=-1).all()


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_cap_leaves_a_step_straight_through_the_origin_alone(dtype):
    """Its tangent part is zero: there is no direction in which to stop at the cap."""
    p = torch.nn.Parameter(torch.eye(3, dtype=dtype))
    optimizer = ng.GatedAdamW([p], lr=1.0, unit_dim=-1, weight_decay=3.0, cap=0.1)
    p.grad = torch.zeros(3, 3, dtype=dtype)
    optimizer.step()
    torch.testing.assert_close(p.detach(), -torch.eye(3, dtype=dtype))


@pytest.mark.parametrize("fused", [None, False])
def test_a_vector_that_became_zero_stays_where_it_is(fused):
    p = parameter(3, 8, dtype=torch.float32)
    optimizer = ng.GatedAdamW([p], lr=0.1, unit_dim=-1, pmen=ng.PMEN(), cap=0.1, weight_decay=0.1, fused=fused)
    p.data[1] = 0
    for _ in range(3):
        p.grad = torch.randn(3, 8)
        optimizer.step()
    assert not p.detach()[1].any()
    torch.testing.assert_close(p.detach()[::2].norm(dim=-1), torch.ones(2))


def test_a_tangent_part_of_four_rounding_errors_is_no_direction_and_nothing_divides_by_it():
    eps, one, zero = torch.finfo(F64).eps, torch.ones((), dtype=F64), torch.zeros((), dtype=F64)
    for errors, counts in ((3.9, False), (4.1, True)):
        for size in (1.0, 1e-6):  # of the displacement
            length, along = sphere.polar(one, zero, one * size**2, one * (errors * eps * size) ** 2)
            assert bool(length > 0) == counts and along == 1
    w = torch.eye(3, dtype=F64)[0]
    assert sphere.turn(w, torch.zeros(3, dtype=F64), one, zero, 0.1).isfinite().all()


def test_a_candidate_that_is_exactly_zero_leaves_the_vector_where_it_was():
    p = torch.nn.Parameter(torch.eye(3, dtype=F64))
    optimizer = ng.GatedAdamW([p], lr=1.0, unit_dim=-1, weight_decay=1.0)
    p.grad = torch.zeros(3, 3, dtype=F64)
    optimizer.step()
    assert torch.equal(p.detach(), torch.eye(3, dtype=F64))


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_the_defaults_are_the_papers_and_torchs():
    papers = dict(betas=(0.975, 0.975), eps_gate=1e-8, eps_num=1e-14, a=0.5, tangent=True)  # section 4.1
    ours = dict(weight_decay=0.0, decay="lr", unit_dim=None, smgc=None, pmen=None, cap=None, maximize=False)
    optimizer = ng.GatedAdamW([parameter(2)], lr=0.1)
    for name, value in (papers | ours).items():
        assert optimizer.param_groups[0][name] == value, name
    assert optimizer.nonfinite == "raise"


def test_unit_rows_are_normalized_when_their_group_is_added():
    p, q = parameter(4, 5), parameter(3, 5)
    optimizer = ng.GatedAdamW([p], lr=0.1, unit_dim=-1)
    assert torch.equal(p.detach(), sphere.unit(parameter(4, 5).detach()))
    optimizer.add_param_group(dict(params=[q], unit_dim=0))
    torch.testing.assert_close(q.detach().norm(dim=0), torch.ones(5, dtype=F64))
    assert not torch.allclose(q.detach().norm(dim=1), torch.ones(3, dtype=F64))


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e-22, 1e30])
def test_rows_whose_squares_leave_float32_are_normalized_as_their_float64_twins(size):
    p = torch.nn.Parameter((size * parameter(4, 300).detach()).float())
    want = sphere.unit(p.detach().double())
    ng.GatedAdamW([p], lr=0.1, unit_dim=-1)
    torch.testing.assert_close(p.detach().double(), want, rtol=0, atol=1e-7)


def test_normalizing_rows_of_an_ordinary_size_rounds_as_unit_does():
    for dtype in (torch.float32, torch.bfloat16, F64):
        p = torch.nn.Parameter((0.02 * parameter(4, 300).detach()).to(dtype))
        want = sphere.unit(p.detach())
        ng.GatedAdamW([p], lr=0.1, unit_dim=-1)
        assert torch.equal(p.detach(), want)


@pytest.mark.parametrize("off, dtype, left", [(1e-5, torch.float32, 3e-7), (0.02, torch.bfloat16, 4e-3), (1e-13, F64, 1e-15)])
def test_rows_that_are_nearly_unit_are_normalized_too(off, dtype, left):
    p = torch.nn.Parameter((sphere.unit(parameter(4, 300).detach()) * (1 + off)).to(dtype))
    ng.GatedAdamW([p], lr=0.1, unit_dim=-1)
    assert (p.detach().double().norm(dim=-1) - 1).abs().max() < left


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
def test_building_a_second_optimizer_on_trained_rows_changes_no_bit(dtype):
    p = parameter(50, 600, dtype=dtype)
    optimizer = ng.GatedAdamW([p], lr=0.05, unit_dim=-1)
    for t in range(5):
        p.grad = wild(p.shape, t, dtype)
        optimizer.step()
    before = p.detach().clone()
    ng.GatedAdamW([p], lr=0.05, unit_dim=-1)
    assert torch.equal(p.detach(), before)


def test_without_a_unit_dim_the_geometry_is_ignored():
    p, q = parameter(4, 5), parameter(4, 5)
    a, b = ng.GatedAdamW([p], lr=0.1, pmen=ng.PMEN(), cap=0.001), ng.GatedAdamW([q], lr=0.1, tangent=False)
    for t in range(5):
        p.grad = wild(p.shape, t)
        q.grad = p.grad.clone()
        a.step(), b.step()
    assert torch.equal(p.detach(), q.detach())


BAD = {
    "lr": [-1e-3, math.nan, math.inf, torch.tensor([1.0, 2.0]), "1e-3", None, 10**400],
    "betas": [(1.0, 0.9), (0.9, -0.1), (0.9,), (0.9, math.nan), 0.9, ("0.9", 0.9)],
    "eps_gate": [0.0, -1e-8, 1e-46, math.inf, math.nan, "1e-8", torch.ones(2)],
    "transport": ["riemann", True], "eps_num": [-1e-14, None], "a": [0.0, -1.0, math.nan, "0.5", True],
    "weight_decay": [-0.1, None], "decay": ["both"], "cap": [-0.1, math.nan, "1 degree", 10**400], "smgc": [True, dict(R=2)],
    "pmen": [10.0], "unit_dim": [2, -3, 1.0, True], "nonfinite": ["ignore"], "tangent": [None, "no"], "maximize": [1],
    "capturable": [None], "foreach": ["yes"], "fused": ["cuda"],
}  # fmt: skip


@pytest.mark.parametrize("name, value", [(k, v) for k, values in BAD.items() for v in values], ids=lambda x: str(x)[:20])
def test_a_bad_value_is_refused_by_name_and_changes_nothing(name, value):
    p = parameter(2, 3)
    before = p.detach().clone()
    with pytest.raises(ValueError, match=name):
        ng.GatedAdamW([p], **({"lr": 0.1, "unit_dim": -1} | {name: value}))
    assert torch.equal(p.detach(), before)
    if name != "nonfinite":  # the same as a group's own value
        optimizer = ng.GatedAdamW([parameter(2, 3)], lr=0.1)
        with pytest.raises(ValueError, match=name):
            optimizer.add_param_group({"params": [p], "unit_dim": -1} | {name: value})
        assert len(optimizer.param_groups) == 1 and torch.equal(p.detach(), before)


@pytest.mark.parametrize("name, value", [(k, v) for k, values in BAD.items() for v in values], ids=lambda x: str(x)[:20])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_bad_value_that_is_written_between_steps_is_refused_and_changes_nothing(name, value, steps):
    p = parameter(2, 3)
    optimizer = ng.GatedAdamW([p], lr=0.1, unit_dim=-1)
    if name not in optimizer.param_groups[0]:
        return
    for t in range(steps + 1):
        p.grad = wild(p.shape, t)
        if t == steps:
            optimizer.param_groups[0][name] = value
            before, state = p.detach().clone(), copy.deepcopy(optimizer.state[p]) if steps else {}
            with pytest.raises(ValueError, match=name):
                optimizer.step()
        else:
            optimizer.step()
    assert torch.equal(p.detach(), before)
    torch.testing.assert_close(dict(optimizer.state.get(p, {})), dict(state), rtol=0, atol=0)


def test_auto_written_between_steps_or_in_a_state_is_an_auto_gate():
    optimizer = ng.GatedAdamW([p := parameter(2, 3)], lr=0.1, unit_dim=-1)
    other = ng.GatedAdamW([parameter(2, 3)], lr=0.1, unit_dim=-1)
    for t in range(2):
        p.grad = wild(p.shape, t)
        optimizer.step()
        optimizer.param_groups[0]["eps_gate"] = "auto"
    assert optimizer.param_groups[0]["eps_gate"] == "auto"  # as long as no step has seen it
    state = optimizer.state_dict()
    p.grad = wild(p.shape, 2)
    optimizer.step()
    other.load_state_dict(state)
    assert optimizer.param_groups[0]["eps_gate"] == other.param_groups[0]["eps_gate"] == ng.AutoGate()


def test_what_holds_no_parameters_is_refused():
    with pytest.raises(ValueError, match=r"GatedAdamW takes parameters.*got 3"):
        ng.GatedAdamW(3)


@pytest.mark.parametrize("second", [dict(a=-1), dict(unit_dim=3), "a zero row", "the first again"], ids=str)
def test_a_mistake_in_a_later_group_leaves_the_earlier_ones_unchanged(second):
    p, q = parameter(2, 3), parameter(2, 3)
    before = p.detach().clone()
    if second == "a zero row":
        q.data[1], second = 0, dict(unit_dim=-1)
    elif second == "the first again":
        q, second = p, {}
    with pytest.raises(ValueError):
        ng.GatedAdamW([dict(params=[p], unit_dim=-1), dict(params=[q], **second)], lr=0.1)
    assert torch.equal(p.detach(), before)


@pytest.mark.parametrize("a", [0.3, 0.5, 1.0])
@pytest.mark.parametrize("eps_num", [0.0, 1e-46, 1e-14])
def test_the_smallest_eps_gate_gives_the_same_finite_step_on_both_paths(a, eps_num):
    def train(fused):
        p = torch.nn.Parameter(torch.ones(2, 8))
        optimizer = ng.GatedAdamW([p], lr=0.1, a=a, eps_gate=1e-30, eps_num=eps_num, fused=fused)
        for size in (1.0, 1e7):
            p.grad = torch.zeros(2, 8)
            p.grad[0, :4] = size
            optimizer.step()
        return p.detach()

    torch.testing.assert_close(train(None), train(False))
    assert train(False).isfinite().all()


def test_decay_eta_with_a_base_step_size_of_zero_is_refused():
    with pytest.raises(ValueError, match="alpha"):
        ng.GatedAdamW([parameter(2)], lr=0.0, decay="eta")
    ng.GatedAdamW([dict(params=[parameter(2)], alpha=0.1)], lr=0.0, decay="eta")


def test_a_zero_row_asked_to_be_unit_is_refused_with_its_name_and_place():
    p = parameter(4, 5)
    p.data[2] = 0
    before = p.detach().clone()
    with pytest.raises(ValueError, match=r"'embed'.*zero vector.*\[2\]"):
        ng.GatedAdamW([("ok", parameter(2, 5)), ("embed", p)], lr=0.1, unit_dim=-1)
    assert torch.equal(p.detach(), before)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_refused_too(value):
    p = torch.nn.Parameter(torch.ones(4, 5))
    p.data[1, 2] = value
    with pytest.raises(ValueError, match=r"'0' has a nonfinite vector \(at \[1\]"):
        ng.GatedAdamW([p], lr=0.1, unit_dim=-1)
    assert p.detach()[0].eq(1).all()


@pytest.mark.parametrize("form", [ng.gate, algorithm.gate_power])
@pytest.mark.parametrize("bad", [dict(a=0.0), dict(a=-1), dict(eps_gate=0.0), dict(eps_gate=1e-46), dict(a="0.5")], ids=str)
def test_the_gate_refuses_what_the_optimizer_does(form, bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be finite and >"):
        form(torch.tensor(1e-8), **bad)


def test_complex_and_meta_parameters_are_refused():
    with pytest.raises(ValueError, match="complex64"):
        ng.GatedAdamW([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=0.1)
    with pytest.raises(ValueError, match="meta"):
        ng.GatedAdamW([torch.nn.Parameter(torch.empty(2, 2, device="meta"))], lr=0.1, unit_dim=-1)


# ---- gradients -------------------------------------------------------------------------------------------------------


def pair(**kwargs):
    a, b = parameter(3, 4), parameter(5)
    groups = [dict(params=[("rows", a)], unit_dim=-1, pmen=ng.PMEN()), dict(params=[("free", b)])]
    return a, b, ng.GatedAdamW(groups, lr=0.1, **kwargs)


def give(a, b, t, bad=None):
    a.grad, b.grad = wild(a.shape, t), wild(b.shape, t)
    if bad is not None:
        b.grad[3] = bad


def snapshot(optimizer):
    return copy.deepcopy([p.detach() for g in optimizer.param_groups for p in g["params"]]), copy.deepcopy(
        optimizer.state_dict()
    )


def same(x, y):
    return all(map(torch.equal, x[0], y[0])) and str(x[1]) == str(y[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("good_steps", [0, 3])
def test_a_nonfinite_gradient_raises_before_anything_changes_and_names_itself(bad, good_steps):
    a, b, optimizer = pair()
    for t in range(good_steps):
        give(a, b, t)
        optimizer.step()
    before = snapshot(optimizer)
    give(a, b, 9, bad)
    with pytest.raises(ValueError, match=rf"'free'.*step {good_steps + 1}\b"):
        optimizer.step()
    assert same(snapshot(optimizer), before)


@pytest.mark.parametrize("path", [dict(), dict(fused=False)], ids=str)
def test_a_gradient_whose_square_overflows_is_reported_and_one_below_it_leaves_its_coordinate_alive(path):
    p = torch.nn.Parameter(torch.zeros(10))
    optimizer = ng.GatedAdamW([("free", p)], lr=0.1, **path)
    p.grad = torch.full((10,), 1.8e19)  # the sum of the squares is beyond float32, each one is not
    optimizer.step()
    assert optimizer.state[p]["exp_avg_sq"].isfinite().all()
    p.grad = torch.full((10,), 1.9e19)  # v would be infinite for ever, and the coordinate would never move again
    with pytest.raises(ValueError, match=r"'free'.*square overflows, at step 2"):
        optimizer.step()


@pytest.mark.parametrize("path", [dict(), dict(fused=False), dict(foreach=True), "on a device"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
def test_a_finite_gradient_whose_projection_overflows_when_squared_does_not_reach_the_unit_rows(path, dtype):
    most = math.sqrt(torch.finfo(dtype).max)
    p = torch.nn.Parameter(torch.ones(3, 64, dtype=dtype))
    deferred = path == "on a device"
    optimizer = ng.GatedAdamW([("rows", p)], lr=0.1, unit_dim=-1, **({} if deferred else path))
    optimizer._watch.defer = deferred or None
    for size, goes in ((1.0, True), (most / 10, True), (most / 8, False)):  # 1 + sqrt(64) = 9
        p.grad = torch.full((3, 64), size, dtype=dtype)
        p.grad[:, ::2] *= -0.5  # neither along w nor across it
        before = p.detach().clone()
        if goes:
            optimizer.step()
        else:
            with pytest.raises(ValueError, match=r"'rows'.*square overflows, at step 3"):
                optimizer.step()
                optimizer._watch.settle()
            assert torch.equal(p.detach(), before)
        assert p.detach().isfinite().all() and optimizer.state[p]["exp_avg_sq"].isfinite().all()
    assert int(optimizer.state[p]["step"]) == 2


def test_without_the_projection_the_same_gradient_passes():
    p = torch.nn.Parameter(torch.ones(3, 64))
    optimizer = ng.GatedAdamW([p], lr=0.1, unit_dim=-1, tangent=False)
    p.grad = torch.full((3, 64), 1.8e19)
    optimizer.step()
    assert p.detach().isfinite().all() and optimizer.state[p]["exp_avg_sq"].isfinite().all()


@pytest.mark.parametrize("cap", [None, 0.1])
@pytest.mark.parametrize("path", [dict(), dict(fused=False)], ids=str)
def test_a_candidate_beyond_the_range_leaves_its_row_where_it_is(path, cap):
    p = torch.nn.Parameter(torch.randn(2, 4))
    optimizer = ng.GatedAdamW([p], lr=0.1, betas=(0.9, 0.0), unit_dim=-1, cap=cap, **path)  # v forgets at once, m does not
    p.grad = torch.tensor([[1.0, -2.0, 3.0, 1.0]] * 2) * torch.tensor([[1e10], [1e-9]])
    optimizer.step()
    p.grad = torch.zeros(2, 4)
    optimizer.step()
    torch.testing.assert_close(p.detach().norm(dim=-1), torch.ones(2))


@pytest.mark.parametrize("beta1", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("unit_dim", [None, -1])
def test_a_short_memory_forgets_a_large_gradient_on_every_path(beta1, unit_dim):
    found = []
    for fused in (None, False):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(3, 40))
        optimizer = ng.GatedAdamW([p], lr=0.01, betas=(beta1, 0.9), unit_dim=unit_dim, fused=fused)
        seen = []
        for size in (1e6, *(1e-2,) * 60):
            p.grad = size * torch.randn(3, 40)
            optimizer.step()
            seen.append(optimizer.state[p]["exp_avg"].clone())
        found.append(seen)
    assert found[1][-1].abs().max() < 0.1
    for fast, plain in zip(*found):
        torch.testing.assert_close(fast, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("key", "value", "words"), [("eps", 1e-6, "eps_gate.* and eps_num"), ("nonfinite", "skip", "the constructor")]
)
def test_a_group_key_that_would_do_nothing_is_refused(key, value, words):
    with pytest.raises(ValueError, match=rf"{key} is not a key of a parameter group; got {value!r}.*{words}"):
        ng.GatedAdamW([{"params": [parameter(3)], key: value}], lr=0.1)
    optimizer = ng.GatedAdamW([parameter(3)], lr=0.1)
    with pytest.raises(ValueError, match="is not a key"):
        optimizer.add_param_group({"params": [parameter(3)], key: value})
    assert len(optimizer.param_groups) == 1


def test_two_parameters_of_one_name_may_not_share_their_noise():
    def groups():
        return [dict(params=[("w", parameter(3, 4))]), dict(params=[("w", parameter(3, 4))])]

    ng.GatedAdamW(groups(), lr=0.1, unit_dim=-1)
    with pytest.raises(ValueError, match="two are called 'w'"):
        ng.GatedAdamW(groups(), lr=0.1, unit_dim=-1, pmen=ng.PMEN())


def test_a_cap_that_a_schedule_wrote_below_zero_is_reported():
    p = parameter(3, 4)
    optimizer = ng.GatedAdamW([p], lr=0.1, unit_dim=-1, cap=0.1)
    optimizer.param_groups[0]["cap"], p.grad = -0.1, torch.ones_like(p)
    with pytest.raises(ValueError, match=r"cap is an angle in radians, >= 0.*-0\.1"):
        optimizer.step()


@pytest.mark.parametrize(
    "name, value", [(n, x) for n in ("lr", "weight_decay") for x in (math.nan, math.inf, -0.1, None)] + [("cap", "x")], ids=str
)
def test_a_number_written_between_steps_is_checked_before_any_group_moves(name, value):
    p, q = parameter(3, 4), parameter(3, 4)
    optimizer = ng.GatedAdamW([dict(params=[p]), dict(params=[q])], lr=0.1, unit_dim=-1)
    optimizer.param_groups[1][name], p.grad, q.grad = value, torch.ones_like(p), torch.ones_like(q)
    before = p.detach().clone()
    with pytest.raises(ValueError, match=f"{name} .*group 1 has {value!r} now"):
        optimizer.step()
    assert torch.equal(p.detach(), before) and not optimizer.state


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("wrap", [float, torch.tensor])
def test_a_cap_of_infinity_is_no_cap(fused, wrap):
    def train(cap):
        p = parameter(3, 8, dtype=torch.float32)
        optimizer = ng.GatedAdamW([p], lr=3.0, unit_dim=-1, cap=cap, fused=fused)
        for t in range(5):
            p.grad = wild(p.shape, t, torch.float32)
            optimizer.step()
        return p.detach()

    assert torch.equal(train(wrap(math.inf)), train(None))


@pytest.mark.parametrize("change", [dict(a=-1.0), dict(decay="bogus"), dict(eps_gate=0.0), dict(betas=(0.9, 1.0))], ids=str)
def test_a_state_that_breaks_a_rule_of_the_constructor_is_refused(change):
    p = parameter(3, 4)
    optimizer = ng.GatedAdamW([p], lr=0.1)
    state = optimizer.state_dict()
    state["param_groups"][0].update(change)
    with pytest.raises(ValueError, match=next(iter(change))):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["a"] == 0.5 and optimizer.param_groups[0]["decay"] == "lr"


@pytest.mark.parametrize("make", [partial(torch.optim.SGD, momentum=0.9), partial(torch.optim.AdamW, amsgrad=True)])
def test_the_state_of_another_optimizer_is_refused(make):
    p = parameter(3, 4)
    p.grad = torch.ones_like(p)
    other = make([p], lr=0.1)
    other.step()
    with pytest.raises(ValueError, match="the state of a parameter must have exp_avg, exp_avg_sq, step"):
        ng.GatedAdamW([p], lr=0.1).load_state_dict(other.state_dict())


@pytest.mark.parametrize("bad", [torch.full((3, 4), torch.nan), -torch.ones(3, 4), torch.empty(3, 4, device="meta"),
                                 torch.zeros(3, 4).to_sparse(), torch.zeros(4, 3), torch.zeros(3, 4).int()])  # fmt: skip
def test_moments_that_no_update_can_have_left_are_refused(bad):
    p = parameter(3, 4)
    optimizer = ng.GatedAdamW([p], lr=0.1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    before, saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg_sq"] = bad
    with pytest.raises(ValueError, match="GatedAdamW: exp_avg_sq "):
        optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)


def adam_state(p, make, **kwargs):
    p.grad = torch.ones_like(p)
    other = make([p], lr=0.1, **kwargs)
    other.step()
    return other.state_dict()


def test_the_decay_of_an_adam_that_adds_it_to_the_gradient_is_refused():
    p = parameter(3, 4)
    mine = ng.GatedAdamW([p], lr=0.5)
    with pytest.raises(ValueError, match=r"not on the gradient \(L2\), as in the state of an Adam with weight_decay=0.2"):
        mine.load_state_dict(adam_state(p, torch.optim.Adam, weight_decay=0.2))
    assert not mine.state and mine.param_groups[0]["lr"] == 0.5
    mine.load_state_dict(adam_state(p, torch.optim.Adam))
    mine.load_state_dict(adam_state(p, torch.optim.AdamW, weight_decay=0.2))
    assert mine.param_groups[0]["weight_decay"] == 0.2


def test_another_eps_in_a_state_of_torchs_adamw_is_reported_and_never_kept():
    p = parameter(3, 4)
    mine = ng.GatedAdamW([p], lr=0.5)
    with pytest.warns(UserWarning, match=r"eps = 1e-06 is not used.*eps_gate = 1e-08.*a=1, eps_num=0, eps_gate=1e-06") as seen:
        mine.load_state_dict(adam_state(p, torch.optim.AdamW, eps=1e-6))
    assert seen[0].filename == __file__ and "eps" not in mine.param_groups[0] and mine.param_groups[0]["eps_gate"] == 1e-8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine.load_state_dict(adam_state(p, torch.optim.AdamW, eps=1e-8))
        ng.GatedAdamW([p], lr=0.5, eps_gate=1e-6).load_state_dict(mine.state_dict())
    assert "eps" not in mine.param_groups[0]


@pytest.mark.parametrize("name", ["pmen", "smgc"])
def test_an_unknown_setting_in_a_state_is_reported(name):
    optimizer = ng.GatedAdamW([parameter(3, 4)], lr=0.1, unit_dim=-1, pmen=ng.PMEN(), smgc=ng.SMGC())
    state = optimizer.state_dict()
    state["param_groups"][0][name]["volume"] = 11
    with pytest.raises(ValueError, match=f"state's {name} has keys that {name.upper()} does not have: volume"):
        optimizer.load_state_dict(state)


def test_vectors_that_a_loaded_state_makes_unit_are_normalized_and_others_keep_their_bits():
    source = ng.GatedAdamW([parameter(3, 4)], lr=0.1, unit_dim=-1)
    p = parameter(3, 4)
    free = p.detach().clone()
    ng.GatedAdamW([p], lr=0.1).load_state_dict(source.state_dict())
    torch.testing.assert_close(p.detach(), sphere.unit(free))
    own = ng.GatedAdamW([p], lr=0.1, unit_dim=-1)
    p.data.mul_(2)  # as foreign weights loaded into the model: for its owner to normalize
    own.load_state_dict(source.state_dict())
    torch.testing.assert_close(p.detach(), 2 * sphere.unit(free))
    zero = torch.nn.Parameter(torch.zeros(3, 4))
    other = ng.GatedAdamW([zero], lr=0.7)
    with pytest.raises(ValueError, match="zero vector"):
        other.load_state_dict(source.state_dict())
    assert other.param_groups[0]["lr"] == 0.7 and other.param_groups[0]["unit_dim"] is None


def test_a_numpy_integer_is_a_dimension_and_a_state_of_it_can_be_read():
    p = parameter(3, 4)
    optimizer = ng.GatedAdamW([p], lr=0.1, unit_dim=np.int64(-1), pmen=ng.PMEN(seed=np.int32(3)))
    torch.testing.assert_close(p.detach().norm(dim=-1), torch.ones(3, dtype=F64))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["param_groups"][0]["pmen"]["seed"] == 3


def test_the_count_of_skipped_steps_is_in_the_state_and_torchs_adamw_reads_it_too():
    a, b, optimizer = pair(nonfinite="skip")
    assert optimizer.state_dict().keys() == {"state", "param_groups"}  # nothing of its own before there is something to say
    for t in range(3):
        give(a, b, t, math.nan if t == 1 else None)
        optimizer.step()
    again = pair(nonfinite="skip")[2]
    again.load_state_dict(optimizer.state_dict())
    assert again.skipped == 1
    again.load_state_dict(pair()[2].state_dict())
    assert again.skipped == 0
    torch.optim.AdamW([dict(params=g["params"]) for g in again.param_groups]).load_state_dict(optimizer.state_dict())


def test_skip_leaves_the_step_out_and_counts_it():
    a, b, optimizer = pair(nonfinite="skip")
    c, d, clean = pair()
    for t in range(6):
        give(a, b, t, math.nan if t in (0, 3) else None)
        optimizer.step()
        if t not in (0, 3):
            give(c, d, t)
            clean.step()
    assert optimizer.skipped == 2
    assert torch.equal(a, c) and torch.equal(b, d) and int(optimizer.state[a]["step"]) == 4


@pytest.mark.parametrize("a", [0.3, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("path", [dict(fused=True), dict(fused=False), dict(foreach=True), dict(capturable=True)], ids=str)
@pytest.mark.parametrize("smgc", [None, ng.SMGC(start=0)], ids=["", "clipped"])
def test_off_lets_nan_through_to_its_coordinate_or_its_whole_vector_and_no_further(a, path, smgc):
    """Every path shows the damage instead of hiding it as a zero; what does not share a vector with it goes on."""
    rows, free = parameter(3, 8, dtype=torch.float32), parameter(5, dtype=torch.float32)
    groups = [dict(params=[rows], unit_dim=-1, pmen=ng.PMEN(), cap=0.1), dict(params=[free])]
    optimizer = ng.GatedAdamW(groups, lr=0.1, a=a, smgc=smgc, nonfinite="off", **path)
    for bad in (None, math.nan, None):
        rows.grad, free.grad = torch.randn(3, 8), torch.randn(5)
        if bad is not None:
            rows.grad[1, 2] = free.grad[3] = bad
        optimizer.step()
    assert rows.detach().isnan().all(dim=-1).tolist() == [False, True, False] and rows.detach()[::2].isfinite().all()
    assert free.detach().isnan().tolist() == [False, False, False, True, False]
    assert optimizer.skipped == 0 and int(optimizer.state[rows]["step"]) == 3


@pytest.mark.parametrize("capturable", [False, True])
def test_with_a_flag_on_the_device_the_update_is_masked_and_the_error_comes_a_step_later(capturable):
    a, b, optimizer = pair(capturable=capturable)
    optimizer._watch.defer = True  # as on an accelerator
    for t in range(2):
        give(a, b, t)
        optimizer.step()
    before = snapshot(optimizer)
    give(a, b, 2, math.nan)
    optimizer.step()
    assert torch.equal(a.detach(), before[0][0]) and torch.equal(b.detach(), before[0][1])
    give(a, b, 3)
    with pytest.raises(ValueError, match=r"'free'.*step 3\b"):
        optimizer.step()
    assert same(snapshot(optimizer), before)


@pytest.mark.parametrize("capturable", [False, True])
def test_with_a_flag_on_the_device_skipping_equals_never_having_stepped(capturable):
    a, b, optimizer = pair(nonfinite="skip", capturable=capturable, fused=False)
    c, d, clean = pair(capturable=capturable, fused=False)
    optimizer._watch.defer = True
    for t in range(6):
        give(a, b, t, math.inf if t in (2, 3, 5) else None)
        optimizer.step()
        if t not in (2, 3, 5):
            give(c, d, t)
            clean.step()
    clean._watch.skipped = 3  # the count alone tells the two apart
    assert same(snapshot(optimizer), snapshot(clean)) and optimizer.skipped == 3


@pytest.mark.parametrize("deferred", [False, True])
def test_an_empty_parameter_is_no_trouble_for_the_check_of_gradients(deferred):
    full, empty = parameter(3, 8), torch.nn.Parameter(torch.empty(0, 8, dtype=F64))
    optimizer = ng.GatedAdamW([("full", full), ("empty", empty)], lr=0.1)
    optimizer._watch.defer = deferred
    for bad in (0.0, math.nan):
        full.grad, empty.grad = torch.full((3, 8), 1.0 + bad, dtype=F64), torch.empty_like(empty)
        before = full.detach().clone()
        if bad and not deferred:
            with pytest.raises(ValueError, match="'full'"):
                optimizer.step()
        else:
            optimizer.step()
        assert torch.equal(full.detach(), before) == bool(bad)


def test_sparse_gradients_are_refused_with_the_way_out():
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = ng.GatedAdamW(embedding.named_parameters(), lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"'weight' is sparse.*sparse=False"):
        optimizer.step()


def test_parameters_without_a_gradient_are_left_alone_and_counted_apart():
    a, b, optimizer = pair()
    before = b.detach().clone()
    for t in range(3):
        give(a, b, t)
        b.grad = None
        optimizer.step()
    assert torch.equal(b.detach(), before) and b not in optimizer.state
    give(a, b, 3)
    optimizer.step()
    assert (int(optimizer.state[a]["step"]), int(optimizer.state[b]["step"])) == (4, 1)


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned():
    p = parameter(3)
    optimizer = ng.GatedAdamW([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[-1] < losses[0] and ng.GatedAdamW([p], lr=0.1).step() is None


def test_maximize_is_descent_on_the_negative():
    a, b = parameter(3, 4), parameter(3, 4)
    up = ng.GatedAdamW([a], lr=0.1, unit_dim=-1, maximize=True, fused=False)
    down = ng.GatedAdamW([b], lr=0.1, unit_dim=-1)
    for t in range(5):
        a.grad = wild(a.shape, t)
        b.grad = -a.grad
        up.step(), down.step()
    assert torch.equal(a, b)


def test_fused_true_says_why_it_cannot_and_changes_nothing():
    a, b, optimizer = pair(fused=True)
    give(a, b, 0)
    with pytest.raises(ValueError, match=r"'rows' cannot take the fused kernel.*float64"):
        optimizer.step()
    assert not optimizer.state_dict()["state"]


# ---- numbers that a schedule writes ----------------------------------------------------------------------------------


def test_lr_and_cap_as_tensors_are_the_same_as_numbers():
    def train(wrap):
        p = parameter(3, 4)
        optimizer = ng.GatedAdamW(
            [p], lr=wrap(0.125), unit_dim=-1, cap=wrap(0.0625), pmen=ng.PMEN(), weight_decay=0.5, decay="eta"
        )
        for t in range(5):
            p.grad = wild(p.shape, t)
            optimizer.step()
        return p.detach()

    torch.testing.assert_close(train(lambda x: torch.tensor(x, dtype=F64)), train(float), rtol=0, atol=1e-15)
    torch.testing.assert_close(train(lambda x: torch.tensor(x)), train(float), rtol=0, atol=1e-7)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("shape", [(), (1,), (3,)], ids=str)
def test_numbers_in_tensors_of_one_dimension_fit_parameters_of_any(shape, dtype, fused):
    def train(wrap):
        p = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
        optimizer = ng.GatedAdamW([p], lr=wrap(0.125), weight_decay=wrap(0.5), decay="eta", fused=fused)
        for t in range(1, 3):
            p.grad = torch.full(shape, 0.5, dtype=dtype)
            optimizer.step()
            assert int(optimizer.state[p]["step"]) == t
        return p.detach()

    torch.testing.assert_close(train(lambda x: torch.tensor([x])), train(float))


def test_torchs_schedulers_drive_it():
    p = parameter(3)
    optimizer = ng.GatedAdamW([p], lr=1.0)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)],
        [5],
    )
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch warns if it believes that the order of the two steps is wrong
        for t in range(12):
            p.grad = wild(p.shape, t)
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    assert rates[0] == pytest.approx(0.1) and max(rates) == pytest.approx(1.0) and rates[-1] < 0.5
    cycle = torch.optim.lr_scheduler.OneCycleLR(ng.GatedAdamW([p], lr=1.0), max_lr=0.1, total_steps=10)
    assert cycle.get_last_lr()[0] < 0.1


# ---- state -----------------------------------------------------------------------------------------------------------


def trained(steps, dtype=F64, start=None):
    p, q = parameter(3, 4, dtype=dtype), parameter(5, dtype=dtype)
    groups = [dict(params=[("p", p)], unit_dim=-1, pmen=ng.PMEN(tau=1e-4), cap=0.05), dict(params=[("q", q)], weight_decay=0.1)]
    optimizer = ng.GatedAdamW(groups, lr=0.1, smgc=ng.SMGC(R=2.0, start=2))
    if start is not None:
        p.data.copy_(start[0]), q.data.copy_(start[1])
        optimizer.load_state_dict(start[2])
    for t in steps:
        p.grad, q.grad = wild(p.shape, t, dtype), wild(q.shape, t, dtype)
        optimizer.step()
    return p.detach(), q.detach(), optimizer.state_dict(), optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
def test_a_run_resumed_from_a_file_repeats_the_uninterrupted_one_to_the_bit(dtype):
    whole = trained(range(10), dtype)
    file = io.BytesIO()
    torch.save(trained(range(5), dtype)[:3], file)
    file.seek(0)
    resumed = trained(range(5, 10), dtype, torch.load(file, weights_only=True))
    assert torch.equal(whole[0], resumed[0]) and torch.equal(whole[1], resumed[1])
    assert resumed[3].param_groups[0]["pmen"] == ng.PMEN(tau=1e-4) and resumed[3].param_groups[1]["smgc"] == ng.SMGC(
        R=2.0, start=2
    )
    for p in resumed[3].state:
        assert resumed[3].state[p]["exp_avg"].dtype == (F64 if dtype == F64 else torch.float32)


def test_the_state_has_torchs_names_and_a_state_of_torchs_adamw_can_be_loaded():
    p = parameter(3, 4, dtype=torch.float32)
    theirs = torch.optim.AdamW([p], lr=0.01, betas=(0.9, 0.95), weight_decay=0.2)
    for t in range(4):
        p.grad = wild(p.shape, t, torch.float32)
        theirs.step()
    mine = ng.GatedAdamW([p], lr=0.5, a=0.25, smgc=ng.SMGC())
    mine.load_state_dict(theirs.state_dict())
    group = mine.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.01, (0.9, 0.95), 0.2)
    assert (group["a"], group["smgc"]) == (0.25, ng.SMGC())
    assert mine.state[p].keys() == theirs.state[p].keys()
    mine.step()
    assert int(mine.state[p]["step"]) == 5


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("step", [4, 4.0, np.float32(4)], ids=repr)
def test_a_state_that_counts_in_plain_numbers_can_be_loaded(step, capturable):
    """As torch's AdamW wrote it before its counters were tensors; torch converts it too."""
    p = parameter(3, 4)
    optimizer = ng.GatedAdamW([p], lr=0.1, capturable=capturable)
    moments = {key: torch.ones_like(p) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.load_state_dict({"state": {0: {"step": step} | moments}, "param_groups": [{"params": [0], "lr": 0.1}]})
    p.grad = wild(p.shape, 1)
    optimizer.step()
    counter = optimizer.state[p]["step"]
    assert torch.equal(counter, torch.tensor(5.0)) and counter.dtype == torch.float32


@pytest.mark.parametrize("switch", ["foreach", "fused"])
def test_the_kernels_of_torchs_adamw_are_not_taken_over_with_its_state(switch):
    p = parameter(3, 4, dtype=torch.float32)
    theirs = torch.optim.AdamW([p], lr=0.01, **{switch: True})
    p.grad = torch.ones_like(p)
    theirs.step()
    mine = ng.GatedAdamW([p], lr=0.5)
    own = {k: mine.param_groups[0][k] for k in ("foreach", "fused", "capturable")}
    mine.load_state_dict(theirs.state_dict())
    assert {k: mine.param_groups[0][k] for k in own} == own and mine.param_groups[0]["lr"] == 0.01


def test_a_state_of_another_model_is_refused_as_torch_refuses_it():
    with pytest.raises(ValueError, match="parameter group"):
        ng.GatedAdamW([parameter(2)], lr=0.1).load_state_dict(trained([])[2])


def test_a_state_of_other_shapes_is_refused_before_anything_is_loaded():
    *_, small = trained(range(2))
    p, q = parameter(3, 6), parameter(5)
    large = ng.GatedAdamW([dict(params=[("p", p)]), dict(params=[("q", q)])], lr=0.7)
    with pytest.raises(ValueError, match=r"exp_avg .*'p' the state holds \(3, 4\), and the parameter is \(3, 6\)"):
        large.load_state_dict(small.state_dict())
    assert not large.state and large.param_groups[0]["lr"] == 0.7


def test_it_can_be_copied_and_pickled_in_the_middle_of_training():
    for clone in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        *_, optimizer = trained(range(3))
        again = clone(optimizer)
        assert again.nonfinite == "raise" and again.param_groups[0]["pmen"] == ng.PMEN(tau=1e-4)
        for one in (optimizer, again):
            for p in (p for g in one.param_groups for p in g["params"]):
                p.grad = wild(p.shape, 3)
            one.step()
        for g, h in zip(optimizer.param_groups, again.param_groups):
            assert all(map(torch.equal, g["params"], h["params"]))


def test_the_counter_is_float32_whatever_the_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = ng.GatedAdamW([p], lr=0.1)
        p.grad = torch.ones(2)
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[p]["step"].dtype == torch.float32


# ---- diagnostics -----------------------------------------------------------------------------------------------------


def test_diagnostics_report_what_happened():
    p, q = parameter(4, 8), parameter(6)
    groups = [
        dict(params=[p], unit_dim=-1, pmen=ng.PMEN(tau=0.0), cap=0.02, name="rows"),
        dict(params=[q], smgc=ng.SMGC(R=1.0, start=1)),
    ]
    optimizer = ng.GatedAdamW(groups, lr=0.1)
    optimizer.diagnostics = Diagnostics()
    p.grad, q.grad = torch.randn(4, 8, dtype=F64), torch.full((6,), 1e-9, dtype=F64)
    p.grad[0] = 0  # one row without gradient: 8 coordinates, all of them perturbed
    q.grad[:2] = 0
    before = p.detach().clone()
    optimizer.step()
    q.grad = torch.full((6,), 5e-9, dtype=F64)  # grows: clipped, except where there is no history (there too: the floor)
    rows, free = optimizer.diagnostics.last
    moved = sphere.angle(before, p.detach() - before)
    assert (rows["step"], rows["name"], rows["coordinates"], free["name"]) == (1, "rows", 32, "1")
    assert rows["perturbed"] == 8 and rows["zero_gradient"] == 8 and rows["zero_gradient_per_d"] == 1
    assert free["zero_gradient"] == 2 and free["zero_gradient_per_d"] is None
    assert rows["never"] == 8 / 32 and free["never"] == pytest.approx(2 / 6)
    assert rows["angle_max"] == pytest.approx(float(moved.max())) and rows["angle_mean"] == pytest.approx(float(moved.mean()))
    assert rows["capped"] == float((moved > 0.02 - 1e-9).double().mean()) > 0
    d = optimizer.state[q]["exp_avg_sq"].div(1 - 0.975).sqrt() + 1e-14
    assert free["mean_gate"] == pytest.approx(float(ng.gate(d).mean())) and free["below_gate"] == 1
    assert sum(free["histogram"]) == 4 and free["clipped"] == 0
    edges = optimizer.diagnostics.edges
    where = free["histogram"].index(4)
    assert edges[where - 1] <= -9 <= edges[where]
    optimizer.step()
    assert optimizer.diagnostics.last[1]["clipped"] == 1 and optimizer.diagnostics.last[1]["step"] == 2
    assert len(optimizer.diagnostics.records) == 4


@pytest.mark.parametrize("capturable", [False, True])
def test_diagnostics_count_no_noise_at_a_step_where_none_is_due(capturable):
    """With the counter on the device such a step computes the noise and multiplies it by 0."""
    p = parameter(4, 8)
    optimizer = ng.GatedAdamW([p], lr=0.1, unit_dim=-1, pmen=ng.PMEN(tau=0.0, every=2), capturable=capturable)
    optimizer.diagnostics = Diagnostics()
    for _ in range(2):
        p.grad = torch.randn(4, 8, dtype=F64)
        p.grad[0] = 0
        optimizer.step()
    assert [record["perturbed"] for record in optimizer.diagnostics.records] == [8, 0]


def test_diagnostics_add_up_the_smooth_profile():
    p = parameter(4, 8)
    optimizer = ng.GatedAdamW([p], lr=0.1, unit_dim=-1, pmen=ng.PMEN(tau=1e-3, profile="smooth"))
    optimizer.diagnostics = Diagnostics()
    p.grad = 1e-2 * torch.randn(4, 8, dtype=F64)
    optimizer.step()
    s = optimizer.state[p]["exp_avg_sq"].sqrt()
    psi = 1 / (1 + (s / 1e-3) ** 2)
    assert optimizer.diagnostics.last[0]["perturbed"] == pytest.approx(float(psi.sum()))


def test_diagnostics_change_nothing_and_look_only_every_nth_step():
    def train(diagnostics, dtype=torch.float32):
        p = parameter(4, 8, dtype=dtype)
        optimizer = ng.GatedAdamW([p], lr=0.1, unit_dim=-1, pmen=ng.PMEN(), fused=False)
        optimizer.diagnostics = diagnostics
        for t in range(7):
            p.grad = wild(p.shape, t, dtype)
            optimizer.step()
        return p.detach()

    looked = Diagnostics(every=3, keep=2)
    assert torch.equal(train(looked), train(None))
    assert [r["step"] for r in looked.records] == [4, 7]
    with pytest.raises(ValueError, match="every"):
        Diagnostics(every=0)


@pytest.mark.parametrize("bad", [dict(keep=0), dict(keep=-1), dict(keep="2"), dict(d_model=0), dict(low=2**31)], ids=str)
def test_diagnostics_refuse_what_they_cannot_hold(bad):
    with pytest.raises(ValueError, match=f"Diagnostics: {next(iter(bad))} "):
        Diagnostics(**bad)


def test_diagnostics_always_hold_the_whole_latest_step_under_the_groups_labels():
    p, q = parameter(2, 3), parameter(4)
    optimizer = ng.GatedAdamW([dict(params=[p], label="rows"), dict(params=[q], label="free", name="own")], lr=0.1)
    optimizer.diagnostics = Diagnostics(keep=1)
    for _ in range(2):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        optimizer.step()
    assert [(r["step"], r["name"]) for r in optimizer.diagnostics.records] == [(2, "rows"), (2, "own")]


@pytest.mark.parametrize("unit_dim", [None, -1])
def test_a_step_for_which_found_inf_is_not_zero_changes_no_bit(unit_dim):
    """The attribute through which torch's fused optimizers are asked, on the device, to skip a step."""
    p = torch.nn.Parameter(sphere.random(3, 5))
    optimizer = ng.GatedAdamW([p], lr=0.1, unit_dim=unit_dim, nonfinite="off")
    for bad in (0.0, 1.0, 0.0):
        state = optimizer.state.get(p, {})
        before = [x.clone() for x in (p.detach(), *(state[key] for key in ("exp_avg", "exp_avg_sq") if state))]
        p.grad = torch.full_like(p, math.nan) if bad else torch.randn_like(p)
        optimizer.found_inf = torch.tensor(bad)
        optimizer.step()
        after = [p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]
        assert all(torch.equal(a, b) == bool(bad) for a, b in zip(after, before))
    assert p.isfinite().all()
