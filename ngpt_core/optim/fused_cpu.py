"""How does the optimizer call its CPU kernel, ``fused_cpu.cpp``? Through ctypes; a slot keeps its pointers between steps."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .. import native
from .algorithm import Rule, Slot
from .pmen import PMEN
from .smgc import SMGC

_SOURCE = Path(__file__).with_suffix(".cpp")

i64, i32 = ctypes.c_int64, ctypes.c_int32


def _fields(**types: str) -> list[Any]:
    return [(name, getattr(ctypes, f"c_{kind}")) for kind, names in types.items() for name in names.split()]


class _Rule(ctypes.Structure):  # the same two lists as in fused_cpu.cpp
    _fields_ = _fields(
        double="lr decay beta1 beta2 eps_gate eps_num a cap R s_min strength tau b",
        int64="smgc_start pmen_start pmen_every",
        int32="unit tangent maximize smooth by_row transport",
    )


class _Job(ctypes.Structure):
    _fields_ = _fields(
        void_p="w g m v", int64="rows d t", uint64="offset", float="limit eps_gate", uint32="key", int32="bf16"
    ) + _fields(void_p="seal changed off broken", float="tolerance")


class Sealed(ctypes.Structure):
    """A tensor under seal (train/seals.py), float32 [rows, d]."""

    _fields_ = _fields(void_p="x", int64="rows d") + _fields(void_p="seal changed off broken", float="tolerance", int32="each")


_WAYS = (None, "project", "parallel")  # Rule.transport, by number
_NO_SMGC, _NO_PMEN = SMGC(start=1 << 62), PMEN(strength=0.0)  # what "off" is to the kernel


@cache
def load() -> ctypes.CDLL | str:
    """The library, or a sentence that says why there is none. Computed once per process."""
    library = native.library(_SOURCE)
    if not isinstance(library, str):
        library.ngpt_step.argtypes, library.ngpt_step.restype = (ctypes.POINTER(_Rule), ctypes.c_void_p, i64, i32), None
        library.ngpt_finite.argtypes, library.ngpt_finite.restype = (ctypes.c_void_p, i64, i32), i32
        library.ngpt_seals.argtypes, library.ngpt_seals.restype = (ctypes.c_void_p, i64, i32, i32), None
    return library


def _job(slot: Slot, unit: bool) -> _Job:
    """The slot as the kernel reads it: what does not change between steps. Gradient and t are written at each step."""
    w, d = slot.w, slot.w.shape[-1] if unit else 1
    job = _Job(w.data_ptr(), 0, slot.m.data_ptr(), slot.v.data_ptr(), w.numel() // max(d, 1), d, 0, slot.offset, slot.limit,
               0.0, slot.key, w.dtype == torch.bfloat16, None, None, None, None, 0.0)  # fmt: skip
    job.address = ctypes.addressof(job)  # while the slot keeps the job, this is where it is
    return job


def finite(slots: list[Slot]) -> bool:
    """Whether every magnitude in contiguous float32 or bfloat16 gradients is below its limit, and so neither nan nor inf."""
    jobs = []
    for slot in slots:
        slot.job.g = slot.g.data_ptr()
        jobs.append(slot.job.address)
    count = len(jobs)
    return bool(load().ngpt_finite((ctypes.c_void_p * count)(*jobs), count, torch.get_num_threads()))  # type: ignore[union-attr]  # a slot has a job once a step has loaded it


def seals(tensors: ctypes.Array, compare: bool) -> None:
    """Compare the seals of an array of ``Sealed``, and the norms of their rows, or take the seals."""
    load().ngpt_seals(tensors, len(tensors), compare, torch.get_num_threads())  # type: ignore[union-attr]  # the caller has asked ``load``


def step(slots: list[Slot], rule: Rule) -> None:
    """One step of one group, in place: ``fused.fused_step`` for tensors on the CPU. A masked step does not come here."""
    smgc, pmen, unit = rule.smgc or _NO_SMGC, rule.pmen or _NO_PMEN, rule.dim is not None
    own = slots[0].eps_gate is not None  # each tensor has its threshold
    numbers = _Rule(
        rule.lr, rule.decay, rule.beta1, rule.beta2, 0.0 if own else rule.eps_gate, rule.eps_num, rule.a,
        -1.0 if rule.cap is None else rule.cap, smgc.R, smgc.s_min, pmen.strength, pmen.tau, pmen.b,
        int(smgc.start), int(pmen.start), int(pmen.every),
        unit, unit and rule.tangent, rule.maximize, pmen.profile == "smooth", pmen.reference == "row",
        _WAYS.index(rule.transport),
    )  # fmt: skip
    jobs = []
    for slot in slots:
        job = slot.job
        if job is None:
            job = slot.job = _job(slot, unit)
        job.g, job.t, job.seal, job.off = slot.g.data_ptr(), int(slot.t), None, None
        if (seal := slot.seal) is not None and unit:
            job.seal, job.changed, job.off, job.broken = seal.address, seal.changed, seal.off, seal.broken
            job.tolerance, seal.taken = seal.tolerance, True
        if own:
            job.eps_gate = float(slot.eps_gate)  # type: ignore[arg-type]  # all slots of a group have one, or none
        jobs.append(job.address)
    count = len(jobs)
    load().ngpt_step(numbers, (ctypes.c_void_p * count)(*jobs), count, torch.get_num_threads())  # type: ignore[union-attr]  # ``usable`` was asked
