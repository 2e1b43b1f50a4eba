"""Are the fast paths right on this very machine, and how fast are they?

    ngpt selftest [--device cuda]

Each fast path runs beside its slow twin on the same random inputs: the largest relative error of values and gradients, the
tolerance, and the time of the fast one as a share of the slow one's. The table can be pasted into a report. On a machine with a
GPU this is also how the timings that nobody has measured yet get measured.
"""

import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from . import __version__, sphere
from .nn.grouped import expert_mm
from .nn.head import linear_cross_entropy, logit_scale
from .nn.ssd import ssd, ssd_chunked, ssd_recurrent
from .optim.gated_adamw import GatedAdamW
from .optim.pmen import PMEN
from .optim.smgc import SMGC

__all__ = ["Row", "format_rows", "main", "run"]

Result = list[Tensor]


@dataclass(frozen=True)
class Row:
    """One comparison. ``error`` is relative to the twin's largest value, ``ratio`` the fast one's time over the slow one's."""

    name: str
    error: float
    tolerance: float
    ratio: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


def _now(device: torch.device) -> float:
    """CPU time of this process; on an accelerator the wall clock, after everything that was asked for is done."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def _compare(name: str, fast: Callable[[], Result], slow: Callable[[], Result], tolerance: float, device, note="") -> Row:
    a, b = fast(), slow()  # the first calls compile, allocate and warm up
    error = max(float((x.double() - y.double()).abs().max() / y.double().abs().max().clamp_min(1e-30)) for x, y in zip(a, b))
    times: dict[Callable, list[float]] = {fast: [], slow: []}
    for _ in range(5):
        for which in (fast, slow):  # interleaved: what else the machine does hits both
            start = _now(device)
            which()
            times[which].append(_now(device) - start)
    return Row(name, error, tolerance, median(f / s for f, s in zip(times[fast], times[slow])), note)


def _with_gradients(make: Callable[..., Tensor], *inputs: Tensor) -> Result:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = make(*leaves)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


# ---- the comparisons -------------------------------------------------------------------------------------------------
def _optimizer(device: torch.device) -> Row:
    draw = torch.Generator().manual_seed(0)
    start = sphere.random(512, 384, generator=draw).to(device)
    gradients = [(10 ** (4 * torch.rand(512, 1, generator=draw) - 9) * torch.randn(512, 384, generator=draw)) for _ in range(8)]
    gradients = [g.masked_fill(torch.rand(512, 1, generator=draw) < 0.1, 0.0).to(device) for g in gradients]

    def trained(fused: bool | None) -> Result:
        p = torch.nn.Parameter(start.clone())
        optimizer = GatedAdamW(
            [("w", p)], lr=0.01, unit_dim=-1, cap=0.0175, pmen=PMEN(), smgc=SMGC(start=2), fused=fused, nonfinite="off"
        )
        for g in gradients:
            p.grad = g
            optimizer.step()
        return [p.detach() - start, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]

    from .optim.fused import usable

    missing = usable(start, start, -1)
    note = f"no fused step here: {missing}" if missing else ""
    return _compare("optimizer: fused step / plain step", lambda: trained(None), lambda: trained(False), 1e-4, device, note)


def _scans(device: torch.device) -> Iterator[Row]:
    draw = torch.Generator().manual_seed(1)
    b, T, H, P, G, N = 2, 256, 8, 64, 2, 64
    x = torch.randn(b, T, H, P, generator=draw)
    dt = F.softplus(torch.randn(b, T, H, generator=draw) - 3)
    A = -torch.exp(torch.rand(H, generator=draw))
    B, C = (torch.randn(b, T, G, N, generator=draw) for _ in range(2))
    inputs = [t.to(device) for t in (x, dt, A, B, C)]

    def scan(form: Callable) -> Callable[[], Result]:
        return lambda: _with_gradients(lambda *t: form(*t)[0], *inputs)

    yield _compare("scan: chunked / recurrence", scan(ssd_chunked), scan(ssd_recurrent), 1e-4, device)
    if device.type == "cuda":
        yield _compare("scan: as the model calls it / chunked", scan(ssd), scan(ssd_chunked), 2e-3, device)


def _experts(device: torch.device) -> Row:
    draw = torch.Generator().manual_seed(2)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # the one kernel is bfloat16's
    E, rows, ff, d = 16, 1024, 128, 256
    counts = torch.randint(0, 2 * rows // E, (E,), generator=draw)
    ends = counts.cumsum(0).to(device=device, dtype=torch.int32)
    x = torch.randn(int(counts.sum()), d, generator=draw).to(device, dtype)
    w = (torch.randn(E, ff, d, generator=draw) / d**0.5).to(device, dtype)

    def loop(x: Tensor, w: Tensor) -> Tensor:
        parts = x.split(counts.tolist())
        return torch.cat([part @ w[e].T for e, part in enumerate(parts)])

    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    fast = lambda: _with_gradients(lambda x, w: expert_mm(x, w, ends, True), x, w)  # noqa: E731
    return _compare("experts: sorted products / loop", fast, lambda: _with_gradients(loop, x, w), tolerance, device)


def _loss(device: torch.device) -> Row:
    draw = torch.Generator().manual_seed(3)
    n, d, V = 512, 256, 8192
    h, w = sphere.random(n, d, generator=draw).to(device), sphere.random(V, d, generator=draw).to(device)
    s_z = (10 + torch.rand(V, generator=draw)).to(device)
    targets = torch.randint(0, V, (n,), generator=draw).to(device)

    def naive(h: Tensor, w: Tensor, s_z: Tensor) -> Tensor:
        return F.cross_entropy(logit_scale(F.linear(h, w), s_z), targets)

    fast = lambda: _with_gradients(lambda h, w, s: linear_cross_entropy(h, w, targets, s_z=s), h, w, s_z)  # noqa: E731
    return _compare("loss: chunked / whole logits", fast, lambda: _with_gradients(naive, h, w, s_z), 1e-4, device)


def run(device: str = "cpu") -> list[Row]:
    """Every comparison on this device."""
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda (cuda:1, ...); got {device!r}.")
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: this torch ({torch.__version__}) sees no CUDA device here. Use --device cpu.")
    return [_optimizer(where), *_scans(where), _experts(where), _loss(where)]


def format_rows(rows: list[Row], device: str = "cpu") -> str:
    """The table as text, with what a reader of a report needs to know about the machine."""
    where = torch.cuda.get_device_name(torch.device(device)) if device.startswith("cuda") else platform.machine()
    lines = [
        f"ngpt_core {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {device}: {where}",
        "",
        f"{'fast path / slow twin':40s} {'error':>9s} {'allowed':>9s} {'time':>7s}",
    ]
    for row in rows:
        verdict = "ok" if row.passed else "WRONG"
        lines.append(f"{row.name:40s} {row.error:9.1e} {row.tolerance:9.0e} {row.ratio:6.2f}x  {verdict}")
        if row.note:
            lines.append(f"    {row.note}")
    return "\n".join(lines)


def main(device: str = "cpu") -> int:
    """Print the table; 0 if every fast path agrees with its twin, 1 otherwise."""
    rows = run(device)
    print(format_rows(rows, device))
    return 0 if all(row.passed for row in rows) else 1
