"""Where does the CPU kernel come from? ``fused_cpu.cpp``, compiled on this machine the first time it is needed.

The library is in the user's cache directory, under a name that depends on the source, the flags, the compiler and this
processor: another compiler, another machine with the same home directory or a new version of the source gets a separate file.
Several processes may race: each compiles to a separate file, and the last rename wins with the same content.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..files import cache_folder, new_file
from .algorithm import Rule, Slot
from .pmen import PMEN
from .smgc import SMGC

_SOURCE = Path(__file__).with_suffix(".cpp")
# Not -ffast-math: linked into a library it makes the whole process flush denormals, and NaN must stay NaN.
_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC", "-pthread")
_TUNE = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler knows

i64, i32 = ctypes.c_int64, ctypes.c_int32


def _fields(**types: str) -> list[Any]:
    return [(name, getattr(ctypes, f"c_{kind}")) for kind, names in types.items() for name in names.split()]


class _Rule(ctypes.Structure):  # the same two lists as in fused_cpu.cpp
    _fields_ = _fields(
        double="lr decay beta1 beta2 eps_gate eps_num a cap R s_min strength tau b",
        int64="smgc_start pmen_start pmen_every",
        int32="unit tangent maximize smooth by_row",
    )


class _Job(ctypes.Structure):
    _fields_ = _fields(void_p="w g m v", int64="rows d t", uint64="offset", float="limit", uint32="key", int32="bf16")


_NO_SMGC, _NO_PMEN = SMGC(start=1 << 62), PMEN(strength=0.0)  # what "off" is to the kernel


def compiler() -> str | None:
    """The C++ compiler of this machine: $CXX, or the first of c++, g++, clang++ on the PATH."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def kernel_folder() -> Path:
    """``kernels`` in the user's cache, or a private temporary folder where that cannot be written."""
    try:
        folder = cache_folder() / "kernels"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError):  # ValueError: there is no home folder
        return Path(tempfile.mkdtemp(prefix="ngpt-"))


def _run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def build(folder: Path | None = None) -> Path:
    """The compiled library, built now if it is not in the cache. RuntimeError: a sentence that says what is missing."""
    cxx = compiler()
    if cxx is None:
        raise RuntimeError(
            "there is no C++ compiler (c++, g++ or clang++) on this machine. Install one (Debian, Ubuntu: apt install g++; "
            "conda: conda install cxx-compiler; macOS: xcode-select --install) or set CXX to its path."
        )
    for tune in _TUNE:
        about = _run(cxx, *tune, "-dM", "-E", "-x", "c++", os.devnull)  # its version and the instructions it will use
        if about.returncode == 0:
            break
    name = hashlib.sha256("\0".join((_SOURCE.read_text(), *_FLAGS, *tune, about.stdout)).encode()).hexdigest()[:20]
    library = (folder or kernel_folder()) / f"fused_cpu-{name}.so"
    if not library.exists():
        with new_file(library) as mine:
            done = _run(cxx, *_FLAGS, *tune, str(_SOURCE), "-o", str(mine))
            if done.returncode != 0:
                message = (done.stderr.strip() or "no message").splitlines()[0]
                raise RuntimeError(f"the C++ compiler {cxx} could not build the kernel: {message}")
    return library


@cache
def load() -> ctypes.CDLL | str:
    """The library, or a sentence that says why there is none. Computed once per process."""
    try:
        library = ctypes.CDLL(str(build()))
    except (RuntimeError, OSError) as error:
        return str(error)
    library.ngpt_step.argtypes, library.ngpt_step.restype = (ctypes.POINTER(_Rule), ctypes.c_void_p, i64, i32), None
    library.ngpt_finite.argtypes, library.ngpt_finite.restype = (ctypes.c_void_p, i64, i32), i32
    return library


def _job(slot: Slot, unit: bool) -> _Job:
    """The slot as the kernel reads it: what does not change between steps. Gradient and t are written at each step."""
    w, d = slot.w, slot.w.shape[-1] if unit else 1
    job = _Job(w.data_ptr(), 0, slot.m.data_ptr(), slot.v.data_ptr(), w.numel() // max(d, 1), d, 0, slot.offset, slot.limit,
               slot.key, w.dtype == torch.bfloat16)  # fmt: skip
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


def step(slots: list[Slot], rule: Rule) -> None:
    """One step of one group, in place: ``fused.fused_step`` for tensors on the CPU. A masked step does not come here."""
    smgc, pmen, unit = rule.smgc or _NO_SMGC, rule.pmen or _NO_PMEN, rule.dim is not None
    numbers = _Rule(
        rule.lr, rule.decay, rule.beta1, rule.beta2, rule.eps_gate, rule.eps_num, rule.a,
        -1.0 if rule.cap is None else rule.cap, smgc.R, smgc.s_min, pmen.strength, pmen.tau, pmen.b,
        int(smgc.start), int(pmen.start), int(pmen.every),
        unit, unit and rule.tangent, rule.maximize, pmen.profile == "smooth", pmen.reference == "row",
    )  # fmt: skip
    jobs = []
    for slot in slots:
        job = slot.job
        if job is None:
            job = slot.job = _job(slot, unit)
        job.g, job.t = slot.g.data_ptr(), int(slot.t)
        jobs.append(job.address)
    count = len(jobs)
    load().ngpt_step(numbers, (ctypes.c_void_p * count)(*jobs), count, torch.get_num_threads())  # type: ignore[union-attr]  # ``usable`` was asked
