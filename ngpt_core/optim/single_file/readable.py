"""What is the whole optimizer, if nothing in it has to be fast? One class around ``algorithm.update``, on whole tensors.

It makes the steps of ``ngpt_core.GatedAdamW`` on its plain path. What that one adds: fused kernels, stacked and sharded
tensors, checks of every group and gradient, diagnostics, quantile gates, CUDA graphs.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ...sphere import unit, widen
from ..algorithm import Rule, run, update
from ..pmen import PMEN
from ..pmen import key as pmen_key
from ..smgc import SMGC

__all__ = ["GatedAdamW"]


class GatedAdamW(torch.optim.Optimizer):
    """Algorithm 1 of "Training nGPT", with the mechanisms of section 2.3 and appendices B, C and D.

    Every keyword is also a key of a parameter group:

        rows = {"params": [p for p in model.parameters() if p.ndim > 1], "unit_dim": -1, "cap": 0.0175}
        others = {"params": [p for p in model.parameters() if p.ndim < 2], "a": 1.0}
        optimizer = GatedAdamW([rows, others], lr=0.24 / d**0.5)

    lr: multiply it, at progress r of training, by 1 - log(1 + r / 0.05) / log(1 + 1 / 0.05), the paper's schedule.
    eps_gate, eps_num, a: the gate's threshold, the constant inside d, the gate's sharpness. a=1, eps_num=0 is AdamW's eps.
    weight_decay: multiplied by lr, as in AdamW.
    unit_dim: the axis along which the group's vectors have length one; they are normalized here and after every step. None:
        coordinates; ``tangent``, ``pmen`` and ``cap`` are then not used.
    tangent: project the gradient (appendix B). smgc: ``SMGC(...)`` or None. pmen: ``PMEN(...)`` or None.
    cap: the largest angle of a step in radians, or None. Change it in the groups as you change lr.
    transport: of the first moment: None (the paper's), "project" or "parallel".
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.975, 0.975),
        *,
        eps_gate: float = 1e-8,
        eps_num: float = 1e-14,
        a: float = 0.5,
        weight_decay: float = 0.0,
        unit_dim: int | None = None,
        tangent: bool = True,
        smgc: SMGC | None = None,
        pmen: PMEN | None = None,
        cap: float | None = None,
        transport: str | None = None,
    ) -> None:
        if not (lr >= 0 and a > 0 and eps_gate > 0 and eps_num >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"Out of range: {lr=}, {betas=}, {eps_gate=}, {eps_num=}, {a=}.")
        numbers = dict(lr=lr, betas=betas, eps_gate=eps_gate, eps_num=eps_num, a=a, weight_decay=weight_decay)
        super().__init__(
            params, numbers | dict(unit_dim=unit_dim, tangent=tangent, smgc=smgc, pmen=pmen, cap=cap, transport=transport)
        )

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["unit_dim"] is not None:
            for p in group["params"]:
                p.copy_(unit(p, group["unit_dim"]))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        order = 0
        for group in self.param_groups:
            names = group.get("param_names") or [str(order + i) for i in range(len(group["params"]))]
            order += len(names)
            for name, p in zip(names, group["params"]):
                if p.grad is not None:
                    self._update(name, p, group)
        return loss

    def _update(self, name: str, p: Tensor, group: dict[str, Any]) -> None:
        state, dim = self.state[p], group["unit_dim"]
        if not state:
            zeros = torch.zeros_like(widen(p))
            state |= {"step": torch.zeros(()), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        state["step"] += 1
        rule = Rule(
            lr=group["lr"], decay=group["lr"] * group["weight_decay"], beta1=group["betas"][0], beta2=group["betas"][1],
            eps_gate=group["eps_gate"], eps_num=group["eps_num"], a=group["a"], smgc=group["smgc"], tangent=group["tangent"],
        )  # fmt: skip
        noise, p_grad = 0, p.grad
        assert p_grad is not None
        w, g, m, v = (x.to(state["exp_avg"].dtype) for x in (p, p_grad, state["exp_avg"], state["exp_avg_sq"]))
        if dim is not None:  # vectors last
            rule = rule._replace(dim=-1, length=p.shape[dim], cap=group["cap"], transport=group["transport"])
            w, g, m, v = (x.movedim(dim, -1) for x in (w, g, m, v))
            if group["pmen"] is not None:  # the noise of a coordinate follows from its position
                rule, noise = rule._replace(pmen=group["pmen"]), pmen_key(group["pmen"].seed, name)

        def places() -> Tensor:
            return torch.arange(p.numel(), device=p.device).view_as(p).movedim(dim, -1)

        found = run(update(w, g, m, v, int(state["step"]), rule, noise, places))
        for old, new in zip((p, state["exp_avg"], state["exp_avg_sq"]), found):
            old.copy_(new if dim is None else new.movedim(-1, dim))
