"""CUDA's kernels as plain torch on the CPU, so that the branches that call them run here, gradients included.

``with cuda_twins():`` takes CUDA's branches on CPU tensors, and gives every operator that calls a CUDA kernel an implementation
for the CPU, its plain form. This checks our side of the call: layouts, offsets, which gradients come back, and that a compiler
sees one graph. What a kernel computes is checked by ``ngpt selftest --device cuda``.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F

import ngpt_core.nn.ssd  # noqa: F401  # it registers operators
from ngpt_core.nn.mamba2 import causal_conv
from ngpt_core.nn.ssd import ssd_chunked
from ngpt_core.rehearsal import rehearse


def gradients(function, inputs, grads):
    """Of those inputs that are tensors of numbers, in order. In a thread: an operator's body runs below autograd."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_gradients, function, inputs, grads).result()


def _gradients(function, inputs, grads):
    leaves = [x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    return torch.autograd.grad(function(*leaves), wanted, grads)


def attend(q, k, v, offsets, causal, scale):
    """Each document alone: q [tokens, H, d_k], k and v [tokens, G, d_k]."""
    parts = []
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
        one = (x[start:end].transpose(0, 1) for x in (q, k, v))
        parts.append(F.scaled_dot_product_attention(*one, is_causal=causal, scale=scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(parts)


def varlen(q, k, v, offsets, offsets_k, longest, longest_k, causal=False, scale=None, window=None, enable_gqa=False, *_):
    lengths = torch.diff(offsets)
    assert torch.equal(offsets, offsets_k) and offsets[0] == 0 and offsets[-1] == len(q) and bool((lengths > 0).all())
    assert offsets.dtype == torch.int32 and int(lengths.max()) <= longest == longest_k < 2 * int(lengths.max())
    assert causal and list(window) == [-1, 0] and (enable_gqa or q.shape[1] == k.shape[1])
    sums = q.new_zeros(q.shape[1], len(q), dtype=torch.float32)
    out = attend(q, k, v, offsets, causal, scale)
    return out.contiguous(), sums, torch.zeros(2, dtype=torch.uint64)


def varlen_backward(g, q, k, v, out, sums, offsets, offsets_k, longest, longest_k, causal, rng, scale=None, window=None):
    return gradients(lambda q, k, v: attend(q, k, v, offsets, causal, scale), (q, k, v), g)


def scan(x, dt, A, B, C, D, initial, seq_idx, chunk):
    y, S = ssd_chunked(x, dt, A, B, C, D, initial, seq_idx, chunk)
    return y.contiguous(), S.contiguous()


def scan_backward(dy, dS, y, x, dt, A, B, C, D, initial, seq_idx, chunk):
    found = gradients(lambda *t: scan(*t, seq_idx, chunk), (x, dt, A, B, C, D, initial), (dy, dS))
    return [g.contiguous() for g in found]


def conv(x, weight, bias, seq_idx):
    return causal_conv(x, weight, bias, None, seq_idx)


def conv_backward(g, x, weight, bias, seq_idx):
    return gradients(lambda *t: conv(*t, seq_idx), (x, weight, bias), g)


KERNELS = {
    "torch_attn::_varlen_attn": varlen, "torch_attn::_varlen_attn_backward": varlen_backward,
    "ngpt_core::ssd_kernels": scan, "ngpt_core::ssd_kernels_backward": scan_backward,
    "ngpt_core::conv_kernel": conv, "ngpt_core::conv_kernel_backward": conv_backward,
}  # fmt: skip


@contextlib.contextmanager
def cuda_twins():
    """Inside, tensors of the CPU take the branches of CUDA, and its kernels are the functions above."""
    import torch.nn.attention.varlen  # torch 2.12

    libraries = []
    for name, function in KERNELS.items():
        namespace, _, operator = name.partition("::")
        libraries.append(torch.library.Library(namespace, "IMPL"))
        libraries[-1].impl(operator, function, "CPU")
    try:
        with rehearse("cuda"):
            yield
    finally:
        for library in libraries:
            library._destroy()
