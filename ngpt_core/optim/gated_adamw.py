"""How does one swap AdamW for the paper's optimizer? ``GatedAdamW``: a torch.optim.Optimizer around ``algorithm.update``.

The mathematics is in ``algorithm.py`` (Algorithm 1 and its order), which calls ``smgc.py``, ``pmen.py`` and ``sphere.py``.
This file is the shell: groups, state, and what a training loop expects of an optimizer. ``paths.py`` plans a group's steps.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any, NoReturn, TypeVar, overload

import torch
from torch import Tensor

from .. import checks
from . import groups as rules
from .algorithm import gate, gate_power
from .auto_gate import AutoGate, Gate, set_gates
from .diagnostics import Diagnostics
from .nonfinite import Watch, capturing
from .paths import Plan, check_written, step_group
from .pmen import PMEN
from .smgc import SMGC

__all__ = ["GatedAdamW", "gate", "gate_power"]

Loss = TypeVar("Loss")


class GatedAdamW(torch.optim.Optimizer):
    r"""Algorithm 1 of "Training nGPT", with the mechanisms of section 2.3 and appendices B, C and D.

    .. math::
        d_t = \sqrt{\hat v_t} + \epsilon_\text{num}, \qquad
        \gamma_t = \sigma\!\left(a \log \frac{d_t}{\epsilon_\text{gate}}\right), \qquad
        \theta_t = \theta_{t-1} - \eta_t \left(\alpha\, \gamma_t \odot \frac{\hat m_t}{d_t} + \lambda\, \theta_{t-1}\right)

    The formula is written with ``decay="eta"``; by default lambda is multiplied by lr. With ``a=1, eps_num=0, eps_gate=eps,
    unit_dim=None`` it is ``torch.optim.AdamW`` with that eps and the same lr, betas and weight_decay (the defaults differ), to
    rounding: the fused step adds the decay to the update, where torch multiplies by 1 - lr lambda first.
    Every argument except ``params`` and ``nonfinite`` is also a key of a parameter group. Keys of others, such as a scheduler's
    ``initial_lr`` or timm's ``lr_scale``, are kept unchanged; one that is nearly ours (``unit_dm``) is a ValueError.
    Everything after ``betas`` is passed by name, since AdamW's fourth argument is a different one.

    >>> model = torch.nn.Linear(4, 4)
    >>> weights = model.parameters()
    >>> # before: torch.optim.AdamW(weights, lr=1e-3)
    >>> optimizer = GatedAdamW(weights, lr=1e-3)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()

    Args:
        params: parameters, (name, parameter) pairs, or groups of them. PMEN draws its signs from the names; without names,
            from the order in which parameters were added.
        lr: alpha_t = alpha eta_t, the learning rate that a scheduler writes. A float, or a tensor of one number.
        betas: beta_1 and beta_2.
        eps_gate, eps_num, a: the gate's threshold, the numerical constant inside d, the gate's sharpness. ``eps_gate`` may
            also be a function of (t, group) that returns a number, or ``AutoGate(...)`` ("auto": its defaults), a quantile of
            sqrt(v_hat) for each tensor; the paper uses neither.
        weight_decay: lambda.
        decay: "lr": lambda is multiplied by lr, as torch's AdamW does. "eta": the paper's Algorithm 1, lambda eta_t with
            eta_t = lr / alpha; alpha is the group's lr when it was added, kept under the group key ``alpha``.
        unit_dim: the dimension along which the group's vectors are points of the sphere (-1: the rows of a matrix). They
            are normalized when the group is added and after every step. None: coordinates without geometry; ``tangent``,
            ``pmen`` and ``cap`` are then ignored. A tensor of one dimension, such as a bias, is only accepted in a group of
            such tensors with its own ``unit_dim``.
        tangent: Pre-Moment Tangent Projection (appendix B).
        smgc: Second-Moment Growth Clipping, ``SMGC(...)`` or None. Acts on every coordinate, unit or not.
        pmen: Post-Moment Exploration Noise, ``PMEN(...)`` or None.
        cap: the Angular Step Cap in radians, or None. A schedule writes it as it writes ``lr``.
        transport: what happens to the first moment of a unit vector after the vector has moved. None: nothing, the paper's.
            "project": its part along the new vector is removed. "parallel": it is carried along the great circle of the
            step, as in Riemannian Adam (appendix B names that).
        nonfinite: what a gradient with nan or inf does: "raise" a ValueError that names it, "skip" the step and count it in
            ``optimizer.skipped``, or "off". The same holds for a gradient so large that its square could overflow, and v with
            it forever (1.8e19 in float32; with ``tangent``, divided by 1 + the root of the rows' length). On an accelerator
            the update is masked at once, and the error or the count comes with the next step, so that the host never waits.
        maximize: ascend instead of descending.
        foreach: stack tensors of one shape and update them together. None: the small ones, on accelerators.
        capturable: keep the step counter on the device, so that a CUDA graph can hold the step. (``lr`` and ``cap`` must
            then be tensors to change between replays.)
        fused: None: a one-pass kernel for the tensors that can take one; True: an error for a tensor that cannot, with the
            reason; False: the plain path.

    State: ``step``, ``exp_avg``, ``exp_avg_sq``, as torch's AdamW names them (float32 for half-precision parameters). A
    state_dict of torch's AdamW can be loaded; its eps is not used (with a warning if eps_gate is another number).
    ``optimizer.diagnostics = Diagnostics()`` shows what happens inside.
    """

    _building = False  # while the constructor adds groups: none is normalized before all are checked
    _plans: list[Plan] = []  # noqa: RUF012  one per group, replaced as a whole; a copy of the optimizer makes its own
    _inherited: list[bool] = []  # noqa: RUF012  likewise: which of the constructor's groups do not set unit_dim themselves

    seals: Mapping[Tensor, Any] = {}
    found_inf: Tensor | None = None  # as torch's fused optimizers take it: where this number is not 0, a step changes nothing

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.975, 0.975),
        *,
        eps_gate: float | str | AutoGate | Gate = 1e-8,
        eps_num: float = 1e-14,
        a: float = 0.5,
        weight_decay: float = 0.0,
        decay: str = "lr",
        unit_dim: int | None = None,
        tangent: bool = True,
        smgc: SMGC | None = None,
        pmen: PMEN | None = None,
        cap: float | Tensor | None = None,
        transport: str | None = None,
        nonfinite: str = "raise",
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
        **unknown: NoReturn,
    ):
        rules.check_arguments(unknown)
        if not isinstance(params, Iterable):
            raise ValueError(f"GatedAdamW takes parameters, as of model.parameters(), or groups of them; got {params!r}.")
        self._watch = Watch(nonfinite)
        self.diagnostics: Diagnostics | None = None
        defaults = dict(lr=lr, betas=betas, eps_gate=eps_gate, eps_num=eps_num, a=a, weight_decay=weight_decay, decay=decay,
                        unit_dim=unit_dim, tangent=tangent, smgc=smgc, pmen=pmen, cap=cap, transport=transport,
                        maximize=maximize, foreach=foreach, capturable=capturable, fused=fused)  # fmt: skip
        self._building = True
        super().__init__(params, defaults)
        self._building = False
        rules.check_biases(self.param_groups, self._inherited)
        found = [rules.sizes(group, first) for group, first in zip(self.param_groups, self._firsts())]
        for group, sizes in zip(self.param_groups, found):
            rules.normalize(group, sizes)

    @property
    def nonfinite(self) -> str:
        return self._watch.policy

    @property
    def skipped(self) -> int:
        """How many steps ``nonfinite="skip"`` has left out. A ``state_dict`` has it under the key "skipped", unless it is 0;
        torch.distributed.checkpoint's ``get_optimizer_state_dict`` drops that key."""
        return self._watch.skipped

    def add_param_group(self, param_group: dict) -> None:
        inherited = isinstance(param_group, dict) and "unit_dim" not in param_group  # it will be the constructor's
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            rules.check_keys(param_group)
            group.setdefault("alpha", float(group["lr"]) if checks.is_number(group["lr"]) else None)
            first = self._firsts()[-1]
            rules.accept(group, first)
            rules.check_names(self.param_groups)
            if self._building:
                self._inherited = [*self._inherited, inherited]
            else:
                rules.check_biases(self.param_groups, [False] * (len(self.param_groups) - 1) + [inherited])
                rules.normalize(group, rules.sizes(group, first))
        except ValueError:
            self.param_groups.pop()  # the optimizer is as it was
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...
    @torch._disable_dynamo  # torch.compile does not trace the step: its kernels are fused already
    @torch.no_grad()
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:
        """One step for every parameter that has a gradient. Returns the closure's loss, if there is a closure."""
        if capturing() and not all(group["capturable"] for group in self.param_groups):
            raise ValueError(
                "GatedAdamW: this step is being captured into a CUDA graph, but its counter is on the host and would stay at "
                "one value in every replay. Build the optimizer with capturable=True."
            )
        self._watch.settle()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        for index, group in enumerate(self.param_groups):
            check_written(index, group)
        try:
            self._update()
        finally:
            for plan in self._plans:
                plan.release()
        return loss

    def _update(self) -> None:
        old, self._plans = self._plans, []
        for i, (group, first) in enumerate(zip(self.param_groups, self._firsts())):
            fits = i < len(old) and old[i].refresh(group, first, self.state)
            self._plans.append(old[i] if fits else Plan(group, first, self.state))
        slots = [slot for plan in self._plans for slot in plan.slots]
        for slot in slots:
            slot.seal = self.seals.get(slot.p)
        go = self._watch.look(slots) if self.found_inf is None else self.found_inf == 0
        if go is False:
            return
        mask = None if go is True else go
        probe = self.diagnostics if self.diagnostics is not None and self.diagnostics.begin() else None
        work = list(zip(self.param_groups, self._plans))
        routes = [plan.routes(group, mask is not None, probe is not None) for group, plan in work]  # errors come before changes
        for group, plan in sorted(work, key=lambda one: isinstance(one[0]["eps_gate"], AutoGate)):  # functions may fail
            set_gates(group, plan.slots, self.state)
        for group, plan in work:
            plan.count(group, self.state, mask)
        self._watch.counted()
        for index, (group, route) in enumerate(zip(self.param_groups, routes)):
            step_group(index, group, route, mask, probe)
        if probe is not None:
            probe.end()

    def _firsts(self) -> list[int]:
        """The index of each group's first parameter among those of all groups."""
        return [0, *accumulate(len(group["params"]) for group in self.param_groups)][:-1]

    # ---- state: plain values out, and back in ------------------------------------------------------------------------

    def state_dict(self) -> dict:
        self._watch.settle()
        packed = super().state_dict()
        packed["param_groups"] = [rules.pack(group) for group in packed["param_groups"]]
        return packed | ({"skipped": self.skipped} if self.skipped else {})

    def load_state_dict(self, state_dict: dict) -> None:
        rules.check_saved(state_dict)
        self._watch.settle()
        saved, moved = state_dict["param_groups"], {}
        if len(saved) == len(self.param_groups):  # otherwise torch's own error explains
            state_dict = {**state_dict, "param_groups": [rules.unpack(s, own) for s, own in zip(saved, self.param_groups)]}
            for i, (group, own, first) in enumerate(zip(state_dict["param_groups"], self.param_groups, self._firsts())):
                group = {**group, "params": own["params"]}
                rules.check(group, first)
                if group["unit_dim"] != own["unit_dim"]:  # these vectors were not unit vectors, or along another dimension
                    moved[i] = rules.sizes(group, first)
        numbers = [n for group in saved for n in group["params"]]
        params = [pair for group in zip(self.param_groups, self._firsts()) for pair in rules.named_parameters(*group)]
        rules.check_state(state_dict["state"])
        for group, own_group in zip(saved, self.param_groups):
            rules.check_foreign(group, own_group)
        kept = [(name, p, state_dict["state"].get(n) or {}) for n, (name, p) in zip(numbers, params)]
        moments = [(name, p, key, entry[key]) for name, p, entry in kept for key in ("exp_avg", "exp_avg_sq") if key in entry]
        for name, p, key, moment in moments:
            if moment.shape != p.shape:
                raise ValueError(
                    f"GatedAdamW: {key} must have its parameter's shape; for {name!r} the state holds {tuple(moment.shape)}, "
                    f"and the parameter is {tuple(p.shape)}. Load the state of the same model, parameters in the same order."
                )
        rules.check_moments(moments)
        super().load_state_dict(state_dict)
        self._plans = []  # they would keep the old counters
        self._watch.skipped = state_dict.get("skipped", 0)
        for i, found in moved.items():
            rules.normalize(self.param_groups[i], found)
        # torch casts the state to the parameter's dtype; in half precision the moments would lose digits
        for _, p, key, moment in [*moments, *((n, p, "eps_gate", e["eps_gate"]) for n, p, e in kept if "eps_gate" in e)]:
            if p.dtype in (torch.bfloat16, torch.float16):
                self.state[p][key] = moment.to(device=p.device, dtype=torch.float32, copy=True)
        for group in self.param_groups:
            for p in group["params"]:
                step = self.state[p].get("step") if p in self.state else None
                if step is not None and not isinstance(step, Tensor):  # as older versions of torch's AdamW counted
                    device = p.device if group["capturable"] else "cpu"
                    self.state[p]["step"] = torch.tensor(float(step), dtype=torch.float32, device=device)

    def __getstate__(self) -> dict:
        self._watch.settle()
        return super().__getstate__() | {"_watch": self._watch, "diagnostics": self.diagnostics}
