"""The Mamba-2 block, as GPT and as nGPT: its equations, its start, its cache, packed documents."""

import math
import sys
import types
from itertools import pairwise

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F

from ngpt_core.config import ModelConfig
from ngpt_core.nn.mamba2 import Mamba2, causal_conv, conv_kernel
from ngpt_core.sphere import unit


def layer(normalized=True, dtype=torch.float64, **options):
    sizes = dict(d_model=24, mamba_heads=4, mamba_head_dim=6, state=5, groups=2, chunk=8)
    config = ModelConfig(vocab_size=7, pattern="M", normalized=normalized, **(sizes | options))
    return Mamba2(config).to(dtype)


def hidden(b=2, T=21, d=24, dtype=torch.float64):
    return unit(torch.randn(b, T, d, dtype=dtype))


def shake(module):
    """Move every parameter away from its start, so that no factor of one and no bias of zero hides a mistake."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return module


OPTIONS = {
    "gpt": {"normalized": False},
    "ngpt": {},
    "vector": {"vector_s_mamba": True},
    "dt unscaled": {"vector_s_mamba": True, "scale_dt": False},
}
KINDS = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@KINDS
@pytest.mark.parametrize("packed", [False, True])
def test_the_layer_is_its_equations(options, packed):
    m, h = shake(layer(**options)), hidden()
    documents = torch.tensor([0] * 4 + [1] * 9 + [2] * 8).expand(2, 21) if packed else None
    p = {name: v.detach().numpy() for name, v in m.named_parameters()}
    s = None if m.s_mamba is None else m.s_mamba().detach().numpy()
    packing, scale_dt = None if documents is None else documents.numpy(), m.config.scale_dt
    expected = reference.mamba2(h.numpy(), p, 4, 2, 5, s, documents=packing, scale_dt=scale_dt)
    np.testing.assert_allclose(m(h, documents).detach().numpy(), expected, rtol=1e-10, atol=1e-12)


@KINDS
def test_cached_reading_equals_reading_at_once(options):
    m, h = shake(layer(**options)), hidden()
    whole, cache = m(h), m.new_cache(2, 21, h.device, h.dtype)
    pieces = [0, 9, 10, 11, 12, 14, 21]  # a prompt, single tokens, and several at once after them
    parts = [m(h[:, start:end], cache=cache) for start, end in pairwise(pieces)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-12)


def test_cached_decoding_agrees_to_1e5_in_float32():
    m, h = layer(dtype=torch.float32), hidden(T=40, dtype=torch.float32)
    with torch.no_grad():
        whole, cache = m(h), m.new_cache(2, 40)
        parts = [m(h[:, t : t + 1], cache=cache) for t in range(40)]
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-5 * whole.abs().max()


@KINDS
def test_a_packed_document_is_read_as_if_it_were_alone(options):
    m, h = shake(layer(**options)), hidden()
    cuts = [0, 2, 3, 11, 21]  # documents shorter than the convolution, and borders inside a chunk
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(cuts).diff()).expand(2, 21)
    alone = [m(h[:, start:end]) for start, end in pairwise(cuts)]
    torch.testing.assert_close(m(h, documents), torch.cat(alone, 1), rtol=1e-10, atol=1e-12)


def test_nothing_flows_back_across_a_document_border_or_from_the_future():
    m, h = shake(layer()), hidden().requires_grad_()
    documents = (torch.arange(21) >= 12).long().expand(2, 21)
    (g,) = torch.autograd.grad(m(h, documents)[:, 12:].sum(), h)
    assert g[:, :12].abs().max() < 1e-14 * g[:, 12:].abs().min(-1).values.max()  # rounding in the sum of the log decays
    (g,) = torch.autograd.grad(m(h)[:, :12].sum(), h)
    assert torch.count_nonzero(g[:, 12:]) == 0 and torch.count_nonzero(g[:, :12]) == g[:, :12].numel()


def test_the_convolution_is_torchs_own():
    x, w, bias = torch.randn(2, 11, 6), torch.randn(4, 6), torch.randn(6)
    expected = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), w.mT[:, None], bias, groups=6)).mT
    torch.testing.assert_close(causal_conv(x, w, bias), expected)
    later = causal_conv(x[:, 5:], w, bias, past=x[:, 2:5])
    torch.testing.assert_close(later, expected[:, 5:])


@pytest.mark.parametrize("packed", [False, True])
def test_the_convolutions_backward_pass_is_right_by_finite_differences(packed):
    x, w, bias, past = (torch.randn(*shape).double().requires_grad_() for shape in ((2, 6, 3), (4, 3), (3,), (2, 3, 3)))
    documents = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 2, 2, 2, 3]]) if packed else None
    function, inputs = lambda *a: causal_conv(*a, documents), (x, w, bias, None if packed else past)
    assert torch.autograd.gradcheck(function, inputs) and torch.autograd.gradgradcheck(function, inputs)


def test_the_cuda_convolution_is_called_with_its_own_conventions(monkeypatch):
    """causal-conv1d wants [b, channels, T] with channels contiguous, [channels, K], and int32 sequence numbers."""
    seen = {}

    def causal_conv1d_fn(x, weight, bias, seq_idx, activation):
        seen.update(strides=x.stride(), offset=x.storage_offset(), seq_idx=seq_idx, activation=activation)
        return F.silu(F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=x.shape[1]))

    module = types.ModuleType("causal_conv1d")
    module.causal_conv1d_fn = causal_conv1d_fn
    monkeypatch.setitem(sys.modules, "causal_conv1d", module)
    x, w, bias = torch.randn(2, 11, 21)[..., 3:19], torch.randn(4, 16), torch.randn(16)
    torch.testing.assert_close(conv_kernel(x, w, bias, torch.full((2, 11), 3)), causal_conv(x, w, bias))
    assert seen["strides"][1] == 1 and seen["strides"][0] % 8 == 0 and seen["strides"][2] % 8 == 0
    assert seen["seq_idx"].dtype == torch.int32 and seen["seq_idx"].is_contiguous() and seen["activation"] == "silu"
    x = torch.randn(2, 11, 24)[..., 3:19]  # rows at a distance of a multiple of 8, and none of them begins at one
    torch.testing.assert_close(conv_kernel(x, w, bias), causal_conv(x, w, bias))
    assert seen["offset"] % 8 == 0


def test_the_cuda_convolutions_gradients_are_asked_for_with_their_own_conventions(monkeypatch):
    """The backward kernel takes [b, channels, T] with channels contiguous, and returns dx, d_weight [channels, K], d_bias."""
    x, w, bias = (torch.randn(*shape, requires_grad=True) for shape in ((2, 11, 16), (4, 16), (16,)))

    def forward(x, weight, bias, seq_idx, activation):
        return F.silu(F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=x.shape[1]))

    def backward(x, weight, bias, dout, seq_idx, initial, d_final, dx, return_d_initial, silu):
        assert x.stride(1) == dout.stride(1) == 1 and silu and not return_d_initial
        K, padded = weight.shape[1], F.pad(x, (weight.shape[1] - 1, 0))
        y = F.conv1d(padded, weight[:, None], bias, groups=x.shape[1])
        d = dout * y.sigmoid() * (1 + y * (1 - y.sigmoid()))
        d_weight = torch.stack([(d * padded[..., k : k + d.shape[-1]]).sum((0, 2)) for k in range(K)], 1)
        return F.conv1d(F.pad(d, (0, K - 1)), weight.flip(1)[:, None], groups=x.shape[1]), d_weight, d.sum((0, 2)), None

    package, functions = types.ModuleType("causal_conv1d"), types.ModuleType("causal_conv1d.cpp_functions")
    package.causal_conv1d_fn, functions.causal_conv1d_bwd_function = forward, backward
    monkeypatch.setitem(sys.modules, "causal_conv1d", package)
    monkeypatch.setitem(sys.modules, "causal_conv1d.cpp_functions", functions)
    g = torch.randn(2, 11, 16)
    for one, two in zip(*(torch.autograd.grad(f(x, w, bias), (x, w, bias), g) for f in (conv_kernel, causal_conv))):
        torch.testing.assert_close(one, two)


def test_item_6_s_mamba_starts_at_half_sqrt_d_and_multiplies_the_input():
    m, h = layer(), hidden()
    assert m.s_mamba.weight.shape == (1,) and m.s_mamba().item() == pytest.approx(0.5 * math.sqrt(24))
    assert layer(vector_s_mamba=True).s_mamba.weight.shape == (24,)
    before = m(h)
    with torch.no_grad():
        m.s_mamba.weight.mul_(3)
    torch.testing.assert_close(m(h / 3), before)


def test_ngpt_has_unit_rows_and_no_inner_norm_and_gpt_the_reverse():
    m = layer()
    assert m.unit_dims == {"in_proj": -1, "out_proj": -1} and m.norm_weight is None
    for w in (m.in_proj, m.out_proj):
        torch.testing.assert_close(w.norm(dim=-1), torch.ones(w.shape[0]).double(), rtol=0, atol=1e-6)
    m = layer(normalized=False)
    assert m.unit_dims == {} and m.s_mamba is None and m.norm_weight.shape == (24,)


def test_the_start_of_the_dynamics():
    m = layer(mamba_heads=400, mamba_head_dim=1, groups=2, dtype=torch.float32)
    A, dt = torch.exp(m.A_log), F.softplus(m.dt_bias)
    assert 1 <= A.min() < 1.5 and 15.5 < A.max() <= 16 + 1e-5
    assert 1e-3 - 1e-7 <= dt.min() < 1.3e-3 and 0.08 < dt.max() <= 0.1 + 1e-6
    assert abs(dt.log().mean() - math.log(1e-2)) < 0.3  # log-uniform, not uniform
    assert torch.equal(m.D, torch.ones(400))


def test_a_layer_on_the_meta_device_is_filled_by_reset_parameters():
    with torch.device("meta"):
        m = layer(dtype=torch.float32)
    m = m.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in m.modules():
        module.reset_parameters()
    torch.manual_seed(3)
    for (name, p), q in zip(m.named_parameters(), layer(dtype=torch.float32).parameters(), strict=True):
        assert torch.equal(p, q), name


def test_half_precision_computes_the_decays_in_float32():
    m, h = layer(dtype=torch.bfloat16), hidden(dtype=torch.bfloat16)
    exact = layer()
    exact.load_state_dict(m.state_dict())
    cache = m.new_cache(2, 21, dtype=torch.bfloat16)
    y, expected = m(h, cache=cache), exact(h.double())
    assert y.dtype == torch.bfloat16 and cache.state.dtype == torch.float32 and cache.conv.dtype == torch.bfloat16
    assert (y.double() - expected).abs().max() < 0.03 * expected.abs().max()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("normalized", [pytest.param(False, marks=pytest.mark.slow), True], ids=["gpt", "ngpt"])
def test_it_compiles_to_one_graph_with_the_same_gradients(normalized, backend):
    m, h = shake(layer(normalized)), hidden()
    documents = (torch.arange(21) >= 12).long().expand(2, 21)
    compiled = torch.compile(m, fullgraph=True, backend=backend)
    expected = torch.autograd.grad(m(h, documents).square().sum(), list(m.parameters()))
    for g, e in zip(torch.autograd.grad(compiled(h, documents).square().sum(), list(m.parameters())), expected):
        torch.testing.assert_close(g, e, rtol=1e-9, atol=1e-10 * max(1.0, float(e.abs().max())))
