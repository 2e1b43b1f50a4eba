"""Attention against loops written from the equations: GQA, QK norm, s_qk, the softmax scale, RoPE, documents, the cache."""

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ngpt_core as ng
from ngpt_core.nn.attention import Attention, document_mask, rotate


def make(normalized=True, **change):
    config = ng.ModelConfig(
        **dict(vocab_size=16, d_model=24, pattern="*", normalized=normalized, n_heads=6, n_kv_heads=2, head_dim=8) | change
    )
    module = Attention(config).double()
    with torch.no_grad():
        if normalized:
            module.s_qk.weight.uniform_(0.5, 1.5)
    return module


def numbers(module):
    names = dict(Wq="q_proj", Wk="k_proj", Wv="v_proj", Wo="o_proj")
    return {k: getattr(module, v).detach().numpy() for k, v in names.items()}


@pytest.mark.parametrize("theta", [None, 1e4])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("heads", "kv"), [(6, 2), (4, 4), (4, 1)])
def test_item_3_attention_is_the_loop_over_heads_and_tokens(normalized, theta, heads, kv):
    module = make(normalized, n_heads=heads, n_kv_heads=kv, rope_theta=theta)
    h = torch.randn(2, 11, 24, dtype=torch.float64)
    s_qk = module.s_qk().detach().numpy() if normalized else None
    want = [reference.attention(x, **numbers(module), heads=heads, kv_heads=kv, s_qk=s_qk, theta=theta) for x in h.numpy()]
    np.testing.assert_allclose(module(h).detach().numpy(), np.stack(want), atol=1e-12)


def test_item_3_softmax_scale_is_sqrt_dk_for_ngpt_and_its_inverse_for_gpt():
    assert make(True).softmax_scale == 8**0.5
    assert make(False).softmax_scale == 8**-0.5
    assert make(False).s_qk is None and make(False).unit_dims == {}


def test_scaling_a_row_of_queries_and_keys_of_a_head_changes_nothing():
    """Norm per head: q_proj and k_proj may be rescaled head by head."""
    module, h = make(), torch.randn(1, 7, 24, dtype=torch.float64)
    want = module(h)
    with torch.no_grad():
        module.q_proj.view(6, 8, 24).mul_(torch.rand(6, 1, 1) + 0.5)
        module.k_proj.view(2, 8, 24).mul_(torch.rand(2, 1, 1) + 0.5)
    torch.testing.assert_close(module(h), want)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(-5_000, 5_000), st.sampled_from([2, 8, 64]))
def test_rope_is_a_rotation_and_sees_relative_positions_only(i, j, shift, d_k):
    torch.manual_seed(d_k)
    q, k = torch.randn(2, 1, d_k, dtype=torch.float64)
    shift = max(shift, -i, -j)
    torch.testing.assert_close(rotate(q, 1e4, i).norm(), q.norm())
    a = (rotate(q, 1e4, i) * rotate(k, 1e4, j)).sum()
    b = (rotate(q, 1e4, i + shift) * rotate(k, 1e4, j + shift)).sum()
    torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


def test_rope_comes_after_s_qk_so_that_attention_sees_relative_positions_only():
    """Rotated before s_qk, as in the original code, the same document would read differently at another place."""
    module, h = make(rope_theta=1e4), torch.randn(1, 9, 24, dtype=torch.float64)
    documents = torch.tensor([[0] * 3 + [1] * 6])
    torch.testing.assert_close(module(h, documents)[:, 3:], module(h[:, 3:]))
    arguments = dict(heads=6, kv_heads=2, s_qk=module.s_qk().detach().numpy(), theta=1e4)
    theirs = reference.attention(h[0].numpy(), **numbers(module), **arguments, rope_first=True)
    assert np.abs(theirs - module(h)[0].detach().numpy()).max() > 1e-3


def test_rope_moves_something_and_is_the_identity_at_position_zero():
    x = torch.randn(3, 8, dtype=torch.float64)
    y = rotate(x, 1e4)
    torch.testing.assert_close(y[0], x[0])
    assert (y[1:] - x[1:]).abs().min() > 1e-6


def test_rope_equals_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x = torch.randn(1, 2, 9, 16)
    phi = torch.arange(9.0)[:, None] * 1e4 ** (-torch.arange(0, 16, 2) / 16)
    cos, sin = torch.cat([phi, phi], -1).cos()[None], torch.cat([phi, phi], -1).sin()[None]
    torch.testing.assert_close(rotate(x, 1e4), llama.apply_rotary_pos_emb(x, x, cos, sin)[0])


def test_the_original_ngpt_codes_rotary_embedding_is_not_a_rotation():
    """The released code (NVIDIA/ngpt, model.py) sends a pair (a, b) to (-b c, a s), two products where a rotation has four:
    even for c = cos phi and s = sin phi norms change, and a dot product changes when both tokens move by the same distance."""

    def theirs(x, phi):
        return torch.stack([-x[1] * torch.cos(phi), x[0] * torch.sin(phi)])

    q, k = torch.tensor([[0.6, 0.8], [1.0, 0.0]], dtype=torch.float64)
    phi = torch.tensor([0.3, 0.5, 1.3, 1.5], dtype=torch.float64)  # positions i, j, and both one further
    assert abs(theirs(q, phi[0]).norm() - 1) > 0.1
    assert abs(theirs(q, phi[0]) @ theirs(k, phi[1]) - theirs(q, phi[2]) @ theirs(k, phi[3])) > 0.1
    ours = [rotate(x[None], 1e4, t)[0] for x, t in ((q, 3), (k, 5), (q, 13), (k, 15))]  # d_k = 2: the angle is the position
    torch.testing.assert_close(ours[0].norm(), q.norm())
    torch.testing.assert_close(ours[0] @ ours[1], ours[2] @ ours[3])


def test_document_mask_is_causal_and_stays_within_documents():
    mask = document_mask(torch.tensor([[0, 0, 3, 3, 3]]))[0, 0]
    want = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert mask.int().tolist() == want


@pytest.mark.parametrize("theta", [None, 1e4])
@pytest.mark.parametrize("normalized", [True, False])
def test_a_packed_document_is_the_document_alone(normalized, theta):
    module, h = make(normalized, rope_theta=theta), torch.randn(1, 12, 24, dtype=torch.float64)
    documents = torch.tensor([[4] * 5 + [5] * 7])
    packed = module(h, documents)
    torch.testing.assert_close(packed[:, :5], module(h[:, :5]))
    torch.testing.assert_close(packed[:, 5:], module(h[:, 5:]))


@pytest.mark.parametrize("theta", [None, 1e4])
@pytest.mark.parametrize("parts", [(9, 1, 1, 1), (1,) * 12, (4, 5, 3)])
def test_with_a_cache_the_parts_give_the_whole(parts, theta):
    module, h = make(rope_theta=theta), torch.randn(2, 12, 24, dtype=torch.float64)
    cache = module.new_cache(2, 12, h.device, h.dtype)
    out = torch.cat([module(x, cache=cache) for x in h.split(parts, 1)], 1)
    torch.testing.assert_close(out, module(h))


def test_gradients_are_finite_at_a_zero_hidden_state():
    module, h = make(), torch.zeros(1, 3, 24, dtype=torch.float64, requires_grad=True)
    module(h).sum().backward()
    assert all(p.grad.isfinite().all() for p in [h, *module.parameters()])


@pytest.mark.parametrize("normalized", [True, False])
def test_it_compiles_as_one_graph(normalized):
    module, h = make(normalized, rope_theta=1e4).float(), torch.randn(2, 9, 24)
    documents = torch.tensor([[0] * 4 + [1] * 5]).expand(2, -1)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(h, documents), module(h, documents))
