"""What do others train a GPT with? Four peers, on the same model, data and schedule as the baseline.

    qk      AdamW, with Norm and a scale on queries and keys (QK norm)
    muon    Muon on the blocks' matrices: the momentum's singular values set to about 1 (Newton-Schulz), and AdamW on the rest
    muonh   the same direction on a sphere: each matrix keeps its Frobenius norm and moves by a share lr of it (Hyperball,
            arXiv 2606.16899, calls that MuonH), and AdamW on the rest
    free    schedule-free AdamW (arXiv 2405.15682): no decay; evaluated at the average of the iterates

``Muon`` does what torch.optim.Muon does (with adjust_lr_fn "match_rms_adamw"), but also for stacks of matrices, as experts are
stored, and together with AdamW in one optimizer. Tests compare both with torch's, and ``ScheduleFree`` with the package.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ngpt_core import recipe
from ngpt_core.nn.attention import Attention
from ngpt_core.nn.scale import Scale
from ngpt_core.optim.schedule import Schedule, wsd
from ngpt_core.train.config import recipe_numbers
from ngpt_core.train.message import Layout
from ngpt_core.train.trainer import Trainer

SIDES = ("qk", "muon", "muonh", "free")
AUX = 0.0022  # the baseline's peak rate
HIDDEN = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj", "up", "gate", "down")  # the matrices inside blocks


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """About U V^T of each matrix U S V^T of the stack g [..., n, m]: the singular values go to between 0.7 and 1.2."""
    x = g.mT if (tall := g.size(-2) > g.size(-1)) else g
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def adam(p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """AdamW's step."""
    if not state:
        state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    (beta1, beta2), m, v = group["betas"], state["exp_avg"], state["exp_avg_sq"]
    state["step"] += 1
    t = state["step"].item()
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    p.mul_(1 - group["lr"] * group["weight_decay"])
    p.addcdiv_(m, (v / (1 - beta2**t)).sqrt_().add_(group["eps"]), value=-group["lr"] / (1 - beta1**t))


class Muon(torch.optim.Optimizer):
    """Muon in the groups with ``matrices``, AdamW in the others. ``sphere``: the matrices keep their norm."""

    def __init__(self, groups: Iterable[dict], momentum: float = 0.95, sphere: bool = False):
        super().__init__(groups, {"matrices": False, "momentum": momentum, "sphere": sphere, "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    (self._turn if group["matrices"] else adam)(p, p.grad, self.state[p], group)

    @staticmethod
    def _turn(p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
            state["norm"] = p.norm(dim=(-2, -1), keepdim=True)
        m = state["momentum_buffer"].lerp_(g, 1 - group["momentum"])
        direction, lr = orthogonal(g.lerp(m, group["momentum"])), group["lr"]  # Nesterov's
        if not group["sphere"]:
            p.mul_(1 - lr * group["weight_decay"])
            p.sub_(direction, alpha=0.2 * math.sqrt(max(p.shape[-2:])) * lr)  # the size of AdamW's steps
            return
        norm = state["norm"]
        p.sub_(lr * norm * direction / direction.norm(dim=(-2, -1), keepdim=True))
        p.mul_(norm / p.norm(dim=(-2, -1), keepdim=True))


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free AdamW. The parameters are y, where gradients are taken; ``averaged`` swaps them for x, the average.

        y = (1 - beta1) z + beta1 x        z <- z - lr (g / sqrt(v_hat) + lambda y)        x <- (1 - c) x + c z

    with c the share of this step's lr^2 in the sum of all. x is not stored: it follows from y and z.
    """

    def __init__(self, groups: Iterable[dict]):
        super().__init__(groups, {"eps": 1e-8, "weight_decay": 0.0, "total": 0.0, "t": 0, "at_x": False, "highest": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            group["t"] += 1
            group["highest"] = max(group["highest"], lr)
            weight = group["highest"] ** 2
            group["total"] += weight
            c = weight / group["total"] if group["total"] else 0.0
            for y in group["params"]:
                if (g := y.grad) is None:
                    continue
                state = self.state[y]
                if not state:
                    state |= {"z": y.detach().clone(), "exp_avg_sq": torch.zeros_like(y)}
                z, v = state["z"], state["exp_avg_sq"]
                v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                u = g / ((v / (1 - beta2 ** group["t"])).sqrt() + group["eps"]) + group["weight_decay"] * y
                x = (y - (1 - beta1) * z) / beta1
                z.sub_(u, alpha=lr)
                x.lerp_(z, c)
                y.copy_(torch.lerp(z, x, beta1))

    @torch.no_grad()
    def averaged(self, at_x: bool) -> None:
        """Put x in the place of y, or y back."""
        for group in self.param_groups:
            beta1 = group["betas"][0]
            for p in group["params"]:
                if group["at_x"] != at_x and p in self.state:
                    weight = 1 - 1 / beta1 if at_x else 1 - beta1  # x = y + (1 - 1/beta1) (z - y), and back
                    p.lerp_(self.state[p]["z"], weight)
            group["at_x"] = at_x


# ---- into the trainer ------------------------------------------------------------------------------------------------
def prepare(trainer: Trainer, side: str, extra: dict[str, Any]) -> None:
    """Turn the baseline's trainer into a peer's."""
    if side == "qk":
        for module in trainer.model.modules():
            if isinstance(module, Attention):
                module.s_qk, module.softmax_scale = Scale(module.head_dim, 1.0), module.head_dim**0.5
        trainer.layout = Layout.of(trainer.model)  # the step's message has the new parameters too
        trainer.parallel.copies = torch.ones(trainer.layout.parameters, dtype=torch.float64)
    numbers = recipe_numbers(trainer.run.config, trainer.run.model, trainer.run.steps)
    groups = recipe.param_groups(trainer.model, trainer.run.steps, numbers)
    if side == "qk":
        optimizer, trainer.schedule = numbers.build(groups, trainer.run.steps)
    elif side in ("muon", "muonh"):
        optimizer = Muon(split(groups, extra, side == "muonh"), sphere=side == "muonh")
    else:
        optimizer = ScheduleFree(groups)
    if side != "qk":
        eta = constant if side == "free" else partial(wsd, eta_min=numbers.eta_min, decay=numbers.wsd_decay)
        trainer.schedule = Schedule(optimizer, trainer.run.steps, eta, numbers.warmup, groups[0]["warmup"])
    trainer.optimizer = optimizer
    trainer.rate = next(g for g in optimizer.param_groups if "embedding.weight" in g["param_names"])


def constant(r: float) -> float:
    return 1.0


def split(groups: list[dict], extra: dict[str, Any], sphere: bool) -> list[dict]:
    """The groups, with the blocks' matrices apart. Their peak rate is ``hidden`` times that of the others; on the sphere, where
    the matrices' rate has another unit, the others have ``hidden`` times AUX."""
    found, hidden = [], extra.get("hidden", 1.0)
    for group in groups:
        matrices = [(n, p) for n, p in group["params"] if p.ndim >= 2 and n.rpartition(".")[2] in HIDDEN]
        others = [(n, p) for n, p in group["params"] if not any(p is q for _, q in matrices)]
        for members, is_matrix in ((matrices, True), (others, False)):
            if members:
                lr = group["lr"]
                if sphere and not is_matrix:
                    lr = AUX * hidden
                elif is_matrix and not sphere:
                    lr *= hidden
                found.append({**group, "params": members, "matrices": is_matrix, "lr": lr, "peak_lr": lr})
    return found
