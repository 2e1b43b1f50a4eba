"""Where does the CPU kernel come from? ``fused_cpu.cpp``, compiled on this machine the first time it is needed.

The library lies in the user's cache directory under a name that depends on the source, the flags and what the compiler says
about itself and this processor: another compiler, another machine on the same home directory or a new version of the source
gets its own. Several processes may race: each compiles to a file of its own, and the last rename wins with the same content.
"""

import ctypes
import hashlib
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import cache_folder
from .pmen import PMEN
from .smgc import SMGC

_SOURCE = Path(__file__).with_suffix(".cpp")
# Not -ffast-math: linked into a library it makes the whole process flush denormals, and NaN must stay NaN.
_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC", "-pthread")
_TUNE = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler knows

f64, i64, i32 = ctypes.c_double, ctypes.c_int64, ctypes.c_int32


class _Rule(ctypes.Structure):  # the same two lists as in fused_cpu.cpp
    _fields_ = [(name, f64) for name in ("lr", "decay", "beta1", "beta2", "eps_gate", "eps_num", "a", "cap", "tau", "b")] + [
        (name, i32) for name in ("unit", "tangent", "maximize", "bf16", "smooth")
    ]


class _Job(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("w", "g", "m", "v")]
        + [("rows", i64), ("d", i64), ("offset", ctypes.c_uint64)]
        + [(name, f64) for name in ("bc1", "bc2", "clip", "floor", "noise")]
        + [("key", ctypes.c_uint32), ("t", ctypes.c_uint32)]
    )


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
    except (OSError, ValueError):  # no home folder at all is the second
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
        handle, mine = tempfile.mkstemp(dir=library.parent, suffix=".so")
        os.close(handle)
        done = _run(cxx, *_FLAGS, *tune, str(_SOURCE), "-o", mine)
        if done.returncode != 0:
            os.unlink(mine)
            message = (done.stderr.strip() or "no message").splitlines()[0]
            raise RuntimeError(f"the C++ compiler {cxx} could not build the kernel: {message}")
        os.replace(mine, library)
    return library


@cache
def load() -> ctypes.CDLL | str:
    """The library, or the sentence that says why there is none. Asked once a process."""
    try:
        library = ctypes.CDLL(str(build()))
    except (RuntimeError, OSError) as error:
        return str(error)
    library.ngpt_step.argtypes = (ctypes.POINTER(_Rule), ctypes.POINTER(_Job), i64, i32)
    library.ngpt_step.restype = None
    library.ngpt_finite.argtypes, library.ngpt_finite.restype = (ctypes.c_void_p, i64, ctypes.c_float, i32, i32), i32
    return library


def finite(x: Tensor, limit: float = math.inf) -> bool:
    """Whether every magnitude in a contiguous float32 or bfloat16 tensor is below ``limit``, and so neither nan nor inf."""
    return bool(load().ngpt_finite(x.data_ptr(), x.numel(), limit, x.dtype == torch.bfloat16, torch.get_num_threads()))  # type: ignore[union-attr]  # ``fused`` has asked: it is no sentence


def step(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[int | Tensor],
    *, lr: float | Tensor, decay: float | Tensor, beta1: float, beta2: float, eps_gate: float, eps_num: float, a: float,
    unit: bool, tangent: bool, smgc: SMGC | None, pmen: PMEN | None, keys: Sequence[int], offsets: Sequence[int],
    cap: float | Tensor | None, maximize: bool, mask: Tensor | None,
) -> None:  # fmt: skip
    """One step of one group, in place: ``fused.fused_step`` for tensors of one dtype on the CPU."""
    if mask is not None and not mask:
        return
    rule = _Rule(
        float(lr), float(decay), beta1, beta2, eps_gate, eps_num, a, -1.0 if cap is None else float(cap),
        pmen.tau if pmen else 0.0, pmen.b if pmen else 0.0,
        unit, tangent, maximize, params[0].dtype == torch.bfloat16, pmen is not None and pmen.profile == "smooth",
    )  # fmt: skip
    jobs: list[Any] = []  # tuples, of which ctypes makes its structures
    for w, g, m, v, t, key, offset in zip(params, grads, exp_avgs, exp_avg_sqs, steps, keys, offsets):
        t, d = int(t), w.shape[-1] if unit else 1
        clip, floor = math.inf, 1.0
        if smgc is not None and t - 1 >= smgc.start:
            clip = math.sqrt((smgc.R - beta2) / (1 - beta2))  # app. C, eq. C_R
            floor = math.sqrt(1 - beta2 ** (t - 1)) * smgc.s_min  # app. C, eq. v_bar, as sqrt(v_bar)
        noise = 0.0
        if pmen is not None and pmen.due(t):
            c = 1 / math.sqrt(d) if pmen.reference == "row" else math.sqrt((1 - beta1) / (1 + beta1))  # app. D, eq. c_j
            noise = pmen.strength * c
        jobs.append((w.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr(), w.numel() // d, d, offset,
                     1 - beta1**t, 1 - beta2**t, clip, floor, noise, key, t & 0xFFFFFFFF))  # fmt: skip
    load().ngpt_step(rule, (_Job * len(jobs))(*jobs), len(jobs), torch.get_num_threads())  # type: ignore[union-attr]  # ``fused`` has asked: it is no sentence
