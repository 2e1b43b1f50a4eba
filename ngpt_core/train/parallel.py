"""How does one model run on many ranks without knowing it?

PyTorch shards it over a grid of ranks (a DeviceMesh) with three axes:

    replica    HSDP: full copies of everything, with gradients all-reduced across them
    shard      FSDP2: each rank keeps 1/shard of every matrix, its gradient and its optimizer state; a block's matrices are
               gathered just before they are used
    expert     expert parallelism: each rank keeps n_experts/expert of the experts, and tokens travel to their experts and back
               (two all-to-alls per layer). For all other parameters this axis extends ``shard``

Every rank reads its own rows of the global batch, whatever the axes. Gradients are *summed* over ranks because a rank's loss is
already its share of the global mean (``model.loss(..., denominator=)``).

Matrices are sharded along their first dimension, so a row (a point on the sphere) is never cut. The scales (alpha, s_qk, s_u,
s_z, s_mamba, s_moe) and A_log, D, dt_bias stay whole and in float32 on every rank: they are small, and their updates would be
lost in bfloat16's 8 bits. (The forward pass of a bfloat16 run rounds every scale except s_z and alpha.) Their gradients are
summed in one message (``Parallel.finish_gradients``).
"""

import hashlib
import math
import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ..config import ModelConfig
from ..nn.model import LanguageModel
from ..nn.moe import Experts, MoE
from ..nn.residual import Residual
from ..nn.scale import Scale
from ..optim.sharding import local
from ..rehearsal import rehearsing
from .config import TrainConfig
from .expert_parallel import cut_experts, divide_experts
from .float8 import Float8Products, in_float8
from .recompute import recomputed
from .world import World, uses_bf16

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = ["Parallel", "check_ranks", "initialize", "parallelize"]

WHOLE = ("A_log", "D", "dt_bias")


# ---- the grid --------------------------------------------------------------------------------------------------------
def make_meshes(config: TrainConfig, world: World) -> tuple[DeviceMesh, DeviceMesh]:
    """The ranks as replica x fsdp, for everything, and as replica x shard x expert, for experts that ranks share. One replica
    has no axis: nothing is summed over it."""
    inner = world.size // config.replicas
    grids = {"fsdp": inner}, {"shard": inner // config.expert_parallel, "expert": config.expert_parallel}
    if config.replicas > 1:
        grids = {"replica": config.replicas, **grids[0]}, {"replica": config.replicas, **grids[1]}
    first, second = (init_device_mesh(world.device.type, tuple(g.values()), mesh_dim_names=tuple(g)) for g in grids)
    return first, second


# ---- initial weights -------------------------------------------------------------------------------------------------
def initialize(model: LanguageModel, seed: int, device: torch.device) -> None:
    """Allocate a model that is on the meta device and draw its initial weights, which do not depend on how it is sharded.

    Each module draws from its own generator, seeded by (seed, its name). A sharded module draws its full matrices and keeps
    its part, one module at a time, so no rank ever holds the whole model.
    """
    if rehearsing():  # there are no values
        return
    model.to_empty(device=device)
    for name, module in model.named_modules():
        if not hasattr(module, "reset_parameters"):
            continue
        own = dict(module.named_parameters(recurse=False))
        full = {key: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=device)) for key, p in own.items()}
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest(), "little"))
            module._parameters.update(full)
            module.reset_parameters()
        module._parameters.update(own)
        with torch.no_grad():
            for key, p in own.items():
                _keep_part(p, full[key].detach())


def _keep_part(p: Tensor, full: Tensor) -> None:
    """p <- full, or this rank's part of it."""
    if not isinstance(p, DTensor):
        p.copy_(full)
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    p.to_local().copy_(full[tuple(slice(o, o + n) for o, n in zip(offset, shape))])


def whole_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that every rank keeps whole and in float32. Not cached: materializing a model replaces its parameters."""
    named = ((m, n, p) for m in model.modules() for n, p in m.named_parameters(recurse=False))
    return [p for m, n, p in named if isinstance(m, Scale) or n in WHOLE]


def gathered(x: Tensor) -> Tensor:
    """The whole tensor. All ranks call this together if x is sharded."""
    return x.full_tensor() if isinstance(x, DTensor) else x


# ---- the model on the grid -------------------------------------------------------------------------------------------
@dataclass
class Parallel:
    """What the training loop must do on a grid of ranks; nothing, if there is only one rank."""

    world: World
    model: LanguageModel
    sharded: "list[FSDPModule]" = field(default_factory=list)

    def __post_init__(self) -> None:
        copies = [_copies(p, self.world.size) for p in self.model.parameters()]
        self.copies = torch.tensor(copies, dtype=torch.float64).to(self.world.device)

    def micro_batch(self, last: bool) -> None:
        """Before a backward pass: replicas exchange gradients only in the last micro-batch of a step."""
        for module in self.sharded:
            module.set_requires_all_reduce(last, recurse=False)
            module.set_is_last_backward(last)

    def finish_gradients(self) -> None:
        """After the last backward pass: sum the gradients of the whole parameters over the ranks, in one message."""
        if self.world.size == 1:
            return
        grads = [p.grad for p in whole_parameters(self.model) if p.grad is not None]
        flat = self.world.sum(torch.cat([g.reshape(-1) for g in grads]))
        parts = flat.split([g.numel() for g in grads])
        torch._foreach_copy_(grads, [part.view_as(g) for g, part in zip(grads, parts)])

    def reshard(self) -> None:
        """After an evaluation: free gathered weights, or the next forward pass would use those from before the update."""
        for module in self.sharded:
            module.reshard()

    @torch.no_grad()
    def squares(self) -> Tensor:
        """||g||^2 of every parameter in float64: this rank's share, so that a sum over ranks counts each coordinate once."""
        grads = [local(p.grad) if p.grad is not None else None for p in self.model.parameters()]
        nothing = torch.zeros(1, device=self.world.device)
        norms = torch._foreach_norm([nothing if g is None or not g.numel() else g for g in grads])
        return torch.stack(norms).double().square() / self.copies

    @torch.no_grad()
    def scale_gradients(self, factor: Tensor) -> None:
        """g <- factor * g, for all parameters."""
        torch._foreach_mul_([local(p.grad) for p in self.model.parameters() if p.grad is not None], factor.float())


def _copies(p: Tensor, ranks: int) -> int:
    """How many ranks hold the same piece of a parameter's gradient."""
    if not isinstance(p, DTensor):
        return ranks
    return math.prod(p.device_mesh.size(axis) for axis, placement in enumerate(p.placements) if placement.is_replicate())


def check_ranks(config: TrainConfig, model: ModelConfig, ranks: int) -> None:
    """Refuse a run that cannot be divided among this number of ranks."""
    per, share = config.replicas * config.expert_parallel, config.batch_size // ranks
    if ranks % per:
        raise ValueError(
            f"{ranks} ranks do not divide into {config.replicas} replicas x {config.expert_parallel} ranks that share experts: "
            f"use a multiple of {per} ranks, or change --replicas or --expert-parallel."
        )
    experts = model.n_experts if "E" in model.pattern else 0
    if config.expert_parallel > 1 and (experts == 0 or experts % config.expert_parallel):
        raise ValueError(
            f"--expert-parallel {config.expert_parallel}: the model's {experts} experts per layer do not divide into "
            f"{config.expert_parallel} parts; choose a divisor of {experts}, or leave the flag out."
        )
    if config.batch_size % ranks:
        raise ValueError(
            f"the global batch of {config.batch_size} sequences does not divide into {ranks} ranks: change --batch-size."
        )
    if config.micro_batch and share % config.micro_batch:
        raise ValueError(
            f"a rank's share of {share} sequences does not divide into micro-batches of {config.micro_batch}: change "
            "--micro-batch."
        )


def parallelize(model: LanguageModel, config: TrainConfig, world: World) -> Parallel:
    """Apply, from the inside out: expert parallelism, activation checkpointing, compilation, FSDP."""
    check_ranks(config, model.config, world.size)
    meshes = make_meshes(config, world) if dist.is_initialized() else None
    if config.expert_parallel > 1:
        for module in model.modules():
            if isinstance(module, Experts):
                assert meshes is not None  # there is more than one rank
                divide_experts(module, meshes[1])
    float8 = _float8(config, world) if config.float8 else None
    compiled = world.device.type == "cuda" if config.compile is None else config.compile
    if compiled:  # one graph per kind of block, shape and grad mode: 8, the default, are too few
        torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
        if config.activation_checkpointing == "selective" and torch.__version__ < "2.13":
            warnings.warn(
                f"In compiled blocks torch {torch.__version__} keeps what --activation-checkpointing selective would compute "
                "again: no memory is saved. Install torch 2.13 or newer, or choose full.",
                stacklevel=2,
            )
    for block in model.blocks:
        if float8 is not None:
            block.forward = in_float8(block.forward, float8)
        # Compiled code has a graph break where tokens are exchanged, and torch.compile skips a checkpoint that contains one.
        around = config.expert_parallel > 1 and isinstance(block.mixer, MoE)
        if compiled and around:
            block.forward = torch.compile(block.forward)
        if config.activation_checkpointing != "none":
            block.forward = recomputed(block.forward, config.activation_checkpointing)
        if compiled and not around:
            block.forward = torch.compile(block.forward)
    return Parallel(world, model) if meshes is None else _fully_shard(model, config, world, *meshes)


def _fully_shard(
    model: LanguageModel, config: TrainConfig, world: World, mesh: DeviceMesh, expert_mesh: DeviceMesh
) -> Parallel:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    bf16 = uses_bf16(config, world.device)
    dtype = torch.bfloat16 if bf16 else None
    if bf16:
        wide = {model.head.s_z, *(block.alpha for block in model.blocks)}  # the loss and the residual step compute in float32
        for module in model.modules():
            if isinstance(module, Scale) and module not in wide:
                module.register_forward_hook(lambda module, args, value: value.to(torch.bfloat16))
        model.cache_dtype = dtype
        for module in model.modules():
            if isinstance(module, Residual) and config.stream == "fp32":
                module.stream, module.products = torch.float32, torch.bfloat16
    wrap = partial(
        fully_shard,
        reshard_after_forward=config.reshard,
        ignored_params=set(whole_parameters(model)),
    )
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if bf16 else None)
    of_blocks = replace(policy, cast_forward_inputs=config.stream == "bf16")  # a stream in float32 is not rounded between them
    names = expert_mesh.mesh_dim_names or ()
    for module in model.modules():
        if isinstance(module, Experts) and config.expert_parallel > 1:
            cut = partial(cut_experts, shards=expert_mesh["shard"].size())
            own = expert_mesh[tuple(name for name in names if name != "expert")]
            wrap(module, mesh=own, shard_placement_fn=cut, mp_policy=policy)
    for module in (model.embedding, *model.blocks, model.head, model):
        wrap(module, mesh=mesh, mp_policy=of_blocks if isinstance(module, Residual) else policy)
    # The entry points of the model and its head: ``loss`` and ``generate`` go through these two.
    register_fsdp_forward_method(model, "hidden")
    register_fsdp_forward_method(model.head, "loss")
    sharded: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for end in (model.embedding, model.head):  # no gradient needs their weights: the loss has computed the head's already
        end.set_unshard_in_backward(False)  # type: ignore[operator]  # a method of the FSDPModule that it is now
    if config.expert_parallel > 1:  # the host waits inside such a block: gather its experts and the next block before that
        for block, after in zip(model.blocks, [*model.blocks[1:], None]):
            ahead = [m for m in block.modules() if isinstance(m, Experts)] + ([after] if after is not None else [])
            block.set_modules_to_forward_prefetch(ahead)  # type: ignore[operator]  # likewise
    for part in sharded:
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # SUM, which every backend has
    return Parallel(world, model, sharded)


# ---- how a block computes -------------------------------------------------------------------------------------------
def _float8(config: TrainConfig, world: World) -> Float8Products:
    """float8 products: computed by the hardware on a GPU that supports them, emulated on a CPU (to try them out)."""
    if not uses_bf16(config, world.device):
        raise ValueError("--float8 replaces bf16 products, and this run computes in fp32: add --precision bf16.")
    if world.device.type == "cuda" and torch.cuda.get_device_capability(world.device) < (8, 9):
        raise ValueError(f"--float8 needs a GPU of compute capability 8.9 or more; {torch.cuda.get_device_name()} has less.")
    return Float8Products(emulate=world.device.type == "cpu")
