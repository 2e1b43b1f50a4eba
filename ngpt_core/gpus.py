"""What is the peak throughput of a GPU, and of this device? One table, from NVIDIA's data sheets."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["GIB", "GPUS", "RESERVE", "Gpu", "peak_flops"]

GIB = 2**30
RESERVE = 5 * GIB  # CUDA context, NCCL buffers, fragmentation: memory that a run cannot use


@dataclass(frozen=True)
class Gpu:
    """A GPU model. Peaks are for dense matrix products, in FLOP/s."""

    name: str
    """A part of torch's name for the device."""
    memory: int
    """Bytes."""
    bf16: float | None
    """None: no bf16 units. (A T4's 65 TFLOP/s are fp16, which the trainer does not use.)"""
    fp32: float
    """torch's default: true fp32, not TF32."""
    bandwidth: float
    """Of its memory, in bytes/s."""
    link: float
    """To the other GPUs of its node, in bytes/s and one direction: NVLink, or else PCIe."""
    network: float
    """To other nodes, in bytes/s per GPU. NVIDIA's DGX has a card per GPU: 400 Gbit/s since H100, 200 before. For the others
    we assume 100 Gbit/s."""
    per_node: int = 8

    @property
    def precision(self) -> str:
        """The precision that ``--precision auto`` selects on this GPU."""
        return "bf16" if self.bf16 else "fp32"

    @property
    def room(self) -> int:
        """The bytes of its memory that a run can use."""
        return self.memory - RESERVE

    @property
    def peak(self) -> float:
        """The peak in that precision."""
        return self.bf16 or self.fp32


GPUS = {  # the first entry with a name contained in the device's wins: "H100 PCIe" comes before "H100", "A100" before "A10"
    "b200-180gb": Gpu("B200", 180 * GIB, 2.25e15, 75e12, 8e12, 900e9, 50e9),
    "b100-180gb": Gpu("B100", 180 * GIB, 1.8e15, 60e12, 8e12, 900e9, 50e9),
    "gh200-96gb": Gpu("GH200", 96 * GIB, 989e12, 67e12, 4e12, 450e9, 50e9, 1),
    "h200-141gb": Gpu("H200", 141 * GIB, 989e12, 67e12, 4.8e12, 450e9, 50e9),
    "h100-pcie-80gb": Gpu("H100 PCIe", 80 * GIB, 756e12, 51e12, 2e12, 64e9, 12.5e9),
    "h100-nvl-94gb": Gpu("H100 NVL", 94 * GIB, 835e12, 60e12, 3.9e12, 64e9, 12.5e9),
    "h100-80gb": Gpu("H100", 80 * GIB, 989e12, 67e12, 3.35e12, 450e9, 50e9),
    "a100-80gb": Gpu("A100", 80 * GIB, 312e12, 19.5e12, 2.039e12, 300e9, 25e9),
    "a100-40gb": Gpu("A100", 40 * GIB, 312e12, 19.5e12, 1.555e12, 300e9, 25e9),
    "l40s-48gb": Gpu("L40S", 48 * GIB, 362e12, 91.6e12, 864e9, 32e9, 12.5e9),
    "rtx4090-24gb": Gpu("4090", 24 * GIB, 165e12, 82.6e12, 1.008e12, 32e9, 12.5e9),
    "rtx3090-24gb": Gpu("3090", 24 * GIB, 71e12, 35.6e12, 936e9, 32e9, 12.5e9),
    "l4-24gb": Gpu("L4", 24 * GIB, 121e12, 30.3e12, 300e9, 32e9, 12.5e9),
    "a10-24gb": Gpu("A10", 24 * GIB, 125e12, 31.2e12, 600e9, 32e9, 12.5e9),
    "v100-32gb": Gpu("V100", 32 * GIB, None, 15.7e12, 900e9, 150e9, 12.5e9),
    "t4-16gb": Gpu("T4", 16 * GIB, None, 8.1e12, 320e9, 16e9, 12.5e9, 1),
}


def peak_flops(device: torch.device) -> float:
    """The peak of this device in FLOP/s: from the table, or measured if the table lacks it.

    The measurement takes the fastest matrix product within a quarter of a second; on a shared machine, the first few may all
    be interrupted. A run with ``--precision fp32`` on a GPU with bf16 units is still compared with the bf16 peak.
    """
    import torch  # imported here: ``ngpt plan --help`` prints the table without it

    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for card in GPUS.values():
            if card.name in name:
                return card.peak
    n = 512 if device.type == "cpu" else 4096
    x = torch.randn(n, n, device=device, generator=torch.Generator(device).manual_seed(0))
    best, begin = math.inf, time.perf_counter()
    last = begin + 0.25
    while begin < last:
        x @ x
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        end = time.perf_counter()
        best, begin = min(best, end - begin), end
    return 2 * n**3 / best
