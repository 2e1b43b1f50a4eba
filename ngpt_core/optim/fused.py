"""Which tensors can take the whole step in one pass, and how? The fast path of GatedAdamW.

The same step as ``algorithm.update``, in the same order (tangent projection, SMGC, moments, gate and update, PMEN, ASC, Norm),
but each number is read from memory once and written once, and no second tensor is made. On the CPU it is a C++ kernel that
this machine's compiler builds at the first use (``fused_cpu``), on CUDA a Triton kernel (``fused_triton``). Both are optional:
``usable`` returns the reason, as a sentence, why a tensor must take the readable path instead.
"""

import logging
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from ..rehearsal import on_gpu, rehearsing
from . import fused_cpu
from .algorithm import Rule, Slot
from .launches import launches

__all__ = ["below", "finite", "fused_step", "usable"]


@cache
def _log_once(reason: str) -> str:
    logging.getLogger("ngpt_core").warning("GatedAdamW takes its plain path, which is slower: %s", reason)
    return reason


def usable(p: Tensor, grad: Tensor, unit_dim: int | None) -> str | None:
    """None if ``fused_step`` takes this tensor; otherwise the reason why not, a sentence.

    A missing compiler (or Triton) is also logged, once. The other reasons follow from the user's own choices.
    """
    if not rehearsing() and (type(p) not in (Tensor, torch.nn.Parameter) or type(grad) is not Tensor):
        return f"the kernels work on plain tensors, and this is a {type(p).__name__} with a gradient {type(grad).__name__}."
    if p.dtype not in (torch.float32, torch.bfloat16) or grad.dtype != p.dtype:
        return f"the kernels work in float32 and bfloat16, with gradients of the same dtype; here {p.dtype} and {grad.dtype}."
    if not (p.is_contiguous() and grad.is_contiguous()):
        return "parameter and gradient must be contiguous in memory (call .contiguous())."
    if unit_dim is not None and unit_dim % p.ndim != p.ndim - 1:
        return f"the kernels need the vectors along the last dimension, not along unit_dim={unit_dim} of {p.ndim} dimensions."
    if p.device != grad.device:
        return f"the parameter is on {p.device} and its gradient on {grad.device}."
    if rehearsing():
        return None if on_gpu(p) else "the CPU's kernel needs memory, which a rehearsal does not have."
    if p.device.type == "cpu":
        library = fused_cpu.load()
        return _log_once(library) if isinstance(library, str) else None
    if p.device.type == "cuda":
        try:
            from . import fused_triton
        except ImportError:
            return _log_once("Triton is not installed (pip install triton; Linux only).")
        return fused_triton.usable(p, unit_dim)
    return f"there are kernels for the CPU and for CUDA, and this tensor is on {p.device}."


def below(x: Tensor, limit: float) -> bool:
    """Whether every magnitude in x is below ``limit``: nan anywhere makes both ends nan, which is below nothing."""
    return not x.numel() or all(abs(float(end)) < limit for end in torch.aminmax(x))


def finite(slots: list[Slot]) -> bool:
    """Whether all gradients are below their limits, each read once. One call for all that the CPU kernel already knows."""
    known = [slot for slot in slots if slot.job is not None]
    return (not known or fused_cpu.finite(known)) and all(below(slot.g, slot.limit) for slot in slots if slot.job is None)


def fused_step(slots: list[Slot], rule: Rule, mask: Tensor | None = None) -> None:
    """One step of one group, in place, for ``usable`` tensors on one device.

    The last dimension holds whole unit vectors, unless ``rule.dim`` is None. On CUDA t, lr, decay and cap may be tensors there
    and nothing waits for the host; where ``mask`` (one bool there) is False, nothing changes.
    """
    dense = [slot if slot.job is not None else _dense(slot) for slot in slots]
    if rehearsing():
        for one in launches(dense, dense[0].w.device):
            w, g, m, v = ([getattr(slot, name) for slot in one.slots] for name in ("w", "g", "m", "v"))
            launch(one.table, w, g, m, v)
    elif slots[0].w.device.type == "cpu":
        fused_cpu.step(dense, rule)
    else:
        from . import fused_triton

        fused_triton.step(dense, rule, mask)
    for slot, copy in zip(slots, dense):
        if copy is not slot:
            slot.m.copy_(copy.m)
            slot.v.copy_(copy.v)


@torch.library.custom_op("ngpt_core::optimizer_kernel", mutates_args=("w", "m", "v"))
def launch(table: Tensor, w: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor]) -> None:
    """What a launch of the CUDA kernel reads and writes, for a rehearsal."""
    raise NotImplementedError("only a rehearsal calls this: training launches fused_triton's kernels.")


@launch.register_fake
def _(table: Tensor, w: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor]) -> None:
    pass


def _dense(slot: Slot) -> Slot:
    """The slot as the kernels read it: the moments of a loaded state may be in another memory order or precision."""
    moments = []
    for moment in (slot.m, slot.v):
        if moment.shape != slot.w.shape or moment.device != slot.w.device:
            raise ValueError(
                f"GatedAdamW: a moment must have its parameter's shape and device, {tuple(slot.w.shape)} on {slot.w.device}; "
                f"the state holds {tuple(moment.shape)} on {moment.device}. Load a state_dict of the same model."
            )
        moments.append(moment if moment.dtype == torch.float32 and moment.is_contiguous() else moment.float().contiguous())
    m, v = moments
    return slot if m is slot.m and v is slot.v else replace(slot, m=m, v=v)
