"""Are the GPU kernels right, on a machine without a GPU? Their algebra in Triton's interpreter, and that they compile.

Neither says anything about speed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed (pip install triton; it exists for Linux only)")
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_kernels_agree_with_the_readable_path_in_the_interpreter(which):
    """tests/triton_interpreted.py, in a process of its own: see there."""
    file = Path(__file__).with_name("triton_interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", which, "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def compiled(kernel, dtype, on_device, capability, **constants):
    """The kernel's machine code for a GPU that is not here."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ngpt_core.optim import fused_triton

    constants |= dict(COUNTER=on_device, DEVICE=on_device, MASKED=True, CLIP=True, MAXIMIZE=False)
    scalar = "*fp32" if on_device else "fp32"
    kinds = dict.fromkeys(("LR", "DECAY", "COS", "SIN"), scalar) | {"T": scalar if on_device else "i32", "MASK": "*i1"}
    kinds |= {"W": f"*{dtype}", "G": f"*{dtype}", "M": "*fp32", "V": "*fp32"}
    kinds |= dict.fromkeys(("smgc_start", "pmen_start", "pmen_every", "key", "offset_low", "offset_high", "d", "n"), "i32")
    kernel = getattr(fused_triton, kernel)
    signature = {name: "constexpr" if name in constants else kinds.get(name, "fp32") for name in kernel.arg_names}
    options = {"num_warps": fused_triton.warps(constants["BLOCK"])}
    return triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32), options=options)


ROW = dict(TANGENT=True, NOISE=True, CAP=True)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    "kernel, dtype, on_device, constants",
    [
        ("row_kernel", "fp32", True, ROW | dict(BLOCK=1024, GATE=0, SMOOTH=False)),
        ("row_kernel", "bf16", False, ROW | dict(BLOCK=1024, GATE=2, SMOOTH=True)),
        ("flat_kernel", "fp32", True, dict(BLOCK=1024, GATE=1)),
        pytest.param("row_kernel", "fp32", False, ROW | dict(BLOCK=8192, GATE=0, SMOOTH=False), marks=pytest.mark.slow),
        pytest.param("row_kernel", "fp32", True, ROW | dict(BLOCK=16384, GATE=1, SMOOTH=False), marks=pytest.mark.slow),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_it_compiles_for_a_real_gpu(kernel, dtype, on_device, constants, capability):
    code = compiled(kernel, dtype, on_device, capability, **constants)
    assert len(code.asm["cubin"]) > 1000 and f"sm_{capability}" in code.asm["ptx"]
