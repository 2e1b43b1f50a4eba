"""Does the GPU's loss compute the same loss and gradients? Its algebra, in Triton's interpreter, against the plain form.

Not collected by name: ``test_triton.py`` runs this file in a process of its own (see triton_interpreted.py). By hand:

    TRITON_INTERPRET=1 python -m pytest tests/triton_interpreted_nn.py
"""

import pytest
import torch
import torch.nn.functional as F
from test_head import naive

from ngpt_core.nn import loss as module
from ngpt_core.nn import loss_triton as kernels
from ngpt_core.nn.head import linear_cross_entropy
from ngpt_core.rehearsal import rehearse

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def problem(N, V, d, ignored=0.2, seed=0):
    g = torch.Generator().manual_seed(seed)
    h, W = (F.normalize(torch.randn(n, d, generator=g), dim=-1).requires_grad_() for n in (N, V))
    s = (10 + 5 * torch.randn(V, generator=g)).requires_grad_()
    targets = torch.where(torch.rand(N, generator=g) < ignored, -100, torch.randint(0, V, (N,), generator=g))
    return h, W, s, targets


def assert_close(found, wanted, tolerance=5e-6):
    for x, y in zip(found, wanted, strict=True):
        assert (x.double() - y.double()).abs().max() <= tolerance * y.double().abs().max().clamp_min(1e-30)


@pytest.fixture
def kernel(monkeypatch):
    """The CUDA branch on tensors of the CPU. Their targets are checked as on a CPU otherwise, so not here."""
    calls = []
    for name in ("rows", "dots"):
        run = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, run=run, name=name: (calls.append(name), run(*a)))
    with rehearse("cuda"):
        yield calls


@pytest.mark.parametrize(("N", "V", "d", "chunk"), [(7, 5, 3, None), (23, 60, 20, 8), (3, 6, 1030, 2)])
@pytest.mark.parametrize("q", [None, 1.0, 2.0])
def test_loss_and_gradients_are_those_of_the_whole_logits(kernel, N, V, d, chunk, q):
    h, W, s, targets = problem(N, V, d)
    targets[0] = V - 1
    loss = linear_cross_entropy(h, W, targets, s, q=q, chunk=chunk)
    found = [loss.detach(), *torch.autograd.grad(loss, (h, W, s))]
    h, W, s = (x.detach().double().requires_grad_() for x in (h, W, s))
    wanted = naive(h, W, targets, s, q=q)
    assert_close(found, [wanted.detach(), *torch.autograd.grad(wanted, (h, W, s))])
    assert kernel.count("rows") == len(module.chunks(N, chunk or 256)) and kernel.count("dots") == 1


def test_a_vocabulary_of_several_blocks(kernel):
    h, W, s, targets = problem(2, 8200, 6, ignored=0)
    targets[0] = 8199
    found, wanted = (torch.autograd.grad(f(h, W, targets, s.detach()), (h, W)) for f in (linear_cross_entropy, naive))
    assert_close(found, wanted, 1e-5)


def test_without_scales_it_is_the_ordinary_cross_entropy(kernel):
    h, W, _, targets = problem(20, 70, 6)
    found = linear_cross_entropy(h, W, targets, chunk=7)
    wanted = F.cross_entropy(F.linear(h, W), targets)
    assert_close(torch.autograd.grad(found, (h, W)), torch.autograd.grad(wanted, (h, W)))
    assert_close([found], [wanted]) and "dots" not in kernel


def test_inputs_may_have_gaps_in_memory(kernel):
    """Columns, a transposed matrix, and one number for all tokens: the kernels read rows without gaps."""
    h, W, _, targets = (x.detach() for x in problem(9, 40, 6))
    h, W, targets = torch.stack([h, -h], 1)[:, 0], W.T.contiguous().T, torch.stack([targets, targets + 1], 1)[:, 0]
    s = torch.full((1,), 7.0).expand(40)
    assert not any(x.is_contiguous() for x in (h, W, targets, s))
    for x in (h, W, s):
        x.requires_grad_()
    for q in (1.0, None):
        found, wanted = (torch.autograd.grad(f(h, W, targets, s, q=q), (h, W, s)) for f in (linear_cross_entropy, naive))
        assert_close(found, wanted)


@pytest.mark.parametrize("wanted", range(3))
def test_each_gradient_alone(kernel, wanted):
    inputs = [x.detach() for x in problem(9, 40, 6)]
    inputs[wanted].requires_grad_()
    h, W, s, targets = inputs
    [found] = torch.autograd.grad(linear_cross_entropy(h, W, targets, s, chunk=4), inputs[wanted])
    [plain] = torch.autograd.grad(naive(h, W, targets, s), inputs[wanted])
    assert_close([found], [plain])


def test_no_gradient_is_one_pass_and_no_target_is_a_loss_of_zero(kernel):
    h, W, s, targets = problem(9, 40, 6)
    with torch.no_grad():
        assert_close([linear_cross_entropy(h, W, targets, s)], [naive(h, W, targets, s)])
    loss = linear_cross_entropy(h, W, torch.full_like(targets, -100), s)
    assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, (h, W, s)))
    assert linear_cross_entropy(h[:0], W, targets[:0], s) == 0


def test_a_scale_of_zero_has_its_exact_gradient(kernel):
    h, W, s, targets = problem(9, 40, 6)
    with torch.no_grad():
        s[:5] = 0
        s[5:8] *= -1
    found, wanted = (torch.autograd.grad(f(h, W, targets, s), (h, W, s)) for f in (linear_cross_entropy, naive))
    assert_close(found, wanted, 1e-5)
    assert found[2][:5].all() and found[1][:5].abs().max() < 1e-10


def test_large_logits_and_one_that_is_far_below_do_not_overflow(kernel):
    h, W, _, targets = problem(6, 30, 5, ignored=0)
    s = torch.full((30,), 1e4)
    s[3] = 0
    assert_close([linear_cross_entropy(h, W, targets, s)], [naive(*(x.double() for x in (h, W)), targets, s.double())], 1e-5)


@pytest.mark.parametrize("bad", [-1, 40, 10**9])
def test_a_target_outside_the_vocabulary_makes_the_loss_nan(kernel, bad):
    h, W, s, targets = problem(9, 40, 6)
    targets[4] = bad
    assert linear_cross_entropy(h, W, targets, s).isnan()


def test_a_nan_stays_visible(kernel):
    h, W, s, targets = problem(9, 40, 6, ignored=0)
    with torch.no_grad():
        h[2, 1] = torch.nan
    loss = linear_cross_entropy(h, W, targets, s)
    assert loss.isnan() and torch.autograd.grad(loss, h)[0][2].isnan().all()


def test_gradients_in_bfloat16_are_those_in_float32():
    u, b, targets = torch.randn(4, 50), torch.rand(50), torch.tensor([3, -100, 0, 49])
    s, losses = 3 * torch.rand(50), torch.empty(4)
    halves, whole = torch.empty(4, 50, dtype=torch.bfloat16), u.clone()
    kernels.rows(u, s, b, targets, -100, losses, halves)
    same = losses.clone()
    kernels.rows(whole, s, b, targets, -100, losses, whole)  # in place
    torch.testing.assert_close(halves.float(), whole, rtol=2**-7, atol=0)  # the interpreter truncates
    assert torch.equal(losses, same) and not halves[1].any()
    p = (u * s).softmax(-1)
    assert_close([whole[2]], [(p[2] - F.one_hot(targets[2], 50)) * b])
