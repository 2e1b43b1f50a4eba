"""Who am I, among how many ranks, and on what device?

torchrun tells a process its rank in environment variables; a process that was started alone is rank 0 of 1. PyTorch's process
group is set up here, NCCL on GPUs and gloo on CPUs, and the few collectives that the training loop itself uses are methods.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .config import TrainConfig

__all__ = ["World", "lost_a_peer", "start", "uses_bf16"]

T = TypeVar("T")


@dataclass
class World:
    """Who am I among how many, and on what device?"""

    device: torch.device
    rank: int = 0
    size: int = 1
    started_here: bool = False

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks, in place; x itself when there is one."""
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
        """What ``function`` returns on the first rank, None elsewhere. Its error is raised on every rank: none waits for it."""
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

    def close(self) -> None:
        if self.started_here:
            dist.destroy_process_group()


def start(config: TrainConfig) -> World:
    """Join the ranks that torchrun started, or be the only one. The group is there even for one rank where FSDP needs it."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ValueError("--device cuda: torch sees no GPU here; leave it out, or use --device cpu.")
    on_cuda = has_cuda and config.device != "cpu"
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if on_cuda else torch.device("cpu")
    if on_cuda and local >= (found := torch.cuda.device_count()):
        raise ValueError(f"this machine has GPUs for {found} ranks, and none for number {local}: lower --nproc-per-node.")
    if on_cuda:
        torch.cuda.set_device(device)
    world = World(device, rank, size)
    if not dist.is_initialized() and (size > 1 or on_cuda or uses_bf16(config, device) or config.async_save):
        backend = "cuda:nccl,cpu:gloo" if on_cuda else "gloo"
        alone: dict = {} if size > 1 else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, **alone)
        world.started_here = True
    return world


def lost_a_peer(error: BaseException) -> bool:
    """Whether this is what a rank meets when another has ended: it is no fault of its own."""
    return any(words in str(error) for words in ("closed by peer", "reset by peer", "remote process exited", "Broken pipe"))


def uses_bf16(config: TrainConfig, device: torch.device) -> bool:
    """Whether matrix products run in bfloat16. ``auto``: on a GPU that has units for them (NVIDIA: from Ampere on).

    Older ones, a T4 or a V100, only emulate bfloat16: torch calls that supported too, unless it is asked to leave it out.
    """
    if config.precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return config.precision == "bf16"
