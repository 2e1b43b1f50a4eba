"""Each operator in C++ of the forward pass computes what the plain form beside it computes, values and gradients."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import ngpt_core as ng
from ngpt_core import native, sphere
from ngpt_core.nn import attention, attention_cpu, fused, grouped, mamba2, mamba2_cpu, mlp, moe, product, rows_cpu

needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler on this machine")
pytestmark = needs_compiler


def assert_twins(kernel, plain, inputs, tolerance=1e-4):
    """Value and gradients in float32 against the plain form in float64; an error is measured by the largest entry."""
    torch.manual_seed(1)
    wanted, found = [], []
    for function, dtype, into in ((plain, torch.float64, wanted), (kernel, torch.float32, found)):
        args = [
            x.detach().to(dtype).requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for x in inputs
        ]
        out = function(*args)
        g = torch.linspace(-1, 2, out.numel(), dtype=dtype).view_as(out).cos()
        into += [out, *torch.autograd.grad(out, [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad], g)]
    for i, (w, f) in enumerate(zip(wanted, found, strict=True)):
        torch.testing.assert_close(
            f.double(), w, rtol=0, atol=tolerance * max(1.0, float(w.detach().abs().max())), msg=lambda m, i=i: f"{i}: {m}"
        )


# ---- the inside of a Mamba-2 layer -----------------------------------------------------------------------------------
def layer(b=2, T=37, G=2, r=3, P=5, N=7, K=4, chunk=16, norm=True, documents=True, dt_min=0.0, seed=0):
    torch.manual_seed(seed)
    H, d_inner = G * r, G * r * P
    channels = d_inner + 2 * G * N
    p, weight, bias = torch.randn(b, T, d_inner + channels + H), torch.randn(K, channels) / 2, torch.randn(channels) / 3
    ids = mamba2.segments(torch.randint(0, 4, (b, T)).sort(1).values) if documents else None
    tensors = (
        p,
        weight,
        bias,
        torch.randn(H),
        -torch.exp(torch.randn(H)),
        torch.randn(H),
        torch.randn(d_inner) if norm else None,
    )
    return (*tensors, ids, G, N, chunk, dt_min, 0.1)  # a small eps under one channel would amplify rounding


kernel, plain = (lambda *a: mamba2_cpu.inside(*a)[0]), (lambda *a: mamba2.inside(*a)[0])


@settings(max_examples=30, deadline=None)
@given(
    T=st.integers(1, 70),
    chunk=st.integers(1, 80),
    G=st.integers(1, 3),
    r=st.integers(1, 3),
    P=st.integers(1, 40),
    N=st.integers(1, 40),
    K=st.integers(1, 5),
    norm=st.booleans(),
    documents=st.booleans(),
    dt_min=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 1000),
)
def test_the_mamba2_kernel_is_its_plain_form(**options):
    assert_twins(kernel, plain, layer(**options))


@pytest.mark.parametrize("sizes", [{"P": 32, "N": 32, "r": 4}, {"P": 32, "N": 16, "r": 2}, {"P": 64, "N": 64}], ids=str)
def test_the_mamba2_kernel_at_the_sizes_of_the_presets(sizes):
    assert_twins(kernel, plain, layer(T=200, chunk=64, **sizes))


@pytest.mark.parametrize("step", [-100.0, -20.0, 30.0, 1e4])
def test_extreme_steps_stay_finite_in_the_mamba2_kernel(step):
    p, *others = layer(T=40)
    p[..., -6:] = step
    inputs = [p.requires_grad_(), *others]
    out = kernel(*inputs)
    assert torch.isfinite(torch.autograd.grad(out.sum(), p)[0]).all()
    assert_twins(kernel, plain, layer(T=40))


def test_a_nan_does_not_get_lost_in_the_mamba2_kernel():
    for column in (0, 40, -1):  # z, x, dt
        p, *others = layer(documents=False)
        p[0, 5, column] = torch.nan
        assert kernel(p, *others).isnan().any() and not kernel(p, *others)[1].isnan().any()


def test_threads_change_no_bit_of_the_mamba2_kernel():
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            p, *others = layer(T=90)
            out = kernel(p.requires_grad_(), *others)
            results.append((out, *torch.autograd.grad(out.sum(), p)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("norm", [True, False])
def test_the_token_kernel_writes_the_cache_that_the_plain_form_returns(norm, K):
    p, *tensors, _, G, N, chunk, dt_min, eps = layer(T=1, K=K, norm=norm, documents=False, dt_min=0.1)
    past, state = torch.randn(2, K - 1, tensors[0].shape[1]), torch.randn(2, 6, 5, N)
    y, last, after = mamba2.inside(p, *tensors, None, G, N, chunk, dt_min, eps, past.clone(), state.clone())
    found = mamba2_cpu.token(p, *tensors, G, N, chunk, dt_min, eps, past, state)
    for a, b in ((found, y), (past, last), (state, after)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_second_derivatives_of_the_mamba2_kernel_are_those_of_its_plain_form():
    results = []
    for function, dtype in ((plain, torch.float64), (kernel, torch.float32)):
        p, *others = (x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in layer(T=12))
        out = function(p.requires_grad_(), *others)
        (g,) = torch.autograd.grad(out.square().sum(), p, create_graph=True)
        results.append(torch.autograd.grad(g.square().sum(), p)[0].double())
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-4 * float(results[0].abs().max()))


# ---- rows ------------------------------------------------------------------------------------------------------------
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 40))


@settings(max_examples=20, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 1000))
def test_the_row_kernels_are_their_plain_forms(shape, seed):
    torch.manual_seed(seed)
    d = shape[-1]
    x, f, w = 0.5 + torch.rand(shape), 0.5 + torch.rand(shape), torch.rand(d)
    assert_twins(rows_cpu.step, lambda h, f, a: sphere.step(h, sphere.unit(f), a), (sphere.unit(x), f, w))
    assert_twins(rows_cpu.norm, lambda x, w: sphere.unit(x) * w, (x, w))
    assert_twins(lambda *a: rows_cpu.norm(*a, 0.1), lambda x, w: torch.nn.functional.rms_norm(x, (d,), w, 0.1), (x, w))
    assert_twins(rows_cpu.relu2, mlp.relu2, (torch.randn(shape),))
    assert_twins(rows_cpu.swiglu, mlp.swiglu, (4 * torch.randn(shape), 4 * torch.randn(shape)))


@settings(max_examples=20, deadline=None)
@given(shape=SHAPES, heads=st.integers(1, 3), layout=st.sampled_from(["tokens", "heads", "gaps"]), start=st.integers(0, 9))
def test_the_rotation_in_every_order_of_memory_is_its_plain_form(shape, heads, layout, start):
    """Queries come as tokens before heads; gaps are what a slice of a larger tensor has."""
    B, T, half = shape
    x = torch.randn(B, heads, T, 2 * half)
    arranged = {
        "heads": lambda x: x.contiguous(),
        "tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "gaps": lambda x: torch.cat((x, x), -1)[..., : 2 * half],
    }[layout]

    def kernel(x):
        return rows_cpu.rotate(arranged(x), attention.rope_table(x.detach(), 1e4, start))

    assert_twins(kernel, lambda x: attention.rotate(arranged(x), 1e4, start), (x,))
    y = rows_cpu.rotate(arranged(x), attention.rope_table(x, 1e4, start))
    assert y.stride() == arranged(x).stride() or layout == "gaps"


# ---- products --------------------------------------------------------------------------------------------------------
@pytest.fixture
def onednn(monkeypatch):
    """Every product goes to oneDNN, whatever the processor and the sizes."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(product, "_LEAST", 0)
    monkeypatch.setattr(product, "_prefers_onednn", lambda: True)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 7, 5), (40, 64, 33), (200, 256, 682)], ids=str)
def test_products_by_onednn_are_their_plain_forms(onednn, sizes):
    m, d, n = sizes
    x, W = torch.randn(2, m, d), torch.randn(n, d)
    assert product._takes(x, W)
    for function, operand in ((product.linear, W), (product.times, W.T.contiguous())):
        with fused.plain():
            assert not product._takes(x, W)
        assert_twins(function, function, (x, operand))  # in float64 it is the plain form
        assert_twins(function, function, (x.transpose(0, 1), operand.T.contiguous().T))  # any order in memory


def test_products_by_onednn_can_be_differentiated_twice_and_leave_out_what_nobody_asked_for(onednn):
    x, W = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    for function, operand in ((product.linear, W), (product.times, W.T)):
        results = []
        for dtype in (torch.float32, torch.float64):
            a, b = (y.detach().to(dtype).requires_grad_() for y in (x, operand))
            (g,) = torch.autograd.grad(function(a, b).cos().sum(), b, create_graph=True)
            results.append([y.double() for y in torch.autograd.grad(g.square().sum(), (a, b))])
        for found, wanted in zip(*results):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    W = W.float().requires_grad_()
    assert torch.autograd.grad(product.linear(x.float(), W).sum(), W)[0].is_contiguous()


def test_small_products_and_other_processors_stay_with_torch(onednn, monkeypatch):
    monkeypatch.setattr(product, "_LEAST", 100)
    assert product._takes(torch.zeros(5, 4), torch.zeros(5, 4))
    assert not product._takes(torch.zeros(6, 4), torch.zeros(4, 4))
    assert not product._takes(torch.zeros(5, 4).double(), torch.zeros(5, 4).double())
    monkeypatch.setattr(product, "_prefers_onednn", lambda: False)
    assert not product._takes(torch.zeros(5, 4), torch.zeros(5, 4))


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, TypeError])
def test_a_torch_with_another_operator_keeps_its_own_products(monkeypatch, error):
    def changed(*args):
        raise error

    monkeypatch.setattr(product, "_multiply", changed)
    product._prefers_onednn.cache_clear()
    assert not product._prefers_onednn()
    product._prefers_onednn.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [True, "dense"])
def test_a_compiled_model_whose_products_are_nodes_has_the_same_gradients(onednn, kind):
    net, x, y = model(kind)
    wanted = gradients(net, x, y)
    torch._dynamo.reset()
    for block in net.blocks:
        block.compile(fullgraph=True)
    assert_close(gradients(net, x, y), wanted)
    torch._dynamo.reset()


# ---- attention -------------------------------------------------------------------------------------------------------
def heads(B=2, H=4, G=2, T=37, d=8, layout="tokens"):
    """q, k and v, in memory as tokens before heads, as heads before tokens, or with gaps between their numbers."""
    torch.manual_seed(T + d)

    def arranged(n):
        x = torch.randn(B, n, T, d)
        if layout == "gaps":
            return x.repeat_interleave(2, -1)[..., ::2]
        return x if layout == "heads" else x.transpose(1, 2).contiguous().transpose(1, 2)

    return arranged(H), arranged(G), arranged(G)


@settings(max_examples=40, deadline=None)
@given(
    T=st.integers(1, 140),
    d=st.integers(1, 40),
    G=st.integers(1, 3),
    r=st.integers(1, 3),
    layout=st.sampled_from(["tokens", "heads", "gaps"]),
    scale=st.sampled_from([0.1, 1.0, 6.0]),
    documents=st.sampled_from([None, 1, 3, 60]),
)
def test_the_attention_kernel_is_its_plain_form(T, d, G, r, layout, scale, documents):
    ids = None if documents is None else mamba2.segments(torch.randint(0, documents, (2, T)).sort(1).values)
    with fused.plain():
        assert_twins(
            lambda *a: attention_cpu.causal(*a, scale, ids),
            lambda *a: attention.causal(*a, scale, ids),
            heads(2, r * G, G, T, d, layout),
        )


@pytest.mark.parametrize("sizes", [(256, 64), (200, 32), (70, 128)], ids=str)
def test_the_attention_kernel_at_the_sizes_of_the_presets(sizes):
    with fused.plain():
        assert_twins(lambda *a: attention_cpu.causal(*a, 0.2), lambda *a: attention.causal(*a, 0.2), heads(1, 4, 2, *sizes))


def test_the_attention_kernel_survives_large_scores_and_shows_nan():
    q, k, v = heads(1, 1, 1, 40)
    out = attention_cpu.causal(100 * q, 100 * k, v, 1.0)
    torch.testing.assert_close(out, attention.F.scaled_dot_product_attention(100 * q, 100 * k, v, is_causal=True, scale=1.0))
    k[..., 17, 3] = torch.nan
    seen = attention_cpu.causal(q, k, v, 1.0).isnan().all(-1).squeeze()
    assert seen.tolist() == [False] * 17 + [True] * 23  # nobody before token 17 looks at it


def test_threads_change_no_bit_of_the_attention_kernel():
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            inputs = [x.requires_grad_() for x in heads(3, 4, 2, 70, 16)]
            out = attention_cpu.causal(*inputs, 1.0)
            results.append((out, *torch.autograd.grad(out.cos().sum(), inputs)))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


def test_second_derivatives_of_the_attention_kernel_are_those_of_the_plain_form():
    results = []
    for dtype in (torch.float32, torch.float64):
        q, k, v = (x.to(dtype).requires_grad_() for x in heads(1, 4, 2, 9, 5))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            (g,) = torch.autograd.grad(attention.causal(q, k, v, 1.0).cos().sum(), k, create_graph=True)
            results.append([x.double() for x in torch.autograd.grad(g.square().sum(), (q, k, v))])
    for found, wanted in zip(*results):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("v", [-1e4, -100.0, 100.0, 1e4])
def test_the_gate_of_swiglu_saturates_as_in_its_plain_form(v):
    u, v = torch.linspace(-2, 2, 21), torch.full((21,), v)
    assert_twins(rows_cpu.swiglu, lambda u, v: u * torch.nn.functional.silu(v), (u, v))
    u[3] = v[7] = torch.nan
    assert rows_cpu.swiglu(u, v).isnan().nonzero().flatten().tolist() == [3, 7]


@pytest.mark.parametrize("way", ["none", "vector", "matrix"])
@pytest.mark.parametrize("E", [1, 5, 40])  # 40: some experts have no tokens
def test_the_expert_kernel_is_dispatch_two_products_and_combine(way, E):
    torch.manual_seed(0)
    n, k, d, ff = 30, min(E, 3), 24, 10
    s_u = {"none": None, "vector": 0.5 + torch.rand(ff), "matrix": 0.5 + torch.rand(E, ff)}[way]
    chosen = torch.rand(n, E).topk(k).indices
    counts = chosen.flatten().bincount(minlength=E)
    order, place = grouped.sort_by_expert(chosen)

    def plain(x, weights, up, down, s_u):
        y = moe.expert_mlp(grouped.dispatch(x, order, place, k), counts, up, down, s_u)
        return grouped.combine(y * weights.flatten()[order, None], order, place, k)

    inputs = (torch.randn(n, d), torch.rand(n, k), torch.randn(E, ff, d) / 5, torch.randn(E, ff, d) / 5, s_u)
    assert_twins(lambda *a: rows_cpu.experts(*a, order, counts), plain, inputs)
    few = rows_cpu.few_experts(*inputs, chosen)
    torch.testing.assert_close(few, plain(*(None if x is None else x.double() for x in inputs)).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scaled", [True, False])
def test_the_expert_operator_keeps_torchs_rules_for_compilers(scaled):
    chosen = torch.tensor([[0, 2], [2, 3], [0, 3]])
    s_u = torch.rand(4, requires_grad=True) if scaled else None
    x, weights, up, down = (torch.randn(shape, requires_grad=True) for shape in ((3, 5), (3, 2), (4, 4, 5), (4, 4, 5)))
    routed = grouped.sort_by_expert(chosen)[0], chosen.flatten().bincount(minlength=4)
    torch.library.opcheck(torch.ops.ngpt_core.experts.default, (x, weights, up, down, s_u, *routed))


@pytest.mark.parametrize("kind", ["ngpt", "gpt", "an expert of odd sizes"])
def test_a_few_tokens_without_gradients_are_the_same_tokens_with_them(kind):
    torch.manual_seed(0)
    odd = dict(d_model=21, head_dim=3, n_heads=7, n_kv_heads=7, expert_ff=7, shared_ff=5) if "odd" in kind else {}
    model = ng.LanguageModel(ng.preset("pico", kind != "gpt", **odd)).eval()
    x = torch.randint(0, 256, (2, 3))
    with torch.no_grad():
        fast = model(x)
        with fused.plain():
            slow = model(x)
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fast, model(x), rtol=1e-4, atol=1e-4)


def test_the_balance_of_the_load_is_only_computed_where_somebody_may_ask_for_it():
    layer = ng.LanguageModel(ng.preset("pico")).blocks[1].mixer
    h = torch.randn(1, 4, layer.router.weight.shape[-1])
    assert layer(h)[1].balance > 0 and layer.eval()(h)[1].balance > 0
    with torch.no_grad():
        assert layer(h)[1].balance == 0 and layer.train()(h)[1].balance > 0


def test_a_row_of_zeros_has_the_finite_gradient_of_the_plain_form():
    zero, a = torch.zeros(2, 6), torch.full((6,), 0.1)
    for kernel_, plain_, inputs in (
        (rows_cpu.norm, lambda x, w: sphere.unit(x) * w, (zero, a)),
        (rows_cpu.step, lambda h, f, a: sphere.step(h, sphere.unit(f), a), (zero, zero, a)),
    ):
        assert_twins(kernel_, plain_, inputs)


@pytest.mark.parametrize("operator", ["step", "norm", "relu2", "swiglu", "rotate"])
def test_second_derivatives_of_the_row_kernels_are_those_of_the_plain_form(operator):
    torch.manual_seed(0)
    f, w = torch.randn(5, 7), torch.rand(7)
    twins = {
        "step": (lambda x: rows_cpu.step(x, f, w), lambda x: sphere.step(x, sphere.unit(f.to(x)), w.to(x))),
        "norm": (lambda x: rows_cpu.norm(x, w), lambda x: sphere.unit(x) * w.to(x)),
        "relu2": (rows_cpu.relu2, mlp.relu2),
        "swiglu": (lambda x: rows_cpu.swiglu(f, x), lambda x: f.to(x) * torch.nn.functional.silu(x)),
        "rotate": (lambda x: _rotate(x[:, :6]), lambda x: attention.rotate(x[:, :6], 1e4, 2)),
    }[operator]
    results = []
    for function, dtype in zip(twins, (torch.float32, torch.float64)):
        x = torch.linspace(-1, 2, 35).view(5, 7).sin().to(dtype).requires_grad_()
        (g,) = torch.autograd.grad(function(x).cos().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(g.square().sum(), x)[0].double())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_threads_change_no_bit_of_the_row_kernels():
    torch.manual_seed(0)
    h, f, a, results, before = (
        torch.randn(300, 33),
        torch.randn(300, 33),
        torch.rand(33).requires_grad_(),
        [],
        torch.get_num_threads(),
    )
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(torch.autograd.grad(rows_cpu.step(h, f, a).cos().sum(), a)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def _rotate(x):
    return rows_cpu.rotate(x, attention.rope_table(x.detach(), 1e4, 2))


def _expert_gradients():
    chosen = torch.tensor([[0, 2], [2, 3], [0, 3]])  # expert 1 has no tokens
    order, counts = grouped.sort_by_expert(chosen)[0], chosen.flatten().bincount(minlength=4)
    inputs = (torch.randn(3, 5), torch.rand(3, 2), torch.randn(4, 4, 5), torch.randn(4, 4, 5), 0.5 + torch.rand(4))
    return (lambda *a: rows_cpu.experts(*a, order, counts)), inputs


def _inside_gradients():
    *tensors, ids, G, N, chunk, dt_min, eps = layer(b=1, T=5, G=1, r=2, P=2, N=3, K=2, chunk=3)
    return (lambda *a: kernel(*a, ids, G, N, chunk, dt_min, eps)), tensors


HAND_WRITTEN = {
    "step": lambda: (rows_cpu.step, (torch.randn(3, 5), torch.randn(3, 5), torch.rand(5))),
    "norm": lambda: (rows_cpu.norm, (torch.randn(3, 5), torch.rand(5))),
    "rms norm": lambda: ((lambda *a: rows_cpu.norm(*a, 0.1)), (torch.randn(3, 5), torch.rand(5))),
    "relu2": lambda: (rows_cpu.relu2, (torch.randn(3, 5),)),
    "swiglu": lambda: (rows_cpu.swiglu, (torch.randn(3, 5), torch.randn(3, 5))),
    "rotate": lambda: (_rotate, (torch.randn(2, 3, 6),)),
    "experts": _expert_gradients,
    "inside": _inside_gradients,
    "attention": lambda: ((lambda *a: attention_cpu.causal(*a, 1.0)), heads(1, 2, 1, 5, 3)),
    "product": lambda: ((lambda *a: product._product(*a, True)), (torch.randn(3, 4), torch.randn(5, 4))),
}


@pytest.mark.parametrize("operator", HAND_WRITTEN)
def test_the_hand_written_gradients_pass_gradcheck(operator):
    """The operators compute in float32, so a difference quotient has four digits; a gradient off by a percent is noticed."""
    torch.manual_seed(0)
    function, inputs = HAND_WRITTEN[operator]()
    inputs = [x.double().requires_grad_() for x in inputs]

    def passes(slope):
        def in_float32(*a):
            y = function(*(x.float() for x in a)).double()
            return y.detach() + slope * (y - y.detach())  # its value, and ``slope`` times its gradient

        return torch.autograd.gradcheck(in_float32, inputs, eps=2e-3, atol=2e-3, rtol=2e-3, raise_exception=slope == 1)

    assert passes(1) and not passes(1.01)


# ---- the ways in which torch may call them ---------------------------------------------------------------------------
DENSE = ng.ModelConfig(vocab_size=256, d_model=32, pattern="*-", n_heads=2, rope_theta=1e4, ff=20, activation="swiglu")


def model(kind=True):
    """nGPT, GPT, or the dense nGPT with its rotary embedding."""
    torch.manual_seed(0)
    hybrid = dict(d_model=32, pattern="M*E", expert_ff=12, shared_ff=20)
    config = DENSE if kind == "dense" else ng.preset("pico", normalized=kind, **hybrid)
    return ng.LanguageModel(config), *torch.randint(0, 256, (2, 2, 40))


def gradients(model, x, y):
    return torch.autograd.grad(model.loss(x, y), list(model.parameters()))


def assert_close(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=2e-5 * max(1.0, float(y.detach().abs().max())))


@pytest.mark.parametrize("kind", [True, False, "dense"])
def test_a_model_has_the_same_gradients_with_and_without_the_operators(kind):
    net, x, y = model(kind)
    with fused.plain():
        wanted = gradients(net, x, y)
    assert_close(gradients(net, x, y), wanted)


@pytest.mark.parametrize("kind", [True, False, "dense"])
def test_torch_func_goes_through_the_blocks_and_the_chunked_loss(kind):
    net, x, y = model(kind)
    params = dict(net.named_parameters())
    found = torch.func.grad(lambda p: _loss(net, p, x, y))(params)
    assert_close([found[name] for name in params], gradients(net, x, y))


def test_half_precision_meshes_and_traces_take_the_plain_form():
    x = torch.randn(2, 3)
    assert rows_cpu.takes(x, torch.nn.Parameter(x), None)
    with fused.plain():
        assert not rows_cpu.takes(x)
    assert not rows_cpu.takes(x.bfloat16()) and not rows_cpu.takes(x.double()) and not rows_cpu.takes(x.to("meta"))
    with torch._subclasses.FakeTensorMode() as mode:
        assert not rows_cpu.takes(mode.from_tensor(x))


def test_activation_checkpointing_gives_the_same_bits():
    net, x, y = model()
    wanted = gradients(net, x, y)
    for block in net.blocks:
        whole = block.forward
        block.forward = lambda *a, whole=whole: checkpoint(whole, *a, use_reentrant=False)
    assert all(map(torch.equal, gradients(net, x, y), wanted))


@pytest.mark.parametrize("normalized", [True, False])
def test_a_compiled_layer_is_one_graph_with_the_mamba2_operator_in_it(normalized):
    net, *_ = model(normalized)
    mixer = net.blocks[0].mixer
    h = torch.randn(2, 40, 32, requires_grad=True)
    run = lambda f: (lambda out: (out, *torch.autograd.grad(out.cos().sum(), [h, *mixer.parameters()])))(f(h))  # noqa: E731
    wanted, seen = run(mixer), []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    assert_close(run(torch.compile(mixer, fullgraph=True, backend=backend)), wanted)
    assert any("mamba2" in target for target in seen)
    torch._dynamo.reset()
    assert_close(run(torch.compile(mixer, fullgraph=True, backend="aot_eager")), wanted)


def test_without_a_compiler_the_model_takes_its_plain_path_and_says_so_once(monkeypatch, caplog):
    net, x, y = model()
    wanted = gradients(net, x, y)
    monkeypatch.setattr(native, "compiler", lambda: None)
    fused.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="ngpt_core"):
            assert_close(gradients(net, x, y), wanted)
        assert {record.getMessage().split(":")[0] for record in caplog.records} == {
            "The model takes its plain path on the CPU, which is slower"
        }
    finally:
        fused.library.cache_clear()


def _loss(net, params, x, y):
    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self):
            return self.net.loss(x, y)

    return torch.func.functional_call(Loss(), {f"net.{name}": p for name, p in params.items()}, ())
