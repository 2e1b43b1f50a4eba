"""The readable path goes through large tensors piece by piece: what a step needs beside the state stays below one parameter
tensor's worth, and not one bit comes out differently."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import ngpt_core as ng
from ngpt_core.optim import Diagnostics, paths

WHOLE = dict(smgc=ng.SMGC(R=4.0, start=2), pmen=ng.PMEN(tau=1e-9), cap=0.02, fused=False)


def gradient(shape, t, dtype=torch.float32):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(t))
    g.movedim(0, -1)[..., 0] = 0  # PMEN's
    return g.to(dtype)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 100), st.data())
def test_pieces_fill_the_tensor_once_and_never_cut_a_vector(shape, most, data):
    dim = data.draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    count, longest = torch.zeros(shape, dtype=torch.int64), 1 if dim is None else shape[dim]
    for region in paths.regions(shape, dim, most):
        piece = count if region is None else count[region]
        piece += 1
        assert dim is None or piece.shape[dim] == shape[dim]
        assert piece.numel() <= max(most, longest)
    assert (count == 1).all()


def test_pieces_are_as_large_as_they_may_be():
    expected = [((8, 128, 512), -1, 8 * 4), ((4, 64, 64), -1, 1), ((5, 640, 64), 1, 5 * 3), ((1000, 256), -1, 16)]
    for shape, dim, pieces in expected:
        assert len(list(paths.regions(shape, dim, 1 << 14))) == pieces


SHAPES = [((70, 128), -1), ((128, 70), 0), ((9, 1001), -1), ((9000,), None)]
SHAPES += [((3, 40, 64), -1), ((3, 64, 40), 1), ((64, 3, 40), 0)]


@pytest.mark.parametrize("shape, dim", SHAPES, ids=str)
@pytest.mark.parametrize("changes", [dict(), dict(a=0.7, weight_decay=0.1), dict(foreach=True), dict(capturable=True)], ids=str)
def test_piece_by_piece_not_one_bit_differs(shape, dim, changes, monkeypatch):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        whole, pieces = (train(shape, monkeypatch, least, dtype, unit_dim=dim, **changes) for least in (1 << 30, 1000))
        assert all(map(torch.equal, whole, pieces))


def test_rows_of_odd_lengths_are_cut_where_the_processors_vectors_begin(monkeypatch):
    """Powers are rounded differently in a vector instruction and in what is left over: it must be at the same places."""
    settings = dict(a=0.3, unit_dim=-1, smgc=ng.SMGC(R=3.0, start=1), pmen=ng.PMEN(profile="smooth", tau=1e-3, b=1.7))
    for shape in ((700, 37), (400, 129)):
        whole, pieces = (train(shape, monkeypatch, least, **settings) for least in (1 << 30, 9000))
        assert all(map(torch.equal, whole, pieces))


def train(shape, monkeypatch, least, dtype=torch.float32, probe=None, **settings):
    """The parameters and states of two tensors after some steps in pieces of about ``least`` coordinates."""
    monkeypatch.setattr(paths, "_LEAST", least)
    params = [torch.nn.Parameter(gradient(shape, 50 + i).add(0.1).to(dtype)) for i in range(2)]
    optimizer = ng.GatedAdamW(params, lr=0.01, **WHOLE | settings)
    optimizer.diagnostics = probe
    for t in range(4):
        for i, p in enumerate(params):
            p.grad = gradient(shape, 10 * t + i, dtype)
        optimizer.step()
    return [x for p in params for x in (p.detach(), *optimizer.state[p].values())]


@pytest.mark.parametrize("shape, dim", [((128, 70), 0), ((9000,), None)])
def test_piece_by_piece_the_diagnostics_report_the_same(shape, dim, monkeypatch):
    whole, pieces = Diagnostics(), Diagnostics()
    for least, probe in ((1 << 30, whole), (1000, pieces)):
        train(shape, monkeypatch, least, probe=probe, unit_dim=dim)
    assert len(whole.records) == len(pieces.records) == 4
    for one, other in zip(whole.records, pieces.records):
        for exact in ("histogram", "name", "zero_gradient_per_d"):
            assert one.pop(exact) == other.pop(exact)
        assert one == pytest.approx(other, rel=1e-5)


def allocated_above(work) -> int:
    """Bytes that torch's allocator held at its highest point during ``work``, above what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = sorted((e.start_ns(), e.nbytes()) for e in seen.profiler.kineto_results.events() if e.name() == "[memory]")
    return max(accumulate((size for _, size in events), initial=0))


def test_the_allocator_is_seen_at_its_highest_point():
    x = torch.zeros(1 << 20)
    assert 8 << 20 <= allocated_above(lambda: (x + 1) * (x + 2)) < 13 << 20


@pytest.mark.parametrize("shape, dim", [((1024, 768), -1), ((768, 1024), 0), ((8, 128, 512), -1), ((1 << 20,), None)], ids=str)
@pytest.mark.parametrize("changes", [dict(), dict(a=0.7, foreach=True), dict(nonfinite="skip", capturable=True)], ids=str)
def test_a_readable_step_needs_less_than_one_more_parameter_tensor(shape, dim, changes):
    params = [torch.nn.Parameter(torch.randn(shape)) for _ in range(2)]
    optimizer = ng.GatedAdamW(params, lr=0.01, unit_dim=dim, **WHOLE | changes)
    for look_on_the_device in (False, True):
        optimizer._watch.defer = look_on_the_device
        for p in params:
            p.grad = torch.randn(shape)
        optimizer.step()
        assert allocated_above(optimizer.step) < params[0].nbytes
