"""What a GPU runs, here: every kind of block with CUDA's branches as one graph, and the residual step in float32."""

import importlib.util
import warnings

import pytest
import torch
from cuda_twins import cuda_twins
from torch.utils._python_dispatch import TorchDispatchMode

import ngpt_core as ng
from ngpt_core import sphere
from ngpt_core.nn import attention, ssd
from ngpt_core.nn.documents import pack
from ngpt_core.nn.residual import Residual
from ngpt_core.train import recompute
from ngpt_core.train.recompute import recomputed

PATTERN = "M*E-"


@pytest.fixture(scope="module", params=[True, False], ids=["nGPT", "GPT"])
def model(request):
    torch.manual_seed(1)
    return ng.LanguageModel(ng.preset("pico", normalized=request.param, pattern=PATTERN, ff=64))


def run(forward, block, h, documents):
    out, aux = forward(h, documents, None)
    loss = out.square().sum() + out[..., 0].sum() + (0 if aux is None else aux.balance)
    return out.detach(), *torch.autograd.grad(loss, [h, *block.parameters()], allow_unused=True)


@pytest.mark.parametrize(
    ("at", "how"),
    [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (0, "full"), (1, "selective"), (2, "selective")],
    ids=["mamba", "attention", "moe", "mlp", "mamba, recomputed", "attention, selective", "moe, selective"],
)
def test_every_kind_of_block_with_cudas_branches_is_one_graph(model, at, how, monkeypatch):
    """fullgraph=True fails at the first graph break. Packed documents; forward, backward, and what is computed again."""
    monkeypatch.setattr(attention, "_takes_varlen", lambda *_: True)  # in float32 too, so that the results can be compared
    if how != "none" and not model.config.normalized:
        pytest.skip("recomputing does not depend on the residual")
    block, documents = model.blocks[at], torch.tensor([[0] * 9 + [1] * 23, [0] * 30 + [2, 3]])
    h = sphere.random(2, 32, model.config.d_model).requires_grad_()
    wanted = run(block.forward, block, h, documents)
    torch._dynamo.reset()
    with cuda_twins(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about recomputing in a graph
        forward = block.forward if how == "none" else recomputed(block.forward, how)
        found = run(torch.compile(forward, fullgraph=True, backend="aot_eager"), block, h, pack(documents))
    for x, y in zip(found, wanted, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4 * float(y.abs().max()) + 1e-7)


@pytest.mark.filterwarnings("ignore:.* is not installed")
@pytest.mark.parametrize(
    ("at", "installed"), [(0, True), (0, False), (1, True)], ids=["mamba", "mamba, no kernels", "attention"]
)
def test_what_a_block_asks_about_its_gpu_does_not_cut_the_graph(at, installed, monkeypatch):
    """A rehearsal takes kernels for granted. A real run looks for packages and asks for the card's capability."""
    torch.manual_seed(1)
    block = ng.LanguageModel(ng.preset("pico", pattern=PATTERN, ff=64)).bfloat16().blocks[at]
    h = sphere.random(2, 64, block.mixer.config.d_model).bfloat16()
    documents, find = torch.tensor([[0] * 9 + [1] * 55, [0] * 30 + [2] * 34]), importlib.util.find_spec
    there = lambda name, *_: ("found" if installed else None) if name in ("mamba_ssm", "causal_conv1d") else find(name, *_)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", there)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for module in (ssd, attention):
        monkeypatch.setattr(module, "rehearsing", lambda: False)
    seen = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    ssd._missing.cache_clear()
    try:
        with cuda_twins(), torch.no_grad():
            packed = pack(documents)
            found = torch.compile(block.forward, fullgraph=True, backend=backend)(h, packed, None)[0]
            torch.testing.assert_close(found, block.forward(h, packed, None)[0])
    finally:
        ssd._missing.cache_clear()
    kernels = {0: ("conv_kernel", "ssd_kernels"), 1: ("_varlen_attn",)}[at]
    assert all(any(kernel in target for target in seen) == installed for kernel in kernels)


def kept(forward, block, h, documents):
    """Bytes that a forward pass keeps for the backward pass, besides its input and the weights."""
    found, given = {}, {x.untyped_storage()._cdata for x in (h, *block.parameters())}

    def pack(x):
        found[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        forward(h, documents, None)
    return sum(size for key, size in found.items() if key not in given)


class Products(TorchDispatchMode):
    """Adds up the bytes of the results that selective checkpointing keeps."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if recompute._is_product(func):
            self.size += sum(x.nbytes for x in (out if isinstance(out, tuple) else [out]))
        return out


@pytest.mark.parametrize(
    ("at", "how"),
    [(0, "selective"), (1, "selective"), (2, "selective"), (3, "full")],
    ids=["mamba, selective", "attention, selective", "moe, selective", "mlp, recomputed"],
)
def test_compiled_blocks_keep_no_more_than_their_checkpointing_says(model, at, how, monkeypatch):
    """With the partitioner that a GPU's compiler uses. (It kept everything once, since torch's modes saw only products.)"""
    if not model.config.normalized:
        pytest.skip("recomputing does not depend on the residual")
    if how == "selective" and torch.__version__ < "2.13":
        pytest.skip("torch 2.12 keeps everything: train/parallel.py warns")
    monkeypatch.setattr(attention, "_takes_varlen", lambda *_: True)
    block, documents = model.blocks[at], torch.tensor([[0] * 9 + [1] * 55, [0] * 30 + [2] * 34])
    h = sphere.random(2, 64, model.config.d_model).requires_grad_()
    torch._dynamo.reset()
    with cuda_twins(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = pack(documents)
        with Products() as products:
            block.forward(h, packed, None)
        compiled = torch.compile(recomputed(block.forward, how), fullgraph=True, backend="aot_eager_decomp_partition")
        found, most = kept(compiled, block, h, packed), 1024 + (products.size if how == "selective" else 0)
        assert found <= most < 0.75 * kept(block.forward, block, h, packed)


@pytest.mark.parametrize("at", [1, 2], ids=["attention", "moe"])
def test_blocks_with_float8_products_are_one_graph(at):
    pytest.importorskip("torchao")
    from ngpt_core.train.float8 import Float8Products, in_float8

    torch.manual_seed(1)
    model = ng.LanguageModel(ng.preset("pico", pattern=PATTERN, ff=64)).bfloat16()
    block, mode = model.blocks[at], Float8Products(emulate=True)
    h = sphere.random(2, 32, model.config.d_model).bfloat16().requires_grad_()
    forward = in_float8(block.forward, mode)
    wanted = run(forward, block, h, None)
    torch._dynamo.reset()
    assert mode.count >= 2
    forward = torch.compile(forward, fullgraph=True, backend="aot_eager")
    found = run(forward, block, h, None)
    with torch._dynamo.config.patch(error_on_recompile=True):  # nothing in the code depends on how often it has run
        run(forward, block, h, None)
    for x, y in zip(found, wanted, strict=True):
        if x is not None:
            torch.testing.assert_close(x.float(), y.float(), rtol=2e-2, atol=2e-2 * float(y.abs().max()))


# ---- the precision of the residual step --------------------------------------------------------------------------------
def test_a_step_in_half_precision_is_computed_in_float32_and_rounded_once():
    h, f = (sphere.random(64, 256).bfloat16() for _ in range(2))
    alpha = torch.rand(256)
    exact = sphere.step(h.double(), f.double(), alpha.double())
    found = sphere.step(h, f, alpha)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= 1.01 * 2**-8 * exact.abs()).all()


def drift(stream, inside):
    """By how much 52 steps turn the state away from the exact one, in mrad, at d = 2688."""
    draw = torch.Generator().manual_seed(0)
    h = exact = sphere.random(4, 2688, generator=draw, dtype=torch.float64)
    h = h.to(stream)
    for _ in range(52):
        f, alpha = sphere.random(4, 2688, generator=draw).bfloat16(), torch.full((2688,), 0.1)
        exact = sphere.step(exact, sphere.unit(f.double()), alpha.double())
        if inside == torch.float32:
            h = sphere.step(h.float(), sphere.unit(f.float()), alpha).to(stream)
        else:
            f, alpha = sphere.unit(f), alpha.bfloat16()
            h = sphere.unit(h + alpha * (f - h))
    return float(sphere.angle(exact, sphere.unit(h.double()) - exact).mean()) * 1e3


def test_what_the_precision_of_the_stream_costs_in_angle():
    before, inside, wide = (
        drift(*precision)
        for precision in (
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float32),
        )
    )
    assert wide < 0.05 < 1 < inside < 0.75 * before


class Half(torch.nn.Module):
    """A block that computes in bfloat16, as all do in training on a GPU."""

    def __init__(self, d):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(d, d).bfloat16())

    def forward(self, h, documents=None, cache=None):
        assert h.dtype == torch.bfloat16
        return h @ self.weight


@pytest.mark.parametrize("normalized", [True, False])
def test_a_stream_in_float32_is_not_rounded_between_blocks(normalized):
    config = ng.preset("pico", normalized=normalized)
    block = Residual(config, Half(config.d_model))
    block.stream, block.products = torch.float32, torch.bfloat16
    h = sphere.random(2, 5, config.d_model).requires_grad_()
    out, _ = block(h)
    assert out.dtype == torch.float32 and not torch.equal(out, out.bfloat16().float())
    [g] = torch.autograd.grad(out.square().sum() + out[..., 0].sum(), h)
    assert g.dtype == torch.float32 and not torch.equal(g, g.bfloat16().float())
    assert block(h.bfloat16())[0].dtype == torch.float32  # the embedding's output
