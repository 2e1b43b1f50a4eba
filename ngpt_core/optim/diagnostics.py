"""What did the optimizer just do? The quantities of the paper's figures, per group and step.

    optimizer.diagnostics = Diagnostics(every=100)
    ...
    optimizer.diagnostics.last        # one record per group, from the latest recorded step

Off, or between the recorded steps, it costs nothing: those steps take the fast path. On several ranks the numbers describe
the full tensors. The fields of a record are listed under ``Diagnostics``.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import is_count
from . import sharding
from .algorithm import Rule, gate_of

__all__ = ["Diagnostics"]

_SUMS = ("coordinates", "gate", "below", "never", "zero", "clipped", "perturbed", "vectors", "angle", "capped")


class Diagnostics:
    """Collects one record per group at the first step that it sees, and at every ``every``-th step after it.

    Set ``optimizer.diagnostics = ng.Diagnostics(every=100)`` and read ``optimizer.diagnostics.last``: the recorded steps are
    1, 101, 201 and so on.

    every: steps from one record to the next.
    d_model: the divisor of the zero-gradient counts; None: the length of the group's unit vectors.
    keep: how many records to keep, but always those of the latest step; None: all.
    low, high: the powers of ten between which the histogram has its edges, two integers.

    A record is a dict of plain numbers:

    - ``at``: how many steps this object has seen, the first being 1.
    - ``step``, ``group``, ``name``: t, the group's index, its "name" key (without one its "label", or its index as a text).
    - ``coordinates``: how many there are.
    - ``mean_gate``: the mean of gamma.
    - ``below_gate``: the share of coordinates with d < eps_gate.
    - ``never``: the share with sqrt(v_hat) = 0: no gradient was ever seen (appendix D).
    - ``zero_gradient``: coordinates whose gradient is exactly zero at this step, before projection.
    - ``zero_gradient_per_d``: the same divided by d_model (appendix D's figure); None where d_model is unknown.
    - ``clipped``: the share of coordinates that SMGC clipped.
    - ``perturbed``: coordinates that PMEN moved (smooth profile: the sum of psi).
    - ``angle_mean``, ``angle_max``: the angle by which unit vectors moved, in radians, after the cap.
    - ``capped``: the share of vectors stopped by the cap.
    - ``histogram``: counts of log10 sqrt(v_hat) between the edges; the ends count what is outside, except zeros.
    """

    def __init__(self, every: int = 1, d_model: int | None = None, keep: int | None = None, low: int = -18, high: int = 4):
        if not is_count(every, 1):
            raise ValueError(
                f"Diagnostics: every counts steps and must be >= 1, got {every!r}. Off is optimizer.diagnostics = None."
            )
        for name, value in (("d_model", d_model), ("keep", keep)):
            if value is not None and not is_count(value, 1):
                raise ValueError(f"Diagnostics: {name} must be an integer >= 1, or None; got {value!r}.")
        if not (isinstance(low, int) and isinstance(high, int) and -100 <= low < high <= 100):
            raise ValueError(f"Diagnostics: low and high are powers of ten, -100 <= low < high <= 100; got {low!r}, {high!r}.")
        self.every, self.d_model, self.keep = every, d_model, keep
        self.edges = [low + i / 4 for i in range(4 * (high - low) + 1)]
        self.records: list[dict] = []
        self._calls = 0
        self._parts: dict[tuple, tuple[Tensor, Tensor]] = {}
        self._about: dict[int, dict] = {}

    @property
    def last(self) -> list[dict]:
        """The records of the latest recorded step, one per group."""
        return [r for r in self.records if r["at"] == self.records[-1]["at"]]

    def begin(self) -> bool:
        """Whether this step is recorded."""
        self._parts, self._about = {}, {}
        self._calls += 1
        return (self._calls - 1) % self.every == 0

    def add(
        self, index: int, group: dict, rule: Rule, t: int | Tensor, params: Sequence[Tensor], seen: dict[str, Tensor]
    ) -> None:
        """Add up what ``algorithm.update`` has put into ``seen``, for one tensor or for a stack of them."""
        d, scale = seen["d"], seen["scale"]
        sums: dict[str, float | Tensor] = dict.fromkeys(_SUMS, d.new_zeros((), dtype=torch.float64))
        sums |= {"coordinates": d.numel(), "gate": gate_of(d, rule.a, rule.eps_gate).sum(), "below": (d < rule.eps_gate).sum()}
        sums |= {"never": (scale == 0).sum(), "zero": (seen["raw"] == 0).sum(), "clipped": seen["clipped"].sum()}
        largest = d.new_zeros((), dtype=torch.float64)
        if rule.dim is not None:
            psi, angle, over = seen.get("psi"), seen["angle"], sharding.split_groups(params[0], rule.dim)
            ranks = 1  # each rank that shares a split vector sees all of its angle
            for g in over:
                ranks *= dist.get_world_size(g)
            sums |= {"vectors": angle.numel() / ranks, "angle": angle.sum() / ranks, "capped": seen["capped"].sum() / ranks}
            sums["perturbed"] = 0 if psi is None else psi.sum()
            largest = angle.max() if angle.numel() else largest
        edges = torch.tensor(self.edges, device=d.device, dtype=torch.float64)
        places = torch.bucketize(scale[scale > 0].double().log10(), edges)
        counts = torch.bincount(places, minlength=len(self.edges) + 1).double()
        part = torch.cat([torch.stack([torch.as_tensor(sums[k], device=d.device, dtype=torch.float64) for k in _SUMS]), counts])
        where = (index, sharding.shard_groups(params[0]))
        total, most = self._parts.get(where, (0, largest))
        self._parts[where] = (total + part, torch.maximum(most, largest))
        d_model = self.d_model or (rule.length if rule.dim is not None else None)
        self._about[index] = {"t": t, "name": group.get("name", group.get("label", str(index))), "d": d_model}

    def end(self) -> None:
        """Add up the ranks' parts, and write the records of the step."""
        totals: dict[int, list] = {}
        for (index, groups), (part, most) in self._parts.items():
            part = sharding.all_sum(part.clone(), groups)
            for g in groups:
                dist.all_reduce(most, op=dist.ReduceOp.MAX, group=g)
            entry = totals.setdefault(index, [0, 0.0])
            entry[0], entry[1] = entry[0] + part, max(entry[1], float(most))
        for index, (total, most) in sorted(totals.items()):
            self.records.append(self._record(index, total.tolist(), most))
        if self.keep is not None:
            del self.records[: -max(int(self.keep), len(totals))]

    def _record(self, index: int, values: list[float], most: float) -> dict:
        x, about = dict(zip(_SUMS, values)), self._about[index]
        n, rows = max(x["coordinates"], 1), max(x["vectors"], 1)
        return {
            "at": self._calls, "step": int(torch.as_tensor(about["t"]).max()), "group": index, "name": about["name"],
            "coordinates": int(x["coordinates"]), "mean_gate": x["gate"] / n, "below_gate": x["below"] / n,
            "never": x["never"] / n, "zero_gradient": int(x["zero"]),
            "zero_gradient_per_d": x["zero"] / about["d"] if about["d"] else None, "clipped": x["clipped"] / n,
            "perturbed": x["perturbed"], "angle_mean": x["angle"] / rows, "angle_max": most, "capped": x["capped"] / rows,
            "histogram": [int(c) for c in values[len(_SUMS) :]],
        }  # fmt: skip
