"""Does the fast path do exactly what the readable one does? And does it say so when it cannot?

The readable path runs in float64 and is the standard; ``reference.GatedAdamW`` (loops, from the equations) checks both. The
gradients are deliberately hard: scales from 1e-9 to 1e-1, spikes, rows and coordinates that never see a gradient.
"""

import ctypes
import logging
import math
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import reference
import torch

from ngpt_core import native, sphere
from ngpt_core.optim import algorithm, fused, fused_cpu
from ngpt_core.optim.algorithm import Slot
from ngpt_core.optim.auto_gate import AutoGate
from ngpt_core.optim.gated_adamw import GatedAdamW
from ngpt_core.optim.pmen import PMEN, key, signs
from ngpt_core.optim.smgc import SMGC

needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler on this machine")
pytestmark = needs_compiler
DEGREE = math.pi / 180


def gradients(shape, steps, seed=0, kind=False):
    """float32 gradients of every kind: mixed scales, spikes, rows without, and (rows first) a coordinate without any.

    ``kind``: scales within a factor of 100 and no spikes, for a transported first moment, which mixes the coordinates of a row:
    float32's rounding of the largest is then a large part of the smallest, on every path.
    """
    rng = torch.Generator().manual_seed(seed)
    scale = 10 ** (-9 + (2 if kind else 8) * torch.rand(shape, generator=rng))
    for t in range(steps):
        g = torch.randn(shape, generator=rng) * scale
        if t % 50 == 30 and not kind:
            g = torch.where(torch.rand(shape, generator=rng) < 0.1, g * 1e5, g)
        if len(shape) > 1:
            g[0] = 0  # never a gradient
            if t % 3 == 0:
                g[-1] = 0  # sometimes none
        g[..., 0] = 0
        yield g


def both(shape, steps=200, lr=0.02, cap=None, start=None, dtype=torch.float32, seed=0, **settings):
    """The same steps on the fast path (float32) and on the readable one (float64): two (parameter, state) pairs."""
    rng = torch.Generator().manual_seed(seed + 1)
    w = torch.randn(shape, generator=rng) if start is None else start
    if settings.get("unit_dim") is not None:
        w = sphere.unit(w)
    w = w.to(dtype)
    fast, slow = torch.nn.Parameter(w.clone()), torch.nn.Parameter(w.double())
    settings = {"lr": lr, "cap": cap, **settings}
    optimizers = GatedAdamW([fast], fused=True, **settings), GatedAdamW([slow], fused=False, **settings)
    for t, g in enumerate(gradients(shape, steps, seed, kind=settings.get("transport") is not None)):
        for p, optimizer in zip((fast, slow), optimizers):
            p.grad = g.to(dtype).to(p.dtype)
            group = optimizer.param_groups[0]
            group["lr"] = lr * (1 - 0.5 * t / steps)
            group["cap"] = None if cap is None else cap * min(1, t / 20)  # begins at zero
            optimizer.step()
    return (fast.detach(), optimizers[0].state[fast]), (slow.detach(), optimizers[1].state[slow])


def assert_same(one, two, w=1e-5, moments=5e-4):
    """As close to float64 as the readable path is when it runs in float32: a few 1e-6 after 200 steps, for a small tangent part
    of a large gradient (what is left after the spikes) a few 1e-4."""
    torch.testing.assert_close(one[0].double(), two[0].double(), rtol=0, atol=w)
    for name in ("exp_avg", "exp_avg_sq"):
        a, b = one[1][name].double(), two[1][name]
        torch.testing.assert_close(a, b, rtol=moments, atol=moments * float(b.abs().max()) * 1e-3)
    assert one[1]["step"] == two[1]["step"]


SWITCHES = {
    "rows only": {"tangent": False},
    "tangent": {},
    "a=1": {"a": 1.0},
    "a=0.3": {"a": 0.3},
    "a=2": {"a": 2.0},
    "a=1, eps_num=0": {"a": 1.0, "eps_num": 0.0},
    "a=0.5, eps_num=0": {"eps_num": 0.0},
    "a=0.3, eps_num=0": {"a": 0.3, "eps_num": 0.0},
    "eps_num below float32": {"eps_num": 1e-46},
    "decay": {"weight_decay": 0.3},
    "SMGC": {"smgc": SMGC(R=2.0, start=10)},
    "SMGC from the first step": {"smgc": SMGC(R=100.0, s_min=1e-5, start=0)},
    "SMGC without a floor": {"smgc": SMGC(R=1.5, s_min=0.0, start=3)},
    "PMEN": {"pmen": PMEN()},
    "PMEN tau=0": {"pmen": PMEN(tau=0.0, strength=3.0, start=5, every=3)},
    "PMEN smooth": {"pmen": PMEN(profile="smooth", tau=1e-4, b=1.5, strength=2.0)},
    "PMEN sharp": {"pmen": PMEN(profile="smooth", tau=1e-4, b=8.0, strength=2.0)},
    "PMEN adam": {"pmen": PMEN(reference="adam", strength=0.5)},
    "cap": {"cap": 1 * DEGREE},
    "cap 0": {"cap": 0.0},
    "cap over 90 degrees": {"cap": 120 * DEGREE, "lr": 3.0},
    "cap over 180 degrees": {"cap": 4.0, "lr": 3.0},
    "betas": {"betas": (0.9, 0.999)},
    "no momentum": {"betas": (0.0, 0.9)},
    "maximize": {"maximize": True, "smgc": SMGC(R=2.0, start=10)},
    "whole recipe": {"smgc": SMGC(start=10), "pmen": PMEN(), "cap": 1 * DEGREE},
    "auto gate": {"eps_gate": AutoGate(quantile=0.3, every=11)},
    "auto gate, a=0.3": {"eps_gate": AutoGate(every=5), "a": 0.3},
    "gate by function": {"eps_gate": lambda t, group: 1e-9 * t},
    "moment projected": {"transport": "project"},
    "moment transported": {"transport": "parallel"},
    "moment transported, not tangent": {"transport": "parallel", "tangent": False, "weight_decay": 0.2, "a": 1.0},
    "moment transported, capped, noisy": {"transport": "parallel", "cap": 1 * DEGREE, "pmen": PMEN(), "smgc": SMGC(start=10)},
    "moment projected, noisy": {"transport": "project", "pmen": PMEN(tau=0.0), "eps_gate": AutoGate(every=20)},
    "everything": {"smgc": SMGC(R=3.0, start=10), "pmen": PMEN(start=4, every=2), "cap": 2 * DEGREE, "weight_decay": 0.1,
                   "maximize": True, "a": 0.7},
}  # fmt: skip


@pytest.mark.parametrize("switch", SWITCHES)
def test_unit_rows_agree_with_the_readable_path_over_200_steps(switch):
    """29 = 16 + 8 + 5: pairs of vectors, a single one, and a rest. Turns of more than 90 degrees amplify rounding: there the
    readable path in float32 is itself up to 1.1e-5 from float64 (seen on one CPU; another rounds otherwise)."""
    assert_same(*both((2, 2, 29), unit_dim=-1, **SWITCHES[switch]), w=5e-5 if switch.startswith("cap over") else 1e-5)


@pytest.mark.parametrize("shape", [(3, 1), (4, 2), (3, 8), (3, 16), (3, 17), (5, 1000), (2, 4099)], ids=str)
def test_rows_of_every_length_agree_over_200_steps(shape):
    assert_same(*both(shape, unit_dim=-1, **SWITCHES["whole recipe"]))


@pytest.mark.parametrize(
    "switch",
    ["tangent", "a=1", "a=0.3", "a=0.5, eps_num=0", "decay", "SMGC", "maximize", "betas", "auto gate", "gate by function"],
)
@pytest.mark.parametrize("shape", [(7,), (3, 1000)], ids=str)
def test_coordinates_agree_with_the_readable_path_over_200_steps(switch, shape):
    assert_same(*both(shape, **SWITCHES[switch]))


@pytest.mark.parametrize("switch", ["whole recipe", "everything", "PMEN smooth", "cap", "PMEN adam"])
def test_unit_rows_agree_with_the_twin(switch):
    settings = dict(SWITCHES[switch])
    lr, cap = settings.get("lr", 0.02), settings.get("cap")
    (w, state), _ = both((3, 7), unit_dim=-1, **settings)
    decay, maximize = settings.pop("weight_decay", 0.0), settings.pop("maximize", False)
    twin = reference.GatedAdamW(
        sphere.unit(torch.randn(3, 7, generator=torch.Generator().manual_seed(1))).numpy(),
        betas=(0.975, 0.975), eps_gate=1e-8, eps_num=1e-14, a=settings.get("a", 0.5), weight_decay=decay, unit=True,
        smgc=vars(settings["smgc"]) if "smgc" in settings else None,
        pmen=vars(settings["pmen"]) if "pmen" in settings else None,
    )  # fmt: skip
    for t, g in enumerate(gradients((3, 7), 200)):
        twin.step((-g if maximize else g).numpy(), lr * (1 - 0.5 * t / 200), None if cap is None else cap * min(1, t / 20))
    torch.testing.assert_close(w.double(), torch.from_numpy(twin.theta), rtol=0, atol=5e-6)
    torch.testing.assert_close(state["exp_avg_sq"].double(), torch.from_numpy(twin.v), rtol=1e-4, atol=0)


def test_the_paper_special_case_is_torch_adamw():
    ours, theirs = (torch.nn.Parameter(torch.randn(9, 50, generator=torch.Generator().manual_seed(2))) for _ in range(2))
    a = GatedAdamW([ours], lr=0.01, betas=(0.9, 0.95), a=1.0, eps_num=0.0, eps_gate=1e-8, weight_decay=0.1, fused=True)
    b = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    for g in gradients((9, 50), 200):
        ours.grad, theirs.grad = g.clone(), g.clone()
        a.step()
        b.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def call(w, g, m=None, v=None, t=1, key=0, offset=0, unit=True, **changes):
    """fused_step on one tensor, with the paper's settings except for the changes."""
    m, v = (torch.zeros_like(w, dtype=torch.float32) if x is None else x for x in (m, v))
    fused.fused_step([Slot(w, g, m, v, t, key, offset)], rule(unit, **changes))
    return m, v


def rule(unit=True, **changes):
    paper = dict(lr=0.01, decay=0.0, beta1=0.975, beta2=0.975, eps_gate=1e-8, eps_num=1e-14, a=0.5, dim=-1 if unit else None)
    return algorithm.Rule(**paper | changes)


@pytest.mark.parametrize("offset", [0, 1, 12345, 2**32 - 1000, 2**32 - 1, 2**33 + 5])
@pytest.mark.parametrize("d", [7, 64, 1000])
def test_the_noise_has_the_signs_of_pmen_wherever_the_shard_begins(offset, d):
    w = sphere.random(3, d)
    old, noise = w.clone(), PMEN(strength=1e-2)
    call(w, torch.zeros_like(w), t=17, lr=1.0, pmen=noise, key=key(0, "x"), offset=offset)
    index = torch.arange(3 * d).reshape(3, d) + offset
    expected = old.double() + 1e-2 / math.sqrt(d) * signs(key(0, "x"), 17, index)
    torch.testing.assert_close(w.double(), expected / expected.norm(dim=-1, keepdim=True), rtol=0, atol=2e-7)


def test_one_rank_and_two_halves_draw_the_same_noise():
    whole = sphere.random(6, 33)
    top, bottom = whole[:2].clone(), whole[2:].clone()
    for w, offset in ((whole, 0), (top, 0), (bottom, 2 * 33)):
        call(w, torch.zeros_like(w), t=5, pmen=PMEN(), key=77, offset=offset)
    assert torch.equal(whole, torch.cat([top, bottom]))


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("changes", [{}, {"lr": 0.0, "pmen": PMEN()}, {"cap": 0.01}, {"smgc": SMGC(start=0), "t": 1}], ids=str)
def test_what_does_not_move_keeps_its_bits(unit, changes):
    w = torch.randn(50, 33)  # not even normalized
    w[0, 0], w[1, 1] = -0.0, 0.0
    bits = w.clone().view(torch.int32)
    m, v = call(w, torch.zeros_like(w), unit=unit, **changes)
    assert torch.equal(w.view(torch.int32), bits)
    assert not m.any() and not v.any()


def test_a_row_of_zeros_stays_where_it_is():
    w, g = sphere.random(3, 20), torch.randn(3, 20)
    w[1] = 0
    call(w, g, cap=0.1, pmen=PMEN(), decay=0.1)
    assert not w[1].any() and w.isfinite().all()


def test_a_candidate_that_is_exactly_zero_leaves_the_row_where_it_was():
    w = torch.eye(4)
    call(w, torch.zeros(4, 4), decay=1.0, cap=0.1)
    assert torch.equal(w, torch.eye(4))


def test_bfloat16_is_rounded_to_nearest_and_ties_to_even_as_torch_does():
    w = torch.arange(0x3F00, 0x4080).to(torch.int16).view(torch.bfloat16)  # every number from 0.5 to 4
    expected = (w.float() * (1 - 2**-9)).bfloat16()  # exact in float32, and often just between two
    call(w, torch.zeros_like(w), unit=False, decay=2**-9)
    assert torch.equal(w, expected)


def test_rows_that_move_are_normalized_and_others_are_left_alone():
    w, g = 3 * torch.randn(4, 50), torch.randn(4, 50)
    g[1] = 0
    old = w.clone()
    call(w, g)
    assert torch.equal(w[1], old[1])
    torch.testing.assert_close(w[[0, 2, 3]].norm(dim=-1), torch.ones(3), rtol=2e-7, atol=0)


@pytest.mark.parametrize("cap", [1e-6, 1e-3, 0.1, 100 * DEGREE])
def test_a_large_step_turns_by_the_cap(cap):
    w = sphere.random(20, 100)
    old = w.clone()
    call(w, w.clone(), lr=1e3, tangent=False, cap=cap)  # against sign(w): about 143 degrees away
    angles = sphere.angle(old.double(), w.double() - old.double())
    torch.testing.assert_close(angles, torch.full_like(angles, cap), rtol=1e-6, atol=5e-8)


def test_a_nearly_radial_step_is_capped_as_in_the_readable_path():
    """There the tangent part is the small difference of large numbers: it is summed on its own."""
    w = sphere.random(8, 300)
    across = sphere.tangent(torch.randn(8, 300), w)
    m = w + 1e-3 * sphere.unit(across)  # the direction: along w, and a little to the side
    one, two = w.clone(), w.double()
    settings = dict(tangent=False, beta1=1.0 - 2**-20, beta2=1.0 - 2**-20, lr=0.5 * 2**-20, eps_num=1.0, a=1.0, eps_gate=1e-30)
    call(one, torch.zeros_like(w), m.clone(), torch.zeros_like(w), cap=1e-4, **settings)
    moved = sphere.angle(two, one.double() - two)
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-4), rtol=2e-3, atol=0)
    direction = sphere.unit(sphere.tangent(two - one.double(), two))
    torch.testing.assert_close((direction * sphere.unit(across.double())).sum(-1), torch.ones(8).double(), rtol=0, atol=1e-4)


def test_bfloat16_rows_keep_float32_moments_and_agree_to_one_rounding():
    (w, state), (_, exact) = both((6, 100), steps=1, unit_dim=-1, dtype=torch.bfloat16, **SWITCHES["whole recipe"])
    assert w.dtype == torch.bfloat16 and state["exp_avg"].dtype == torch.float32
    torch.testing.assert_close(state["exp_avg_sq"].double(), exact["exp_avg_sq"], rtol=1e-3, atol=0)
    plain, other = (torch.nn.Parameter(w.clone()) for _ in range(2))
    a = GatedAdamW([plain], lr=0.05, unit_dim=-1, fused=False, pmen=PMEN(), cap=0.02)
    b = GatedAdamW([other], lr=0.05, unit_dim=-1, fused=True, pmen=PMEN(), cap=0.02)
    for g in gradients((6, 100), 1):
        plain.grad = other.grad = g.bfloat16()
        a.step()
        b.step()
    assert (plain != other).float().mean() < 0.01, "only what lies between two bfloat16 numbers may round the other way"
    torch.testing.assert_close(plain, other, rtol=2**-7, atol=0)
    assert not torch.equal(w, other)


@pytest.mark.parametrize(("a", "eps_num"), [(0.5, 1e-14), (0.5, 1e-30), (1.0, 1e-14), (1.0, 0.0)])
def test_the_direction_has_a_few_rounding_errors_at_every_magnitude(a, eps_num):
    """Of one step from w = 0, where nothing is added to it: moments from 1e-18 to 1e18, and v = 0."""
    rng = torch.Generator().manual_seed(0)
    g = torch.randn(100_003, generator=rng).sign() * 10 ** (-18 + 36 * torch.rand(100_003, generator=rng))
    g[::1000] = 0
    w = torch.zeros_like(g)
    m, v = call(w, g, unit=False, lr=1.0, a=a, eps_num=eps_num)
    d = (v.double() / (1 - 0.975)).sqrt() + eps_num
    exact = -m.double() / (1 - 0.975) / (d + 1e-8 * (d / 1e-8) ** (1 - a))
    torch.testing.assert_close(w.double(), exact.nan_to_num(), rtol=5e-7, atol=0)


@pytest.mark.parametrize("a", [0.5, 1.0])
def test_a_second_moment_that_has_overflowed_stops_its_coordinate(a):
    w = torch.zeros(40)
    _, v = call(w, torch.full((40,), 1e30), unit=False, a=a)
    assert v.isinf().all() and not w.any()


@pytest.mark.parametrize("a", [0.5, 1.0, 0.3])
@pytest.mark.parametrize("tangent", [True, False])
def test_nan_passes_through_where_it_is_not_checked(a, tangent):
    w, g = sphere.random(3, 20), torch.randn(3, 20)
    g[1, 3] = math.nan
    call(w, g, smgc=SMGC(start=0), t=9, cap=0.1, a=a, tangent=tangent)
    assert w[1].isnan().all() and w[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [0, 1, 3, 5, 1000, 131073, 400001])
def test_finite_finds_nan_and_inf_wherever_they_are(n, dtype):
    x = torch.randn(n).to(dtype)
    if n:
        x[0] = torch.finfo(dtype).max
    assert finite(x)
    for i in {0, n // 4, n // 2, n - 1} if n else ():
        for bad in (math.nan, math.inf, -math.inf):
            y = x.clone()
            y[i] = bad
            assert not finite(y) and not fused.below(y, math.inf)


def test_finite_looks_at_every_coordinate_of_rows():
    x = torch.randn(3, 7)
    assert finite(x, unit=True)
    x[2, 6] = math.nan
    assert not finite(x, unit=True)


def finite(x, limit=math.inf, kernel=True, unit=False):
    """``fused.finite`` of one gradient: by the kernel, which has made a step with it, or by torch."""
    slot = Slot(x.clone(), x, *torch.zeros(2, *x.shape), 1, limit=limit)
    if kernel:
        fused.fused_step([slot], rule(unit=unit))
    return fused.finite([slot])


def test_one_bad_gradient_among_many_is_found_whichever_it_is():
    for bad in range(5):
        slots = [Slot(*torch.zeros(4, 3 + i), 1, limit=2.0) for i in range(5)]
        fused.fused_step(slots[:4], rule(unit=False))  # the last one has no job: torch looks at it
        assert fused.finite(slots)
        slots[bad].g = torch.full((3 + bad,), -3.0)
        assert not fused.finite(slots)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_finite_finds_what_is_not_below_a_limit(dtype, kernel):
    x = torch.zeros(1000, dtype=dtype)
    for size, below in ((2.0**100, True), (2.0**101, False), (-(2.0**101), False), (-math.inf, False), (math.nan, False)):
        x[700] = size
        assert finite(x, 2.0**101, kernel) is below
    assert finite(x[:0], 1.0, kernel)


@pytest.mark.parametrize("x", [torch.ones(3, 4).t(), torch.ones(5).double(), torch.full((4,), 3e38)])
def test_finite_takes_any_tensor_and_compiles_nothing(x):
    fused_cpu.load.cache_clear()  # as before the first step
    assert finite(x, kernel=False)
    bad = x.clone()
    bad[-1] = math.inf
    assert not finite(bad, kernel=False)
    assert not fused_cpu.load.cache_info().currsize


def test_threads_change_no_bit():
    w, g = sphere.random(3000, 130), torch.randn(3000, 130)
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        one = w.clone()
        call(one, g, cap=0.01, pmen=PMEN())
        results.append(one)
    torch.set_num_threads(1)
    assert torch.equal(*results)


def test_tensors_of_several_shapes_steps_and_no_size_in_one_call():
    shapes, steps = [(4, 9), (0, 5), (3, 0), (2, 2, 31)], [1, 2, 3, 400]
    many = [sphere.random(*s) for s in shapes]
    grads, alone = [torch.randn(s) for s in shapes], [w.clone() for w in many]
    zeros = [[torch.zeros_like(w) for w in many] for _ in range(2)]
    settings = dict(beta1=0.9, beta2=0.9, smgc=SMGC(start=1), pmen=PMEN(), cap=0.1)
    slots = [Slot(*one) for one in zip(many, grads, *zeros, steps, [1, 2, 3, 4], [0, 0, 0, 10])]
    fused.fused_step(slots, rule(**settings))
    for i, w in enumerate(alone):
        call(w, grads[i], t=steps[i], key=i + 1, offset=10 * (i == 3), **settings)
        assert torch.equal(w, many[i])


def test_a_moment_in_another_order_or_precision_is_read_as_what_it_is():
    w, g, m = sphere.random(6, 8), torch.randn(6, 8), torch.randn(6, 8)
    other, v, odd = w.clone(), torch.rand(6, 8), torch.empty(8, 6).t().copy_(m)
    call(w, g, m, v.clone())
    _, new_v = call(other, g, odd, v.double())
    assert torch.equal(w, other) and torch.equal(m, odd)
    assert new_v.dtype == torch.float64
    with pytest.raises(ValueError, match=r"shape and device, \(6, 8\) on cpu"):
        call(w, g, torch.zeros(3, 8))


@pytest.mark.parametrize(
    "p, dim, why",
    [
        (torch.zeros(4, 6).t(), -1, "contiguous"),
        (torch.zeros(4, 6, dtype=torch.float64), -1, "float32 and bfloat16"),
        (torch.zeros(4, 6, dtype=torch.float16), -1, "float32 and bfloat16"),
        (torch.zeros(4, 6), 0, "last dimension, not along unit_dim=0"),
        (torch.zeros(4, 6, device="meta"), -1, "on meta"),
        (torch.zeros(4, 6).as_subclass(type("Own", (torch.Tensor,), {})), -1, "plain tensors, and this is a Own"),
    ],
)
def test_usable_says_why_not(p, dim, why):
    reason = fused.usable(p, p.detach().clone() if type(p) is torch.Tensor else torch.zeros(4, 6), dim)
    assert why in reason and reason.endswith((".", ")."))


@pytest.mark.parametrize("dim", [-1, 1, None])
def test_usable_takes_rows_and_coordinates(dim):
    p = torch.nn.Parameter(torch.zeros(4, 6))
    assert fused.usable(p, torch.zeros(4, 6), dim) is None
    assert "gradient" in fused.usable(p, torch.zeros(6, 4).t(), dim)


def test_without_a_compiler_the_plain_path_runs_and_one_line_says_what_to_install(monkeypatch, caplog):
    monkeypatch.setattr(native, "compiler", lambda: None)
    fused_cpu.load.cache_clear()
    fused._log_once.cache_clear()
    try:
        p = torch.nn.Parameter(sphere.random(4, 6))
        optimizer = GatedAdamW([p], lr=0.1, unit_dim=-1)
        with caplog.at_level(logging.WARNING, logger="ngpt_core"):
            for _ in range(3):
                p.grad = torch.randn(4, 6)
                optimizer.step()
        assert p.norm(dim=-1).allclose(torch.ones(4))
        assert len(caplog.records) == 1 and "apt install g++" in caplog.text
        with pytest.raises(ValueError, match="no C\\+\\+ compiler"):
            GatedAdamW([p], lr=0.1, unit_dim=-1, fused=True).step()
    finally:
        fused_cpu.load.cache_clear()


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    broken = tmp_path / "cxx"
    broken.write_text("#!/bin/sh\necho 'no such processor' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(RuntimeError, match="no such processor"):
        native.build(fused_cpu._SOURCE, tmp_path)
    assert not list(tmp_path.glob("*.so"))


def test_several_may_race_to_build_it(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_FLAGS", ("-O0", *native._FLAGS[1:]))  # as the product, but compiled quickly
    with ThreadPoolExecutor(3) as racers:
        libraries = list(racers.map(native.build, [fused_cpu._SOURCE] * 3, [tmp_path] * 3))
    assert len(set(libraries)) == 1 and ctypes.CDLL(str(libraries[0])).ngpt_step
    assert sorted(f.suffix for f in tmp_path.iterdir()) == [".sha256", ".so"]
    assert native.build(fused_cpu._SOURCE, tmp_path) == next(tmp_path.glob("*.so"))


def test_a_cache_that_cannot_be_written_is_replaced_by_a_private_folder(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = native.kernel_folder()
    assert folder.is_dir() and folder.stat().st_mode & 0o077 == 0
    folder.rmdir()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other instruction set is x86-64's oldest")
def test_the_oldest_processor_computes_the_same(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_TUNE", ((),))
    monkeypatch.setattr(native, "kernel_folder", lambda: tmp_path)
    fused_cpu.load.cache_clear()
    try:
        for switch in ("everything", "PMEN smooth"):
            assert_same(*both((3, 37), unit_dim=-1, **SWITCHES[switch]))
    finally:
        fused_cpu.load.cache_clear()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_step_needs_no_second_tensor():
    """The highest resident set during a step of 32 MB tensors, in a process of its own: under 1 MB above the state's."""
    script = """
import torch
torch.set_num_threads(1)
from ngpt_core.optim.gated_adamw import GatedAdamW
from ngpt_core.optim.pmen import PMEN
from ngpt_core.optim.smgc import SMGC
p = torch.nn.Parameter(torch.randn(8192, 1024))
p.grad = torch.randn(8192, 1024)
optimizer = GatedAdamW([p], lr=0.01, unit_dim=-1, smgc=SMGC(start=1), pmen=PMEN(tau=1e9), cap=0.01, fused=True)
optimizer.step()
status = lambda x: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(x))
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
optimizer.step()
print(status("VmHWM") - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1024


@needs_compiler
def test_a_library_that_is_damaged_or_open_to_others_is_not_loaded_but_built_again(tmp_path, monkeypatch):
    monkeypatch.setenv("NGPT_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_FLAGS", ("-O0", *native._FLAGS[1:]))  # as the product, but compiled quickly
    library = native.build(fused_cpu._SOURCE)
    whole, stamp = library.read_bytes(), library.stat().st_mtime_ns
    assert native.build(fused_cpu._SOURCE) == library and library.stat().st_mtime_ns == stamp
    for damage in (b"", whole[:1000], b"planted" + whole[7:]):
        library.write_bytes(damage)
        assert native.build(fused_cpu._SOURCE) == library and library.read_bytes() == whole
    stamp = library.stat().st_mtime_ns
    library.chmod(0o777)
    native.build(fused_cpu._SOURCE)
    assert library.stat().st_mtime_ns != stamp and not library.stat().st_mode & 0o022
    (tmp_path / "kernels").chmod(0o777)
    assert not native.kernel_folder().is_relative_to(tmp_path)
