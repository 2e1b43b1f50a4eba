"""The whole model: the invariants of the sphere, the equations, documents, batches, the loss, compilation, and bad input."""

import copy
import math

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import ngpt_core as ng
from ngpt_core import sphere
from ngpt_core.nn.residual import Residual
from ngpt_core.nn.scale import Scale
from ngpt_core.nn.unit import normalize_, unit_axes

BOTH = pytest.mark.parametrize("normalized", [True, False], ids=["nGPT", "GPT"])


def make(normalized=True, double=True, name="pico", **change):
    """A small hybrid with all four kinds of blocks, its scales moved away from their start."""
    config = dict(pattern="ME*-ME", ff=96, d_model=48, mamba_heads=4, mamba_head_dim=16, chunk=8) if name == "pico" else {}
    model = ng.LanguageModel(ng.preset(name, normalized, **config | change))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Scale):
                module.weight.mul_(torch.rand_like(module.weight) + 0.5)
    return model.double() if double else model


def tokens(*shape):
    return torch.randint(0, 256, shape)


# ---- the sphere ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["pico", "pico-dense", "micro"])
def test_every_matrix_of_ngpt_starts_with_unit_rows_and_check_agrees(name):
    model = make(name=name, double=False)
    axes = unit_axes(model)
    for key, dim in axes.items():
        norms = model.get_parameter(key).double().norm(dim=dim)
        torch.testing.assert_close(norms, torch.ones_like(norms), atol=1e-6, rtol=0)
        assert dim == -1 and model.get_parameter(key).shape[-1] == model.config.d_model
    conv = {k for k, p in model.named_parameters() if k.endswith("conv_weight")}
    per_expert = {k for k, p in model.named_parameters() if k.endswith("s_u.weight")}
    assert {k for k, p in model.named_parameters() if p.ndim > 1} - conv - per_expert == axes.keys()
    model.check()


def test_the_gpt_baseline_has_no_unit_rows_and_no_scales():
    model = make(False)
    assert unit_axes(model) == {} and not any(isinstance(m, Scale) for m in model.modules())
    model.check()


def test_item_1_ngpt_has_no_norm_layers_and_gpt_has_one_for_each_block_and_one_before_the_head():
    assert not [k for k, _ in make().named_parameters() if "norm" in k]
    norms = [k for k, _ in make(False).named_parameters() if "norm" in k]
    assert len(norms) == 6 + 1 + 2  # blocks, the last, and the gated norm of both Mamba layers


def test_h_is_a_unit_vector_after_every_block():
    model, seen = make(double=False), []
    hooks = [b.register_forward_hook(lambda m, a, out: seen.append(out[0])) for b in [*model.blocks]]
    model(tokens(3, 20))
    assert len(seen) == len(hooks) == 6
    for h in seen:
        torch.testing.assert_close(h.norm(dim=-1), torch.ones(3, 20), atol=1e-6, rtol=0)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**31))
def test_rescaling_any_unit_row_before_norm_changes_nothing(seed):
    torch.manual_seed(0)
    model, x = make(), tokens(1, 12)
    normalize_(model)  # float32 rows, now in float64
    want = model(x)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, dim in unit_axes(model).items():
            w = model.get_parameter(key)
            w.mul_(torch.empty_like(w.sum(dim, keepdim=True)).uniform_(0.1, 10, generator=generator))
    normalize_(model)
    torch.testing.assert_close(model(x), want, atol=1e-10, rtol=0)


def test_item_5_a_block_is_a_step_with_eigen_learning_rates_that_start_at_a_tenth():
    config = ng.preset("pico-dense", alpha_scale=0.02)
    block = ng.LanguageModel(config).double().blocks[0]
    torch.testing.assert_close(block.alpha(), torch.full((64,), 0.1, dtype=torch.float64))
    h = sphere.random(2, 5, 64, dtype=torch.float64)
    with torch.no_grad():
        block.alpha.weight.uniform_(-0.05, 0.05)  # |alpha| is used
    alpha, f = block.alpha().abs().detach().numpy(), reference.norm(block.mixer(h).detach().numpy())
    want = reference.norm(h.numpy() + alpha * (f - h.numpy()))
    np.testing.assert_allclose(block(h)[0].detach().numpy(), want, atol=1e-14)
    free = Residual(ng.preset("pico-dense", abs_alpha=False), block.mixer).double()
    with torch.no_grad():
        free.alpha.weight.fill_(-0.1)
    assert (free(h)[0] - h).abs().max() > 1e-3 and (free(h)[0] * block(h)[0]).sum(-1).max() < 1


def test_gpt_adds_the_block_of_the_normalized_stream():
    block = ng.LanguageModel(ng.preset("pico-dense", False)).double().blocks[1]
    h = torch.randn(2, 5, 64, dtype=torch.float64)
    rms = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(block(h)[0], h + block.mixer(rms))


def test_a_scale_is_used_in_units_of_init_and_learned_in_units_of_scale():
    s = Scale(3, init=0.5, scale=0.1)
    torch.testing.assert_close(s(), torch.full((3,), 0.5))
    s().sum().backward()
    torch.testing.assert_close(s.weight.grad, torch.full((3,), 5.0))


# ---- the equations ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("theta", [None, 1e4])
def test_dense_ngpt_is_the_original_ngpts_equations(theta):
    """A Transformer with SwiGLU against an independent transcription, token by token and head by head. (s_qk is equal on the
    two coordinates of a rotated plane, where the original's order of rotation and scale and ours agree.)"""
    model = make(name="pico-dense", activation="swiglu", n_kv_heads=2, rope_theta=theta, pattern="*-*-*-")
    with torch.no_grad():
        for block in model.blocks[::2]:
            block.mixer.s_qk.weight[8:] = block.mixer.s_qk.weight[:8]
            block.alpha.weight[::3] *= -1
    x = tokens(1, 9)

    def array(t):
        return t.detach().numpy()

    layers = []
    for attention, mlp in zip(model.blocks[::2], model.blocks[1::2]):
        a, m = attention.mixer, mlp.mixer
        A = {f"W{x}": array(getattr(a, f"{x}_proj")) for x in "qkvo"} | {"s_qk": array(a.s_qk())}
        s_u, s_v = array(m.s_u())
        M = dict(up=array(m.up), gate=array(m.gate), down=array(m.down), s_u=s_u, s_v=s_v)
        layers.append((A, np.abs(array(attention.alpha())), M, np.abs(array(mlp.alpha()))))
    head = array(model.head.weight), array(model.head.s_z())
    want = reference.dense_ngpt(x[0].numpy(), array(model.embedding.weight), layers, *head, heads=4, kv_heads=2, theta=theta)
    np.testing.assert_allclose(array(model(x))[0], want, atol=1e-12)


def test_items_7_and_8_logits_are_scaled_by_s_z_and_their_gradient_is_not():
    model, x = make(), tokens(1, 6)
    h, _ = model.hidden(x)
    torch.testing.assert_close(model(x), model.head.s_z() * (h @ model.head.weight.T))
    assert model.config.lgp_q == 1.0
    plain = copy.deepcopy(model)
    with torch.no_grad():
        plain.head.s_z.weight.mul_(1e3)  # softmax becomes one-hot; without LGP the gradient would be 1e3 times larger
    g = []
    for m in (model, plain):
        logits = m(x)
        g.append(torch.autograd.grad(logits, m.embedding.weight, torch.ones_like(logits))[0])
    torch.testing.assert_close(g[0], g[1])


# ---- documents, batches, time ----------------------------------------------------------------------------------------
@BOTH
def test_a_packed_document_gives_the_logits_of_the_document_alone(normalized):
    model, x = make(normalized), tokens(2, 30)
    documents = torch.tensor([[0] * 7 + [1] * 1 + [2] * 22, [5] * 30])
    packed = model(x, documents)
    for row, start, end in [(0, 0, 7), (0, 7, 8), (0, 8, 30), (1, 0, 30)]:
        torch.testing.assert_close(packed[row, start:end], model(x[row : row + 1, start:end])[0], atol=1e-10, rtol=0)


@BOTH
def test_a_batch_gives_the_logits_of_its_rows_one_at_a_time(normalized):
    model, x = make(normalized, double=False), tokens(4, 25)
    torch.testing.assert_close(model(x), torch.cat([model(row[None]) for row in x]), atol=1e-5, rtol=0)


@BOTH
def test_no_token_sees_the_future(normalized):
    model, x = make(normalized), tokens(1, 20)
    y = x.clone()
    y[:, 12:] = tokens(1, 8)
    torch.testing.assert_close(model(x)[:, :12], model(y)[:, :12], atol=1e-10, rtol=0)
    assert (model(x)[:, 12:] - model(y)[:, 12:]).abs().max() > 1e-3


# ---- the loss --------------------------------------------------------------------------------------------------------
@BOTH
def test_the_loss_is_the_mean_cross_entropy_and_balance_is_added_in_training_only(normalized):
    model, x, y = make(normalized), tokens(2, 16), tokens(2, 16)
    y[0, :5] = -100
    want = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
    torch.testing.assert_close(model.eval().loss(x, y), want)
    assert model.stats["balance"] == 0
    loss = model.train().loss(x, y)
    balance = sum(a.balance for a in model.hidden(x)[1]) * 1e-4
    torch.testing.assert_close(loss, want + balance)
    torch.testing.assert_close(model.stats["cross_entropy"] + model.stats["balance"], loss.detach())
    assert balance > 0 and not model.stats["cross_entropy"].requires_grad
    assert [load.sum().item() for load in model.stats["load"]] == [2 * 16 * 2] * 2  # two MoE layers, top-2


def test_parts_of_a_batch_add_up_to_the_whole_in_loss_and_gradient():
    model, x, y = make(), tokens(4, 16), tokens(4, 16)
    y[:, 12:] = -100
    whole = model.loss(x, y)
    want = torch.autograd.grad(whole, list(model.parameters()))
    parts = [model.loss(x[i : i + 2], y[i : i + 2], denominator=4 * 12) for i in (0, 2)]
    got = torch.autograd.grad(sum(parts), list(model.parameters()))
    torch.testing.assert_close(sum(parts), whole)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-6)


def test_a_forward_pass_changes_no_buffer_and_update_router_bias_moves_the_biases():
    model, x = make(), tokens(2, 16)
    before = copy.deepcopy(dict(model.named_buffers()))
    model.train().loss(x, x).backward()
    assert before and all((b == before[k]).all() for k, b in model.named_buffers())
    model.update_router_bias(model.stats["load"])
    moved = {k: (b - before[k]).abs().max().item() for k, b in model.named_buffers()}
    assert all(math.isclose(m, 1e-3) for m in moved.values())
    with pytest.raises(ValueError, match=r"one tensor \[experts\] per MoE layer, .*\[\(8,\), \(8,\)\]; got \[\(8,\)\]"):
        model.update_router_bias(model.stats["load"][:1])
    with pytest.raises(ValueError, match=r"got \[\(3,\), \(3,\)\]"):
        model.update_router_bias([torch.ones(3) for _ in model.stats["load"]])


def test_a_checkpointed_block_counts_its_tokens_once_and_has_the_same_gradients():
    model, x = make(), tokens(2, 16)
    want = torch.autograd.grad(model.loss(x, x), list(model.parameters()))
    load = [a.clone() for a in model.stats["load"]]
    for block in model.blocks:
        block.forward = lambda *args, f=block.forward: checkpoint(f, *args, use_reentrant=False)
    got = torch.autograd.grad(model.loss(x, x), list(model.parameters()))
    assert all((a == b).all() for a, b in zip(model.stats["load"], load))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


@BOTH
def test_gradients_are_finite_and_reach_every_parameter_even_at_zero_vectors(normalized):
    model, x = make(normalized, double=False), tokens(2, 40)
    with torch.no_grad():
        model.embedding.weight[x[0, :3]] = 0
        for block in model.blocks:
            for name in ("o_proj", "down", "out_proj"):
                if hasattr(block.mixer, name):
                    getattr(block.mixer, name).zero_()  # every suggestion of these blocks is the zero vector
    model.loss(x, x).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name


# ---- machines --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("normalized", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["nGPT", "GPT"])
def test_every_block_compiles_as_one_graph_with_its_gradients(normalized):
    model = make(normalized)
    documents = torch.tensor([[0] * 9 + [1] * 11] * 2)
    h = sphere.random(2, 20, 48, dtype=torch.float64).requires_grad_()
    for letter, block in zip("ME*-", model.blocks):
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        (a, _), (b, _) = compiled(h, documents), block(h, documents)
        torch.testing.assert_close(a, b)
        g = torch.randn_like(b)
        for x, y in zip(*(torch.autograd.grad(out, [h, *block.parameters()], g, allow_unused=True) for out in (a, b))):
            assert (x is None) == (y is None), letter
            if x is not None:
                torch.testing.assert_close(x, y)


@pytest.mark.slow
@BOTH
def test_the_whole_loss_compiles_as_one_graph(normalized):
    model, x = make(normalized, double=False), tokens(2, 20)
    compiled = torch.compile(model.loss, fullgraph=True)
    torch.testing.assert_close(compiled(x, x), model.loss(x, x), atol=1e-5, rtol=0)
    assert len(model.stats["load"]) == 2


@BOTH
def test_built_on_the_meta_device_and_filled_later_it_is_the_fresh_model(normalized):
    config = make(normalized).config
    with torch.device("meta"):
        model = ng.LanguageModel(config)
        assert model(torch.zeros(2, 8, dtype=torch.long)).shape == (2, 8, 256)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.init_weights()
    torch.manual_seed(3)
    fresh = ng.LanguageModel(config)
    for (k, a), (_, b) in zip(model.state_dict().items(), fresh.state_dict().items()):
        assert (a == b).all(), k
    model.check()


@BOTH
def test_it_runs_in_bfloat16(normalized):
    model, x = make(normalized, double=False), tokens(2, 20)
    want = model(x)
    half = copy.deepcopy(model).bfloat16()
    got = half(x)
    assert got.dtype == torch.float32  # logits are widened
    assert F.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.99
    if normalized:
        normalize_(half)
        half.check()


# ---- bad input -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.tensor([[0, 256]]),), r"\[0, vocab_size\) = \[0, 256\); got values from 0 to 256"),
        ((torch.tensor([[-1, 3]]),), "from -1 to 3"),
        ((torch.zeros(1, 2),), "integers .*float32"),
        ((torch.zeros(4, dtype=torch.long),), r"\[batch, time\].*\(4,\)"),
        ((torch.zeros(1, 0, dtype=torch.long),), "time >= 1"),
        ((torch.zeros(1, 33, dtype=torch.long),), "at most max_seq_len = 32 tokens; got 33"),
        ((torch.zeros(2, 4, dtype=torch.long), torch.zeros(1, 4).long()), r"documents must have the shape of tokens, \(2, 4\)"),
        ((torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4)), "documents must be integers .*float32"),
        ((torch.zeros(1, 4, dtype=torch.long), [[0, 0, 1, 1]]), "documents must be a tensor .*got list"),
        ((torch.zeros(1, 4, dtype=torch.long), torch.tensor([[0, 1, 0, 0]])), r"not decrease along time; got \[1, 0\] at"),
        (([[0, 1]],), "tokens must be a tensor .*got list"),
    ],
)
def test_bad_tokens_are_value_errors(arguments, words):
    with pytest.raises(ValueError, match=words):
        make(max_seq_len=32)(*arguments)


def test_bad_targets_are_value_errors():
    model = make()
    with pytest.raises(ValueError, match=r"targets must have the shape of tokens, \(1, 4\)"):
        model.loss(tokens(1, 4), tokens(1, 5))
    with pytest.raises(ValueError, match="256"):
        model.loss(tokens(1, 2), torch.tensor([[0, 256]]))
    with pytest.raises(ValueError, match=r"targets must be integers .*float32"):
        model.loss(tokens(1, 2), torch.zeros(1, 2))


@pytest.mark.parametrize("value", [0, 0.0, -3, float("nan"), "5", torch.tensor(0), torch.tensor([4.0, 4.0])])
def test_a_denominator_is_one_positive_number(value):
    with pytest.raises(ValueError, match=r"denominator must be one number > 0, .*; got"):
        make().loss(tokens(1, 4), tokens(1, 4), denominator=value)


@pytest.mark.parametrize("value", [8, 8.0, np.int64(8), torch.tensor(8), torch.tensor([8.0])])
def test_a_denominator_may_be_any_kind_of_number(value):
    model, x = make(), tokens(2, 4)
    loss = model.loss(x, x, denominator=value)
    assert loss.shape == ()
    torch.testing.assert_close(loss, model.loss(x, x))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64])
def test_tokens_targets_and_documents_may_be_integers_of_any_width(dtype):
    model, x, y = make(), tokens(2, 12), tokens(2, 12)
    y[0, 0] = 156  # what -100 is in a byte: a target like any other
    documents = torch.tensor([[0] * 5 + [1] * 7] * 2)
    assert torch.equal(model(x.to(dtype), documents.to(dtype)), model(x, documents))
    assert torch.equal(model.loss(x.to(dtype), y.to(dtype), denominator=24), model.loss(x, y, denominator=24))
    narrow = x % 128
    assert torch.equal(model(narrow.to(torch.int8)), model(narrow))
    with pytest.raises(ValueError, match="got values from"):
        model(torch.full((1, 2), -1, dtype=torch.int8))


@pytest.mark.parametrize("what", ["pico", None, {"d_model": 64}])
def test_a_model_is_made_of_a_config(what):
    with pytest.raises(ValueError, match=r"LanguageModel takes a ModelConfig.*got"):
        ng.LanguageModel(what)


@pytest.mark.parametrize("length", [1, 5, 16, None])
def test_check_probes_no_more_tokens_than_the_model_takes(length):
    make(max_seq_len=length, double=False).check()


def test_check_names_what_is_broken():
    model = make(double=False)
    with torch.no_grad():
        model.blocks[1].mixer.experts.up[3, 2] *= 1.0001
    with pytest.raises(ValueError, match=r"blocks\.1\.mixer\.experts\.up has left the sphere.*1\.00e-04"):
        model.check()
    normalize_(model)
    model.check()
    with torch.no_grad():
        model.head.s_z.weight[7] = float("nan")
    with pytest.raises(ValueError, match=r"head\.s_z\.weight .*not finite"):
        model.check()


def test_check_looks_at_the_routers_biases_and_needs_values():
    model = make(double=False)
    model.blocks[1].mixer.router.bias[2] = float("nan")
    with pytest.raises(ValueError, match=r"blocks\.1\.mixer\.router\.bias .*not finite"):
        model.check()
    with torch.device("meta"), pytest.raises(ValueError, match="on the meta device and has no values"):
        make(double=False).check()


def test_on_the_meta_device_there_is_a_loss_without_a_value():
    with torch.device("meta"):
        model, x = ng.LanguageModel(ng.preset("30B")), torch.zeros(1, 8, dtype=torch.long)
        loss = model.loss(x, x)
    assert loss.is_meta and loss.shape == () and loss.dtype == torch.float32


def test_a_batch_without_rows_has_a_loss_of_zero():
    model, none = make(), torch.zeros(0, 5, dtype=torch.long)
    loss = model.train().loss(none, none, denominator=10)
    loss.backward()
    assert loss == 0 and model.stats["balance"] == 0 and all(p.grad.abs().max() == 0 for p in model.parameters())


def test_loads_may_come_as_one_tensor():
    model, other = make(), make()
    load = torch.arange(16.0).reshape(2, 8)
    model.update_router_bias(load)
    other.update_router_bias(list(load))
    for a, b in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b) and a.abs().max() > 0


def test_check_sees_a_hidden_state_that_leaves_the_sphere():
    model = make(double=False)
    f = model.blocks[3].forward
    model.blocks[3].forward = lambda *args: (f(*args)[0] * 1.01, None)
    with pytest.raises(ValueError, match=r"h after block 3 \(-\) has left the sphere"):
        model.check()
