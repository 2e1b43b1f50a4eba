"""Do the GPU kernels compute the same step? Their algebra, in Triton's interpreter, against the readable path in float64.

Not collected by name: ``test_triton.py`` runs this file in a process of its own, because TRITON_INTERPRET=1 must be set before
Triton is imported and would change every other kernel of the process. To run it by hand:

    TRITON_INTERPRET=1 python -m pytest tests/triton_interpreted.py
"""

import math

import pytest
import torch
from test_fused import SWITCHES, gradients

from ngpt_core import sphere
from ngpt_core.optim import algorithm
from ngpt_core.optim import fused_triton as kernels
from ngpt_core.optim.algorithm import Slot
from ngpt_core.optim.auto_gate import AutoGate, quantiles
from ngpt_core.optim.pmen import PMEN, key, signs
from ngpt_core.optim.smgc import SMGC

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def settings(lr=0.02, cap=None, betas=(0.975, 0.975), weight_decay=0.0, unit_dim=None, **rest):
    """GatedAdamW's keywords as ``algorithm.Rule`` names them."""
    names = dict(eps_gate=1e-8, eps_num=1e-14, a=0.5, tangent=True, smgc=None, pmen=None, maximize=False) | rest
    return names | dict(lr=lr, decay=lr * weight_decay, beta1=betas[0], beta2=betas[1], cap=cap, dim=unit_dim)


def run(shape, steps, on_device=False, offset=0, dtype=torch.float32, seed=0, **switch):
    """The kernel in float32 and ``algorithm.update`` in float64, step by step: (w, m, v) of each."""
    s = settings(**switch)
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1))
    if s["dim"] is not None:
        w = sphere.unit(w)
    ours = [w.to(dtype), torch.zeros(shape), torch.zeros(shape)]
    theirs = [ours[0].double(), torch.zeros(shape).double(), torch.zeros(shape).double()]
    index = torch.arange(w.numel()).reshape(shape) + offset
    rule = algorithm.Rule(length=shape[-1], **s)
    number = (lambda x: x if x is None else torch.tensor(float(x))) if on_device else (lambda x: x)
    gate, kept = s["eps_gate"], 1e-8
    for t, g in enumerate(gradients(shape, steps, seed, kind=s.get("transport") is not None), start=1):
        slot = Slot(ours[0], g.to(dtype), ours[1], ours[2], number(t), key(0, "w"), offset)
        numbers = {name: number(s[name]) for name in ("lr", "decay", "cap")}
        if isinstance(gate, AutoGate) or callable(gate):  # the threshold is a tensor's own, as paths.py gives it to the slot
            if callable(gate):
                kept = gate(t, {})
            elif t > 1 and (t - 2) % gate.every == 0:
                kept = float((quantiles([theirs[2]], gate.quantile)[0] / (1 - s["beta2"] ** (t - 1))).sqrt())
            slot.eps_gate = torch.tensor(kept) if on_device else kept  # which goes before the rule's
        kernels.step([slot], rule._replace(**numbers), torch.tensor(True) if on_device else None)
        if slot.eps_gate is not None:
            rule = rule._replace(eps_gate=kept)
        g = -g.to(dtype).double() if s["maximize"] else g.to(dtype).double()
        theirs = algorithm.run(algorithm.update(theirs[0], g, *theirs[1:], t, rule, key(0, "w"), lambda: index))
    return ours, theirs


def assert_same(ours, theirs, w=1e-5, moments=5e-4):
    torch.testing.assert_close(ours[0].double(), theirs[0], rtol=0, atol=w)
    for a, b in zip(ours[1:], theirs[1:]):
        torch.testing.assert_close(a.double(), b, rtol=moments, atol=moments * float(b.abs().max()) * 1e-3)


@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_rows_agree_with_the_readable_path(switch, on_device):
    changed = {k: SMGC(v.R, v.s_min, min(v.start, 2)) if k == "smgc" else v for k, v in SWITCHES[switch].items()}
    assert_same(*run((3, 13), 5, on_device, unit_dim=-1, **changed))


@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize(
    "switch", ["tangent", "a=1", "a=0.3", "a=0.5, eps_num=0", "decay", "SMGC", "maximize", "auto gate, a=0.3"]
)
def test_coordinates_agree_with_the_readable_path(switch, on_device):
    assert_same(*run((3, 700), 12, on_device, **SWITCHES[switch]))


@pytest.mark.parametrize("d", [1, 2, 16, 1000, 8192])
def test_rows_of_every_length_agree(d):
    assert_same(*run((2, d), 5, unit_dim=-1, smgc=SMGC(start=2), pmen=PMEN(), cap=0.02))


def group(unit, seed=3):
    """Slots of a group: shapes that repeat and one that does not, an empty tensor, one whose memory is not aligned."""
    rng, slots = torch.Generator().manual_seed(seed), []
    for i, shape in enumerate([(3, 13), (2, 13), (3, 13), (0, 13), (3, 13), (1, 700)]):
        w = sphere.unit(torch.randn(shape, generator=rng)) if unit else torch.randn(shape, generator=rng)
        g, m, v = (10.0**-i * torch.randn(shape, generator=rng) for _ in range(3))
        if i == 4:
            w = torch.cat([w.flatten()[:1], w.flatten()])[1:].view(shape)
            assert w.data_ptr() % 16
        slots.append(Slot(w, g, m, v.square(), 7, key(0, str(i)), 1000 * i))
    return slots


@pytest.mark.parametrize("unit", [True, False])
def test_tensors_that_share_a_launch_step_as_if_each_was_alone(unit, monkeypatch):
    rule = algorithm.Rule(**settings(unit_dim=-1 if unit else None, cap=0.02, pmen=PMEN(strength=1.0), smgc=SMGC(start=2)))
    together, alone = group(unit), group(unit)
    kernels.step(together, rule)
    for slot in alone:
        kernels.step([slot], rule)
    for a, b in zip(together, alone):
        assert all(torch.equal(x, y) for x, y in ((a.w, b.w), (a.m, b.m), (a.v, b.v)))
    assert not torch.equal(together[0].w, group(unit)[0].w)
    shared = kernels.launches(together, torch.device("cpu"))
    assert [len(one.slots) for one in shared] == [3, 1, 1] and [one.aligned for one in shared] == [False, True, True]


def test_the_table_is_copied_again_only_if_something_in_it_has_changed():
    slots, device = group(True), torch.device("cpu")
    first = kernels.launches(slots, device)[0].table
    assert kernels.launches(slots, device)[0].table.data_ptr() == first.data_ptr()
    slots[2].g = slots[2].g.clone()  # as the gradient of another step
    assert kernels.launches(slots, device)[0].table.data_ptr() != first.data_ptr()
    assert kernels.launches(slots, device)[0].table[1, 1] == slots[2].g.data_ptr()


@pytest.mark.slow
def test_the_whole_recipe_agrees_over_200_steps():
    assert_same(*run((3, 29), 200, True, unit_dim=-1, smgc=SMGC(start=10), pmen=PMEN(), cap=0.02))


@pytest.mark.slow
@pytest.mark.parametrize(
    "switch", ["auto gate", "gate by function", "moment projected, noisy", "moment transported, capped, noisy"]
)
def test_the_switches_agree_over_200_steps(switch):
    assert_same(*run((3, 29), 200, True, unit_dim=-1, **SWITCHES[switch]))


def test_bfloat16_rows_keep_float32_moments():
    ours, theirs = run((2, 40), 1, unit_dim=-1, dtype=torch.bfloat16)
    assert ours[0].dtype == torch.bfloat16
    assert_same(ours, theirs, w=2**-9)


def zero_gradient(w, t=3, g=None, m=None, v=None, offset=0, mask=None, unit=True, **changes):
    g, m, v = (torch.zeros_like(w) if x is None else x for x in (g, m, v))
    numbers = dict(lr=1.0, decay=0.0, beta1=0.9, beta2=0.9, eps_gate=1e-8, eps_num=1e-14, a=0.5, dim=-1 if unit else None)
    kernels.step([Slot(w, g, m, v, t, key(0, "x"), offset)], algorithm.Rule(**numbers | changes), mask)
    return m, v


@pytest.mark.parametrize(("way", "length"), [("project", 1.0), ("parallel", 1.0), ("parallel", 2.0)])
def test_a_row_that_stays_keeps_its_moment_or_has_it_projected(way, length):
    w, g = length * sphere.random(2, 33), torch.randn(2, 33)
    bits = w.clone()
    m, _ = zero_gradient(w, g=g, lr=0.0, beta1=0.0, tangent=False, transport=way)
    assert torch.equal(w, bits)
    torch.testing.assert_close(m, sphere.tangent(g, w) if way == "project" else g, rtol=1e-5, atol=1e-6)


def test_at_the_antipode_there_is_no_great_circle_and_the_moment_stays():
    w, g = sphere.random(2, 33), torch.randn(2, 33)
    before = w.clone()
    m, _ = zero_gradient(w, g=g, lr=1e-12, decay=2.0, beta1=0.0, tangent=False, transport="parallel")
    torch.testing.assert_close(w, -before)
    torch.testing.assert_close(m, g)


@pytest.mark.parametrize("t", [17, torch.tensor(17.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("offset", [0, 2**31 - 5, 2**32 - 20, 2**33 + 5])
def test_the_noise_has_the_signs_of_pmen(offset, t):
    w = sphere.random(2, 33)
    old = w.double()
    zero_gradient(w, t, pmen=PMEN(strength=1e-2), offset=offset)
    expected = old + 1e-2 / math.sqrt(33) * signs(key(0, "x"), 17, torch.arange(66).reshape(2, 33) + offset)
    torch.testing.assert_close(w.double(), expected / expected.norm(dim=-1, keepdim=True), rtol=0, atol=2e-7)


@pytest.mark.parametrize("unit", [True, False])
def test_what_does_not_move_keeps_its_bits(unit):
    w = torch.randn(2, 33)
    w[0, 0] = -0.0
    bits = w.clone().view(torch.int32)
    m, v = zero_gradient(w, unit=unit)
    assert torch.equal(w.view(torch.int32), bits) and not m.any() and not v.any()


def test_a_row_of_zeros_stays_where_it_is():
    w = sphere.random(2, 33)
    w[1] = 0
    zero_gradient(w, g=torch.randn(2, 33), cap=0.1)
    assert not w[1].any() and w.isfinite().all()


def test_a_candidate_beyond_the_range_leaves_its_row_where_it_is():
    w = sphere.random(2, 33)
    old = w.clone()
    g = torch.randn(2, 33) * torch.tensor([[1e10], [1e-9]])
    m, v = zero_gradient(w, t=1, g=g, beta2=0.0)
    after = w.clone()
    zero_gradient(w, 2, None, m, v, lr=0.1, beta2=0.0)
    assert torch.equal(w[0], after[0]) and not torch.equal(after, old)  # m / eps_num of the first row has no square
    torch.testing.assert_close(w.norm(dim=-1), torch.ones(2))


@pytest.mark.parametrize("unit_dim", [None, -1])
def test_a_short_memory_forgets_a_large_gradient(unit_dim):
    m = torch.full((2, 33), 1e6)
    v, w = m.square(), sphere.random(2, 33)
    g = 1e-2 * torch.randn(2, 33)
    zero_gradient(w, 2, g, m, v, unit=unit_dim is not None, lr=0.0, beta1=0.0, tangent=False)
    assert torch.equal(m, g)  # m_t = g_t at beta_1 = 0


@pytest.mark.parametrize("unit", [True, False])
def test_the_mask_of_a_bad_step_lets_nothing_through(unit):
    w, g = sphere.random(2, 33), torch.full((2, 33), math.nan)
    old = w.clone()
    m, v = zero_gradient(w, g=g, unit=unit, mask=torch.tensor(False))
    assert torch.equal(w, old) and not m.any() and not v.any()
    m, v = zero_gradient(w, g=g, unit=unit, mask=torch.tensor(True), tangent=False, smgc=SMGC(start=0))
    assert w.isnan().all() and v.isnan().all()
