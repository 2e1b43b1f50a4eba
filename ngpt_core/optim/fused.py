"""Which tensors can take the whole step in one pass, and how? The fast path of GatedAdamW.

The same step as ``algorithm.update``, in the same order (tangent projection, SMGC, moments, gate and update, PMEN, ASC, Norm),
but each number is read from memory once and written once, and no second tensor is made. On the CPU it is a C++ kernel that
this machine's compiler builds at the first use (``fused_cpu``), on CUDA a Triton kernel (``fused_triton``). Neither is needed:
``usable`` says, as a sentence, why a tensor must take the readable path instead.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from .pmen import PMEN
from .smgc import SMGC

__all__ = ["finite", "fused_step", "usable"]


@cache
def _say_once(reason: str) -> str:
    logging.getLogger("ngpt_core").warning("GatedAdamW takes its plain path, which is slower: %s", reason)
    return reason


def usable(p: Tensor, grad: Tensor, unit_dim: int | None) -> str | None:
    """None if ``fused_step`` takes this tensor; otherwise the reason why not, a sentence.

    A missing compiler (or Triton) is also logged, once: everything else about a tensor is as the user chose it.
    """
    if torch.compiler.is_compiling():
        return "torch.compile traces the plain path instead."
    if type(p) not in (Tensor, torch.nn.Parameter) or type(grad) is not Tensor:
        return f"the kernels work on plain tensors, and this is a {type(p).__name__} with a gradient {type(grad).__name__}."
    if p.dtype not in (torch.float32, torch.bfloat16) or grad.dtype != p.dtype:
        return f"the kernels work in float32 and bfloat16, the gradient as the parameter; here {p.dtype} and {grad.dtype}."
    if not (p.is_contiguous() and grad.is_contiguous()):
        return "parameter and gradient must lie contiguously in memory (call .contiguous())."
    if unit_dim is not None and unit_dim % p.ndim != p.ndim - 1:
        return f"the kernels want the vectors along the last dimension, and unit_dim={unit_dim} of {p.ndim} is another."
    if p.device != grad.device:
        return f"the parameter is on {p.device} and its gradient on {grad.device}."
    if p.device.type == "cpu":
        from . import fused_cpu

        library = fused_cpu.load()
        return _say_once(library) if isinstance(library, str) else None
    if p.device.type == "cuda":
        try:
            from . import fused_triton
        except ImportError:
            return _say_once("Triton is not installed (pip install triton; Linux only).")
        return fused_triton.usable(p, unit_dim)
    return f"there are kernels for the CPU and for CUDA, and this tensor is on {p.device}."


def finite(x: Tensor, limit: float = math.inf) -> bool:
    """Whether every magnitude in x is below ``limit``, neither nan nor inf, in one reading.

    By the CPU kernel, once a step has loaded it (nothing is compiled for this alone). Otherwise by the smallest and the largest
    number: nan anywhere makes both nan, and is below nothing.
    """
    plain = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16) and x.is_contiguous()
    if plain and not torch.compiler.is_compiling():
        from . import fused_cpu

        if fused_cpu.load.cache_info().currsize and not isinstance(fused_cpu.load(), str):
            return fused_cpu.finite(x, limit)
    return not x.numel() or all(abs(float(end)) < limit for end in torch.aminmax(x))


def fused_step(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[int | Tensor],
    *, lr: float | Tensor, beta1: float, beta2: float, eps_gate: float, eps_num: float, a: float,
    weight_decay_factor: float | Tensor, unit: bool, tangent: bool, smgc: SMGC | None, pmen: PMEN | None,
    pmen_keys: Sequence[int], index_offsets: Sequence[int], cap: float | Tensor | None, maximize: bool,
    smgc_active: bool | None = None, pmen_active: bool | None = None, mask: Tensor | None = None,
) -> None:  # fmt: skip
    """One step of one group, in place, for tensors that are ``usable``.

    ``steps`` are t, counted from 1 (this step included). ``weight_decay_factor`` multiplies theta: lr lambda, or eta_t lambda.
    ``unit``: the last dimension holds unit vectors, whole ones. ``pmen_keys``, ``index_offsets``: ``pmen.key`` of each tensor,
    and the position of its first coordinate in the full tensor. ``smgc_active``, ``pmen_active``: None: by the counter.
    On CUDA t, lr, the factor and cap may be tensors there and nothing waits for the host; where ``mask`` (one bool there) is
    False nothing changes.
    """
    smgc = None if smgc_active is False else smgc
    pmen = None if pmen_active is False or not unit else pmen
    cap = cap if unit else None
    kinds = defaultdict(list)
    for i, p in enumerate(params):
        if p.numel():
            kinds[p.device, p.dtype].append(i)
    for (device, _), members in kinds.items():
        if device.type == "cpu":
            from .fused_cpu import step
        else:
            from .fused_triton import step
        moments = [(_dense(exp_avgs[i], params[i]), _dense(exp_avg_sqs[i], params[i])) for i in members]
        exp_avg, exp_avg_sq = zip(*moments)
        step(
            [params[i] for i in members], [grads[i] for i in members], exp_avg, exp_avg_sq, [steps[i] for i in members],
            lr=lr, decay=weight_decay_factor, beta1=beta1, beta2=beta2, eps_gate=eps_gate, eps_num=eps_num, a=a, unit=unit,
            tangent=tangent and unit, smgc=smgc, pmen=pmen, keys=[pmen_keys[i] for i in members],
            offsets=[index_offsets[i] for i in members], cap=cap, maximize=maximize, mask=mask,
        )  # fmt: skip
        for i, (m, v) in zip(members, moments):
            for state, new in ((exp_avgs[i], m), (exp_avg_sqs[i], v)):
                if state is not new:
                    state.copy_(new)


def _dense(moment: Tensor, p: Tensor) -> Tensor:
    """The moment as the kernels read it: a loaded state may lie in another order, or be in another precision."""
    if moment.shape != p.shape or moment.device != p.device:
        raise ValueError(
            f"GatedAdamW: a moment must have its parameter's shape and device, {tuple(p.shape)} on {p.device}, but the state "
            f"holds {tuple(moment.shape)} on {moment.device}. Load a state_dict of the same model."
        )
    return moment if moment.dtype == torch.float32 and moment.is_contiguous() else moment.float().contiguous()
