"""How can one process be rank 0 of thousands? With torch's fake process group, whose collectives return at once.

No socket is opened and no other process is started. The group is made before the fake tensors, and meshes are computed outside
of them (machine.py).
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...train.world import World

__all__ = ["Axes", "fake_world"]


@contextlib.contextmanager
def fake_world(size: int, has_group: bool) -> Iterator[World]:
    """This process as rank 0 of ``size`` ranks that do not exist. ``has_group``: a single rank has a process group too."""
    if dist.is_initialized():
        raise ValueError("a simulation needs a process without a process group: destroy the existing one first.")
    world = World(torch.device("cpu"), 0, size)
    if size == 1 and not has_group:
        yield world
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    _forget_meshes()  # of an earlier world
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield world
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """torch remembers how operators are sharded, with the mesh. A later mesh of the same shape would get this one's groups."""
    from torch.distributed.tensor import debug

    getattr(debug, "_clear_sharding_prop_cache", lambda: None)()  # a private name, which may move


class Axes:
    """Which mesh dimension does a process group belong to, and on how many nodes is it?"""

    def __init__(self, per_node: int) -> None:
        self.per_node = per_node
        self._named: dict[str, list[str]] = {}  # group -> dimensions, more than one if they hold the same ranks

    def learn(self, mesh: DeviceMesh) -> None:
        """The groups of a mesh's dimensions."""
        for dim, name in enumerate(mesh.mesh_dim_names or ()):
            self._named.setdefault(mesh.get_group(dim).group_name, []).append(name)

    def of(self, group: dist.ProcessGroup, op: str) -> tuple[str, int, int]:
        """(axis, ranks, their nodes). Only experts exchange; a sum over all ranks has the axis "world"."""
        ranks = dist.get_process_group_ranks(group)
        names = self._named.get(group.group_name, [])
        if op == "all_to_all":
            axis = "expert"
        elif op == "all_reduce" and "replica" in names:
            axis = "replica"
        else:
            axis = "world" if op == "all_reduce" or not names else names[0]
        return axis, len(ranks), len({rank // self.per_node for rank in ranks})
