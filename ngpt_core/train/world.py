"""Who am I, among how many ranks, and on what device?

torchrun passes each process its rank in environment variables; a process started without torchrun is rank 0 of 1. ``start``
sets up PyTorch's process group, NCCL on GPUs and gloo on CPUs. The few collectives that the training loop uses are methods of
``World``.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .config import TrainConfig

if TYPE_CHECKING:
    from .watchdog import Watchdog

__all__ = ["World", "lost_a_peer", "start", "uses_bf16"]

T = TypeVar("T")


@dataclass
class World:
    """This process's rank, the number of ranks, and its device."""

    device: torch.device
    rank: int = 0
    size: int = 1
    started_here: bool = False
    watchdog: "Watchdog | None" = None

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def largest(self, x: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def first(self, function: Callable[[], T]) -> T | None:
        """The result of ``function`` on the first rank, None elsewhere. Its error is raised on every rank: no rank waits."""
        result: T | None = None
        error: list[Exception | None] = [None]
        if self.main:
            try:
                result = function()
            except (ValueError, OSError) as failed:
                error = [failed]
        if self.size > 1:
            dist.broadcast_object_list(error)
        if error[0] is not None:
            raise error[0]
        return result

    def at(self, doing: str) -> None:
        """Note, for the watchdog, what all ranks begin to do."""
        if self.watchdog is not None:
            self.watchdog.at(doing)

    def close(self, why: str = "") -> None:
        """Leave the other ranks; ``why`` is the error, if there was one."""
        if self.watchdog is not None:
            self.watchdog.close(why)
        if self.started_here:
            dist.destroy_process_group()


def start(config: TrainConfig) -> World:
    """Join the ranks that torchrun started, or be the only one. A single rank gets a process group too if FSDP needs it."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ValueError("--device cuda: torch finds no GPU on this machine; leave the flag out, or use --device cpu.")
    on_cuda = has_cuda and config.device != "cpu"
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if on_cuda else torch.device("cpu")
    if on_cuda and local >= (found := torch.cuda.device_count()):
        raise ValueError(f"local rank {local} needs its own GPU, but this machine has {found}: lower --nproc-per-node.")
    if on_cuda:
        torch.cuda.set_device(device)
    world = World(device, rank, size)
    if not dist.is_initialized() and (size > 1 or on_cuda or uses_bf16(config, device) or config.async_save):
        backend = "cuda:nccl,cpu:gloo" if on_cuda else "gloo"
        single: dict = {} if size > 1 else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        # the watchdog, whose message says more, ends a run after half of this time
        dist.init_process_group(backend, timeout=timedelta(seconds=2 * config.timeout), **single)
        world.started_here = True
    return world


def lost_a_peer(error: BaseException) -> bool:
    """Whether the error only means that another rank has ended."""
    return any(words in str(error) for words in ("closed by peer", "reset by peer", "remote process exited", "Broken pipe"))


def uses_bf16(config: TrainConfig, device: torch.device) -> bool:
    """Whether matrix products run in bfloat16. ``auto``: on a GPU with bfloat16 units (NVIDIA: Ampere or newer).

    Older GPUs such as the T4 and V100 only emulate bfloat16, which torch also reports as supported unless asked to exclude it.
    """
    if config.precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return config.precision == "bf16"
