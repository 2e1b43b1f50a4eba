"""Is our state-space scan the one that others wrote? transformers' torch path; mamba-ssm's listing, step and kernels."""

import importlib.util
import os
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from ngpt_core.nn.ssd import ssd_chunked, ssd_recurrent

HOW = "mamba-ssm is not installed; without CUDA: MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-build-isolation --no-deps mamba-ssm, and pip install triton"  # fmt: skip # noqa: E501
needs_mamba = pytest.mark.skipif(
    importlib.util.find_spec("mamba_ssm") is None or importlib.util.find_spec("triton") is None, reason=HOW
)
b, T, H, P, G, N, CHUNK = 2, 32, 4, 8, 2, 16, 8


@pytest.fixture
def mamba_ssm(monkeypatch):
    """mamba-ssm imports its compiled CUDA extension at the top; none of what is used here needs it."""
    for name in ("selective_scan_cuda", "causal_conv1d_cuda"):
        if importlib.util.find_spec(name) is None:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))


def inputs(dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(b, T, H, P, generator=draw, dtype=dtype)
    dt = F.softplus(torch.randn(b, T, H, generator=draw, dtype=dtype) - 2)
    A = -torch.exp(torch.rand(H, generator=draw, dtype=dtype) * 2)
    B, C = (torch.randn(b, T, G, N, generator=draw, dtype=dtype) for _ in range(2))
    return x, dt, A, B, C, torch.randn(H, generator=draw, dtype=dtype), torch.randn(b, H, P, N, generator=draw, dtype=dtype)


def test_the_chunked_scan_is_transformers_mamba2():
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    x, dt, A, B, C, D, state = inputs(torch.float32)
    theirs, last = mamba2.mamba2_chunk_scan(x, dt, A, B, C, CHUNK, D=D, initial_states=state, return_final_states=True)
    ours, final = ssd_chunked(x, dt, A, B, C, D, initial_state=state, chunk=CHUNK)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(final, last, rtol=1e-4, atol=1e-5)


@needs_mamba
def test_the_chunked_scan_is_mamba_ssms_minimal_listing(mamba_ssm):
    from mamba_ssm.modules.ssd_minimal import ssd_minimal_discrete

    x, dt, A, B, C, _, state = inputs()
    repeat = [part.repeat_interleave(H // G, 2) for part in (B, C)]  # the listing has no groups
    theirs, last = ssd_minimal_discrete(x * dt[..., None], A * dt, *repeat, CHUNK, initial_states=state[:, None])
    for form in (ssd_recurrent, ssd_chunked):
        ours, final = form(x, dt, A, B, C, initial_state=state)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(final, last, rtol=1e-9, atol=1e-10)


@needs_mamba
def test_the_recurrence_is_mamba_ssms_reference_step(mamba_ssm):
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update_ref

    x, dt, A, B, C, D, state = inputs()
    ours, final = ssd_recurrent(x, dt, A, B, C, D, initial_state=state)
    wide = lambda v: v[..., None].expand(*v.shape, P)  # noqa: E731  (one number a head, for each of its channels)
    for t in range(T):
        y = selective_state_update_ref(
            state, x[:, t], wide(dt[:, t]), wide(A)[..., None].expand(H, P, N), B[:, t], C[:, t], wide(D)
        )
        torch.testing.assert_close(ours[:, t], y, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(final, state, rtol=1e-9, atol=1e-10)


KERNELS = """
import sys, types, contextlib
for name in ("selective_scan_cuda", "causal_conv1d_cuda"):
    sys.modules.setdefault(name, types.ModuleType(name))
import torch
torch.cuda.device = lambda *a, **k: contextlib.nullcontext()
gpu = types.SimpleNamespace(multi_processor_count=1, warp_size=32, major=9, minor=0)
torch.cuda.get_device_properties = lambda *a, **k: gpu
import mamba_ssm.ops.triton.ssd_combined as combined, mamba_ssm.ops.triton as kernels, pkgutil, importlib
from triton.runtime.autotuner import Autotuner
for info in pkgutil.iter_modules(kernels.__path__):
    for value in vars(importlib.import_module(f"{kernels.__name__}.{info.name}")).values():
        if isinstance(value, Autotuner):
            value.configs = value.configs[-1:]  # one: there is nothing to tune in an interpreter
sys.path.insert(0, sys.argv[1])
import test_peers
from ngpt_core.nn.ssd import ssd_chunked
x, dt, A, B, C, D, state = test_peers.inputs(torch.float32)
leaves = [v.clone().requires_grad_() for v in (x, dt, A, B, C, D)]
ours, final = ssd_chunked(*leaves, initial_state=state, chunk=16)
weight = torch.linspace(-1, 1, ours.numel()).view_as(ours)
grads = torch.autograd.grad((ours * weight).sum(), leaves)
leaves = [v.clone().requires_grad_() for v in (x, dt, A, B, C, D)]
theirs, last = combined.mamba_chunk_scan_combined(*leaves[:5], 16, D=leaves[5], initial_states=state, return_final_states=True)
theirs_grads = torch.autograd.grad((theirs * weight).sum(), leaves)
for a, b in zip((ours, final, *grads), (theirs, last, *theirs_grads)):
    error = float((a - b).abs().max() / b.abs().max())
    assert error < 1e-3, error
print("kernels agree")
"""


@pytest.mark.slow
@needs_mamba
def test_the_chunked_scan_is_mamba_ssms_triton_kernels_in_the_interpreter(tmp_path):
    script = tmp_path / "kernels.py"
    script.write_text(KERNELS)
    here = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run(
        [sys.executable, script, here], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=900
    )
    assert "kernels agree" in done.stdout, done.stderr[-2000:]
