"""Where is this rank's piece of a parameter, and which ranks hold the rest of its vectors?

With FSDP2, HSDP, tensor or expert parallelism a parameter is a DTensor. A vector that is whole on a rank needs no
communication. A vector that is split has its sums all-reduced before anything is done with them (appendix B), the sums of
many tensors in one message. Gloo or NCCL; even, uneven and empty shards.

    local shard    the plain tensor that this rank holds        mesh dim    one axis of the ranks' grid
    offset         where the shard begins in the full tensor, along each of its dimensions
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from .algorithm import Update
from .arriving import constant

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Groups = tuple["dist.ProcessGroup", ...]


def is_dtensor(x: Tensor) -> TypeGuard["DTensor"]:
    return hasattr(x, "device_mesh")  # importing DTensor takes half a second, which a single process can save


def local(x: Tensor) -> Tensor:
    """The piece of x on this rank, sharing its memory; x itself if it is not distributed."""
    return x.to_local() if is_dtensor(x) else x


def local_grad(p: Tensor, g: Tensor) -> Tensor:
    """This rank's piece of g, the gradient of p: one that is partial or placed differently is brought to p's placement."""
    if is_dtensor(p) and is_dtensor(g) and g.placements != p.placements:
        g = g.redistribute(p.device_mesh, p.placements)
    return local(g)


def _groups(p: Tensor, wanted: Callable[[object], bool]) -> Groups:
    """The process groups of the mesh dims (of more than one rank) with a ``wanted`` placement."""
    if not is_dtensor(p):
        return ()
    mesh = p.device_mesh
    return tuple(mesh.get_group(i) for i, x in enumerate(p.placements) if mesh.size(i) > 1 and wanted(x))


def split_groups(p: Tensor, dim: int) -> Groups:
    """The process groups over which the vectors along ``dim`` are split; () if they are whole here."""
    return _groups(p, lambda x: getattr(x, "dim", None) == dim % p.ndim)


def shard_groups(p: Tensor) -> Groups:
    """The process groups over which p is split along any dimension."""
    return _groups(p, lambda x: getattr(x, "dim", None) is not None)


def all_sum(x: Tensor, groups: Groups) -> Tensor:
    for group in groups:
        dist.all_reduce(x, group=group)
    return x


def offsets(p: Tensor) -> tuple[int, ...]:
    """Where this rank's piece begins in the full tensor, along each dimension."""
    if not is_dtensor(p):
        return (0,) * p.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)[1])


def global_index(p: Tensor, region: tuple[slice, ...] | None = None) -> Tensor:
    """int64, shaped as the local piece (or a region of it): each coordinate's row-major position in the full tensor."""
    piece, start = local(p), offsets(p)
    index, stride = torch.zeros((), dtype=torch.int64, device=piece.device), 1
    for dim in reversed(range(p.ndim)):
        first, last, _ = (slice(None) if region is None else region[dim]).indices(piece.shape[dim])
        at = torch.arange(first, last, device=piece.device) + start[dim]
        index = index + (at * stride).reshape(-1, *(1,) * (p.ndim - 1 - dim))
        stride *= p.shape[dim]
    return index


def index_offset(p: Tensor) -> int | None:
    """The position of the piece's first coordinate if the piece is one uninterrupted run of the full tensor, else None."""
    piece, start = local(p), offsets(p)
    if not is_dtensor(p) or piece.numel() == 0:
        return 0
    cut = [dim for dim in range(p.ndim) if piece.shape[dim] != p.shape[dim]]
    if cut and any(piece.shape[dim] != 1 for dim in range(cut[-1])):
        return None
    offset = 0
    for dim in range(p.ndim):
        offset = offset * p.shape[dim] + start[dim]
    return offset


def run_split(updates: Sequence[Update], groups: Groups) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Carry out updates of vectors that are split over the same ``groups``, in step: one message for all sums of a stage."""
    sums: list[Tensor | None] = [None] * len(updates)
    while True:
        asked, results = [], []
        for one, answer in zip(updates, sums):
            try:
                asked.append(next(one) if answer is None else one.send(answer))
            except StopIteration as end:
                results.append(end.value)
        if results:
            return results  # every update of a unit tensor yields equally often, so all end together
        whole = all_sum(torch.cat([x.reshape(-1) for x in asked]), groups)
        sums = [part.reshape(x.shape) for part, x in zip(whole.split([x.numel() for x in asked]), asked)]


def agree(bad: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(which parameters any rank finds bad, whether any is), the same on all ranks of the parameters' meshes.

    ``bad`` holds one number per parameter. Meshes are visited from small to large, and each message also carries what was
    found so far, so a sub-mesh (expert parallelism) reports to the mesh that contains it.
    """
    bad, anywhere = bad.clone(), bad.max() if bad.numel() else bad.new_zeros(())
    meshes: dict = {}
    for i, p in enumerate(params):
        if is_dtensor(p):
            meshes.setdefault(p.device_mesh, []).append(i)
    for mesh, places in sorted(meshes.items(), key=lambda item: item[0].size()):
        index = constant(tuple(places), torch.int64, bad.device)
        message = torch.cat([bad[index], anywhere.reshape(1)])  # built on the device: nothing waits for the host
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                dist.all_reduce(message, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
        bad.index_copy_(0, index, message[:-1])
        anywhere = message[-1]
    return bad, anywhere
