"""Post-Moment Exploration Noise: its profile, its size, its signs, and when it acts."""

import math
from collections import Counter

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ngpt_core as ng
from ngpt_core.optim import pmen

quick = settings(max_examples=60, deadline=None)


def noise_of(setting, steps=1, shape=(3, 8), lr=0.01, name="w", dtype=torch.float64, **kwargs):
    """The displacements of a unit tensor that never receives a gradient, step by step."""
    w = torch.nn.Parameter(torch.nn.functional.normalize(torch.randn(shape, dtype=dtype), dim=-1))
    optimizer = ng.GatedAdamW([(name, w)], lr=lr, unit_dim=-1, pmen=setting, **kwargs)
    moved = []
    for _ in range(steps):
        before, w.grad = w.detach().clone(), torch.zeros_like(w)
        optimizer.step()
        moved.append(w.detach() - before)
    return moved


@quick
@given(st.floats(0, 1e-3), st.floats(1e-12, 1e-3), st.sampled_from(["step", "smooth"]), st.floats(0.5, 8))
def test_the_profile_is_the_papers(s, tau, kind, b):
    got = float(pmen.profile(torch.tensor(s, dtype=torch.float64), ng.PMEN(tau=tau, profile=kind, b=b)))
    assert got == pytest.approx(reference.psi(s, tau, kind, b), rel=1e-12)


def test_the_defaults_are_the_papers():
    papers = dict(strength=10.0, tau=1e-10, profile="step", reference="row", start=1, every=1)  # section 3.3, item 9
    assert ng.PMEN() == ng.PMEN(**papers, seed=0)


def test_the_step_profile_includes_its_threshold_and_tau_zero_means_exactly_zero():
    s = torch.tensor([0.0, 1e-30, 1e-10, 1.1e-10])
    assert pmen.profile(s, ng.PMEN(tau=1e-10)).tolist() == [1, 1, 1, 0]
    assert pmen.profile(s, ng.PMEN(tau=0.0)).tolist() == [1, 0, 0, 0]


def test_a_threshold_above_one_is_one_of_the_root_too():
    """v = 3 is below it, since sqrt(v) < 2."""
    v, places = torch.full((2, 4), 3.0), torch.arange(8).view(2, 4)
    moved = pmen.add(torch.zeros(2, 4), 1.0, v, ng.PMEN(tau=2.0), 7, 1, lambda: places)
    assert (moved.abs() == 1).all()


def test_the_smooth_profile_is_half_at_the_threshold_and_becomes_the_step():
    s = torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=torch.float64)
    assert pmen.profile(s, ng.PMEN(tau=1.0, profile="smooth", b=3.0)).tolist() == pytest.approx([1, 8 / 9, 0.5, 1 / 9])
    assert pmen.profile(s, ng.PMEN(tau=1.0, profile="smooth", b=400.0)).tolist() == pytest.approx([1, 1, 0.5, 0])


@quick
@given(
    st.integers(0, 2**40), st.text(max_size=20), st.integers(1, 10**6), st.lists(st.integers(0, 2**40), min_size=1, max_size=20)
)
def test_signs_are_the_twins_bit_for_bit(seed, name, t, index):
    got = pmen.signs(pmen.key(seed, name), t, torch.tensor(index))
    assert got.tolist() == [reference.sign(seed, name, t, i) for i in index]


def test_signs_are_the_ones_that_were_fixed():
    """A change of the hash would silently change every run: these values, computed once, hold."""
    assert pmen.key(0, "w") == 0x5B143C22
    assert (
        "".join("-+"[x > 0] for x in pmen.signs(pmen.key(0, "w"), 1, torch.arange(32)).tolist())
        == "---++-++-+--++-+-+--+-++++-+-+++"
    )


def test_signs_with_the_step_on_the_device_are_the_same():
    index = torch.arange(1000)
    assert torch.equal(pmen.signs(7, torch.tensor(12.0), index), pmen.signs(7, 12, index))


def test_signs_look_random_over_coordinates_steps_names_and_seeds():
    n = 20000
    index = torch.arange(n)
    base = pmen.signs(pmen.key(0, "w"), 1, index).double()
    others = [(0, "w", 2), (0, "w", 3), (0, "v", 1), (1, "w", 1)]
    assert abs(base.mean()) < 4 / math.sqrt(n)
    assert abs((base[1:] * base[:-1]).mean()) < 4 / math.sqrt(n)
    for seed, name, t in others:
        assert abs((base * pmen.signs(pmen.key(seed, name), t, index)).mean()) < 4 / math.sqrt(n)
    runs = Counter(tuple(x) for x in base[: n // 4 * 4].reshape(-1, 4).tolist())
    assert len(runs) == 16 and max(runs.values()) < 1.25 * n / 4 / 16


@quick
@given(st.integers(0, 8), st.floats(1e-4, 0.5), st.floats(0.1, 20), st.sampled_from(["row", "adam"]))
def test_the_norm_of_the_noise_is_the_papers_formula(k, lr, strength, reference_scale):
    """||dw||^2 = lr^2 lambda^2 c^2 k_j, k_j the selected coordinates."""
    setting = ng.PMEN(strength=strength, tau=0.5, reference=reference_scale)
    s = torch.cat([torch.zeros(k), torch.ones(8 - k)]).double()
    dw = pmen.amplitude(setting, lr, 8, 0.975) * pmen.profile(s, setting) * pmen.signs(3, 1, torch.arange(8))
    c = 1 / math.sqrt(8) if reference_scale == "row" else math.sqrt((1 - 0.975) / (1 + 0.975))
    assert float(dw.square().sum()) == pytest.approx(lr**2 * strength**2 * c**2 * k, rel=1e-12)


def test_a_row_without_any_gradient_turns_by_strength_times_lr():
    (moved,) = noise_of(ng.PMEN(strength=2.0), lr=1e-4)
    torch.testing.assert_close(moved.norm(dim=-1), torch.full((3,), 2e-4, dtype=torch.float64), rtol=0.25, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_acts_at_start_and_every_nth_step_from_there(dtype):
    moved = noise_of(ng.PMEN(start=3, every=4), steps=12, dtype=dtype)
    assert [t for t, x in enumerate(moved, 1) if x.any()] == [3, 7, 11]


def test_it_enters_neither_moment():
    w = torch.nn.Parameter(torch.randn(3, 8))
    optimizer = ng.GatedAdamW([w], lr=0.1, unit_dim=-1, pmen=ng.PMEN())
    for _ in range(3):
        w.grad = torch.zeros_like(w)
        optimizer.step()
    assert not optimizer.state[w]["exp_avg"].any() and not optimizer.state[w]["exp_avg_sq"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_single_vector_gets_the_noise_of_a_matrix_with_one_row(dtype):
    def moved(shape):
        w = torch.nn.Parameter(torch.full((8,), 8**-0.5, dtype=dtype).view(shape))
        w.grad = torch.zeros_like(w)
        ng.GatedAdamW([("w", w)], lr=1e-3, unit_dim=-1, pmen=ng.PMEN()).step()
        return w.detach().view(8)

    assert torch.equal(moved((8,)), moved((1, 8))) and not torch.equal(moved((8,)), torch.full((8,), 8**-0.5, dtype=dtype))


def test_it_touches_only_coordinates_with_little_second_moment():
    w = torch.nn.Parameter(torch.nn.functional.normalize(torch.randn(1, 8, dtype=torch.float64), dim=-1))
    twin = torch.nn.Parameter(w.detach().clone())
    with_noise = ng.GatedAdamW([w], lr=1e-3, unit_dim=-1, pmen=ng.PMEN(tau=0.0), tangent=False)
    without = ng.GatedAdamW([twin], lr=1e-3, unit_dim=-1, tangent=False)
    grad = torch.tensor([[1.0, 1, 1, 1, 0, 0, 0, 0]], dtype=torch.float64)
    w.grad, twin.grad = grad, grad.clone()
    with_noise.step(), without.step()
    ratio = (w / twin).detach()[0]  # the common factor is the normalization's
    torch.testing.assert_close(ratio[:4], ratio[:1].expand(4))
    assert (ratio[4:] - ratio[0]).abs().min() > 1e-4


def test_names_choose_the_signs_and_what_wrappers_add_to_them_does_not():
    def moved(name):
        torch.manual_seed(0)
        return noise_of(ng.PMEN(), name=name, shape=(1, 64))[0]

    assert torch.equal(moved("x.weight"), moved("module._orig_mod.x.weight"))
    assert torch.equal(moved("x.weight"), moved("x._checkpoint_wrapped_module.weight"))
    assert not torch.equal(moved("x.weight"), moved("y.weight"))


def test_without_names_the_order_of_addition_is_the_name():
    def run(named):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(2, 6)) for _ in range(3)]
        if named:
            groups = [{"params": [("0", params[0])]}, {"params": [("1", params[1]), ("2", params[2])]}]
        else:
            groups = [{"params": params[:1]}, {"params": params[1:]}]
        optimizer = ng.GatedAdamW(groups, lr=0.1, unit_dim=-1, pmen=ng.PMEN())
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        return torch.stack([p.detach() for p in params])

    assert torch.equal(run(True), run(False))


@pytest.mark.parametrize("setting", [ng.PMEN(profile="smooth", tau=1e-30), ng.PMEN(tau=1e-46), ng.PMEN(tau=0.0)], ids=str)
def test_the_smallest_thresholds_give_the_same_finite_step_on_both_paths(setting):
    def train(fused):
        p = torch.nn.Parameter(torch.ones(3, 8))
        optimizer = ng.GatedAdamW([("w", p)], lr=0.01, unit_dim=-1, pmen=setting, fused=fused)
        p.grad = torch.zeros(3, 8)
        p.grad[0, :4] = 1
        optimizer.step()
        return p.detach()

    torch.testing.assert_close(train(None), train(False))
    assert train(False).isfinite().all()


@pytest.mark.parametrize(
    "bad",
    [dict(strength=-1.0), dict(tau=-1e-10), dict(profile="soft"), dict(profile="smooth", tau=0.0),
     dict(profile="smooth", tau=1e-46), dict(profile="smooth", b=0.0), dict(reference="none"), dict(start=0), dict(every=0),
     dict(every=1.5), dict(strength=math.nan), dict(strength="10"), dict(every=math.inf), dict(start=math.nan), dict(seed="a"),
     dict(seed=0.5), dict(profile="smooth", b="2")], ids=str,
)  # fmt: skip
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValueError, match=f"PMEN: .*{list(bad)[-1]}"):
        ng.PMEN(**bad)
