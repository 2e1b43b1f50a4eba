"""The dense MLP against the equations: squared ReLU, and SwiGLU with the sqrt(d) that it needs."""

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ngpt_core as ng
from ngpt_core import sphere
from ngpt_core.nn.mlp import MLP


def make(normalized=True, activation="relu2", d=32, ff=20):
    config = ng.ModelConfig(vocab_size=16, d_model=d, pattern="-", normalized=normalized, ff=ff, activation=activation)
    module = MLP(config).double()
    with torch.no_grad():
        if normalized:
            module.s_u.weight.uniform_(0.5, 1.5)
    return module


@pytest.mark.parametrize("normalized", [True, False])
def test_item_4_squared_relu_with_s_u(normalized):
    module, h = make(normalized), torch.randn(3, 5, 32, dtype=torch.float64)
    s_u = module.s_u().detach().numpy() if normalized else None
    want = reference.mlp_relu2(h.numpy(), module.up.detach().numpy(), module.down.detach().numpy(), s_u)
    np.testing.assert_allclose(module(h).detach().numpy(), want, atol=1e-13)


@pytest.mark.parametrize("normalized", [True, False])
def test_swiglu_has_sqrt_d_on_its_gate_and_a_scale_for_each_side(normalized):
    module, h = make(normalized, "swiglu"), torch.randn(3, 5, 32, dtype=torch.float64)
    s_u, s_v = module.s_u().detach().numpy() if normalized else (None, None)
    up, gate, down = (w.detach().numpy() for w in (module.up, module.gate, module.down))
    want = reference.mlp_swiglu(h.numpy(), up, gate, down, s_u, s_v)
    np.testing.assert_allclose(module(h).detach().numpy(), want, atol=1e-13)


def test_silu_sees_numbers_of_size_one_whatever_the_width():
    """sqrt(d) times the cosine of random unit vectors has standard deviation 1: this is why it is there."""
    for d in (64, 1024):
        v = sphere.random(500, d) @ sphere.random(200, d).T * d**0.5
        assert abs(v.std() - 1) < 0.05


@settings(deadline=None)
@given(st.floats(0.1, 10.0))
def test_the_direction_of_a_squared_relu_block_does_not_depend_on_the_size_of_s_u(factor):
    torch.manual_seed(0)
    module, h = make(), torch.randn(4, 32, dtype=torch.float64)
    want = module(h)
    with torch.no_grad():
        module.s_u.weight.mul_(factor)
    torch.testing.assert_close(module(h), want * factor**2)  # section 3.1: quadratic in magnitude
    torch.testing.assert_close(sphere.unit(module(h)), sphere.unit(want))


def test_unit_axes_are_declared_only_for_ngpt():
    assert make().unit_dims == {"up": -1, "down": -1}
    assert make(activation="swiglu").unit_dims == {"up": -1, "gate": -1, "down": -1}
    assert make(normalized=False, activation="swiglu").unit_dims == {}
    assert make(normalized=False).s_u is None


def test_gpt_starts_with_small_output_projections_ngpt_on_the_sphere():
    config = dict(vocab_size=16, d_model=64, pattern="-" * 16, ff=4096)
    gpt = MLP(ng.ModelConfig(**config, normalized=False))
    torch.testing.assert_close(gpt.up.std(), torch.tensor(0.02), rtol=0.02, atol=0)
    torch.testing.assert_close(gpt.down.std(), torch.tensor(0.02 / 4), rtol=0.02, atol=0)
    ngpt = MLP(ng.ModelConfig(**config))
    for w in (ngpt.up, ngpt.down):
        torch.testing.assert_close(w.double().norm(dim=-1), torch.ones(4096, dtype=torch.float64), atol=1e-6, rtol=0)
        assert w.mean(0).norm() < 0.05  # no preferred direction


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_it_compiles_as_one_graph(activation):
    module, h = make(activation=activation).float(), torch.randn(2, 9, 32)
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(h), module(h))
