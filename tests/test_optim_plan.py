"""Does a plan notice everything that it depends on? GatedAdamW keeps one per group, and each change here must end as it does
for an optimizer that plans every step again."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import ngpt_core as ng
from ngpt_core.optim import Diagnostics, paths

WHOLE = dict(unit_dim=-1, smgc=ng.SMGC(R=4.0, start=2), pmen=ng.PMEN(tau=1e-6), cap=0.02)


def build(dtype=torch.float32, **settings):
    shapes = [(4, 8), (8, 8), (3, 8)]
    params = [torch.randn(s, generator=torch.Generator().manual_seed(i)).to(dtype) for i, s in enumerate(shapes)]
    params = [torch.nn.Parameter(p) for p in params]
    return params, ng.GatedAdamW([(f"p{i}", p) for i, p in enumerate(params)], lr=0.05, **WHOLE | settings)


def give(params, t):
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * t + i)).to(p.dtype)
        p.grad[0] = 0  # PMEN's


def train(change, forget, steps=6, **settings):
    """Parameters and states after some steps with ``change`` before the third. ``forget``: plan every step again."""
    params, optimizer = build(**settings)
    for t in range(steps):
        give(params, t)
        if t >= 2:
            params, optimizer = change(params, optimizer, t) or (params, optimizer)
        if forget:
            optimizer._plans = []
        optimizer.step()
    states = [optimizer.state[p][k] for p in params for k in ("step", "exp_avg", "exp_avg_sq") if p in optimizer.state]
    return [p.detach() for p in params] + states


def once(change):
    return lambda params, optimizer, t: change(params, optimizer) if t == 2 else None


def no_gradient(params, optimizer, t):
    params[1].grad = None if t in (2, 4) else params[1].grad


def strided_gradient(params, optimizer, t):
    if t in (2, 4):
        params[1].grad = params[1].grad.t().contiguous().t()


def other_data(params, optimizer):
    params[0].data = params[0].data.clone()


def transposed_data(params, optimizer):
    params[1].data = params[1].data.t()  # the same memory, and a gradient in the usual order


def to_bfloat16(params, optimizer):
    for p in params:
        p.data, p.grad = p.data.bfloat16(), p.grad.bfloat16()


def new_gradient_data(params, optimizer, t):
    params[1].grad.data = params[1].grad.data.clone() * 2


def loaded(params, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def other_moments(params, optimizer):
    state = optimizer.state[params[0]]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg"] * 2, state["exp_avg_sq"].t().contiguous().t()


def moved(*names):
    def change(params, optimizer):
        for name in names:
            value = optimizer.state[params[0]][name]
            KEPT.append(value.data)  # a pointer to it stays readable
            value.data = value.data.clone() + 1

    return once(change)


KEPT = []


def forgotten_state(params, optimizer):
    del optimizer.state[params[0]]


def other_parameter(params, optimizer):
    new = torch.nn.Parameter(params[0].detach().clone())
    new.grad, optimizer.state[new] = params[0].grad, copy.deepcopy(optimizer.state[params[0]])
    optimizer.param_groups[0]["params"][0] = new
    return [new, *params[1:]], optimizer


def another_group(params, optimizer):
    more = torch.nn.Parameter(torch.randn(5, 8, generator=torch.Generator().manual_seed(9)))
    more.grad = torch.ones_like(more)
    optimizer.add_param_group({"params": [("more", more)]})


def renamed(params, optimizer):
    optimizer.param_groups[0]["param_names"][1] = "other"


def edit(**changes):
    return once(lambda params, optimizer: optimizer.param_groups[0].update(changes))


CHANGES = {
    "nothing": lambda *_: None,
    "a gradient that goes and comes back": no_gradient,
    "a gradient in another order": strided_gradient,
    "another gradient under the same name": new_gradient_data,
    "p.data": once(other_data),
    "p.data transposed": once(transposed_data),
    "another dtype": once(to_bfloat16),
    "a loaded state": once(loaded),
    "other moments": once(other_moments),
    "moments and counter moved in place": moved("exp_avg", "exp_avg_sq", "step"),
    "the first moment moved in place": moved("exp_avg"),
    "the second moment moved in place": moved("exp_avg_sq"),
    "the counter moved in place": moved("step"),
    "a state that is gone": once(forgotten_state),
    "another parameter": once(other_parameter),
    "another group": once(another_group),
    "another name": once(renamed),
    "a copy": once(lambda params, optimizer: copied(params, optimizer, copy.deepcopy)),
    "a pickle": once(lambda params, optimizer: copied(params, optimizer, lambda x: pickle.loads(pickle.dumps(x)))),
    "unit_dim": edit(unit_dim=0),
    "no unit_dim": edit(unit_dim=None),
    "tangent": edit(tangent=False),
    "pmen": edit(pmen=ng.PMEN(tau=1e-6, seed=3)),
    "no pmen": edit(pmen=None),
    "smgc": edit(smgc=None),
    "capturable": edit(capturable=True),
    "foreach": edit(foreach=True),
    "fused": edit(fused=False),
    "maximize": edit(maximize=True),
    "numbers": edit(lr=0.01, betas=(0.9, 0.95), a=1.0, eps_gate=1e-6, weight_decay=0.1, cap=None),
}


def copied(params, optimizer, how):
    grads = [p.grad for p in params]
    optimizer = how(optimizer)
    params = optimizer.param_groups[0]["params"]
    for p, g in zip(params, grads):
        p.grad = g.clone()
    return params, optimizer


@pytest.mark.parametrize("settings", [{}, dict(nonfinite="skip"), dict(fused=False), dict(capturable=True)], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_steps_is_noticed(change, settings):
    kept, made_again = (train(CHANGES[change], forget, **settings) for forget in (False, True))
    assert len(kept) == len(made_again) and all(map(torch.equal, kept, made_again))


def test_every_step_reads_the_gradient_that_is_there():
    """Two tensors in turn, both alive: nobody looks at them before the kernel does."""
    ends = []
    for replaced in (True, False):
        params, optimizer = build(nonfinite="off")
        noise = torch.Generator().manual_seed(1)
        grads = [(torch.randn(p.shape, generator=noise), torch.randn(p.shape, generator=noise)) for p in params]
        one = [torch.empty_like(p) for p in params]
        for t in range(4):
            for p, g, buffer in zip(params, grads, one):
                p.grad = g[t % 2] if replaced else buffer.copy_(g[t % 2])
            optimizer.step()
        ends.append([p.detach() for p in params])
    assert all(map(torch.equal, *ends))


SAME = {"nothing", "a loaded state", "a copy", "a pickle", "p.data", "another parameter", "another group"}
SAME |= {"capturable", "foreach", "fused", "a gradient in another order"}  # to rounding


@pytest.mark.parametrize("change", sorted(CHANGES.keys() - SAME))
def test_these_changes_do_change_something(change):
    assert not all(map(torch.equal, train(CHANGES[change], False), train(CHANGES["nothing"], False)))


def test_a_plan_is_kept_as_long_as_nothing_changes(monkeypatch):
    made = []
    monkeypatch.setattr(paths.Plan, "__init__", lambda self, *a, real=paths.Plan.__init__: (made.append(1), real(self, *a))[1])
    params, optimizer = build()
    for t in range(5):
        give(params, t)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + t)
        optimizer.step()
        optimizer.zero_grad()
    assert len(made) == 1


@pytest.mark.parametrize("bad", [False, True])
def test_a_plan_keeps_no_tensor_between_steps(bad):
    params, optimizer = build()
    for t in range(2):
        give(params, t)
        optimizer.step()
    give(params, 2)
    if bad:
        params[0].grad[0, 0] = torch.nan
        with pytest.raises(ValueError, match="'p0'"):
            optimizer.step()
    else:
        optimizer.step()
    state = optimizer.state[params[0]]
    held = [weakref.ref(x) for x in (params[0].grad, state["exp_avg"], state["exp_avg_sq"])]
    params[0].grad = None
    state |= {name: torch.zeros(4, 8) for name in ("exp_avg", "exp_avg_sq")}
    gc.collect()
    assert [x() for x in held] == [None, None, None]


def test_steps_with_diagnostics_are_recorded_between_fast_ones():
    params, optimizer = build()
    optimizer.diagnostics = Diagnostics(every=2)
    for t in range(5):
        give(params, t)
        optimizer.step()
    assert [record["step"] for record in optimizer.diagnostics.records] == [1, 3, 5]


def test_a_gradient_that_becomes_sparse_is_refused():
    params, optimizer = build(unit_dim=None)
    give(params, 0)
    optimizer.step()
    params[1].grad = params[1].grad.to_sparse()
    with pytest.raises(ValueError, match="'p1' is sparse"):
        optimizer.step()


def test_a_bad_gradient_is_named_whether_the_kernel_knows_it_or_not():
    for steps in (0, 1, 2):
        params, optimizer = build()
        for t in range(steps):
            give(params, t)
            optimizer.step()
        give(params, 9)
        params[2].grad[1, 3] = torch.inf
        before = [p.detach().clone() for p in params]
        with pytest.raises(ValueError, match=rf"'p2'.*step {steps + 1}\b"):
            optimizer.step()
        assert all(torch.equal(p, b) for p, b in zip(params, before))
