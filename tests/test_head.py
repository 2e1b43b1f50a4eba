"""Logit Gradient Preconditioning, the chunked cross-entropy that carries it, and the output head (section 2.1)."""

import gc
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import lgp_cross_entropy, lgp_scale, positive
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ngpt_core import sphere
from ngpt_core.config import ModelConfig
from ngpt_core.nn import head
from ngpt_core.nn import loss as loss_module
from ngpt_core.nn.head import Head, PositiveScale, backward_scale, linear_cross_entropy, logit_scale, row_norms
from ngpt_core.nn.scale import Scale
from ngpt_core.rehearsal import rehearse
from ngpt_core.tools.simulate.machine import Machine
from ngpt_core.tools.simulate.storage import Memory
from ngpt_core.tools.simulate.values import Values

LGP = [(q, form) for q in (0, 1.0, 2, 0.5, 1.7, None) for form in ("ratio", "power")]


def problem(N=23, V=31, d=7, dtype=torch.float64, seed=0):
    """h, W, s_z that want gradients, and targets, some of them ignored."""
    g = torch.Generator().manual_seed(seed)
    h = sphere.random(N, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    W = sphere.random(V, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    s_z = (0.5 + 4 * torch.rand(V, generator=g, dtype=torch.float64)).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=g)
    targets[::5] = -100
    return h, W, s_z, targets


def grads(loss, *inputs):
    return torch.autograd.grad(loss, inputs)


def naive(h, W, targets, s_z=None, q=1.0, form="ratio", **kw):
    u = F.linear(h, W)
    return F.cross_entropy(u if s_z is None else logit_scale(u, s_z, q, form), targets, **kw)


def close(a, b, tol=1e-12):
    for x, y in zip(a, b):
        torch.testing.assert_close(torch.as_tensor(x), torch.as_tensor(y), rtol=tol, atol=tol)


# ---- LGP ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("q, form", LGP)
def test_lgp_changes_the_gradient_of_u_only(q, form):
    u, s_z = torch.randn(3, 5, 9, dtype=torch.float64), torch.rand(9, dtype=torch.float64) + 0.2
    u.requires_grad_(), s_z.requires_grad_()
    dz = torch.randn(3, 5, 9, dtype=torch.float64)
    z, plain = logit_scale(u, s_z, q, form), s_z * u
    assert torch.equal(z, plain)  # the forward pass is the product, bit for bit
    du, ds = torch.autograd.grad(z, (u, s_z), dz)
    _, ds_plain = torch.autograd.grad(plain, (u, s_z), dz)
    close([du], [dz * torch.tensor(lgp_scale(s_z.detach(), q, form), dtype=torch.float64)])
    close([ds], [ds_plain], 1e-14)


def test_lgp_is_the_exact_gradient_when_it_replaces_nothing_and_not_otherwise():
    u = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    s_z = torch.rand(6, dtype=torch.float64) + 0.5
    unit_mean = (s_z / s_z.mean()).requires_grad_()
    assert torch.autograd.gradcheck(lambda u: logit_scale(u, unit_mean.detach()), (u,))
    assert torch.autograd.gradcheck(lambda s: logit_scale(u.detach(), s), (unit_mean,))
    assert torch.autograd.gradcheck(lambda u, s: logit_scale(u, s, q=None), (u, unit_mean))
    assert not torch.autograd.gradcheck(lambda u: logit_scale(u, 3 * unit_mean.detach()), (u,), raise_exception=False)
    # the gradient of s_z is exact at any scale and q
    s_z.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: logit_scale(u.detach(), s, 0.5, "power"), (s_z,))


def test_the_chunked_loss_passes_gradcheck():
    h, weight, s_z = (x.double().requires_grad_() for x in (torch.randn(7, 4), torch.randn(5, 4), torch.rand(5) + 0.5))
    targets = torch.tensor([0, 4, -100, 2, 2, 1, 3])

    def passes(q, strict):
        def loss(h, weight, s_z):
            return linear_cross_entropy(h, weight, targets, s_z, q, chunk=3)

        return torch.autograd.gradcheck(loss, (h, weight, s_z), raise_exception=strict)

    assert passes(None, True) and not passes(1, False)  # without LGP


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=20), st.floats(0, 4), st.floats(0.1, 50))
@settings(max_examples=60, deadline=None)
def test_the_backward_scale_does_not_see_the_size_of_s_z(s, q, c):
    s_z = torch.tensor(s, dtype=torch.float64)
    for form in ("ratio", "power"):
        close([backward_scale(c * s_z, q, form)], [backward_scale(s_z, q, form)], 1e-9)
    assert abs(backward_scale(s_z, q, "power").mean().item() - 1) < 1e-9
    for q in (0, 1):  # the two forms agree at both ends
        close([backward_scale(s_z, q, "ratio")], [backward_scale(s_z, q, "power")])


@pytest.mark.parametrize("q", [np.float32(1), np.int64(2), np.float64(0.5), Fraction(1, 2), torch.tensor(2.0)], ids=repr)
def test_q_may_be_any_kind_of_number(q):
    h, W, s_z, targets = problem()
    for form in ("ratio", "power"):
        want = grads(linear_cross_entropy(h, W, targets, s_z, q=float(q), form=form), h, W, s_z)
        got = grads(linear_cross_entropy(h, W, targets, s_z, q=q, form=form), h, W, s_z)
        naively = grads(naive(h, W, targets, s_z, q=q, form=form), h, W, s_z)
        assert all(map(torch.equal, got, want))
        close(naively, want)


def test_a_fractional_power_needs_positive_scales_and_an_integer_power_does_not():
    u, s_z = torch.ones(2, 3), torch.tensor([1.0, -0.5, 2.0])
    for bad in (s_z, torch.tensor([1.0, 0.0, 2.0]), torch.tensor([1.0, float("nan"), 2.0])):
        with pytest.raises(ValueError, match="every entry of s_z must be > 0"):
            logit_scale(u, bad, q=0.5)
        with pytest.raises(ValueError, match="PositiveScale"):
            linear_cross_entropy(u, torch.ones(3, 3), torch.zeros(2, dtype=torch.long), bad, q=1.5)
    for q in (0, 1, 2, 3.0):
        assert torch.equal(logit_scale(u, s_z, q), u * s_z)
    close([backward_scale(s_z, 2.0)], [(s_z / s_z.mean()) ** 2])


# ---- the loss ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("q, form", LGP)
@pytest.mark.parametrize("chunk", [1, np.int64(6), 23, None])
def test_the_chunked_loss_equals_the_twin(q, form, chunk):
    h, W, s_z, targets = problem()
    loss = linear_cross_entropy(h, W, targets, s_z, q, form=form, chunk=chunk)
    twin = lgp_cross_entropy(*(x.detach().numpy() for x in (h, W, targets, s_z)), q, form)
    assert loss.dtype == torch.float64
    close((loss, *grads(loss, h, W, s_z)), [np.asarray(x) for x in twin])


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(1, 45), st.sampled_from(LGP), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_chunked_loss_equals_torchs_cross_entropy_of_the_logits(N, V, d, chunk, lgp, scaled):
    h, W, s_z, targets = problem(N, V, d, seed=N * V + d)
    targets[-1] = V - 1  # at least one target counts: torch's mean over none is NaN
    s = s_z if scaled else None
    inputs = (h, W, s_z) if scaled else (h, W)
    ours = linear_cross_entropy(h, W, targets, s, lgp[0], form=lgp[1], chunk=chunk)
    theirs = naive(h, W, targets, s, *lgp)
    close((ours, *grads(ours, *inputs)), (theirs, *grads(theirs, *inputs)))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no F.linear_cross_entropy")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("q, scaled", [(1, True), (None, True), (1, False)])
def test_torchs_own_linear_cross_entropy_gives_the_same(q, scaled, dtype):
    h, W, s_z, targets = problem(dtype=dtype)
    s, inputs = (s_z, (h, W, s_z)) if scaled else (None, (h, W))
    a, b = (linear_cross_entropy(h, W, targets, s, q, chunk=6, backend=x) for x in ("chunked", "torch"))
    close((a, *grads(a, *inputs)), (b, *grads(b, *inputs)), 1e-12 if dtype == torch.float64 else 1e-5)


def test_leading_dimensions_and_integer_types_do_not_matter():
    h, W, s_z, targets = problem(N=24)
    flat = linear_cross_entropy(h, W, targets, s_z)
    assert torch.equal(linear_cross_entropy(h.view(2, 3, 4, -1), W, targets.view(2, 3, 4), s_z), flat)
    assert torch.equal(linear_cross_entropy(h, W, targets.int(), s_z), flat)
    one = linear_cross_entropy(h[1], W, targets[1], s_z)  # one token, no batch dimension
    close([one], [naive(h[1:2], W, targets[1:2], s_z)])


def test_any_index_can_be_the_ignored_one():
    h, W, s_z, targets = problem()
    targets = targets.clamp_min(0)
    ours, theirs = (f(h, W, targets, s_z, ignore_index=0) for f in (linear_cross_entropy, naive))
    close((ours, *grads(ours, h, W, s_z)), (theirs, *grads(theirs, h, W, s_z)))


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


def test_tokens_times_vocabulary_never_exists():
    N, V, d, chunk = 512, 300, 16, 64
    h, W, s_z, targets = problem(N, V, d, torch.float32)
    with Largest() as naively:
        naive(h, W, targets, s_z).backward()
    assert naively.numel >= N * V  # the probe works
    with Largest() as inside:  # a mode does not see inside an operation: look at its body, then around it
        x, w, s = (y.detach() for y in (h, W, s_z))
        loss_module._cross_entropy_sum(x, w, targets, s, s, -100, chunk, True, True, True)
    with Largest() as around:
        linear_cross_entropy(h, W, targets, s_z, chunk=chunk).backward()
    assert inside.numel == chunk * V
    assert around.numel <= max(N * d, V * d)


def test_the_loss_of_the_largest_model_on_a_gpu_takes_less_than_one_and_a_half_gib():
    """V = 131072, T = 8192, d = 2688, counted by the simulator: above the inputs and their gradients in bfloat16. Between the
    three products of a chunk there is one kernel, and all chunks have the same length."""
    N, V, d = 8192, 131072, 2688
    now = SimpleNamespace(kind=lambda: "loss", place=lambda: ("", "", ""), seconds=lambda: 0.0)
    machine, memory, launched = Machine("cuda", Values("balanced")), Memory(512, now), Counter()
    with rehearse("cuda"), machine.running():
        h, W = (torch.empty(n, d, dtype=torch.bfloat16).requires_grad_() for n in (N, V))
        s_z, targets = torch.empty(V).requires_grad_(), torch.empty(N, dtype=torch.long)
        machine.observers[:] = [memory, lambda call: launched.update([str(call.func)])]
        linear_cross_entropy(h, W, targets, s_z, denominator=5.0).backward()
        machine.observers.clear()
    gradients = sum(x.numel() * x.itemsize for x in (h, W, s_z))
    assert gradients <= memory.peak.bytes < gradients + 1.5 * 2**30
    assert memory.total == pytest.approx(gradients, abs=2**20) and not machine.waits
    assert launched["aten.addmm.dtype_out"] == 16 and launched["aten.mm.out"] == launched["ngpt_core.loss_rows.default"] == 8
    assert launched["ngpt_core.loss_dots.default"] == 1


def test_chunks_have_equal_lengths_and_leave_no_tail():
    for N, most in [(8192, 1344), (8192, 2688), (1, 5), (7, 3), (1000, 999), (0, 4), (2**15, 300)]:
        parts = loss_module.chunks(N, most)
        lengths = [part.stop - part.start for part in parts]
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(N))
        assert max(lengths, default=0) <= most and max(lengths, default=0) - min(lengths, default=0) <= 1
    assert [part.stop - part.start for part in loss_module.chunks(8192, 1344)] == [1024] * 8


def test_gradients_that_are_not_needed_are_not_computed():
    h, W, s_z, targets = problem()
    with torch.no_grad(), Largest() as probe:
        loss = linear_cross_entropy(h, W, targets, s_z)
    assert probe.numel <= max(h.numel(), targets.numel()) and not loss.requires_grad
    close([loss], [linear_cross_entropy(h, W, targets, s_z).detach()])
    for wanted in range(3):  # each input alone
        x = problem()
        for i in range(3):
            x[i].requires_grad_(i == wanted)
        one = linear_cross_entropy(x[0], x[1], x[3], x[2])
        close(grads(one, x[wanted]), grads(naive(h, W, targets, s_z), (h, W, s_z)[wanted]))


def test_bfloat16_makes_logits_loss_and_weight_gradient_in_float32():
    h, W, s_z, targets = (x.detach() for x in problem(400, 500, 64))
    s_z = 20 * s_z
    h, W = (x.bfloat16().requires_grad_() for x in (h, W))
    s_z = s_z.float().requires_grad_()
    wide = [x.detach().double().requires_grad_() for x in (h, W, s_z)]
    exact = naive(wide[0], wide[1], targets, wide[2])
    exact_grads = grads(exact, *wide)

    def error(x, y):
        return ((x.double() - y).norm() / y.norm()).item()

    loss = linear_cross_entropy(h, W, targets, s_z, chunk=64)
    dh, dW, ds = grads(loss, h, W, s_z)
    assert (loss.dtype, dh.dtype, dW.dtype, ds.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16, torch.float32)
    assert error(loss, exact) < 1e-6
    assert error(ds, exact_grads[2]) < 1e-4
    for got, want in zip((dh, dW), exact_grads):  # one rounding to 8 bits at the end: relative error about 2^-9 / sqrt(3)
        assert error(got, want) < 2.5e-3
    # logits rounded to bfloat16 would be off by more than that
    rounded = naive(h, W, targets, s_z)
    assert error(rounded, exact) > 1e-5


def test_the_path_that_multiplies_halves_agrees_with_the_path_that_widens_them(monkeypatch):
    """CUDA's path, with its one operation that a CPU lacks (halves in, float32 out) emulated."""

    def addmm_(out, a, b, beta):
        assert out.dtype == torch.float32 and a.dtype == b.dtype == torch.bfloat16
        out.mul_(beta).nan_to_num_(0.0).add_(a.float() @ b.float())

    h, W, s_z, targets = (x.detach() for x in problem(100, 60, 16))
    h, W, s_z = h.bfloat16().requires_grad_(), W.bfloat16().requires_grad_(), (5 * s_z).float().requires_grad_()

    def run():
        loss = linear_cross_entropy(h, W, targets, s_z, chunk=32)
        return loss, *grads(loss, h, W, s_z)

    widened = run()
    monkeypatch.setattr(loss_module, "_multiplies_halves", lambda x: True)
    monkeypatch.setattr(loss_module, "_addmm_", addmm_)
    halves = run()
    close([halves[0]], [widened[0]], 1e-6)  # the logits are float32 in both
    for a, b in zip(halves[1:], widened[1:]):  # dz is rounded to 8 bits before its products
        assert a.dtype == b.dtype
        assert (a.float() - b.float()).norm() < 4e-3 * b.float().norm()


def test_a_torch_that_cannot_accumulate_halves_in_float32_widens_them_with_one_warning(monkeypatch):
    """Some builds want all three matrices of a product in one precision; torch on a CPU is one."""
    h, W, s_z, targets = (x.detach() for x in problem(100, 60, 16))
    h, W, s_z = h.bfloat16(), W.bfloat16(), s_z.float()
    wanted = linear_cross_entropy(h, W, targets, s_z)
    monkeypatch.setattr(loss_module, "on_gpu", lambda x: True)
    loss_module._accumulates.cache_clear()
    with pytest.warns(UserWarning, match="does not add products of torch.bfloat16 to float32") as seen:
        for _ in range(3):
            close([linear_cross_entropy(h, W, targets, s_z)], [wanted], 1e-6)
    assert len(seen) == 1
    loss_module._accumulates.cache_clear()
    monkeypatch.setattr(loss_module, "_addmm_", lambda out, a, b, beta: out.mul_(beta).add_(a.float() @ b.float()))
    assert loss_module._accumulates(torch.bfloat16, torch.device("cpu"))
    loss_module._accumulates.cache_clear()


def test_autocast_is_as_for_linear():
    h, W, s_z, targets = problem(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(h, W, targets, s_z)
    direct = linear_cross_entropy(h.bfloat16(), W.bfloat16(), targets, s_z)
    assert loss.dtype == torch.float32 and torch.equal(loss, direct)
    assert grads(loss, W)[0].dtype == torch.float32
    double = problem()
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_cross_entropy(double[0], double[1], double[3], double[2]).dtype == torch.float64


def test_large_logits_do_not_overflow():
    h, W, s_z, targets = problem(dtype=torch.float32)
    big = (1e4 * s_z).detach().requires_grad_()
    ours, theirs = linear_cross_entropy(h, W, targets, big), naive(h, W, targets, big)
    assert torch.isfinite(ours)
    close((ours, *grads(ours, h, W, big)), (theirs, *grads(theirs, h, W, big)), 1e-4)


@pytest.mark.parametrize("reduction, denominator", [("mean", None), ("sum", None), ("mean", 7), ("sum", torch.tensor(7.0))])
@pytest.mark.parametrize("N", [0, 5])
def test_without_a_target_that_counts_loss_and_gradients_are_zero(N, reduction, denominator):
    h, W, s_z, _ = problem(N)
    targets = torch.full((N,), -100)
    loss = linear_cross_entropy(h, W, targets, s_z, reduction=reduction, denominator=denominator)
    assert loss.item() == 0
    for x, g in zip((h, W, s_z), grads(loss, h, W, s_z)):
        assert g.shape == x.shape and not g.any()


def test_micro_batches_with_one_denominator_add_up_to_the_batch():
    h, W, s_z, targets = problem(30)
    whole = linear_cross_entropy(h, W, targets, s_z)
    expected = grads(whole, h, W, s_z)
    count = int((targets != -100).sum())
    for x, y in zip(h.split(11), targets.split(11)):  # 11, 11, 8 tokens: of unequal size
        linear_cross_entropy(x, W, y, s_z, denominator=count).backward()
    close((h.grad, W.grad, s_z.grad), expected)
    close([linear_cross_entropy(h, W, targets, s_z, reduction="sum") / count], [whole])


def test_a_scaled_loss_scales_every_gradient():
    h, W, s_z, targets = problem(dtype=torch.float32)
    plain = grads(linear_cross_entropy(h, W, targets, s_z), h, W, s_z)
    scaled = grads(65536.0 * linear_cross_entropy(h, W, targets, s_z), h, W, s_z)
    close([g / 65536 for g in scaled], plain, 1e-7)


def test_a_kept_graph_gives_the_same_gradients_again_and_a_second_derivative_is_refused():
    h, W, s_z, targets = problem()
    loss = linear_cross_entropy(h, W, targets, s_z)
    first = torch.autograd.grad(loss, (h, W, s_z), retain_graph=True)
    again = torch.autograd.grad(2 * loss, (h, W, s_z), retain_graph=True)
    last = torch.autograd.grad(loss, (h, W, s_z))
    for a, b, c in zip(first, again, last):
        assert torch.equal(a, c) and torch.equal(2 * a, b)
        assert not c.requires_grad  # a gradient that held its graph would hold the memory
    dh = torch.autograd.grad(linear_cross_entropy(h, W, targets, s_z), h, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no second derivative"):
        dh.sum().backward()


def test_the_graph_is_freed_without_the_garbage_collector():
    h, W, s_z, targets = problem()
    loss = linear_cross_entropy(h, W, targets, s_z, reduction="sum")
    kept = [StorageWeakRef(x.untyped_storage()) for x in loss.grad_fn.saved_tensors]
    assert len(kept) == 3 and not any(ref.expired() for ref in kept)
    gc.disable()
    try:
        del loss
        assert all(ref.expired() for ref in kept)
    finally:
        gc.enable()


@pytest.mark.parametrize("q", [1.0, 2])
def test_the_compiler_takes_model_and_loss_as_one_graph(q):
    h, W, s_z, targets = problem()

    def step(h, W, s_z):
        return linear_cross_entropy(torch.tanh(3 * h), W, targets, s_z, q, chunk=6)

    def logits(h, W, s_z):
        return F.cross_entropy(logit_scale(F.linear(torch.tanh(3 * h), W), s_z, q), targets)

    expected = (step(h, W, s_z), *grads(step(h, W, s_z), h, W, s_z))
    for fn in (step, logits):
        compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
        loss = compiled(h, W, s_z)
        close((loss, *grads(loss, h, W, s_z)), expected)
        with torch.no_grad():
            close([compiled(h, W, s_z)], [expected[0].detach()])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_around_it_changes_nothing(reentrant):
    h, W, s_z, targets = problem()
    plain = linear_cross_entropy(h, W, targets, s_z)
    kept = checkpoint(linear_cross_entropy, h, W, targets, s_z, use_reentrant=reentrant)
    kept.backward()
    close((kept, h.grad, W.grad, s_z.grad), (plain, *grads(plain, h, W, s_z)))


def test_a_sharded_head_trains_as_a_whole_one(tmp_path):
    """FSDP2 hands the forward pass plain tensors; forward and loss both run through the module's hooks."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    head, twin = Head(config()), Head(config())
    twin.load_state_dict(head.state_dict())
    h, targets = sphere.random(6, 8), torch.randint(0, 11, (6,))
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        fully_shard(head, mesh=init_device_mesh("cpu", (1,)))
        register_fsdp_forward_method(head, "loss")
        head.loss(h, targets).backward()
        got = [p.grad.full_tensor() for p in head.parameters()]
    finally:
        destroy_process_group()
    twin.loss(h, targets).backward()
    close(got, [p.grad for p in twin.parameters()], 1e-7)


# ---- LGP for an ordinary Transformer -----------------------------------------------------------------------------------
@pytest.mark.parametrize("q, form", [(q, form) for q, form in LGP if q is not None])
def test_row_norms_give_lgp_to_a_model_without_s_z(q, form):
    h, W, _, targets = problem()
    W = (torch.rand(31, 1, dtype=torch.float64) * 3 + 0.2) * W.detach()
    W.requires_grad_()
    W_bar, s = row_norms(W)
    close([torch.linalg.vector_norm(W_bar, dim=-1), s.unsqueeze(1) * W_bar], [torch.ones(31, dtype=torch.float64), W])
    ordinary = naive(h, W, targets)
    lgp = linear_cross_entropy(h, W_bar, targets, s, q, form=form)
    close([lgp], [ordinary])  # the forward pass is unchanged
    dh, dW = grads(lgp, h, W)
    # the closed form of the docstring, from G = dL/dz^T h, which is the ordinary gradient of W
    (G,) = grads(ordinary, W)
    b = torch.tensor(lgp_scale(s.detach(), q, form), dtype=torch.float64)
    s, W_bar = s.detach(), W_bar.detach()
    radial = (W_bar * G).sum(-1, keepdim=True) * W_bar
    close([dW], [(b / s).unsqueeze(1) * (G - radial) + radial], 1e-11)
    u = F.linear(h, W_bar)
    logits = logit_scale(u, s, q, form)
    close([dh], grads(F.cross_entropy(logits, targets), h))


def test_row_norms_without_lgp_are_the_ordinary_gradient_and_a_zero_row_is_harmless():
    h, W, _, targets = problem()
    W = (3 * W).detach().requires_grad_()
    W_bar, s = row_norms(W)
    plain, split = naive(h, W, targets), linear_cross_entropy(h, W_bar, targets, s, q=None)
    close((split, *grads(split, h, W)), (plain, *grads(plain, h, W)))
    with torch.no_grad():
        W[4] = 0
    W_bar, s = row_norms(W)
    loss = linear_cross_entropy(h, W_bar, targets, s)
    assert all(torch.isfinite(g).all() for g in grads(loss, h, W))


# ---- the module --------------------------------------------------------------------------------------------------------
def config(**kw):
    return ModelConfig(**({"vocab_size": 11, "d_model": 8, "pattern": "*", "n_heads": 2} | kw))


def test_the_head_of_ngpt_has_unit_rows_and_a_scale_of_one_and_gpts_has_neither():
    head = Head(config())
    assert head.unit_dims == {"weight": -1} and head.weight.shape == (11, 8)
    close([torch.linalg.vector_norm(head.weight.detach(), dim=-1)], [torch.ones(11)], 1e-6)
    assert type(head.s_z) is Scale and torch.equal(head.s_z(), torch.ones(11))  # item 7
    assert (head.q, head.form) == (1.0, "ratio")  # item 8
    gpt = Head(config(normalized=False))
    assert gpt.unit_dims == {} and gpt.s_z is None and len(list(gpt.parameters())) == 1


POWER = {"lgp_q": 1.5, "lgp_form": "power", "s_z_init": 3.0}


@pytest.mark.parametrize("kw", [{}, {"normalized": False}, {"lgp_q": 0.5}, POWER])
def test_the_heads_loss_is_the_cross_entropy_of_its_logits(kw):
    head = Head(config(**kw)).double()
    h, targets = sphere.random(2, 5, 8, dtype=torch.float64).requires_grad_(), torch.randint(0, 11, (2, 5))
    targets[0, 0] = -100
    a = head.loss(h, targets, chunk=4)
    b = F.cross_entropy(head(h).flatten(0, 1), targets.flatten())
    inputs = (h, *head.parameters())
    close((a, *grads(a, *inputs)), (b, *grads(b, *inputs)))
    close([head.loss(h, targets, denominator=9.0) * 9], [head.loss(h, targets, denominator=1)])
    half = head.bfloat16()
    assert half(h.bfloat16()).dtype == torch.float32 and half.loss(h.bfloat16(), targets).dtype == torch.float32


def test_a_positive_scale_starts_as_a_plain_one_and_never_reaches_zero():
    plain, positive = Scale(4, 2.0, 0.5), PositiveScale(4, 2.0, 0.5)
    for scale in (plain, positive):
        assert torch.equal(scale(), torch.full((4,), 2.0))
    close(grads(positive().sum(), positive.weight), grads(plain().sum(), plain.weight), 1e-7)
    with torch.no_grad():
        for scale in (plain, positive):
            scale.weight.copy_(torch.tensor([1.5, 0.6, -1.0, -5.0]))
    assert (positive() > 0).all() and torch.equal(positive()[:2], plain()[:2]) and (positive()[:-1] > positive()[1:]).all()
    x = torch.tensor([0.3, 0.5000001, 0.4999999], dtype=torch.float64, requires_grad=True)
    slope = grads(torch.func.functional_call(positive, {"weight": x}, ()).sum(), x)[0]
    close([slope[1:]], [torch.full((2,), 4.0, dtype=torch.float64)], 1e-5)  # no kink where the two branches meet
    assert type(Head(config(lgp_q=0.5)).s_z) is PositiveScale and torch.equal(Head(config(lgp_q=0.5)).s_z(), torch.ones(11))


@pytest.mark.parametrize("form", ["ratio", "power"])
@pytest.mark.parametrize("path", ["chunked", "logits"])
def test_a_head_with_a_positive_scale_is_the_twin(form, path):
    h, W, _, targets = problem(V=11, d=8)
    head = Head(config(lgp_q=0.5, lgp_form=form)).double()
    stored = torch.linspace(-2.0, 3.0, 11, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(W), head.s_z.weight.copy_(stored)
    loss = head.loss(h, targets) if path == "chunked" else F.cross_entropy(head(h), targets)
    s_z = positive(stored, head.s_z.init, head.s_z.scale)
    close([head.s_z()], [torch.tensor(s_z, dtype=torch.float64)])
    want, dh, dW, ds = lgp_cross_entropy(*(x.detach().numpy() for x in (h, W, targets)), s_z, 0.5, form)
    slope = [head.s_z.init / head.s_z.scale if x > head.s_z.scale else s / head.s_z.scale for x, s in zip(stored.tolist(), s_z)]
    close((loss, *grads(loss, h, head.weight, head.s_z.weight)), (np.asarray(want), dh, dW, ds * np.array(slope)))


# ---- bad input ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["chunked", "torch"] if hasattr(F, "linear_cross_entropy") else ["chunked"])
@pytest.mark.parametrize("bad", [-1, 31, 1000])
def test_a_target_outside_the_vocabulary_is_named(bad, backend):
    h, W, s_z, targets = problem()
    targets[7] = bad
    with pytest.raises(ValueError, match=rf"\[0, 31\).*got {bad} at token 7"):
        linear_cross_entropy(h, W, targets, s_z, backend=backend)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"h": torch.ones(5, 4)}, r"The shapes must be"),
        ({"targets": torch.zeros(4, dtype=torch.long)}, r"targets \[4\]"),
        ({"targets": torch.zeros(5)}, "integer token ids"),
        ({"s_z": torch.ones(1)}, r"s_z \[1\]"),
        ({"h": torch.ones(5, 3, dtype=torch.float64)}, "same floating-point dtype"),
        ({"q": -1}, "q must be"),
        ({"q": float("inf")}, "q must be"),
        ({"form": "both"}, "'ratio'"),
        ({"q": "1"}, "q must be"),
        ({"q": True}, "q must be"),
        ({"chunk": 0}, "chunk must be a number of tokens"),
        ({"reduction": "none"}, "'mean' or 'sum'"),
        ({"backend": "cuda"}, "'chunked' or 'torch'"),
        ({"backend": "torch", "q": 2}, "q = 1 or None"),
        ({"denominator": 0}, "denominator must be one number > 0.*got 0"),
        ({"denominator": torch.ones(3)}, "denominator must be one number > 0"),
        ({"denominator": "a"}, "denominator must be one number > 0.*got 'a'"),
        ({"h": 1.0}, "h must be a tensor; got float"),
        ({"targets": [0] * 5}, "targets must be a tensor"),
        ({"s_z": 2.0}, "s_z must be a tensor; got float"),
    ],
)
def test_a_wrong_argument_is_a_value_error_that_says_what_to_do(change, message):
    good = dict(h=torch.ones(5, 3), weight=torch.ones(7, 3), targets=torch.zeros(5, dtype=torch.long), s_z=torch.ones(7))
    linear_cross_entropy(**good)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**(good | change))


@pytest.mark.parametrize("call", [lambda: logit_scale(1.0, 2.0), lambda: head.lgp_cross_entropy(None, None, None)])
def test_what_is_not_a_tensor_is_refused_by_name(call):
    with pytest.raises(ValueError, match=r"(u|h) must be a tensor; got"):
        call()


def test_the_backward_scale_refuses_what_logit_scale_refuses():
    s_z = torch.tensor([-1.0, 2.0, 3.0])
    backward_scale(s_z, 2)
    for change, message in (({"form": "rati"}, "'ratio'"), ({"q": "a"}, "q must be"), ({"q": 0.5}, "every entry of s_z")):
        with pytest.raises(ValueError, match=message):
            backward_scale(s_z, **{"q": 1.0, **change})


def test_a_scale_of_another_length_or_a_negative_start_is_refused():
    with pytest.raises(ValueError, match=r"s_z \[3\], u \[2, 4\]"):
        logit_scale(torch.ones(2, 4), torch.ones(3))
    with pytest.raises(ValueError, match=r"s_z \[1\], u \[\]"):
        logit_scale(torch.tensor(1.0), torch.ones(1))
    with pytest.raises(ValueError, match="s_z_init must be > 0"):
        Head(config(lgp_q=0.5, s_z_init=-1.0))
