"""The chunked scan is the recurrence: values, gradients, states, packed documents, precision."""

import sys
import types
from itertools import pairwise

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ngpt_core.nn.ssd import segments, ssd, ssd_chunked, ssd_kernels, ssd_recurrent


def inputs(b=2, T=37, H=4, P=3, G=2, N=5, dtype=torch.float64, documents=False, state=False, seed=0, grad=False):
    """Random arguments of a scan, in order: x, dt, A, B, C, D, initial_state, documents."""
    torch.manual_seed(seed)
    x, B, C, D = torch.randn(b, T, H, P), torch.randn(b, T, G, N), torch.randn(b, T, G, N), torch.randn(H)
    dt, A = torch.rand(b, T, H), -1 - 4 * torch.rand(H)
    S = torch.randn(b, H, P, N) if state else None
    made = [v if v is None else v.to(dtype).requires_grad_(grad) for v in (x, dt, A, B, C, D, S)]
    return [*made, torch.randint(0, 4, (b, T)).sort(1).values if documents else None]


def gradients(scan, args):
    """Gradients of a fixed mixture of y and the final state with respect to every tensor of the arguments."""
    y, S = scan(*args)
    mixture = (y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum() + (S * torch.linspace(2, -1, S.numel()).view_as(S)).sum()
    return torch.autograd.grad(mixture, [v for v in args[:-1] if v is not None])


def assert_close(actual, expected, tolerance):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance * max(1.0, float(e.detach().abs().max())))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("state", [False, True])
def test_both_forms_equal_the_loop_over_heads_and_tokens(documents, state):
    args = inputs(documents=documents, state=state)
    y, S = map(torch.from_numpy, reference.state_space_scan(*(None if v is None else v.numpy() for v in args)))
    assert_close(ssd_recurrent(*args), (y, S), 1e-12)
    assert_close(ssd_chunked(*args, chunk=8), (y, S), 1e-12)
    assert_close(ssd_chunked(*args, chunk=np.int32(8)), (y, S), 1e-12)


@settings(max_examples=25, deadline=None)
@given(
    T=st.integers(1, 40),
    chunk=st.integers(1, 48),
    G=st.integers(1, 3),
    r=st.integers(1, 3),
    documents=st.booleans(),
    state=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_of_the_chunked_form_are_those_of_the_recurrence(T, chunk, G, r, documents, state, seed):
    args = inputs(T=T, H=G * r, G=G, documents=documents, state=state, seed=seed, grad=True)
    fast = lambda *a: ssd_chunked(*a, chunk=chunk)  # noqa: E731
    assert_close(fast(*args), ssd_recurrent(*args), 1e-11)
    assert_close(gradients(fast, args), gradients(ssd_recurrent, args), 1e-10)


def test_gradients_of_the_recurrence_are_right_by_finite_differences():
    args = inputs(b=1, T=5, H=2, P=2, G=1, N=2, state=True, grad=True)
    assert torch.autograd.gradcheck(ssd_recurrent, args[:-1])


@pytest.mark.parametrize("scan", [ssd_recurrent, lambda *a: ssd_chunked(*a, chunk=16)])
def test_a_packed_document_is_read_as_if_it_were_alone(scan):
    x, dt, A, B, C, D, *_ = inputs(b=1, T=50)
    cuts = [0, 3, 16, 17, 41, 50]  # borders inside a chunk, on its edge, and one token long
    documents = torch.repeat_interleave(torch.arange(5), torch.tensor(cuts).diff())[None]
    y, S = scan(x, dt, A, B, C, D, None, documents)
    for start, end in pairwise(cuts):
        part = slice(start, end)
        alone, last = scan(x[:, part], dt[:, part], A, B[:, part], C[:, part], D)
        torch.testing.assert_close(y[:, part], alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(S, last, rtol=1e-12, atol=1e-12)


def test_nothing_at_all_flows_back_across_a_document_border():
    args = inputs(T=40, state=True, grad=True)
    args[-1] = (torch.arange(40) >= 21).long().expand(2, 40)
    y, S = ssd_chunked(*args, chunk=16)
    x, dt, _, B, C, _, initial, _ = args
    *exact, of_dt = torch.autograd.grad(y[:, 21:].sum() + S.sum(), (x, B, C, initial, dt))
    for g in exact[:3]:
        assert torch.count_nonzero(g[:, :21]) == 0 and torch.count_nonzero(g[:, 21:]) > 0
    assert torch.count_nonzero(exact[3]) == 0
    assert of_dt[:, :21].abs().max() < 1e-14 * of_dt.abs().max()  # a sum of terms that cancel, up to rounding


def test_only_changes_of_the_document_id_matter():
    args = inputs(documents=True)
    returning = [*args[:-1], args[-1] % 2 + 100]  # ids come back later: still another document
    assert_close(ssd_chunked(*args, chunk=8), ssd_chunked(*returning, chunk=8), 0.0)
    assert segments(torch.tensor([[7, 7, 9, 9, 7]])).tolist() == [[0, 0, 1, 1, 2]]


def test_the_final_state_continues_the_sequence():
    x, dt, A, B, C, D, S, _ = inputs(T=45, state=True)
    whole = ssd_chunked(x, dt, A, B, C, D, S, chunk=16)
    y1, middle = ssd_chunked(x[:, :19], dt[:, :19], A, B[:, :19], C[:, :19], D, S, chunk=16)
    y2, end = ssd_chunked(x[:, 19:], dt[:, 19:], A, B[:, 19:], C[:, 19:], D, middle, chunk=16)
    assert_close((torch.cat([y1, y2], 1), end), whole, 1e-12)


@pytest.mark.parametrize("dt", [0.0, 1e-8, 50.0, 1e4])
@pytest.mark.parametrize("documents", [False, True])
def test_extreme_decays_stay_finite_in_float32_forward_and_backward(dt, documents):
    args = inputs(T=40, dtype=torch.float32, documents=documents, state=True, grad=True)
    args[1] = torch.full_like(args[1], dt).requires_grad_()
    fast = lambda *a: ssd_chunked(*a, chunk=16)  # noqa: E731
    assert_close(fast(*args), ssd_recurrent(*args), 1e-5)
    for g, e in zip(gradients(fast, args), gradients(ssd_recurrent, args)):
        assert torch.isfinite(g).all()
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-4 * max(1.0, float(e.abs().max())))


def test_float32_is_close_to_float64_at_the_sizes_of_a_model():
    args = inputs(b=1, T=512, H=4, P=16, G=1, N=32, dtype=torch.float32)
    args[1] = 0.1 * args[1]
    exact = ssd_recurrent(*(v if v is None else v.double() for v in args))
    y, S = ssd_chunked(*args, chunk=128)
    assert (y - exact[0]).abs().max() < 2e-5 * exact[0].abs().max()
    assert (S - exact[1]).abs().max() < 2e-5 * exact[1].abs().max()


def test_half_precision_keeps_its_state_in_float32():
    args = [v if v is None else v.bfloat16() for v in inputs(T=64)]
    y, S = ssd_chunked(*args, chunk=16)
    exact = ssd_recurrent(*(v if v is None else v.double() for v in args))
    assert y.dtype == torch.bfloat16 and S.dtype == torch.float32
    assert (S - exact[1]).abs().max() < 1e-5 * exact[1].abs().max()
    torch.testing.assert_close(y.double(), exact[0], rtol=2**-8, atol=1e-4)


@pytest.mark.slow
def test_it_compiles_to_one_graph_for_several_lengths():
    compiled = torch.compile(ssd_chunked, fullgraph=True)
    for T, documents in ((24, True), (37, False)):
        args = inputs(T=T, documents=documents, state=True, grad=True)
        scan = lambda *a: compiled(*a, chunk=8)  # noqa: E731
        assert_close(scan(*args), ssd_recurrent(*args), 1e-11)
        assert_close(gradients(scan, args), gradients(ssd_recurrent, args), 1e-10)


def test_the_model_takes_the_recurrence_for_one_token_and_chunks_for_many(monkeypatch):
    seen = []
    for name in ("ssd_recurrent", "ssd_chunked"):
        monkeypatch.setattr(sys.modules["ngpt_core.nn.ssd"], name, lambda *a, name=name: seen.append(name))
    ssd(*inputs(T=1))
    ssd(*inputs(T=2))
    assert seen == ["ssd_recurrent", "ssd_chunked"]


def test_the_kernels_are_called_with_their_own_conventions(monkeypatch):
    """mamba-ssm wants int32 sequence numbers that start at 0 where an initial state is given; it answers in our order."""
    seen = {}

    def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, **kw):
        seen.update(kw, chunk_size=chunk_size)
        return ssd_recurrent(x, dt, A, B, C, kw["D"], kw["initial_states"], kw["seq_idx"])

    module = types.ModuleType("ssd_combined")
    module.mamba_chunk_scan_combined = mamba_chunk_scan_combined
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.triton.ssd_combined", module)
    for parent in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    args = inputs(documents=True, state=True)
    args[-1] = args[-1] + 5
    assert_close(ssd_kernels(*args, chunk=64), ssd_recurrent(*args), 0.0)
    assert seen["seq_idx"].dtype == torch.int32 and seen["seq_idx"][:, 0].tolist() == [0, 0]
    assert seen["chunk_size"] == 64 and seen["return_final_states"] is True


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dt": torch.zeros(2, 4, 4)}, "dt must have shape"),
        ({"A": torch.zeros(3)}, "A must have shape"),
        ({"C": torch.zeros(2, 5, 2, 6)}, "C must have shape"),
        ({"initial_state": torch.zeros(2, 4, 5, 3)}, "initial_state must have shape"),
        ({"documents": torch.zeros(2, 6)}, "documents must have shape"),
        ({"D": torch.zeros(3)}, "D must have shape"),
    ],
)
def test_wrong_shapes_are_named(change, says):
    names = ("x", "dt", "A", "B", "C", "D", "initial_state", "documents")
    with pytest.raises(ValueError, match=says):
        ssd_chunked(**(dict(zip(names, inputs(T=5))) | change))


def test_autocast_changes_nothing_of_the_scan():
    args = inputs(dtype=torch.float32, documents=True, state=True)
    for scan in (ssd_recurrent, ssd_chunked, ssd):
        plain = scan(*args)
        with torch.autocast("cpu", torch.bfloat16):
            cast = scan(*args)
        assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))
