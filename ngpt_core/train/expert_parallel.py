"""How do several ranks share the experts of a layer? Tokens travel to their experts and back.

Each rank keeps E/P of the E experts. The module's interface does not change: it takes this rank's tokens, sorted by expert, and
returns them in the same order; in between, two all-to-alls exchange them. Gradients flow back the same way, so an expert's
gradient is already summed over the P ranks.

Symbols: P ranks that share the experts of a layer; E experts; N rows (token, expert) of this rank; d d_model.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd as all_to_all
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ..nn.moe import Experts, expert_mlp
from ..optim.sharding import local

__all__ = ["cut_experts", "divide_experts"]


def divide_experts(experts: Experts, mesh: DeviceMesh) -> None:
    """Keep only this rank's experts, and exchange tokens in ``forward``: the module's interface does not change."""
    axis = mesh["expert"]
    for name in ("up", "down"):
        part = distribute_tensor(getattr(experts, name).detach(), axis, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(part))
    experts.forward = partial(_exchange, experts, axis)  # type: ignore[method-assign]  # replaced in this one module, not in its class


@torch.compiler.disable  # the host waits inside, and sizes change at every step: a compiler would only repeat itself
def _exchange(experts: Experts, axis: DeviceMesh, x: Tensor, counts: Tensor) -> Tensor:
    """x [N, d] sorted by expert, counts [E] -> [N, d] in the same order, each row computed on the rank that has its expert.

    What a rank sends is already sorted by expert; what it receives is ordered by sender and then by expert, so it is sorted by
    expert before the product.
    """
    P, group = axis.size(), axis.get_group()
    mine = len(counts) // P
    sent = counts.view(P, mine).long()
    received = torch.empty_like(sent)  # [sender, expert of this rank]
    dist.all_to_all_single(received, sent.contiguous(), group=group)
    n_sent, n_received = torch.stack([sent.sum(1), received.sum(1)]).tolist()  # the host waits here, once

    x = all_to_all(x.contiguous(), n_received, n_sent, group)
    expert = torch.arange(mine, device=x.device).repeat(P).repeat_interleave(received.flatten(), output_size=len(x))
    order = expert.argsort(stable=True)
    place = torch.empty_like(order)
    place.scatter_(0, order, torch.arange(len(order), device=x.device))

    s_u = None if experts.s_u is None else experts.s_u()
    if s_u is not None and s_u.ndim == 2:  # one row per expert of the layer
        first = axis.get_local_rank() * mine
        s_u = s_u[first : first + mine]
    y = expert_mlp(x[order], received.sum(0).to(counts.dtype), local(experts.up), local(experts.down), s_u)
    return all_to_all(y[place].contiguous(), n_sent, n_received, group)


def cut_experts(p: nn.Parameter, shards: int) -> Shard:
    """Experts [E_local, ff, d] are cut along E, or along ff if E does not divide evenly: rows stay whole either way."""
    return Shard(1) if p.ndim == 3 and local(p).shape[0] % shards and p.shape[1] % shards == 0 else Shard(0)
