"""Are the GPU kernels right, on a machine without a GPU? Their algebra in Triton's interpreter, and that they compile.

Neither says anything about speed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ngpt_core.optim import algorithm
from ngpt_core.optim.algorithm import Slot
from ngpt_core.optim.pmen import PMEN
from ngpt_core.optim.smgc import SMGC

triton = pytest.importorskip("triton", reason="Triton is not installed (pip install triton; it exists for Linux only)")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("triton_interpreted.py", "not slow"),
        pytest.param("triton_interpreted.py", "slow", marks=pytest.mark.slow),
        ("triton_interpreted_nn.py", "not slow"),
    ],
    ids=["optimizer", "optimizer, slow", "loss"],
)
def test_the_kernels_agree_with_the_readable_path_in_the_interpreter(name, which):
    """tests/triton_interpreted*.py, each in a process of its own: see there."""
    file = Path(__file__).with_name(name)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", which, "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.fixture(params=[80, 90, 100], ids=["sm_80", "sm_90", "sm_100"])
def compiled(request, monkeypatch):
    """A GPU that is not here: kernels are bound, specialized and compiled as at a launch, and collected instead of run."""

    class Absent:
        def get_current_target(self):
            return GPUTarget("cuda", request.param, 32)

        def get_current_device(self):
            return request.param  # Triton keeps what it compiled by this number

        def get_current_stream(self, device):
            return 0

    kernels, run = [], JITFunction.run
    collect = lambda self, *args, **kw: kernels.append(run(self, *args, **(kw | {"warmup": True})))  # noqa: E731
    monkeypatch.setattr(JITFunction, "run", collect)
    monkeypatch.setattr(driver, "_active", Absent())
    yield kernels
    assert kernels and all(f"sm_{request.param}" in k.asm["ptx"] and len(k.asm["cubin"]) > 1000 for k in kernels)


def step(t=7, d=64, dtype=torch.float32, key=2**31 + 5, offset=2**32 - 3, unit=True, mask=None, **changes):
    """One launch by the code that launches it in training."""
    from ngpt_core.optim import fused_triton

    paper = dict(lr=0.1, decay=0.0, beta1=0.975, beta2=0.975, eps_gate=1e-8, eps_num=1e-14, a=0.5, dim=-1 if unit else None)
    rule = algorithm.Rule(**paper | dict(smgc=SMGC(start=0), pmen=PMEN(), cap=0.01) | changes)
    w, g, m, v = (torch.zeros(2, d, dtype=x) for x in (dtype, dtype, torch.float32, torch.float32))
    fused_triton.step([Slot(w, g, m, v, t, key, offset)], rule, mask)


ON_DEVICE = dict(t=torch.tensor(3.0), lr=torch.tensor(0.1), cap=torch.tensor(0.1), mask=torch.tensor(True))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        ON_DEVICE,
        dict(dtype=torch.bfloat16, a=0.3, pmen=PMEN(profile="smooth")),
        dict(mask=torch.tensor(True), smgc=None, pmen=None, cap=None, maximize=True),
        dict(unit=False),
        ON_DEVICE | dict(unit=False, a=1.0),
        pytest.param(dict(d=2688), marks=pytest.mark.slow),
        pytest.param(ON_DEVICE | dict(d=8192), marks=pytest.mark.slow),
        pytest.param(dict(d=16384), marks=pytest.mark.slow),
    ],
    ids=["numbers", "on the device", "bfloat16", "masked", "flat", "flat on the device", "d=2688", "d=8192", "d=16384"],
)
def test_the_kernels_compile_for_a_real_gpu(compiled, changes):
    step(**changes)
    assert len(compiled) == 1


def test_addresses_from_the_table_are_loaded_four_numbers_at_once(compiled):
    """A pointer that is an argument is known to be aligned; one that was loaded is not, unless the kernel says so."""
    step(d=1024, mask=torch.tensor(True))
    assert compiled[0].asm["ptx"].count("ld.global.v4.b32") >= 4  # w, g, m, v
    step(d=1024, unit=False)
    assert compiled[1].asm["ptx"].count("ld.global.v4.b32") >= 4


def test_a_kernel_is_compiled_once_and_not_at_every_step(compiled):
    for t in range(1, 20):
        step(t, key=t * 2**28, offset=t * 2**30, lr=0.1 / t, cap=0.01 * t)
    assert len({id(kernel) for kernel in compiled}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaled", [True, False])
def test_the_kernels_of_the_loss_compile_for_a_real_gpu(compiled, scaled, dtype):
    """At the sizes of the ladder: V = 131072, d = 2688."""
    from ngpt_core.nn import loss_triton

    u, s = torch.empty(1, 131072), torch.empty(131072) if scaled else None
    losses, targets = torch.empty(1), torch.zeros(1, dtype=torch.long)
    loss_triton.rows(u, s, s, targets, -100, losses, u.to(dtype))
    loss_triton.rows(u, s, s, targets, -100, losses, None)
    loss_triton.dots(torch.empty(1, 2688), torch.empty(1, 2688, dtype=dtype), losses, losses)
    assert len(compiled) == 3 and all(kernel.metadata.shared < 48 * 1024 for kernel in compiled)
