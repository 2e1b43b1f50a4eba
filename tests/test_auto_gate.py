"""Is the gate's threshold the quantile it claims to be, on every path, and is a wrong one refused before anything changes?"""

import copy
import io
import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import ngpt_core as ng
from ngpt_core.checks import LEAST_DIVISOR
from ngpt_core.optim import Diagnostics, auto_gate
from ngpt_core.rehearsal import rehearse

F64 = torch.float64


def parameter(*shape, dtype=torch.float32, seed=1):
    return torch.nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def gradient(shape, t, dtype=torch.float32):
    rng = torch.Generator().manual_seed(100 + t)
    g = torch.randn(shape, generator=rng) * 10 ** (-8 * torch.rand(shape, generator=rng))
    g[..., 0] = 0
    return g.to(dtype)


def steps(optimizer, first, last):
    for t in range(first, last + 1):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = gradient(p.shape, t, p.dtype)
        optimizer.step()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.floats(0.001, 0.999), st.integers(0, 10**6), st.sampled_from([torch.float32, F64]))
def test_the_quantile_is_numpys_inverted_cdf_of_what_is_not_zero(n, share, seed, dtype):
    rng = np.random.default_rng(seed)
    x = 10.0 ** rng.uniform(-36, 30, n) * (rng.random(n) < 0.8)
    x[rng.random(n) < 0.2] = 1e-6  # ties
    v = torch.tensor(x).to(dtype)
    positive = v[v > 0].double().numpy()
    expected = 0.0 if not len(positive) else np.sort(positive)[max(1, math.ceil(len(positive) * share)) - 1]
    assert float(auto_gate.quantiles([v], share)) == expected


def test_many_tensors_at_once_and_one_too_large_for_one_piece():
    many = [torch.rand(n, generator=torch.Generator().manual_seed(n)) for n in (3, 10, (1 << 20) + 77)]
    found = auto_gate.quantiles([*many, torch.zeros(4), torch.zeros(0)], 0.25)
    for v, x in zip(many, found):
        assert float(x) == float(v.sort().values[math.ceil(0.25 * len(v)) - 1])
    assert found[3:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype, kind", [(torch.float32, torch.int32), (F64, torch.int64)], ids=str)
def test_a_quantile_whose_last_digits_are_the_highest(dtype, kind):
    bits = torch.tensor([1.0, 2.0], dtype=dtype).view(kind) - 1  # ..FFFF
    v = bits.view(dtype)
    assert [float(auto_gate.quantiles([v], share)) for share in (0.3, 0.9)] == v.tolist()
    least = torch.ones((), dtype=kind).view(dtype)  # positive, the smallest there is
    assert torch.equal(auto_gate.quantiles([torch.stack([least, 0 * least])], 0.5)[0], least)


def test_two_shards_find_the_number_of_the_whole(monkeypatch):
    v = torch.rand(2, 50, generator=torch.Generator().manual_seed(4))
    both, meeting = {}, Barrier(2)

    def all_sum(x, rank):
        both[rank] = x
        meeting.wait()
        total = both[0] + both[1]
        meeting.wait()
        return total

    monkeypatch.setattr(auto_gate.sharding, "all_sum", all_sum)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: auto_gate.quantiles([v[rank]], 0.7, rank), range(2)))
    assert [float(x) for x in found] == [float(v.reshape(-1).sort().values[69])] * 2


def test_forty_tensors_of_a_group_have_their_thresholds():
    params = [parameter(2, 3, seed=i) for i in range(40)]
    optimizer = ng.GatedAdamW(params, lr=0.01, eps_gate=ng.AutoGate(every=1))
    for _ in range(2):
        for i, p in enumerate(params):
            p.grad = torch.full((2, 3), (i + 1) * 1e-6)
        optimizer.step()
    found = [float(optimizer.state[p]["eps_gate"]) for p in params]
    assert found == pytest.approx([(i + 1) * 1e-6 for i in range(40)], rel=1e-5)


class ReadsOnly(TorchDispatchMode):
    """Refuses what makes the host wait for a device: reading a number, or a shape that depends on numbers."""

    def __init__(self, counters):
        super().__init__()
        self.counters, self.read = counters, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"):
            assert args[0].data_ptr() in self.counters, f"the host waits in {func}"
            self.read += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_refresh_reads_nothing_but_the_counters_of_the_host(capturable, foreach):
    params = [parameter(4, 9), parameter(5)]
    groups = [dict(params=params[:1], unit_dim=-1, transport="parallel"), dict(params=params[1:])]
    settings = dict(eps_gate=ng.AutoGate(every=2), nonfinite="off", fused=False, foreach=foreach, capturable=capturable)
    optimizer = ng.GatedAdamW(groups, lr=0.01, **settings)
    steps(optimizer, 1, 1)
    counters = () if capturable else [optimizer.state[p]["step"].data_ptr() for p in params]
    before = [float(optimizer.state[p]["eps_gate"]) for p in params]
    with ReadsOnly(counters) as watch, rehearse("cuda"):  # where the CPU's own shortcuts are not taken
        steps(optimizer, 2, 5)  # t = 2 and t = 4 refresh
    assert watch.read > 0 or capturable
    assert all(float(optimizer.state[p]["eps_gate"]) != old for p, old in zip(params, before))


@pytest.mark.parametrize("path", [dict(), dict(fused=False), dict(foreach=True), dict(capturable=True)], ids=str)
def test_it_is_the_papers_at_first_then_the_quantile_which_is_kept_for_a_while(path):
    p = parameter(6, 20)
    optimizer = ng.GatedAdamW([p], lr=0.01, unit_dim=-1, eps_gate=ng.AutoGate(quantile=0.3, every=5), **path)
    seen = []
    for t in range(1, 13):
        before = optimizer.state[p]["exp_avg_sq"].clone() if t > 1 else None
        steps(optimizer, t, t)
        seen.append(float(optimizer.state[p]["eps_gate"]))
        if (t - 2) % 5 == 0 and before is not None:
            scale = (before.double() / (1 - 0.975 ** (t - 1))).sqrt()
            scale = scale[scale > 0].sort().values
            assert seen[-1] == pytest.approx(float(scale[math.ceil(0.3 * len(scale)) - 1]), rel=1e-5)
    assert seen[0] == pytest.approx(1e-8) and optimizer.state[p]["eps_gate"].dtype == torch.float32
    changes = [t + 1 for t in range(1, 12) if seen[t] != seen[t - 1]]
    assert changes == [2, 7, 12]


def test_auto_is_the_median_every_hundred_steps_and_each_tensor_has_its_own_threshold():
    p, q = parameter(3, 8), parameter(3, 8)
    optimizer = ng.GatedAdamW([p, q], lr=0.01, eps_gate="auto")
    assert optimizer.param_groups[0]["eps_gate"] == ng.AutoGate(quantile=0.5, every=100)
    for _ in range(2):
        p.grad, q.grad = torch.full((3, 8), 1e-3), torch.full((3, 8), 1e-6)
        optimizer.step()
    assert float(optimizer.state[p]["eps_gate"]) == pytest.approx(1e-3, rel=1e-5)
    assert float(optimizer.state[q]["eps_gate"]) == pytest.approx(1e-6, rel=1e-5)


@pytest.mark.parametrize("capturable", [False, True])
def test_a_tensor_without_any_gradient_keeps_the_papers_threshold(capturable):
    p = parameter(3, 8)
    optimizer = ng.GatedAdamW([p], lr=0.01, eps_gate=ng.AutoGate(every=1), capturable=capturable)
    for _ in range(3):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert float(optimizer.state[p]["eps_gate"]) == pytest.approx(1e-8) and p.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
def test_a_resumed_run_repeats_the_uninterrupted_one_to_the_bit(dtype):
    """The threshold is older than the checkpoint: it must come from the file."""
    kwargs = dict(lr=0.02, unit_dim=-1, eps_gate=ng.AutoGate(quantile=0.4, every=10), transport="parallel")
    whole, half = parameter(4, 9, dtype=dtype), parameter(4, 9, dtype=dtype)
    one, two = ng.GatedAdamW([whole], **kwargs), ng.GatedAdamW([half], **kwargs)
    steps(one, 1, 25), steps(two, 1, 16)
    file = io.BytesIO()
    torch.save((two.state_dict(), half.detach()), file)
    file.seek(0)
    state, w = torch.load(file, weights_only=True)
    again = torch.nn.Parameter(w.clone())
    three = ng.GatedAdamW([again], lr=0.5, unit_dim=-1)
    three.load_state_dict(state)
    assert three.param_groups[0]["eps_gate"] == kwargs["eps_gate"] and three.param_groups[0]["transport"] == "parallel"
    steps(three, 17, 25)
    assert torch.equal(again, whole) and three.state[again]["eps_gate"] == one.state[whole]["eps_gate"]


def test_switched_on_in_the_middle_it_takes_its_first_quantile_at_once():
    p = parameter(4, 9)
    optimizer = ng.GatedAdamW([p], lr=0.02)
    steps(optimizer, 1, 4)
    optimizer.param_groups[0]["eps_gate"] = ng.AutoGate(every=1000)
    steps(optimizer, 5, 5)
    assert float(optimizer.state[p]["eps_gate"]) != pytest.approx(1e-8)
    optimizer.param_groups[0]["eps_gate"] = 1e-8  # and off again: the number holds
    other = parameter(4, 9)
    other.data.copy_(p)
    plain = ng.GatedAdamW([other], lr=0.02)
    plain.load_state_dict({**plain.state_dict(), "state": copy.deepcopy(optimizer.state_dict()["state"])})
    steps(optimizer, 6, 8), steps(plain, 6, 8)
    assert torch.equal(p, other)


def test_a_function_is_called_once_per_group_and_step_with_t_from_one():
    asked = []

    def gate(t, group):
        asked.append((t, group["name"]))
        return 1e-8

    groups = [dict(params=[parameter(2, 3)], name="a"), dict(params=[parameter(2, 3), parameter(4)], name="b")]
    optimizer = ng.GatedAdamW(groups, lr=0.1, eps_gate=gate)
    steps(optimizer, 1, 2)
    assert asked == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]


@pytest.mark.parametrize(
    "bad",
    [
        math.nan,
        0.0,
        -1e-8,
        math.inf,
        1e-40,
        10**400,
        "1e-8",
        None,
        True,
        torch.ones(2),
        torch.ones(0),
        torch.ones(2, 3),
        torch.zeros(1),
        torch.tensor(math.nan),
        torch.tensor(True),
        torch.tensor(1e-8 + 0j),
    ],
    ids=lambda x: repr(x)[:30],
)
def test_a_function_that_returns_something_else_is_refused_before_anything_changes(bad):
    p, q = parameter(2, 3), parameter(2, 3)
    groups = [dict(params=[p], eps_gate=ng.AutoGate(every=1)), dict(params=[q], eps_gate=lambda t, _: 1e-8 if t < 3 else bad)]
    optimizer = ng.GatedAdamW(groups, lr=0.1)
    steps(optimizer, 1, 2)
    before = copy.deepcopy([p, q, *optimizer.state[p].values(), *optimizer.state[q].values()])
    rule = r"^GatedAdamW: eps_gate, as a function of \(t, group\), must return one finite number >= 1e-30; got .* at t = 3\. "
    with pytest.raises(ValueError, match=rule):
        steps(optimizer, 3, 3)
    after = [p, q, *optimizer.state[p].values(), *optimizer.state[q].values()]
    assert all(torch.equal(x, y) for x, y in zip(after, before, strict=True)) and optimizer.state[p]["step"] == 2


def test_a_function_may_return_the_least_threshold_or_a_tensor():
    p, q = parameter(2, 3), parameter(2, 3)
    q.data.copy_(p)
    for x, value in ((p, 1e-30), (q, torch.tensor([1e-30]))):
        steps(ng.GatedAdamW([x], lr=0.1, fused=False, eps_gate=lambda t, group, value=value: value), 1, 3)
    assert p.isfinite().all() and torch.allclose(p, q)


def test_thresholds_are_kept_as_they_were_if_a_tensor_cannot_take_the_path_that_was_asked_for():
    p = parameter(3, 8)
    optimizer = ng.GatedAdamW([p], lr=0.1, eps_gate=ng.AutoGate(every=1))
    steps(optimizer, 1, 2)
    before = optimizer.state[p]["eps_gate"].clone()
    optimizer.param_groups[0] |= dict(fused=True, foreach=True)
    with pytest.raises(ValueError, match="cannot take the fused kernel"):
        steps(optimizer, 3, 3)
    assert torch.equal(optimizer.state[p]["eps_gate"], before)


@pytest.mark.parametrize(
    "bad", [dict(quantile=x) for x in (0, 1, -0.1, 1.5, math.nan, "0.5")] + [dict(every=x) for x in (0, 1.5, "9")]
)
def test_a_quantile_outside_0_to_1_and_a_step_count_below_1_are_refused(bad):
    with pytest.raises(ValueError, match=f"AutoGate: {next(iter(bad))}"):
        ng.AutoGate(**bad)


def test_numpy_numbers_are_stored_as_python_numbers():
    gate = ng.AutoGate(np.float32(0.25), np.int64(3))
    assert gate == ng.AutoGate(0.25, 3) and type(gate.quantile) is float and type(gate.every) is int


def test_only_the_shape_of_a_tensor_on_another_device_is_checked():
    there = torch.device("meta")
    assert auto_gate.called(lambda t, group: torch.empty(1, 1, device=there), 3, {}, there).shape == ()
    for bad, got in ((torch.empty(2, device=there), r"a tensor of shape \(2,\)"), (torch.ones(1, device=there) > 0, "tensor")):
        with pytest.raises(ValueError, match=f"must return one finite number.*got {got}"):
            auto_gate.called(lambda t, group, bad=bad: bad, 3, {}, there)


@pytest.mark.parametrize("bad", [math.nan, 0.0, -1.0, math.inf, "x", None, torch.ones(2)], ids=repr)
def test_a_state_with_an_invalid_threshold_is_refused(bad):
    p, q = parameter(2, 3), parameter(2, 3)
    one, two = (ng.GatedAdamW([x], lr=0.1, eps_gate="auto") for x in (p, q))
    steps(one, 1, 2), steps(two, 1, 2)
    state = copy.deepcopy(one.state_dict())
    state["state"][0]["eps_gate"] = bad
    before = copy.deepcopy(two.state_dict())
    with pytest.raises(ValueError, match=r"^GatedAdamW: eps_gate of parameter 0 must be one finite number >= 1e-30; got"):
        two.load_state_dict(state)
    assert str(two.state_dict()) == str(before)


def test_a_state_with_a_function_needs_the_function_again():
    gate = lambda t, group: 1e-7  # noqa: E731
    optimizer = ng.GatedAdamW([parameter(2, 3)], lr=0.1, eps_gate=gate)
    steps(optimizer, 1, 1)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again = ng.GatedAdamW([parameter(2, 3)], lr=0.1, eps_gate=gate)
    again.load_state_dict(state)
    assert again.param_groups[0]["eps_gate"] is gate
    with pytest.raises(ValueError, match=r"a function as its eps_gate, which a state cannot hold.*eps_gate=1e-08"):
        ng.GatedAdamW([parameter(2, 3)], lr=0.1).load_state_dict(state)


def test_diagnostics_see_the_thresholds_in_force():
    p, q = parameter(3, 8), parameter(3, 8, seed=2)
    optimizer = ng.GatedAdamW([p, q], lr=0.01, unit_dim=-1, eps_gate=ng.AutoGate(quantile=0.75, every=1), foreach=True)
    optimizer.diagnostics = Diagnostics()
    steps(optimizer, 1, 30)
    below = optimizer.diagnostics.last[0]["below_gate"]
    assert 0.6 < below < 0.9  # about the quantile: the gate is half open there


@pytest.mark.parametrize("shape", [(3, 8), (8,)], ids=str)
def test_each_tensor_of_a_stack_has_its_own_threshold(shape):
    """Tensors of one shape are stacked by foreach=True; their thresholds are a thousand times apart."""
    unit = -1 if len(shape) == 2 else None

    def trained(**path):
        params = [parameter(*shape, dtype=F64, seed=seed) for seed in (1, 2)]
        optimizer = ng.GatedAdamW(params, lr=0.01, unit_dim=unit, eps_gate=ng.AutoGate(quantile=0.5, every=1), **path)
        for t in range(1, 6):
            for p, size in zip(params, (1.0, 1e-3), strict=True):
                p.grad = size * torch.randn(shape, generator=torch.Generator().manual_seed(t)).to(F64)
            optimizer.step()
        gates = [float(optimizer.state[p]["eps_gate"]) for p in params]
        return torch.stack([p.detach() for p in params]), gates

    one_by_one, gates = trained(fused=False, foreach=False)
    assert 500 < gates[0] / gates[1] < 2000
    torch.testing.assert_close(trained(fused=False, foreach=True)[0], one_by_one, rtol=1e-12, atol=0)


@pytest.mark.parametrize("path", [dict(fused=True), dict(fused=False), dict(foreach=True)], ids=str)
def test_a_number_for_the_threshold_reaches_every_path(path):
    """A constant gradient of 1 has d = 1: with a = 1 the gate of threshold 9 is open by a tenth."""
    p, q = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    optimizer = ng.GatedAdamW([p, q], lr=1.0, a=1.0, eps_gate=9.0, eps_num=0.0, **path)
    p.grad = q.grad = torch.ones(4)
    optimizer.step()
    torch.testing.assert_close(torch.stack([p.detach(), q.detach()]), torch.full((2, 4), -0.1))


def test_a_threshold_is_never_smaller_than_what_the_update_may_divide_by():
    p = torch.nn.Parameter(torch.zeros(4, dtype=F64))
    optimizer = ng.GatedAdamW([p], lr=0.01, eps_gate=ng.AutoGate(quantile=0.5, every=1), fused=False)
    for _ in range(3):
        p.grad = torch.full((4,), 1e-100, dtype=F64)
        optimizer.step()
    assert float(optimizer.state[p]["eps_gate"]) == LEAST_DIVISOR
