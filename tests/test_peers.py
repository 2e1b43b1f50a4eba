"""What others wrote computes the same: transformers' and mamba-ssm's scans, step, norm and kernels. And one that does not:
the rotary embedding of the original nGPT code.

mamba-ssm runs in a separate process, which is this file run as a program. It imports a compiled extension (replaced by an empty
module), its kernels run in Triton's interpreter, and inside this process transformers would find it and pass CPU tensors to GPU
kernels.
"""

import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from ngpt_core.nn.attention import rotate
from ngpt_core.nn.mamba2 import Mamba2, group_rms_norm
from ngpt_core.nn.ssd import ssd_chunked, ssd_kernels, ssd_recurrent

INSTALL = "MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-build-isolation --no-deps mamba-ssm triton"
needs_mamba_ssm = pytest.mark.skipif(
    find_spec("mamba_ssm") is None or find_spec("triton") is None, reason=f"needs mamba-ssm (no GPU): {INSTALL}"
)
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason='needs: pip install "ngpt-core[hf]"')


def arguments(b=2, T=48, H=4, P=16, G=2, N=16):
    """x, dt, A, B, C, D, initial state and packed documents, in float32."""
    torch.manual_seed(1)
    x, B, C, D, S = (torch.randn(*s) for s in ((b, T, H, P), (b, T, G, N), (b, T, G, N), (H,), (b, H, P, N)))
    documents = torch.tensor([0] * 10 + [1] * 6 + [2] * T, dtype=torch.int32)[:T].expand(b, T)
    return x, 0.5 * torch.rand(b, T, H), -0.1 - torch.rand(H), B, C, D, S, documents


def assert_close(actual, expected, tolerance=1e-5):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance * max(1.0, float(e.abs().max())))


def with_gradients(scan, inputs):
    """[y, final state, gradients of a fixed mixture of both with respect to the inputs], detached."""
    inputs = [v.clone().requires_grad_() for v in inputs]
    y, S = scan(*inputs)
    mixture = (y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum() + (S * torch.linspace(2, -1, S.numel()).view_as(S)).sum()
    return [v.detach() for v in (y, S, *torch.autograd.grad(mixture, inputs))]


# ---- transformers ----------------------------------------------------------------------------------------------------------


@needs_transformers
@pytest.mark.parametrize("T", [32, 45])
def test_the_scan_is_that_of_transformers(T):
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    *inputs, S, _ = arguments(T=T)
    theirs = lambda x, dt, A, B, C, D, S: mamba2_chunk_scan(  # noqa: E731
        x, dt, A, B, C, chunk_size=16, D=D, initial_states=S, return_final_states=True
    )
    ours = lambda *a: ssd_chunked(*a, chunk=16)  # noqa: E731
    assert_close(with_gradients(ours, [*inputs, S]), with_gradients(theirs, [*inputs, S]))


@needs_transformers
def test_the_block_is_that_of_transformers_mamba2():
    """Its Mamba2 normalizes over the whole inner width: our GPT block with one group. (NemotronH, by groups: test_hf.py.)"""
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    from ngpt_core.config import ModelConfig

    sizes = dict(num_heads=6, head_dim=8, state_size=16, n_groups=1, conv_kernel=4, chunk_size=16)
    theirs = Mamba2Mixer(Mamba2Config(hidden_size=24, expand=2, **sizes), layer_idx=0)
    sizes = dict(mamba_heads=6, mamba_head_dim=8, state=16, groups=1, chunk=16)
    ours = Mamba2(ModelConfig(vocab_size=2, d_model=24, pattern="M", normalized=False, **sizes))
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.1 * torch.randn_like(p))
        ours.in_proj.copy_(theirs.in_proj.weight)
        ours.out_proj.copy_(theirs.out_proj.weight.mT)
        ours.conv_weight.copy_(theirs.conv1d.weight[:, 0].mT)
        ours.conv_bias.copy_(theirs.conv1d.bias)
        ours.norm_weight.copy_(theirs.norm.weight)
        for name in ("A_log", "D", "dt_bias"):
            getattr(ours, name).copy_(getattr(theirs, name))
        h = torch.randn(2, 45, 24)
        assert_close([ours(h)], [theirs(h)])


# ---- mamba-ssm -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mamba_ssm(tmp_path_factory):
    """task -> what mamba-ssm computes, in its own process."""

    def run(task):
        out = tmp_path_factory.mktemp("mamba_ssm") / f"{task}.pt"
        folder = Path(__file__).parent
        path = os.pathsep.join([str(folder.parent), str(folder), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        done = subprocess.run([sys.executable, __file__, task, str(out)], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return torch.load(out)

    return run


@pytest.fixture(scope="module")
def references(mamba_ssm):
    return mamba_ssm("references")


@needs_mamba_ssm
def test_the_scan_is_mamba_ssms_minimal_listing(references):
    x, dt, A, B, C, _, S, _ = arguments()
    assert_close(ssd_chunked(x, dt, A, B, C, initial_state=S, chunk=16), references["minimal"])


@needs_mamba_ssm
def test_the_scan_is_mamba_1s_reference_with_one_decay_per_head(references):
    x, dt, A, B, C, D, _, _ = arguments()
    assert_close(ssd_chunked(x, dt, A, B, C, D, chunk=16), references["selective scan"])


@needs_mamba_ssm
def test_a_single_step_is_mamba_ssms_state_update(references):
    x, dt, A, B, C, D, S, _ = arguments(T=1)
    assert_close(ssd_recurrent(x, dt, A, B, C, D, S), references["step"])


@needs_mamba_ssm
def test_the_gated_norm_is_mamba_ssms_with_the_gate_first(references):
    y, z, weight = gated()
    assert_close([group_rms_norm(y * torch.nn.functional.silu(z), weight, 4, 1e-5)], [references["norm"]])


@pytest.mark.slow
@needs_mamba_ssm
def test_the_scan_is_that_of_mamba_ssms_kernels_forward_and_backward(mamba_ssm):
    """In Triton's interpreter, through ``ssd_kernels``: plain, with an initial state, with packed documents, with both, and
    as one node of a compiled graph."""
    results = mamba_ssm("kernels")
    assert len(results) == 5
    for name, kernels in results.items():
        assert_close(with_gradients(*case(name, lambda *a: ssd_chunked(*a, chunk=16))), kernels, 2e-5)


def case(name, scan):
    """A scan of differentiable inputs, and these inputs, for one way to call it."""
    *inputs, S, documents = arguments(b=1, T=40)
    packed = documents if "documents" in name else None
    if "state" in name:
        return (lambda *a: scan(*a, packed)), [*inputs, S]
    return (lambda *a: scan(*a, None, packed)), inputs


def gated():
    torch.manual_seed(2)
    return torch.randn(2, 5, 32), torch.randn(2, 5, 32), torch.randn(32)


def compute_references():
    from mamba_ssm.modules.ssd_minimal import ssd_minimal_discrete
    from mamba_ssm.ops.selective_scan_interface import selective_scan_ref
    from mamba_ssm.ops.triton.layernorm_gated import rms_norm_ref
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update_ref

    x, dt, A, B, C, D, S, _ = arguments()
    (b, T, H, P), (G, N) = x.shape, B.shape[2:]
    heads = [part.repeat_interleave(H // G, 2) for part in (B, C)]
    minimal = ssd_minimal_discrete(x * dt[..., None], A * dt, *heads, block_len=16, initial_states=S[:, None])
    # Mamba-1 has a decay for every channel and state: here all those of a head are the same.
    channels = [v.reshape(b, T, H * P).mT for v in (x, dt[..., None].expand_as(x))]
    A_all, D_all = A.repeat_interleave(P)[:, None].expand(H * P, N), D.repeat_interleave(P)
    y, last = selective_scan_ref(*channels, A_all, *(v.permute(0, 2, 3, 1) for v in (B, C)), D_all, return_last_state=True)
    x1, dt1, A1, B1, C1, D1, S1, _ = arguments(T=1)
    step = selective_state_update_ref(
        S1, x1[:, 0], dt1[:, 0, :, None].expand(b, H, P), A1[:, None, None].expand(H, P, N), B1[:, 0], C1[:, 0],
        D1[:, None].expand(H, P),
    )  # fmt: skip
    gate_first = {"group_size": 8, "norm_before_gate": False}
    return {
        "minimal": minimal,
        "selective scan": (y.mT.reshape(b, T, H, P), last.reshape(b, H, P, N)),
        "step": (step[:, None], S1),  # it has changed the state in place
        "norm": rms_norm_ref(*(gated()[i] for i in (0, 2)), None, z=gated()[1], eps=1e-5, **gate_first),
    }


def compute_kernels():
    from contextlib import nullcontext
    from importlib import import_module
    from types import SimpleNamespace

    from triton.runtime.autotuner import Autotuner

    torch.cuda.device = lambda *_: nullcontext()
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=1)
    for name in ("ssd_combined", "ssd_chunk_scan", "ssd_chunk_state", "ssd_bmm", "ssd_state_passing"):
        for kernel in vars(import_module(f"mamba_ssm.ops.triton.{name}")).values():
            if isinstance(kernel, Autotuner):
                kernel.configs = kernel.configs[:1]  # nothing to time, no device to time it on
    compiled = torch.compile(ssd_kernels, fullgraph=True, backend="aot_eager")
    forms = dict.fromkeys(("plain", "state", "documents", "state and documents"), ssd_kernels)
    forms["compiled, state and documents"] = compiled
    return {name: with_gradients(*case(name, lambda *a, f=form: f(*a, chunk=16))) for name, form in forms.items()}


# ---- the original nGPT code's rotary embedding -----------------------------------------------------------------------------


def original_rotary(x):
    """What github.com/NVIDIA/ngpt (model.py, commit ed19eb2) does to a head's vectors x [T, d], coordinate by coordinate.

    Its table alternates sin and cos along its columns but is read as if sines were the first half and cosines the second;
    and of a rotation's (x0 cos - x1 sin, x1 cos + x0 sin) only (-x1 cos, x0 sin) is left.
    """
    T, d = x.shape
    table, out = np.zeros((T, d)), np.zeros((T, d))
    for t in range(T):
        for i in range(d // 2):
            frequency = 10000 ** (-2 * i / d)
            table[t, 2 * i], table[t, 2 * i + 1] = math.sin(t * frequency), math.cos(t * frequency)
        for j in range(d // 2):
            sine, cosine = table[t, j], table[t, d // 2 + j]
            out[t, 2 * j], out[t, 2 * j + 1] = -x[t, 2 * j + 1] * cosine, x[t, 2 * j] * sine
    return out


def test_the_original_rotary_embedding_is_not_a_rotation_and_ours_is():
    x = np.random.default_rng(0).normal(size=(20, 16))
    norms = np.linalg.norm(x, axis=-1)
    ours = rotate(torch.from_numpy(x), theta=1e4).numpy()
    np.testing.assert_allclose(np.linalg.norm(ours, axis=-1), norms, rtol=1e-12)
    np.testing.assert_allclose(ours[0], x[0])  # position 0 is left alone
    theirs = original_rotary(x)
    ratio = np.linalg.norm(theirs, axis=-1) / norms
    assert ratio.max() < 0.95 and ratio.min() < 0.75  # every vector shrinks, each by another factor
    assert np.count_nonzero(theirs[0]) == 8  # at position 0 half of the coordinates vanish


def test_its_dot_products_depend_on_more_than_the_distance_of_two_positions():
    """Even after Norm, which the original applies next: the same q and k at the same distance, at every position."""
    q, k = (np.tile(v, (40, 1)) for v in np.random.default_rng(1).normal(size=(2, 16)))

    def cosines(rotary):  # of q at t with k at t - 3
        a, b = (v / np.linalg.norm(v, axis=-1, keepdims=True) for v in (rotary(q)[3:], rotary(k)[:-3]))
        return (a * b).sum(-1)

    assert np.ptp(cosines(lambda v: rotate(torch.from_numpy(v), theta=1e4).numpy())) < 1e-12
    assert np.ptp(cosines(original_rotary)) > 0.2


if __name__ == "__main__":
    sys.modules["selective_scan_cuda"] = type(sys)("selective_scan_cuda")
    torch.set_num_threads(1)
    torch.save({"references": compute_references, "kernels": compute_kernels}[sys.argv[1]](), sys.argv[2])
